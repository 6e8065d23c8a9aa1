"""Partitions by context, and interpolated ones against searched ones: the paper's figure 10."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from kvrsim.units import format_tokens
from kvrsim.views.style import INK
from validate.figures.cases import Predictions, Printed, PrintedPartition, Scope
from validate.figures.style import GREY, LOOKS, new_figure, png, ticks, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEIGHT = 0.74  # of a bar
_ROOM = 0.055  # share of the context in which a number can be read
_MOST_SHOWN = 1.9  # per cent; beyond, a number stands instead of the curve
_COLOURS = (LOOKS["kvr-s"].colour, LOOKS["tsp"].colour)


def draw_breakdown(scope: Scope, predictions: Predictions, printed: Printed) -> bytes:
    """PNG: shares of KVR-S's partitions by context, one panel a number of GPUs."""
    title = f"{scope.partition_model}: KVR-S's partitions over NVLink"
    subtitle = "Each rank's share in per cent, first rank on the left. Triangles: boundaries that the paper prints."
    contexts = breakdown_contexts(scope)
    figure = new_figure(10.5, 1.5 + 0.3 * len(contexts), title, subtitle)
    panels = figure.subplots(1, len(scope.gpu_counts), sharey=True, squeeze=False)[0]
    for axes, num_gpus in zip(panels, scope.gpu_counts, strict=True):
        for position, tokens in enumerate(contexts):
            chunks = predictions.of(scope.partition_model, tokens, num_gpus, "kvr-s").partition
            _bar(axes, position, [chunk / tokens for chunk in chunks])
            for partition in printed.partitions:
                if _matches(partition, scope.partition_model, tokens, num_gpus):
                    _marks(axes, position, partition)
        _share_axes(axes, num_gpus, contexts)
    panels[0].set_ylabel("context, tokens")
    return png(figure)


