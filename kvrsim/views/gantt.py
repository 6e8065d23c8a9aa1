"""A Gantt chart of a timeline: what each rank computes, when it waits, and what the links carry."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrsim.program import Array
from kvrsim.results.timeline import Span, Timeline
from kvrsim.units import format_seconds
from kvrsim.views.figure import HATCHED, WAITING, Head, check_suffix, drawing, save_figure
from kvrsim.views.style import GROUND, INK, OPERATIONS, faded, operation_of, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 10.0  # inches


def write_gantt(timeline: Timeline, path: str | Path, *, title: str, subtitle: str = "") -> None:
    """Draw ranks x seconds as PNG, SVG or PDF by the path's suffix; written atomically.

    Raises InputError naming the argument plot where the suffix is another or the file cannot be written.
    """
    check_suffix(path)
    with styled():
        save_figure(draw_gantt(timeline, title, subtitle), path)


def draw_gantt(timeline: Timeline, title: str, subtitle: str) -> Figure:
    """Ranks x seconds; the interactive page (views/timeline.py) zooms."""
    with styled():
        return _draw(timeline, title, subtitle)


def _draw(timeline: Timeline, title: str, subtitle: str) -> Figure:
    ranks, alternates = timeline.num_ranks, not is_pipeline(timeline)
    entries = legend_entries(timeline.spans, alternates=alternates)
    head = Head(title=title, subtitle=subtitle, width=WIDTH, entries=entries)
    height = min(10.0, max(0.9, ranks * (0.34 if ranks <= MAX_DETAILED_RANKS else 0.11))) + head.height + 0.85
    figure = drawing(WIDTH, height)
    left = 0.07 if timeline.gpus_per_rank == 1 else 0.115
    edges: dict[str, Any] = dict(left=left, right=0.98, top=1 - (head.height + 0.3) / height, bottom=0.55 / height)
    axes = figure.add_subplot(figure.add_gridspec(1, 1, **edges)[0, 0])
    draw_lanes(axes, timeline.spans, 0.0, timeline.end_s, alternates=alternates)
    lane_axes(axes, timeline, 0.0, timeline.end_s)
    mark_first_token(axes, timeline)
    head.draw(figure)
    return figure


def lane_axes(
    axes: Axes, timeline: Timeline, start_s: float, end_s: float, *, title: str = "", named: bool = True
) -> None:
    """Axes of one time window: one lane per rank, seconds below."""
    ranks = timeline.num_ranks
    axes.set_xlim(start_s, max(end_s, start_s + 1e-12))
    axes.set_ylim(ranks - 0.45, -0.55)
    every = math.ceil(ranks / 32)
    axes.set_yticks(range(0, ranks, every))
    axes.set_yticklabels([timeline.rank_name(rank) if named else "" for rank in range(0, ranks, every)])
    axes.set_title(title, loc="left", fontsize=10, color=INK, pad=5)
    axes.tick_params(axis="y", length=0, labelsize=9, colors=INK)
    axes.tick_params(axis="x", labelsize=8.5, colors=INK)
    axes.set_xlabel("seconds", fontsize=9, color=INK, labelpad=2)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x", color="#e3e3e3", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)


def mark_first_token(axes: Axes, timeline: Timeline) -> None:
    """Mark TTFT, the time at which the last rank ends."""
    last = [span for span in timeline.spans if span.rank == timeline.num_ranks - 1 and is_solid(span)]
    ttft_s = max((span.end_s for span in last if span.kind != "transfer"), default=timeline.end_s)
    axes.axvline(ttft_s, color=INK, linewidth=1.4, zorder=6, clip_on=False)
    _above(axes, ttft_s, f"TTFT {format_seconds(ttft_s)}", ha="right", fontsize=10, fontweight="bold")


def _above(axes: Axes, x_s: float, text: str, **style: Any) -> None:
    """Write a label above the axes."""
    axes.annotate(
        text,
        xy=(x_s, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 4),
        textcoords="offset points",
        va="bottom",
        color=INK,
        **style,
    )


# Lanes: the operations of each rank over time as coloured bars or pixels

MAX_DETAILED_RANKS = 32  # with more ranks, lanes are thin
PIXELS = 1400  # of a figure's width, about
_THIN = 1.5  # pixels; thinner bars are drawn as pixels
_LAYER = 4  # pixels; thinner layers are all alike
_HATCHED = 6  # pixels; a longer wait is hatched
_LINK_ROWS = 100  # ranks; with more, lanes have no room for links

# A rank's lane reaches from -0.5 to 0.5 around its number; down is later in the context.
_BAR = (-0.36, 0.22)
_LINK_BAR = (0.27, 0.38)

Box = tuple[float, float, float, float]  # start_s, end_s, top, bottom


def is_solid(span: Span) -> bool:
    """Whether a rank's stream is occupied by work or a collective of its own group, rather than waiting."""
    return span.kind == "compute" or span.op == "collective"


