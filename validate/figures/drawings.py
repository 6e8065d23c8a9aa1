"""The paper's figures 8 to 11: TTFT by context and GPUs, scalability, partitions, and a noisy network."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any

from kvrsim.results.results import Plan
from kvrsim.units import format_tokens
from kvrsim.views.style import INK
from validate.figures.cases import (
    CLOSED_FORM,
    GREY,
    LOOKS,
    NO_COMMUNICATION,
    Look,
    Predictions,
    Printed,
    PrintedPartition,
    Scope,
    claim_line,
    new_figure,
    panels,
    png,
    second_ticks,
    ticks,
    tidy,
    token_ticks,
)
from validate.published.compare import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BANDS = ("tsp", "kvr-s")
_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_SERIES = {**LOOKS, "no-communication": NO_COMMUNICATION, "closed-form": CLOSED_FORM}


def draw_ttft(scope: Scope, predictions: Predictions, model: str) -> bytes:
    """PNG: TTFT above, how much faster than TSP beneath; one column per number of GPUs."""
    subtitle = (
        "Lines: predicted; bands: low to high of the prediction (KVR-E's, as wide, is left out)."
        " Markers: printed in the paper's appendix; bars: their rounding."
    )
    figure = new_figure(10.5, 6.2, f"{model}: TTFT over NVLink by context", subtitle)
    grid = figure.subplots(2, len(scope.gpu_counts), sharex=True, sharey="row", height_ratios=(1.6, 1), squeeze=False)
    for column, num_gpus in enumerate(scope.gpu_counts):
        upper, lower = grid[0, column], grid[1, column]
        _ttft_panel(upper, scope, predictions, model, num_gpus)
        _speedup_panel(lower, scope, predictions, model, num_gpus)
        tidy(upper, f"{num_gpus} GPUs")
        tidy(lower)
        lower.set_xlabel("context, tokens")
    _scales(grid, scope.contexts(model))
    _legend(grid[0, 0], {row.strategy for row in scope.rows if row.model == model})
    return png(figure)


def _ttft_panel(axes: Axes, scope: Scope, predictions: Predictions, model: str, num_gpus: int) -> None:
    contexts = scope.curve(model)
    for strategy, look in LOOKS.items():
        results = [predictions.of(model, tokens, num_gpus, strategy) for tokens in contexts]
        if strategy in _BANDS:
            low_s, high_s = [result.ttft_low_s for result in results], [result.ttft_high_s for result in results]
            axes.fill_between(contexts, low_s, high_s, color=look.colour, alpha=0.16, linewidth=0)
        ttft_s = [result.ttft_s for result in results]
        axes.plot(contexts, ttft_s, **look.line)
        rows = scope.reported(model, num_gpus, strategy)
        axes.plot([r.context_len for r in rows], [r.ttft_s for r in rows], linestyle="", zorder=4, **look.printed)
    if not any(scope.reported(model, num_gpus, strategy) for strategy in LOOKS):
        where: dict[str, Any] = dict(xycoords="axes fraction", ha="right", fontsize=8.5, color=GREY)
        axes.annotate("predicted only: no printed row at hand", xy=(0.98, 0.03), **where)


def _speedup_panel(axes: Axes, scope: Scope, predictions: Predictions, model: str, num_gpus: int) -> None:
    """TSP's TTFT over the strategy's; printed pairs have the range of their rounding."""
    contexts = scope.curve(model)
    tsp_s = [predictions.of(model, tokens, num_gpus, "tsp").ttft_s for tokens in contexts]
    axes.axhline(1.0, color=LOOKS["tsp"].colour, linewidth=1.5)
    tsp_rows = {row.context_len: row for row in scope.reported(model, num_gpus, "tsp")}
    for strategy in ("kvr-e", "kvr-s"):
        look = LOOKS[strategy]
        own_s = [predictions.of(model, tokens, num_gpus, strategy).ttft_s for tokens in contexts]
        ratios = [tsp / own for tsp, own in zip(tsp_s, own_s, strict=True)]
        axes.plot(contexts, ratios, **look.line)
        for row in scope.reported(model, num_gpus, strategy):
            if row.context_len in tsp_rows:
                _printed_speedup(axes, tsp_rows[row.context_len], row, look)


def _printed_speedup(axes: Axes, tsp: Row, row: Row, look: Look) -> None:
    ratio = tsp.ttft_s / row.ttft_s
    least = (tsp.ttft_s - tsp.rounding_s) / (row.ttft_s + row.rounding_s)
    most = (tsp.ttft_s + tsp.rounding_s) / (row.ttft_s - row.rounding_s)
    yerr = [[ratio - least], [most - ratio]]
    axes.errorbar([row.context_len], [ratio], yerr=yerr, zorder=4, linewidth=1.2, **look.printed)


def _scales(grid: Any, contexts: tuple[int, ...]) -> None:
    """Both axes of TTFT are logarithmic, so that equal shares look equal."""
    first, upper, lower = contexts[0], grid[0, 0], grid[1, 0]
    lower.set_xscale("log", base=2)
    lower.set_xlim(first / 1.12, contexts[-1] * 1.12)
    for axes in grid.flat:
        token_ticks(axes.xaxis, contexts)
        axes.tick_params(axis="x", labelrotation=0)
    for axes in grid[0]:
        second_ticks(axes, _SECONDS)
    upper.set_ylabel("TTFT, seconds")
    lower.set_ylabel("times as fast as TSP")


def _legend(axes: Axes, strategies_with_rows: set[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: dict[str, Any] = {}
    for strategy, look in LOOKS.items():
        style = (
            look.printed
            | look.line
            | {"linewidth": None}
            | ({} if strategy in strategies_with_rows else {"marker": ""})
        )
        handles[look.label] = Line2D([], [], **style)
    handles["low to high"] = Patch(color=GREY, alpha=0.22, linewidth=0)
    axes.legend(handles.values(), handles.keys(), loc="upper left", frameon=False, fontsize=9, handlelength=2.6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """TTFTs on some number of GPUs."""

    num_gpus: int
    ttft_s: Mapping[str, float]  # by strategy; and of the two bounds
    lower_bound_s: float  # proven, of every KVR partition
    fits: bool  # KVR-S in memory
    reported_s: Mapping[str, float]  # by strategy, where there is a row


def scalings(scope: Scope, predictions: Predictions) -> tuple[Scaling, ...]:
    """By number of GPUs; the closed form is the paper's, TTFT(1) / 2 x (1/p + 1/p^2)."""
    model, tokens = scope.partition_model, scope.scaling_context_len
    return tuple(_scaling(scope, predictions.plan(model, tokens, count)) for count in scope.scaling_gpu_counts)


