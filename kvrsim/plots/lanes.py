"""Lanes: the operations of a rank over time as coloured bars, and their legend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrsim.plots.style import INK, OPERATIONS, WAITING_LINES, faded, operation_of
from kvrsim.program.operations import Array
from kvrsim.results.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_DETAILED_RANKS = 32  # with more ranks, lanes only show the busy share
_MOST_BARS = 700  # of a rank; with more, bars are thinner than a pixel
_MOST_ARROWS = 14  # of a rank

_BUSY = "#22406b"  # of lanes that show the busy share
_WAIT_COLOUR = OPERATIONS["waiting"].colour.light
_WAIT: dict[str, Any] = dict(facecolor=_WAIT_COLOUR, edgecolor=WAITING_LINES.light, hatch="/////")
_BINS = 1200  # of lanes that show the busy share

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


def draw_bars(axes: Axes, spans: Iterable[Span], *, alternates: bool = True) -> None:
    """Draw bars of all spans, one collection a colour, which is fast with thousands of bars.

    alternates: draw odd layers in lighter colours.
    """
    boxes: dict[str, list[Box]] = {}
    waits: list[Box] = []
    for span in spans:
        top, bottom = _LINK_BAR if span.kind == "transfer" else _BAR
        box = (span.start_s, span.end_s, span.rank + top, span.rank + bottom)
        if span.kind == "wait" and not is_solid(span):
            waits.append(box)
        else:
            boxes.setdefault(_colour(span, alternates=alternates), []).append(box)
    if waits:
        _boxes(axes, waits, **_WAIT, linewidths=0)
    for colour, group in boxes.items():
        _boxes(axes, group, facecolor=colour, linewidths=0)


def _boxes(axes: Axes, boxes: list[Box], **style: Any) -> None:
    from matplotlib.collections import PolyCollection

    corners = [((x0, y0), (x1, y0), (x1, y1), (x0, y1)) for x0, x1, y0, y1 in boxes]
    axes.add_collection(PolyCollection(corners, zorder=2, **style))


def fits_bars(timeline: Timeline) -> bool:
    """Whether all bars of a timeline are wider than a pixel."""
    counts = Counter(span.rank for span in timeline.spans if is_solid(span))
    return timeline.num_ranks <= MAX_DETAILED_RANKS and max(counts.values(), default=0) <= _MOST_BARS


def draw_shares(axes: Axes, timeline: Timeline) -> None:
    """Draw the busy share of every rank as shades, where bars would be thinner than a pixel."""
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("busy", [_WAIT_COLOUR, _BUSY])
    ranks, end_s = timeline.num_ranks, max(timeline.end_s, 1e-12)
    extent = (0.0, end_s, ranks - 0.5, -0.5)
    shares = busy_shares(timeline, _BINS)
    axes.imshow(shares, extent=extent, aspect="auto", cmap=shades, vmin=0, vmax=1, interpolation="nearest", zorder=2)
    for rank in range(1, ranks):
        axes.axhline(rank - 0.5, color="white", linewidth=0.8, zorder=3)


def busy_shares(timeline: Timeline, bins: int) -> Array:
    """Busy share of each rank in `bins` equal time bins, shape (num_ranks, bins)."""
    edges = np.linspace(0.0, max(timeline.end_s, 1e-12), bins + 1)
    shares = np.zeros((timeline.num_ranks, bins))
    solid: dict[int, list[Span]] = {}
    for span in timeline.spans:
        if span.kind != "transfer" and is_solid(span):
            solid.setdefault(span.rank, []).append(span)
    for rank, spans in solid.items():
        times = np.array([moment for span in spans for moment in (span.start_s, span.end_s)])
        steps = np.array([step for span in spans for step in (0.0, span.duration_s)])
        shares[rank] = np.diff(np.interp(edges, times, np.cumsum(steps))) / np.diff(edges)
    return np.clip(shares, 0.0, 1.0)


def draw_arrows(axes: Axes, transfers: Sequence[Span], start_s: float, end_s: float) -> None:
    """Draw arrows from the sender's link to the receiver's lane; none for an all-gather or ring."""
    if any(span.peer != span.rank + 1 for span in transfers):
        return
    if len(transfers) > _MOST_ARROWS * len({span.rank for span in transfers}):
        return
    for span in transfers:
        if start_s <= span.start_s and span.end_s <= end_s:
            axes.annotate(
                "",
                xy=(span.end_s, span.rank + 1 + _BAR[0]),
                xytext=(span.start_s, span.rank + _LINK_BAR[1]),
                arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0},
                zorder=4,
            )


def number_layers(axes: Axes, spans: Iterable[Span], start_s: float, end_s: float) -> None:
    """Write each layer's number once a rank, in its longest attention bar, where there is room."""
    for (rank, layer), (begin_s, until_s) in _longest_attention(spans).items():
        begin_s, until_s = max(begin_s, start_s), min(until_s, end_s)
        if until_s - begin_s < 0.013 * len(str(layer)) * (end_s - start_s):
            continue
        middle = rank + (_BAR[0] + _BAR[1]) / 2 + 0.02
        style: dict[str, Any] = dict(
            ha="center", va="center", fontsize=7, color=INK if layer % 2 else "white", zorder=5
        )
        axes.text((begin_s + until_s) / 2, middle, str(layer), clip_on=True, **style)