def is_pipeline(timeline: Timeline) -> bool:
    """Whether every layer is on some of the ranks only."""
    ranks: dict[int, set[int]] = {}
    for span in timeline.spans:
        if span.layer is not None and span.kind == "compute":
            ranks.setdefault(span.layer, set()).add(span.rank)
    return bool(ranks) and all(len(on) < timeline.num_ranks for on in ranks.values())


def draw_lanes(
    axes: Axes, spans: Sequence[Span], start_s: float, end_s: float, *, pixels: int = PIXELS, alternates: bool = True
) -> None:
    """Draw spans from `start_s` to `end_s`: as bars, or as pixels where many bars are thinner than that.

    A message is a pixel wide at least. pixels: of the axes, about. alternates: draw odd layers in lighter colours.
    """
    shown = [span for span in spans if span.end_s > start_s and span.start_s < end_s]
    pixel_s = (end_s - start_s) / pixels
    stream = [span for span in shown if span.kind != "transfer"]
    alternates = alternates and _layers_of_a_rank(stream) < pixels / _LAYER
    thin = sum(span.duration_s < _THIN * pixel_s for span in stream)
    if thin < 0.02 * len(stream) or not stream:
        _draw_bars(axes, shown, pixel_s, alternates=alternates)
    else:
        _draw_pixels(axes, shown, start_s, end_s, pixels, alternates=alternates)


def _layers_of_a_rank(spans: Iterable[Span]) -> int:
    """Number of layers of the busiest rank."""
    counts: dict[int, int] = {}
    last: dict[int, int | None] = {}
    for span in spans:
        if span.layer is not None and last.get(span.rank) != span.layer:
            counts[span.rank] = counts.get(span.rank, 0) + 1
        last[span.rank] = span.layer
    return max(counts.values(), default=0)


def _draw_bars(axes: Axes, spans: Iterable[Span], pixel_s: float, *, alternates: bool) -> None:
    """One collection a colour, which is fast with thousands of bars."""
    boxes: dict[str, list[Box]] = {}
    waits: list[Box] = []
    for span in spans:
        moves = span.kind == "transfer"
        top, bottom = _LINK_BAR if moves else _BAR
        end_s = max(span.end_s, span.start_s + pixel_s) if moves else span.end_s
        box = (span.start_s, end_s, span.rank + top, span.rank + bottom)
        if span.kind == "wait" and not is_solid(span):
            waits.append(box)
        else:
            boxes.setdefault(_colour(span, alternates=alternates), []).append(box)
    if waits:
        _boxes(axes, waits, **HATCHED, linewidths=0)
    for colour, group in boxes.items():
        _boxes(axes, group, facecolor=colour, linewidths=0)


def _boxes(axes: Axes, boxes: list[Box], **style: Any) -> None:
    from matplotlib.collections import PolyCollection

    corners = [((x0, y0), (x1, y0), (x1, y1), (x0, y1)) for x0, x1, y0, y1 in boxes]
    axes.add_collection(PolyCollection(corners, zorder=2, **style))