def _scaling(scope: Scope, plan: Plan) -> Scaling:
    own = {result.strategy: result for result in plan.strategies}
    rows = {
        strategy: row.ttft_s
        for strategy in LOOKS
        for row in scope.reported(plan.model, plan.num_gpus, strategy)
        if row.context_len == plan.context_len
    }
    bounds = {"no-communication": plan.bounds.ttft_no_comm_s, "closed-form": plan.bounds.ttft_star_s}
    return Scaling(
        num_gpus=plan.num_gpus,
        ttft_s={strategy: own[strategy].ttft_s for strategy in LOOKS} | bounds,
        lower_bound_s=plan.bounds.lower_bound_s or 0.0,
        fits=own["kvr-s"].fits,
        reported_s=rows,
    )


def draw_scalability(scope: Scope, predictions: Predictions, printed: Printed) -> bytes:
    """PNG: TTFT by GPUs, and each over TTFT(p)."""
    results = scalings(scope, predictions)
    title = f"{scope.partition_model}, {format_tokens(scope.scaling_context_len)} tokens: TTFT by GPUs"
    subtitle = "Lines with small markers: predicted. Large markers: printed. Hollow: would not fit in a GPU's memory."
    figure = new_figure(10.5, 4.5, title, subtitle)
    left, right = figure.subplots(1, 2)
    for name, look in _SERIES.items():
        _scaling_line(left, results, {scaling.num_gpus: scaling.ttft_s[name] for scaling in results}, look)
        above = {scaling.num_gpus: _above(scaling, name) for scaling in results}
        if name != "no-communication":
            _scaling_line(right, results, above, look)
    _printed_points(left, results)
    _scaling_axes(left, right, results)
    right.axhline(0, **NO_COMMUNICATION.line)
    most = 100 * printed.kvr_s_above_no_communication
    text, last = f"the paper's KVR-S: up to {most:g} %", results[-1].num_gpus
    claim_line(right, most, text, right=last, colour=LOOKS["kvr-s"].colour)
    left.legend(loc="lower left", frameon=False, fontsize=9, handlelength=2.8, labelcolor=INK)
    return png(figure)


def _above(scaling: Scaling, name: str) -> float:
    """Per cent above TTFT(p)."""
    return 100 * (scaling.ttft_s[name] / scaling.ttft_s["no-communication"] - 1)


