"""A Gantt chart of a timeline: what each rank computes, when it waits, and what the links carry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrsim.program import Array
from kvrsim.results.timeline import Span, Timeline
from kvrsim.units import format_seconds
from kvrsim.views.figure import HATCHED, WAITING, WIDTH, Head, figure_with_head, set_lanes
from kvrsim.views.style import GROUND, INK, OPERATIONS, chart_style, fade, operation_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_DETAILED_RANKS = 32  # largest number of ranks with thick lanes
_PIXELS = 2800  # columns of a lane; a picture has about half as many pixels
_HATCHED = 12  # largest wait that is not hatched, in columns
_LINK_ROWS = 100  # largest number of ranks for which lanes have room for links
# A rank's lane reaches from -0.5 to 0.5 around its number; lower lanes are later in the context.
_BAR = (-0.36, 0.22)
_LINK_BAR = (0.27, 0.38)


def draw_gantt(timeline: Timeline, title: str, subtitle: str) -> Figure:
    """Draw ranks x seconds; the interactive page (views/timeline.py) can zoom."""
    with chart_style():
        ranks = timeline.num_ranks
        entries = legend_entries(timeline.spans, alternates=not is_pipeline(timeline))
        head = Head(title=title, subtitle=subtitle, width=WIDTH, entries=entries)
        lanes = min(10.0, max(0.9, ranks * (0.34 if ranks <= MAX_DETAILED_RANKS else 0.11)))
        figure, axes = figure_with_head(head, lanes, left=0.07 if timeline.gpus_per_rank == 1 else 0.115)
        draw_timeline(axes, timeline, timeline.end_s)
    return figure


def draw_timeline(axes: Axes, timeline: Timeline, end_s: float, *, title: str = "") -> None:
    """Draw one lane per rank from 0 to `end_s`, with seconds below, and mark TTFT, when the last rank ends."""
    ranks = timeline.num_ranks
    end_s = max(end_s, 1e-12)
    _draw_lanes(axes, timeline.spans, end_s, alternates=not is_pipeline(timeline))
    axes.set_xlim(0.0, end_s)
    set_lanes(axes, timeline.rank_names, "seconds")
    axes.set_title(title, loc="left", fontsize=10, color=INK, pad=5)
    last = (span.end_s for span in timeline.spans if span.rank == ranks - 1 and is_solid(span))
    ttft_s = max(last, default=timeline.end_s)
    axes.axvline(ttft_s, color=INK, linewidth=1.4, zorder=6, clip_on=False)
    place: dict[str, Any] = dict(xycoords=("data", "axes fraction"), xytext=(0, 4), textcoords="offset points")
    style: dict[str, Any] = dict(ha="right", va="bottom", fontsize=10, fontweight="bold", color=INK)
    axes.annotate(f"TTFT {format_seconds(ttft_s)}", xy=(ttft_s, 1.0), **place, **style)


def is_solid(span: Span) -> bool:
    """Whether a rank computes or takes part in a collective of its own group, instead of waiting."""
    return span.kind == "compute" or (span.kind == "wait" and span.op == "collective")


def is_pipeline(timeline: Timeline) -> bool:
    """Whether the timeline is a pipeline's: no layer is on all ranks."""
    ranks: dict[int, set[int]] = {}
    for span in timeline.spans:
        if span.layer is not None and span.kind == "compute":
            ranks.setdefault(span.layer, set()).add(span.rank)
    return bool(ranks) and all(len(on) < timeline.num_ranks for on in ranks.values())


def legend_entries(spans: Iterable[Span], *, alternates: bool = True) -> dict[str, str]:
    """Labels and colours of all operations drawn, in the order of the legend."""
    operations = {operation_of(span.kind, span.op) for span in spans}
    entries = {one.label: one.colour.light for one in OPERATIONS.values() if one in operations}
    if alternates and operations & {OPERATIONS[op] for op in ("qkv", "attention", "output+mlp")}:
        entries["odd layers: lighter"] = fade(OPERATIONS["attention"].colour.light)
    return entries


# Lanes: the operations of each rank over time, in the mean colour of each pixel


def _draw_lanes(axes: Axes, spans: Iterable[Span], end_s: float, *, alternates: bool) -> None:
    """Draw each pixel in the mean colour of its spans; long waits are hatched, messages are at least two pixels wide.

    alternates: draw odd layers in lighter colours.
    """
    from matplotlib.collections import PolyCollection

    pixel_s = end_s / _PIXELS
    lanes: dict[tuple[int, bool], dict[str, list[tuple[float, float]]]] = {}
    waits: list[tuple[tuple[float, float], ...]] = []
    for span in spans:
        moves = span.kind == "transfer"
        operation = operation_of(span.kind, span.op)
        colour = operation.colour.light
        colour = fade(colour) if alternates and span.layer is not None and span.layer % 2 else colour
        until_s = max(span.end_s, span.start_s + 2 * pixel_s) if moves else span.end_s
        lanes.setdefault((span.rank, moves), {}).setdefault(colour, []).append((span.start_s, until_s))
        if operation is WAITING and span.duration_s > _HATCHED * pixel_s:
            top = span.rank + _BAR[0]
            bottom = span.rank + _BAR[1]
            ends_s = span.start_s, span.end_s
            waits.append(((ends_s[0], top), (ends_s[1], top), (ends_s[1], bottom), (ends_s[0], bottom)))
    for (rank, moves), by_colour in lanes.items():
        if moves and len(lanes) > 2 * _LINK_ROWS:
            continue
        shares = {colour: covered_shares(times, end_s, _PIXELS) for colour, times in by_colour.items()}
        top, bottom = _LINK_BAR if moves else _BAR
        extent = (0.0, end_s, rank + bottom, rank + top)
        colours = mean_colours(shares, GROUND.light)
        axes.imshow(colours[None], extent=extent, aspect="auto", interpolation="antialiased", zorder=2)
    axes.add_collection(PolyCollection(waits, zorder=2, linewidths=0, **HATCHED))


def covered_shares(times_s: Sequence[tuple[float, float]], end_s: float, bins: int) -> Array:
    """Share that intervals cover of each of `bins` equal bins from 0 to `end_s`, shape (bins,); at most 1."""
    edges = np.linspace(0.0, end_s, bins + 1)
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
    """At each edge, the sum of the seconds since each earlier moment."""
    ordered = np.sort(moments_s)
    passed = np.searchsorted(ordered, edges_s)
    since: Array = passed * edges_s - np.concatenate([[0.0], np.cumsum(ordered)])[passed]
    return since


def _rgb(colour: str) -> Array:
    return np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