def breakdown_contexts(scope: Scope) -> tuple[int, ...]:
    """The lookup table's contexts, and those halfway between."""
    halfway = [(low + high) // 2 for low, high in zip(scope.knots, scope.knots[1:], strict=False)]
    return tuple(sorted({*scope.knots, *halfway}))


def _matches(partition: PrintedPartition, model: str, context_len: int, num_gpus: int) -> bool:
    return (partition.model, partition.context_len, partition.num_gpus) == (model, context_len, num_gpus)


def _bar(axes: Axes, position: int, shares: list[float]) -> None:
    from matplotlib import colormaps

    for rank, (share, end) in enumerate(zip(shares, accumulate(shares), strict=True)):
        shade = rank / max(1, len(shares) - 1)
        colour = colormaps["viridis"](0.18 + 0.77 * shade)
        axes.barh(position, share, left=end - share, height=_HEIGHT, color=colour, edgecolor="white", linewidth=0.4)
        if share >= _ROOM:
            style: dict[str, Any] = dict(ha="center", va="center", fontsize=7.5, color=INK if shade > 0.45 else "white")
            axes.text(end - share / 2, position, f"{100 * share:.0f}", **style)


def _marks(axes: Axes, position: int, partition: PrintedPartition) -> None:
    """Where the paper's partition puts the boundaries: on the bar's upper and lower edge."""
    ends = list(accumulate(partition.shares))[:-1]
    for side, marker in ((-1, "v"), (1, "^")):
        edge = position + side * (_HEIGHT / 2 + 0.06)
        axes.scatter(ends, [edge] * len(ends), marker=marker, s=30, color=INK, linewidth=0, zorder=4)


def _share_axes(axes: Axes, num_gpus: int, contexts: tuple[int, ...]) -> None:
    tidy(axes, f"{num_gpus} GPUs")
    axes.grid(visible=False)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(contexts) - 0.4, -0.6)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], labels=["0", "25", "50", "75", "100"])
    axes.set_yticks(range(len(contexts)), labels=[format_tokens(tokens) for tokens in contexts])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("share of the context, %")
    axes.spines["left"].set_visible(False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpolated:
    """One context on some GPUs: looked up, searched, and even."""

    context_len: int  # tokens
    num_gpus: int
    neighbours: tuple[int, int]  # contexts whose searched partitions were interpolated
    shares: tuple[float, ...]  # of the context, before rounding to tokens
    chunk_lens: tuple[int, ...]  # KVR-P
    searched: tuple[int, ...]  # KVR-S
    ttft_s: float  # of KVR-P
    searched_s: float
    even_s: float
    tsp_s: float

    @property
    def above_searched(self) -> float:
        """KVR-P's TTFT over KVR-S's, less one."""
        return self.ttft_s / self.searched_s - 1


def interpolated(
    predictions: Predictions, model: str, context_len: int, num_gpus: int, knots: Sequence[int]
) -> Interpolated:
    """KVR-P at a context between two of the knots, ascending."""
    low, high = neighbours(context_len, knots)
    table = {tokens: _shares(predictions.of(model, tokens, num_gpus, "kvr-s").partition) for tokens in (low, high)}
    shares = between(context_len, (low, high), table)
    chunk_lens = whole_tokens(shares, context_len)
    searched = predictions.of(model, context_len, num_gpus, "kvr-s")
    return Interpolated(
        context_len=context_len,
        num_gpus=num_gpus,
        neighbours=(low, high),
        shares=shares,
        chunk_lens=chunk_lens,
        searched=searched.partition,
        ttft_s=predictions.with_partition(model, context_len, chunk_lens).ttft_s,
        searched_s=searched.ttft_s,
        even_s=predictions.of(model, context_len, num_gpus, "kvr-e").ttft_s,
        tsp_s=predictions.of(model, context_len, num_gpus, "tsp").ttft_s,
    )


def neighbours(context_len: int, knots: Sequence[int]) -> tuple[int, int]:
    """The two knots around a context; a knot is its own upper neighbour, save the first."""
    assert knots[0] <= context_len <= knots[-1], "no extrapolation"
    upper = max(1, bisect.bisect_left(knots, context_len))
    return knots[upper - 1], knots[upper]


def between(context_len: int, ends: tuple[int, int], table: Mapping[int, Sequence[float]]) -> tuple[float, ...]:
    """Each rank's share of the context, linear in the context's length."""
    low, high = ends
    weight = (context_len - low) / (high - low)
    return tuple((1 - weight) * first + weight * last for first, last in zip(table[low], table[high], strict=True))


def whole_tokens(shares: Sequence[float], num_tokens: int) -> tuple[int, ...]:
    """Chunks that sum to the context: largest remainders get the tokens that rounding down leaves.

    None is empty: shares below a token take theirs from the longest chunk. There are at least as many tokens as shares.
    """
    exact = [share * num_tokens for share in shares]
    chunks = [max(1, math.floor(tokens)) for tokens in exact]
    order = sorted(range(len(chunks)), key=lambda rank: chunks[rank] - exact[rank])
    for rank in order[: max(0, num_tokens - sum(chunks))]:
        chunks[rank] += 1
    while sum(chunks) > num_tokens:
        chunks[chunks.index(max(chunks))] -= 1
    return tuple(chunks)


def _shares(chunk_lens: Sequence[int]) -> tuple[float, ...]:
    return tuple(chunk / sum(chunk_lens) for chunk in chunk_lens)


def tables(scope: Scope) -> dict[str, tuple[int, ...]]:
    """Lookup tables by what they are called: every knot, and every second one, the last included."""
    every = scope.knots[1] - scope.knots[0]
    return {
        f"entries {every // 1024}k apart": scope.knots,
        f"entries {2 * every // 1024}k apart": scope.knots[::-2][::-1],
    }


def comparison(scope: Scope, predictions: Predictions, num_gpus: int, knots: tuple[int, ...]) -> list[Interpolated]:
    """KVR-P at all compared contexts that lie within the knots."""
    inside = [tokens for tokens in scope.compared if knots[0] <= tokens <= knots[-1]]
    return [interpolated(predictions, scope.partition_model, tokens, num_gpus, knots) for tokens in inside]


def draw_kvr_p(scope: Scope, predictions: Predictions, printed: Printed) -> bytes:
    """PNG: TTFT of KVR-P above KVR-S by context, one panel a number of GPUs."""
    title = f"{scope.partition_model}: KVR-P, partitions looked up and interpolated, against KVR-S, searched"
    subtitle = (
        "Predicted TTFT of KVR-P above that of KVR-S's own search at the same context. Dots: entries of the table."
    )
    figure = new_figure(10.5, 3.9, title, subtitle)
    panels = figure.subplots(1, len(scope.lookup_gpu_counts), sharey=True, squeeze=False)[0]
    for axes, num_gpus in zip(panels, scope.lookup_gpu_counts, strict=True):
        for colour, (name, knots) in zip(_COLOURS, tables(scope).items(), strict=True):
            found = comparison(scope, predictions, num_gpus, knots)
            _curve(axes, found, knots, colour, name)
        _excess_axes(axes, scope, num_gpus)
        _claim(axes, scope, printed)
    panels[0].set_ylabel("KVR-P above KVR-S, % of TTFT")
    panels[0].legend(loc="upper left", frameon=False, fontsize=9)
    return png(figure)


def _curve(axes: Axes, found: list[Interpolated], knots: tuple[int, ...], colour: str, name: str) -> None:
    percent = {one.context_len: 100 * one.above_searched for one in found}
    axes.plot(list(percent), list(percent.values()), color=colour, linewidth=1.5, label=name)
    dots: dict[str, Any] = dict(marker="o", markersize=6, linestyle="", color=colour, markeredgecolor="white", zorder=3)
    axes.plot(list(knots), [percent.get(tokens, 0.0) for tokens in knots], **dots)
    worst = max(found, key=lambda one: one.above_searched)
    if 100 * worst.above_searched > _MOST_SHOWN:
        text = f"up to {worst.above_searched:.0%}\nat {format_tokens(worst.context_len)}"
        style: dict[str, Any] = dict(fontsize=8.5, color=colour, ha="center", va="top")
        axes.text(sum(worst.neighbours) / 2, 0.98 * _MOST_SHOWN, text, **style)


def _claim(axes: Axes, scope: Scope, printed: Printed) -> None:
    most = 100 * max(printed.kvr_p_above_kvr_s)
    axes.axhline(most, color=GREY, linestyle=(0, (1, 3)), linewidth=1)
    note: dict[str, Any] = dict(xytext=(0, 3), textcoords="offset points", ha="right", fontsize=8.5, color=GREY)
    axes.annotate(f"the paper: up to {most:g} %", xy=(scope.knots[-1], most), **note)


def _excess_axes(axes: Axes, scope: Scope, num_gpus: int) -> None:
    tidy(axes, f"{num_gpus} GPUs")
    ticks(axes.xaxis, scope.knots, [format_tokens(tokens) for tokens in scope.knots])
    axes.set_xlabel("context, tokens")
    axes.set_ylim(-0.12, _MOST_SHOWN)
