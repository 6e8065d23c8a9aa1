"""Lanes: the operations of a rank over time as coloured bars or pixels, and what their legend says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvrsim.plots.head import HATCHED, WAITING
from kvrsim.plots.pixels import any_colour, covered_shares, draw_row, mean_colours, touched
from kvrsim.plots.style import GROUND, INK, OPERATIONS, faded, operation_of
from kvrsim.results.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_DETAILED_RANKS = 32  # with more ranks, lanes are thin and there are no close-ups
_MOST_ARROWS = 14  # of a rank
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
    """How many layers the busiest rank passes."""
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
    """Each pixel has the mean colour of what it covers; long waits are hatched."""
    stream: dict[int, dict[str, list[Span]]] = {}
    links: dict[int, dict[str, list[Span]]] = {}
    waits: list[Box] = []
    for span in spans:
        of = links if span.kind == "transfer" else stream
        of.setdefault(span.rank, {}).setdefault(_colour(span, alternates=alternates), []).append(span)
        if operation_of(span.kind, span.op) is WAITING and span.duration_s > _HATCHED * (end_s - start_s) / pixels:
            waits.append((span.start_s, span.end_s, span.rank + _BAR[0], span.rank + _BAR[1]))
    for rank, by_colour in stream.items():
        shares = {colour: covered_shares(some, start_s, end_s, pixels) for colour, some in by_colour.items()}
        draw_row(axes, mean_colours(shares, GROUND.light), (start_s, end_s, rank + _BAR[0], rank + _BAR[1]))
    for rank, by_colour in links.items() if len(stream) <= _LINK_ROWS else ():
        counts = {colour: touched(some, start_s, end_s, pixels) for colour, some in by_colour.items()}
        covered = covered_shares([span for some in by_colour.values() for span in some], start_s, end_s, pixels)
        draw_row(axes, any_colour(counts, covered), (start_s, end_s, rank + _LINK_BAR[0], rank + _LINK_BAR[1]))
    if waits:
        _boxes(axes, waits, **HATCHED, linewidths=0)


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
        if until_s - begin_s < (0.004 + 0.016 * len(str(layer))) * (end_s - start_s):
            continue
        middle = rank + (_BAR[0] + _BAR[1]) / 2 + 0.02
        style: dict[str, Any] = dict(ha="center", va="center", fontsize=8, color=INK, zorder=5)
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


def legend_entries(spans: Iterable[Span], *, alternates: bool = True) -> dict[str, str]:
    """Labels of everything drawn, in the order of a layer, with colours."""
    drawn = {operation_of(span.kind, span.op) for span in spans}
    found = {one.label: one.colour.light for one in OPERATIONS.values() if one in drawn}
    if alternates and drawn & {OPERATIONS[op] for op in ("qkv", "attention", "output+mlp")}:
        found["odd layers: lighter"] = faded(OPERATIONS["attention"].colour.light)
    return found
