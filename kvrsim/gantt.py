"""A Gantt chart of a timeline: who computes what when, who waits, and what the links carry."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrsim.plots.save import save_figure
from kvrsim.timeline import Span, Timeline
from kvrsim.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_DETAILED_RANKS = 32  # with more, a lane shows computing and waiting only

_GROUPS = {  # operations that share a colour
    "qkv": ("Q, K, V projections", "#4c78a8"),
    "append": ("appending KV", "#8a6fb0"),
    "attention": ("attention", "#ee8434"),
    "output+mlp": ("output projection, MLP", "#4f9d5d"),
    "ends": ("embedding, head", "#c2517c"),
    "compute": ("compute", "#4c78a8"),
}
_GROUP_OF = {"assemble": "append", "embedding": "ends", "prepare": "ends", "head": "ends"}
_LINK, _INK = "#3d4451", "#2b2f36"
_WAIT: dict[str, Any] = dict(facecolor="#f4f4f4", edgecolor="#c4c4c4", hatch="/////")
_RC: dict[Any, Any] = {"hatch.linewidth": 0.6, "font.family": "DejaVu Sans"}

# A rank's lane reaches from -0.5 to 0.5 around its number; down is later in the context.
_BAR = (-0.36, 0.22)
_LINK_BAR = (0.27, 0.38)

Box = tuple[float, float, float, float]  # start_s, end_s, top, bottom


@dataclass(frozen=True, slots=True)
class _Window:
    """A stretch of time worth a panel of its own."""

    name: str  # as the whole shows it
    title: str  # of the panel
    start_s: float
    end_s: float


def write_gantt(timeline: Timeline, path: str | Path, *, title: str, subtitle: str = "") -> None:
    """Draw ranks x seconds as PNG, SVG or PDF by the path's suffix; the file appears whole or not at all.

    Beneath the whole prefill stand two close-ups: the first two layers, and two in the middle. Raises
    InputError naming `plot` where the suffix is another or the file cannot be written.
    """
    import matplotlib

    with matplotlib.rc_context(_RC):
        save_figure(_draw(timeline, title, subtitle), path)


def _draw(timeline: Timeline, title: str, subtitle: str) -> Figure:
    """The whole figure."""
    from matplotlib.figure import Figure

    ranks = timeline.num_ranks
    detailed = ranks <= MAX_DETAILED_RANKS
    windows = _windows(timeline) if detailed else []
    lanes = min(10.0, max(0.9, ranks * (0.34 if detailed else 0.15)))  # inches, as all here
    rows, gap = (2, 0.74) if windows else (1, 0.0)
    height = rows * lanes + gap + 1.7
    figure = Figure(figsize=(13, height))
    edges: dict[str, Any] = dict(left=0.07, right=0.985, top=1 - 1.15 / height, bottom=0.55 / height)
    grid = figure.add_gridspec(rows, max(1, len(windows)), hspace=gap / lanes, wspace=0.06, **edges)
    spans = timeline.spans if detailed else tuple(_aggregated(timeline))
    whole = figure.add_subplot(grid[0, :])
    _panel(whole, spans, ranks, _Window("", "", 0.0, timeline.end_s))
    _mark_ttft(whole, timeline)
    for column, window in enumerate(windows):
        _panel(figure.add_subplot(grid[1, column]), spans, ranks, window, named=column == 0)
        _frame(whole, window)
    _head(figure, height, title, subtitle)
    _legend(figure, height, spans)
    return figure


def _windows(timeline: Timeline) -> list[_Window]:
    """The first two layers, and two in the middle; none where the whole is as good."""
    layers = sorted({span.layer for span in timeline.spans if span.layer is not None})
    if len(layers) < 8:
        return []
    middle = len(layers) // 2
    return [
        _window(timeline, "first layers", layers[:2]),
        _window(timeline, "midway", layers[middle : middle + 2]),
    ]


def _window(timeline: Timeline, name: str, layers: list[int]) -> _Window:
    """From the layers' first operation to their last; on the last rank only, where ranks drift far apart."""
    spans = [span for span in timeline.spans if span.layer in layers and span.kind == "compute"]
    title = f"{name}: {layers[0]} and {layers[1]}"
    last = timeline.num_ranks - 1
    if layers[0] > 0 and _end_s(spans) - _start_s(spans) > timeline.end_s / 5:
        spans = [span for span in spans if span.rank == last]
        title += f" of rank {last}"
    pad_s = 0.01 * (_end_s(spans) - _start_s(spans))
    return _Window(name, title, max(0.0, _start_s(spans) - pad_s), _end_s(spans) + pad_s)


