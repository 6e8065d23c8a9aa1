"""A Gantt chart of a timeline: what each rank computes, when it waits, and what the links carry."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrsim.plots.head import Head
from kvrsim.plots.lanes import (
    MAX_DETAILED_RANKS,
    PIXELS,
    draw_arrows,
    draw_lanes,
    is_pipeline,
    is_solid,
    legend_entries,
    number_layers,
)
from kvrsim.plots.save import check_suffix, save_figure
from kvrsim.plots.style import INK, styled
from kvrsim.results.timeline import Span, Timeline
from kvrsim.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 10.0  # inches
_LEAST_LAYERS = 8  # with fewer layers there are no close-ups of layers
_LEAST_REQUESTS = 4  # with fewer requests there are no close-ups of requests
_SHORT = 0.4  # the longest close-up, as a share of the timeline


@dataclass(frozen=True, slots=True)
class _Window:
    """A time window with its own panel."""

    name: str  # label in the whole timeline
    title: str  # of its panel
    start_s: float
    end_s: float


def write_gantt(timeline: Timeline, path: str | Path, *, title: str, subtitle: str = "") -> None:
    """Draw ranks x seconds as PNG, SVG or PDF by the path's suffix; written atomically.

    Raises InputError naming the argument plot where the suffix is another or the file cannot be written.
    """
    check_suffix(path)
    with styled():
        save_figure(draw_gantt(timeline, title, subtitle), path)


def draw_gantt(timeline: Timeline, title: str, subtitle: str) -> Figure:
    """Ranks x seconds.

    Beneath the whole stand two close-ups, where they show more: of layers, of a pipeline's pieces or, of several
    requests, of two behind each other.
    """
    with styled():
        return _draw(timeline, title, subtitle)


def _draw(timeline: Timeline, title: str, subtitle: str) -> Figure:
    from kvrsim.plots.drawing import Drawing

    ranks = timeline.num_ranks
    detailed = ranks <= MAX_DETAILED_RANKS
    windows = _windows(timeline) if detailed else []
    alternates = not is_pipeline(timeline)
    entries = legend_entries(timeline.spans, alternates=alternates)
    head = Head(title=title, subtitle=subtitle, width=WIDTH, entries=entries)
    lanes = min(10.0, max(0.9, ranks * (0.34 if detailed else 0.11)))
    rows, gap = (2, 0.8) if windows else (1, 0.0)
    height = rows * lanes + gap + head.height + 0.85
    figure = Drawing(figsize=(WIDTH, height))
    left = 0.07 if timeline.gpus_per_rank == 1 else 0.115
    edges: dict[str, Any] = dict(left=left, right=0.98, top=1 - (head.height + 0.3) / height, bottom=0.55 / height)
    grid = figure.add_gridspec(rows, max(1, len(windows)), hspace=gap / lanes, wspace=0.06, **edges)
    whole = figure.add_subplot(grid[0, :])
    draw_lanes(whole, timeline.spans, 0.0, timeline.end_s, alternates=alternates)
    lane_axes(whole, timeline, 0.0, timeline.end_s)
    mark_first_tokens(whole, timeline)
    for column, window in enumerate(windows):
        axes = figure.add_subplot(grid[1, column])
        _close_up(axes, timeline, window, alternates=alternates)
        lane_axes(axes, timeline, window.start_s, window.end_s, title=window.title, named=column == 0)
        _frame(whole, window)
    head.draw(figure)
    return figure


def _close_up(axes: Axes, timeline: Timeline, window: _Window, *, alternates: bool) -> None:
    """Draw bars, arrows and layer numbers of one time window."""
    inside = [span for span in timeline.spans if span.end_s > window.start_s and span.start_s < window.end_s]
    draw_lanes(axes, inside, window.start_s, window.end_s, pixels=PIXELS // 2, alternates=alternates)
    draw_arrows(axes, [span for span in inside if span.kind == "transfer"], window.start_s, window.end_s)
    if alternates and not timeline.first_tokens_s:
        number_layers(axes, inside, window.start_s, window.end_s)


def _windows(timeline: Timeline) -> list[_Window]:
    """Close-ups; none where the whole timeline shows as much."""
    if timeline.first_tokens_s:
        return _of_requests(timeline.first_tokens_s)
    if is_pipeline(timeline):
        return _of_pieces(timeline)
    layers = sorted({span.layer for span in timeline.spans if span.layer is not None})
    if len(layers) < _LEAST_LAYERS:
        return []
    middle = len(layers) // 2
    return [
        _of_layers(timeline, "first layers", layers[:2]),
        _of_layers(timeline, "midway", layers[middle : middle + 2]),
    ]


def _of_layers(timeline: Timeline, name: str, layers: Sequence[int]) -> _Window:
    """From the first operation of some layers to their last; only on the last rank where ranks are far apart."""
    spans = [span for span in timeline.spans if span.layer in layers and is_solid(span) and span.kind != "transfer"]
    title = f"{name}: {layers[0]} and {layers[1]}"
    last = [span for span in spans if span.rank == timeline.num_ranks - 1]
    if layers[0] > 0 and last and _end_s(spans) - _start_s(spans) > timeline.end_s / 5:
        spans = last
        title += f" of rank {timeline.num_ranks - 1}"
    if not spans:
        return _Window(name, title, 0.0, timeline.end_s)
    pad_s = 0.01 * (_end_s(spans) - _start_s(spans))
    return _Window(name, title, max(0.0, _start_s(spans) - pad_s), _end_s(spans) + pad_s)


def _of_pieces(timeline: Timeline) -> list[_Window]:
    """Windows as long as a pipeline takes to fill, at the beginning and midway."""
    last = timeline.num_ranks - 1
    fills_s = 1.25 * min((span.start_s for span in timeline.of(last, "compute")), default=timeline.end_s)
    if not 0 < fills_s <= _SHORT * timeline.end_s:
        return []
    middle_s = (timeline.end_s - fills_s) / 2
    return [
        _Window("fills", "while the pipeline fills", 0.0, fills_s),
        _Window("midway", "midway, as long a stretch", middle_s, middle_s + fills_s),
    ]


def _of_requests(first_tokens_s: Sequence[float]) -> list[_Window]:
    """Windows of two consecutive requests, at the beginning and midway."""
    if len(first_tokens_s) < _LEAST_REQUESTS:
        return []
    middle = len(first_tokens_s) // 2
    first, last = middle - 1, middle + 1
    title = f"requests {middle + 1} and {middle + 2}: from the first token before to theirs"
    return [
        _Window("first two", "requests 1 and 2: to their first tokens", 0.0, first_tokens_s[1]),
        _Window("midway", title, first_tokens_s[first], first_tokens_s[last]),
    ]


def _start_s(spans: Iterable[Span]) -> float:
    return min(span.start_s for span in spans)


def _end_s(spans: Iterable[Span]) -> float:
    return max(span.end_s for span in spans)


def lane_axes(
    axes: Axes, timeline: Timeline, start_s: float, end_s: float, *, title: str = "", named: bool = True
) -> None:
    """Axes of one time window: one lane a rank, seconds below."""
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


def mark_first_tokens(axes: Axes, timeline: Timeline) -> None:
    """Mark TTFT, when the last rank is done; with several requests, mark each one."""
    if timeline.first_tokens_s:
        for moment_s in timeline.first_tokens_s:
            axes.axvline(moment_s, color=INK, linewidth=0.8, zorder=6)
        count = len(timeline.first_tokens_s)
        text = f"lines: first tokens of {count} requests"
        _above(axes, timeline.first_tokens_s[-1], text, ha="right", fontsize=10, fontweight="bold")
        return
    last = [span for span in timeline.spans if span.rank == timeline.num_ranks - 1 and is_solid(span)]
    ttft_s = max((span.end_s for span in last if span.kind != "transfer"), default=timeline.end_s)
    axes.axvline(ttft_s, color=INK, linewidth=1.4, zorder=6, clip_on=False)
    _above(axes, ttft_s, f"TTFT {format_seconds(ttft_s)}", ha="right", fontsize=10, fontweight="bold")


def _frame(whole: Axes, window: _Window) -> None:
    """Mark a close-up in the whole timeline."""
    style: dict[str, Any] = dict(facecolor="none", edgecolor=INK, linewidth=0.9, linestyle=(0, (4, 2)), zorder=5)
    whole.axvspan(window.start_s, window.end_s, **style)
    _above(whole, window.start_s, window.name, ha="left", fontsize=8)


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