def _scaling_line(axes: Axes, scalings: tuple[Scaling, ...], values: Mapping[int, float], look: Look) -> None:
    axes.plot(list(values), list(values.values()), label=look.label, **look.line)
    for scaling in scalings:
        face = look.colour if scaling.fits else "white"
        style: dict[str, Any] = dict(marker=look.marker, markersize=4, color=look.colour, markerfacecolor=face)
        axes.plot([scaling.num_gpus], [values[scaling.num_gpus]], zorder=3, **style)


def _printed_points(axes: Axes, scalings: tuple[Scaling, ...]) -> None:
    for scaling in scalings:
        for strategy, ttft_s in scaling.reported_s.items():
            axes.plot([scaling.num_gpus], [ttft_s], zorder=4, **LOOKS[strategy].printed | {"markersize": 9})


def _scaling_axes(left: Axes, right: Axes, results: tuple[Scaling, ...]) -> None:
    counts = [scaling.num_gpus for scaling in results]
    for axes, title in ((left, "TTFT"), (right, "above TTFT(p)")):
        axes.set_xscale("log", base=2)
        ticks(axes.xaxis, counts, [str(count) for count in counts])
        axes.set_xlabel("GPUs, p")
        tidy(axes, title)
    second_ticks(left, (0.2, 0.5, 1.0, 2.0, 5.0, 10.0))
    left.set_ylabel("TTFT, seconds")
    right.set_ylabel("per cent above TTFT(p)")


_HEIGHT = 0.74  # of a bar
_ROOM = 0.055  # share of the context in which a number can be read
_MOST_SHOWN = 1.9  # per cent; beyond, a number stands instead of the curve
_COLOURS = (LOOKS["kvr-s"].colour, LOOKS["tsp"].colour)


def draw_breakdown(scope: Scope, predictions: Predictions, printed: Printed) -> bytes:
    """PNG: shares of KVR-S's partitions by context, one panel per number of GPUs."""
    title = f"{scope.partition_model}: KVR-S's partitions over NVLink"
    subtitle = "Each rank's share in per cent, first rank on the left. Triangles: boundaries that the paper prints."
    contexts = breakdown_contexts(scope)
    figure = new_figure(10.5, 1.5 + 0.3 * len(contexts), title, subtitle)
    by_count = panels(figure, scope.gpu_counts)
    for num_gpus, axes in by_count.items():
        for position, tokens in enumerate(contexts):
            chunks = predictions.of(scope.partition_model, tokens, num_gpus, "kvr-s").partition
            _bar(axes, position, [chunk / tokens for chunk in chunks])
            case = (scope.partition_model, tokens, num_gpus)
            for partition in printed.partitions:
                if (partition.model, partition.context_len, partition.num_gpus) == case:
                    _marks(axes, position, partition)
        _share_axes(axes, contexts)
    by_count[scope.gpu_counts[0]].set_ylabel("context, tokens")
    return png(figure)