def _start_s(spans: Iterable[Span]) -> float:
    return min(span.start_s for span in spans)


def _end_s(spans: Iterable[Span]) -> float:
    return max(span.end_s for span in spans)


def _aggregated(timeline: Timeline) -> Iterator[Span]:
    """A rank's compute spans, those that touch as one, and its waits."""
    for rank in range(timeline.num_ranks):
        runs: list[tuple[float, float]] = []
        for span in timeline.of(rank, "compute"):
            touches = runs and span.start_s <= runs[-1][1] * (1 + 1e-9)
            start_s = runs.pop()[0] if touches else span.start_s
            runs.append((start_s, span.end_s))
        for start_s, end_s in runs:
            yield Span(rank=rank, kind="compute", name="compute", layer=None, start_s=start_s, end_s=end_s)
        yield from timeline.of(rank, "wait")


def _panel(axes: Axes, spans: Iterable[Span], ranks: int, window: _Window, *, named: bool = True) -> None:
    """Lanes, bars and axes of one stretch of time."""
    inside = [span for span in spans if span.end_s > window.start_s and span.start_s < window.end_s]
    _bars(axes, inside)
    if window.title:
        _arrows(axes, [span for span in inside if span.kind == "transfer"], window)
        _number_layers(axes, inside, window)
    axes.set_xlim(window.start_s, window.end_s)
    axes.set_ylim(ranks - 0.45, -0.55)
    every = math.ceil(ranks / 32)
    axes.set_yticks(range(0, ranks, every))
    axes.set_yticklabels([f"rank {rank}" if named else "" for rank in range(0, ranks, every)])
    axes.set_title(window.title, loc="left", fontsize=10, color=_INK, pad=5)
    axes.tick_params(axis="y", length=0, labelsize=9, colors=_INK)
    axes.tick_params(axis="x", labelsize=8.5, colors=_INK)
    axes.set_xlabel("seconds", fontsize=9, color=_INK, labelpad=2)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x", color="#e3e3e3", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)


def _bars(axes: Axes, spans: Iterable[Span]) -> None:
    """One collection a colour: fast with thousands of spans."""
    boxes: dict[str, list[Box]] = {}
    waits: list[Box] = []
    for span in spans:
        top, bottom = _LINK_BAR if span.kind == "transfer" else _BAR
        box = (span.start_s, span.end_s, span.rank + top, span.rank + bottom)
        if span.kind == "wait":
            waits.append(box)
        else:
            boxes.setdefault(_colour(span), []).append(box)
    if waits:
        _boxes(axes, waits, **_WAIT, linewidths=0)
    for colour, group in boxes.items():
        _boxes(axes, group, facecolor=colour, linewidths=0)


def _boxes(axes: Axes, boxes: list[Box], **style: Any) -> None:
    from matplotlib.collections import PolyCollection

    corners = [((x0, y0), (x1, y0), (x1, y1), (x0, y1)) for x0, x1, y0, y1 in boxes]
    axes.add_collection(PolyCollection(corners, zorder=2, **style))


def _group(span: Span) -> str:
    group = _GROUP_OF.get(span.name, span.name)
    return group if group in _GROUPS else "compute"


def _colour(span: Span) -> str:
    """The operation's colour; lighter in every second layer, so that layers can be told apart."""
    colour = _LINK if span.kind == "transfer" else _GROUPS[_group(span)][1]
    return _lighter(colour) if span.layer is not None and span.layer % 2 else colour


def _lighter(colour: str) -> str:
    parts = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(part + 0.42 * (255 - part)):02x}" for part in parts)