def _draw_pixels(
    axes: Axes, spans: Iterable[Span], start_s: float, end_s: float, pixels: int, *, alternates: bool
) -> None:
    """Draw each pixel in the mean colour of its spans; long waits are hatched, messages take at least a pixel."""
    pixel_s = (end_s - start_s) / pixels
    lanes: dict[tuple[int, bool], dict[str, list[tuple[float, float]]]] = {}
    waits: list[Box] = []
    for span in spans:
        moves = span.kind == "transfer"
        until_s = max(span.end_s, span.start_s + pixel_s) if moves else span.end_s
        lane = lanes.setdefault((span.rank, moves), {})
        lane.setdefault(_colour(span, alternates=alternates), []).append((span.start_s, until_s))
        if operation_of(span.kind, span.op) is WAITING and span.duration_s > _HATCHED * pixel_s:
            waits.append((span.start_s, span.end_s, span.rank + _BAR[0], span.rank + _BAR[1]))
    for (rank, moves), by_colour in lanes.items():
        if moves and len(lanes) > 2 * _LINK_ROWS:
            continue
        shares = {colour: covered_shares(times, start_s, end_s, pixels) for colour, times in by_colour.items()}
        top, bottom = _LINK_BAR if moves else _BAR
        extent = (start_s, max(end_s, start_s + 1e-12), rank + bottom, rank + top)
        colours = mean_colours(shares, GROUND.light)
        axes.imshow(colours[None], extent=extent, aspect="auto", interpolation="nearest", zorder=2)
    if waits:
        _boxes(axes, waits, **HATCHED, linewidths=0)


def _colour(span: Span, *, alternates: bool) -> str:
    """The operation's colour; lighter in every second layer."""
    colour = operation_of(span.kind, span.op).colour.light
    return faded(colour) if alternates and span.layer is not None and span.layer % 2 else colour


def legend_entries(spans: Iterable[Span], *, alternates: bool = True) -> dict[str, str]:
    """Labels of everything drawn, in the order of a layer, with colours."""
    drawn = {operation_of(span.kind, span.op) for span in spans}
    found = {one.label: one.colour.light for one in OPERATIONS.values() if one in drawn}
    if alternates and drawn & {OPERATIONS[op] for op in ("qkv", "attention", "output+mlp")}:
        found["odd layers: lighter"] = faded(OPERATIONS["attention"].colour.light)
    return found


# Lanes as rows of pixels, for bars that are thinner


def covered_shares(times_s: Sequence[tuple[float, float]], start_s: float, end_s: float, bins: int) -> Array:
    """Share of each of `bins` equal time bins that intervals cover, shape (bins,); at most 1 where they overlap."""
    edges = np.linspace(start_s, max(end_s, start_s + 1e-12), bins + 1)
    begin_s, until_s = zip(*times_s, strict=True)
    shares: Array = np.diff(_since(begin_s, edges) - _since(until_s, edges)) / np.diff(edges)
    return shares.clip(0.0, 1.0)


def mean_colours(shares: Mapping[str, Array], ground: str) -> Array:
    """RGB of each bin, 0 to 1, shape (bins, 3): colours weighted by their shares, and background for the rest."""
    total: Array = np.sum(list(shares.values()), axis=0)
    mixed: Array = (1.0 - total).clip(0.0)[:, None] * _rgb(ground)
    for colour, share in shares.items():
        mixed = mixed + (share / total.clip(1.0))[:, None] * _rgb(colour)
    return mixed.clip(0.0, 1.0)


def _since(moments_s: Sequence[float], edges_s: Array) -> Array:
    """Sum over past moments of the seconds since each, at each edge."""
    ordered = np.sort(moments_s)
    passed = np.searchsorted(ordered, edges_s)
    since: Array = passed * edges_s - np.concatenate([[0.0], np.cumsum(ordered)])[passed]
    return since


def _rgb(colour: str) -> Array:
    return np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