def _longest_attention(spans: Iterable[Span]) -> dict[tuple[int, int], tuple[float, float]]:
    """The longest attention bar without a gap, by rank and layer."""
    runs: dict[tuple[int, int], tuple[float, float]] = {}
    longest: dict[tuple[int, int], tuple[float, float]] = {}
    for span in spans:
        if span.op != "attention" or span.kind != "compute" or span.layer is None:
            continue
        key = (span.rank, span.layer)
        begin_s, until_s = runs.get(key, (span.start_s, span.start_s))
        touches = span.start_s <= until_s * (1 + 1e-9)
        runs[key] = (begin_s if touches else span.start_s, span.end_s)
        best = longest.get(key, runs[key])
        longest[key] = max(best, runs[key], key=lambda run: run[1] - run[0])
    return longest


def _colour(span: Span, *, alternates: bool) -> str:
    """The operation's colour; lighter in every second layer."""
    colour = operation_of(span.kind, span.op).colour.light
    return faded(colour) if alternates and span.layer is not None and span.layer % 2 else colour


def share_entries(*, among_others: bool) -> dict[str, str | None]:
    """Labels and colours of lanes that show the busy share; among_others: shorter, beside those of bars."""
    if among_others:
        return {"above: computing": _BUSY}
    return {"computing; a shade: part of the time": _BUSY, "not computing": _WAIT_COLOUR}


def legend_entries(spans: Iterable[Span], *, alternates: bool = True) -> dict[str, str | None]:
    """Labels of everything drawn, in the order of a layer, with colours; None: a remark."""
    drawn = {operation_of(span.kind, span.op) for span in spans}
    found: dict[str, str | None] = {one.label: one.colour.light for one in OPERATIONS.values() if one in drawn}
    if alternates and drawn & {OPERATIONS[op] for op in ("qkv", "attention", "output+mlp")}:
        found["lighter: odd layers"] = None
    return found


def draw_legend(figure: Figure, height: float, entries: dict[str, str | None]) -> None:
    """Draw the legend in one line below the subtitle of a figure that is `height` inches high."""
    from matplotlib.patches import Patch

    patches = []
    for label, colour in entries.items():
        if label == OPERATIONS["waiting"].label:
            patches.append(Patch(**_WAIT, linewidth=0))
        elif colour is not None:
            patches.append(Patch(facecolor=colour))
        else:
            patches.append(Patch(facecolor="none", edgecolor="none"))
    corner = (0.006, 1 - 0.62 / height)
    place: dict[str, Any] = dict(loc="upper left", bbox_to_anchor=corner, ncols=len(entries))
    style: dict[str, Any] = dict(frameon=False, fontsize=9, labelcolor=INK, handlelength=1.3, columnspacing=1.2)
    figure.legend(patches, list(entries), **place, **style)