def _arrows(axes: Axes, transfers: list[Span], window: _Window) -> None:
    """From the sender's link to the receiver's lane; not of an all-gather, whose arrows would cross."""
    if any(span.peer != span.rank + 1 for span in transfers):
        return
    for span in transfers:
        if window.start_s <= span.start_s and span.end_s <= window.end_s:
            _arrow(axes, span)


def _arrow(axes: Axes, span: Span) -> None:
    axes.annotate(
        "",
        xy=(span.end_s, span.rank + 1 + _BAR[0]),
        xytext=(span.start_s, span.rank + _LINK_BAR[1]),
        arrowprops={"arrowstyle": "-|>", "color": _INK, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0},
        zorder=4,
    )


def _number_layers(axes: Axes, spans: list[Span], window: _Window) -> None:
    """The layer's number in its attention, where there is room."""
    room_s = 0.02 * (window.end_s - window.start_s)
    for span in spans:
        start_s, end_s = max(span.start_s, window.start_s), min(span.end_s, window.end_s)
        if span.name != "attention" or span.kind != "compute" or end_s - start_s < room_s:
            continue
        middle = span.rank + (_BAR[0] + _BAR[1]) / 2 + 0.02
        colour = _INK if span.layer is not None and span.layer % 2 else "white"
        x_s = (start_s + end_s) / 2
        axes.text(x_s, middle, str(span.layer), ha="center", va="center", fontsize=7, color=colour, zorder=5)


def _mark_ttft(axes: Axes, timeline: Timeline) -> None:
    """The first token comes from the last rank."""
    ttft_s = _end_s(timeline.of(timeline.num_ranks - 1, "compute"))
    axes.axvline(ttft_s, color=_INK, linewidth=1.4, zorder=6, clip_on=False)
    _above(axes, ttft_s, f"TTFT {format_seconds(ttft_s)}", ha="right", fontsize=10, fontweight="bold")


def _frame(whole: Axes, window: _Window) -> None:
    """Show in the whole where a close-up lies."""
    style: dict[str, Any] = dict(facecolor="none", edgecolor=_INK, linewidth=0.9, linestyle=(0, (4, 2)), zorder=5)
    whole.axvspan(window.start_s, window.end_s, **style)
    _above(whole, window.start_s, window.name, ha="left", fontsize=8)


def _above(axes: Axes, x_s: float, text: str, **style: Any) -> None:
    """A word above the axes."""
    axes.annotate(
        text,
        xy=(x_s, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 4),
        textcoords="offset points",
        va="bottom",
        color=_INK,
        **style,
    )


def _head(figure: Figure, height: float, title: str, subtitle: str) -> None:
    """Title and subtitle, `height` inches up."""
    style: dict[str, Any] = dict(va="top", parse_math=False)
    figure.text(0.012, 1 - 0.14 / height, title, fontsize=14, fontweight="bold", color=_INK, **style)
    figure.text(0.012, 1 - 0.43 / height, subtitle, fontsize=9.5, color="#5b616b", **style)


def _legend(figure: Figure, height: float, spans: Iterable[Span]) -> None:
    """What is drawn, in the order of a layer."""
    from matplotlib.patches import Patch

    drawn = {(span.kind, _group(span)) for span in spans}
    kinds = {kind for kind, _ in drawn}
    groups = {group for kind, group in drawn if kind == "compute"}
    shown = {label: colour for group, (label, colour) in _GROUPS.items() if group in groups}
    entries = {label: Patch(facecolor=colour) for label, colour in shown.items()}
    if "wait" in kinds:
        entries["waiting"] = Patch(**_WAIT, linewidth=0)
    if "transfer" in kinds:
        entries["KV on the link"] = Patch(facecolor=_LINK)
    if groups - {"ends", "compute"}:
        entries["lighter: layers with odd numbers"] = Patch(facecolor="none", edgecolor="none")
    corner = (0.006, 1 - 0.62 / height)
    place: dict[str, Any] = dict(loc="upper left", bbox_to_anchor=corner, ncols=len(entries))
    style: dict[str, Any] = dict(frameon=False, fontsize=9, labelcolor=_INK, handlelength=1.3, columnspacing=1.4)
    figure.legend(list(entries.values()), list(entries), **place, **style)