def breakdown_contexts(scope: Scope) -> tuple[int, ...]:
    """The lookup table's contexts, and those halfway between."""
    halfway = [(low + high) // 2 for low, high in zip(scope.knots, scope.knots[1:], strict=False)]
    return tuple(sorted({*scope.knots, *halfway}))


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


def _share_axes(axes: Axes, contexts: tuple[int, ...]) -> None:
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
    """PNG: TTFT of KVR-P above KVR-S by context, one panel per number of GPUs."""
    title = f"{scope.partition_model}: KVR-P, partitions looked up and interpolated, against KVR-S, searched"
    subtitle = (
        "Predicted TTFT of KVR-P above that of KVR-S's own search at the same context. Dots: entries of the table."
    )
    figure = new_figure(10.5, 3.9, title, subtitle)
    by_count = panels(figure, scope.lookup_gpu_counts)
    most = 100 * max(printed.kvr_p_above_kvr_s)
    for num_gpus, axes in by_count.items():
        for colour, (name, knots) in zip(_COLOURS, tables(scope).items(), strict=True):
            _curve(axes, comparison(scope, predictions, num_gpus, knots), knots, colour, name)
        token_ticks(axes.xaxis, scope.knots)
        axes.set_xlabel("context, tokens")
        axes.set_ylim(-0.12, _MOST_SHOWN)
        claim_line(axes, most, f"the paper: up to {most:g} %", right=scope.knots[-1], colour=GREY)
    first = by_count[scope.lookup_gpu_counts[0]]
    first.set_ylabel("KVR-P above KVR-S, % of TTFT")
    first.legend(loc="upper left", frameon=False, fontsize=9)
    return png(figure)


def _curve(axes: Axes, compared: list[Interpolated], knots: tuple[int, ...], colour: str, name: str) -> None:
    percent = {one.context_len: 100 * one.above_searched for one in compared}
    axes.plot(list(percent), list(percent.values()), color=colour, linewidth=1.5, label=name)
    dots: dict[str, Any] = dict(marker="o", markersize=6, linestyle="", color=colour, markeredgecolor="white", zorder=3)
    axes.plot(list(knots), [percent.get(tokens, 0.0) for tokens in knots], **dots)
    worst = max(compared, key=lambda one: one.above_searched)
    if 100 * worst.above_searched > _MOST_SHOWN:
        text = f"up to {worst.above_searched:.0%}\nat {format_tokens(worst.context_len)}"
        style: dict[str, Any] = dict(fontsize=8.5, color=colour, ha="center", va="top")
        axes.text(sum(worst.neighbours) / 2, 0.98 * _MOST_SHOWN, text, **style)


_WIDTH = 0.26  # of a bar


@dataclass(frozen=True, kw_only=True, slots=True)
class Increase:
    """Relative increase of one strategy's TTFT on the noisy network: mean over noise-free TTFT, less one."""

    context_len: int  # tokens
    num_gpus: int
    strategy: str
    mean: float
    low: float  # 95 % confidence limits of the mean
    high: float


def increases(scope: Scope, predictions: Predictions, printed: Printed) -> tuple[Increase, ...]:
    """By number of GPUs, context and strategy, in this order."""
    noisy = printed.noisy_network
    cases = product(noisy.num_gpus, noisy.context_lens, LOOKS)
    return tuple(_increase(scope, predictions, noisy.model, *case) for case in cases)


def _increase(
    scope: Scope, predictions: Predictions, model: str, num_gpus: int, tokens: int, strategy: str
) -> Increase:
    ttft = predictions.noisy(model, tokens, num_gpus, strategy, noise=scope.noise, samples=scope.noise_samples)
    limits_s = (ttft.mean.value_s, ttft.mean.low_s or ttft.mean.value_s, ttft.mean.high_s or ttft.mean.value_s)
    mean, low, high = (seconds / ttft.quiet_s - 1 for seconds in limits_s)
    return Increase(context_len=tokens, num_gpus=num_gpus, strategy=strategy, mean=mean, low=low, high=high)


def mean_increase(all_increases: tuple[Increase, ...], strategy: str) -> float:
    """Mean of a strategy over all contexts and numbers of GPUs."""
    own = [one.mean for one in all_increases if one.strategy == strategy]
    return sum(own) / len(own)


def draw_noise(scope: Scope, predictions: Predictions, printed: Printed) -> bytes:
    """PNG: increase of TTFT by context, one panel per number of GPUs."""
    noisy = printed.noisy_network
    all_increases = increases(scope, predictions, printed)
    title = f"{noisy.model}: how much a noisy network adds to TTFT"
    subtitle = f"Bars: mean of {scope.noise_samples} simulated runs each. Dotted: what the paper prints, at most."
    figure = new_figure(10.5, 4.2, title, subtitle)
    by_count = panels(figure, noisy.num_gpus)
    for num_gpus, axes in by_count.items():
        _noise_panel(axes, [one for one in all_increases if one.num_gpus == num_gpus], noisy.context_lens)
        for strategy, share in noisy.shares.items():
            axes.axhline(100 * share, color=LOOKS[strategy].colour, linestyle=(0, (1, 2)), linewidth=1.2)
    first = by_count[noisy.num_gpus[0]]
    first.set_ylabel("mean TTFT above quiet, %")
    first.legend(frameon=False, fontsize=9, labelcolor=GREY)
    return png(figure)


def _noise_panel(axes: Axes, increases: list[Increase], contexts: tuple[int, ...]) -> None:
    for index, (strategy, look) in enumerate(LOOKS.items()):
        own = [one for one in increases if one.strategy == strategy]
        centres = [contexts.index(one.context_len) + (index - 1) * _WIDTH for one in own]
        heights = [100 * one.mean for one in own]
        axes.bar(centres, heights, width=_WIDTH, color=look.colour, label=look.label, zorder=2)
        for centre, height in zip(centres, heights, strict=True):
            axes.annotate(f"{height:.1f}", xy=(centre, height), ha="center", va="bottom", fontsize=8, color=GREY)
    axes.set_xticks(range(len(contexts)), labels=[format_tokens(tokens) for tokens in contexts])
    axes.set_xlabel("context, tokens")
