"""TTFT by context and GPUs, and scalability: the paper's figures 8 and 9, and the same for grouped KV heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrsim.results.results import Plan
from kvrsim.units import format_tokens
from kvrsim.views.style import INK
from validate.figures.cases import Predictions, Printed, Scope
from validate.figures.style import CLOSED_FORM, GREY, LOOKS, NO_COMMUNICATION, Look, new_figure, png, ticks, tidy
from validate.published.reference import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BANDS = ("tsp", "kvr-s")
_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_SERIES = {**LOOKS, "no-communication": NO_COMMUNICATION, "closed-form": CLOSED_FORM}


def draw_ttft(scope: Scope, predictions: Predictions, model: str) -> bytes:
    """PNG: TTFT above, how much faster than TSP beneath; one column a number of GPUs."""
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
        axes.plot(contexts, ttft_s, color=look.colour, linestyle=look.dashes, linewidth=1.5)
        rows = scope.reported(model, num_gpus, strategy)
        printed: dict[str, Any] = dict(marker=look.marker, color=look.colour, markeredgecolor="white", markersize=7.5)
        axes.plot([r.context_len for r in rows], [r.ttft_s for r in rows], linestyle="", zorder=4, **printed)
    if not any(scope.reported(model, num_gpus, strategy) for strategy in LOOKS):
        where: dict[str, Any] = dict(xycoords="axes fraction", ha="right", fontsize=8.5, color=GREY)
        axes.annotate("predicted only: no printed row at hand", xy=(0.98, 0.03), **where)


def _speedup_panel(axes: Axes, scope: Scope, predictions: Predictions, model: str, num_gpus: int) -> None:
    """TSP's TTFT over the strategy's; of printed pairs, with what rounding leaves open."""
    contexts = scope.curve(model)
    tsp_s = [predictions.of(model, tokens, num_gpus, "tsp").ttft_s for tokens in contexts]
    axes.axhline(1.0, color=LOOKS["tsp"].colour, linewidth=1.5)
    tsp_rows = {row.context_len: row for row in scope.reported(model, num_gpus, "tsp")}
    for strategy in ("kvr-e", "kvr-s"):
        look = LOOKS[strategy]
        own_s = [predictions.of(model, tokens, num_gpus, strategy).ttft_s for tokens in contexts]
        ratios = [tsp / own for tsp, own in zip(tsp_s, own_s, strict=True)]
        axes.plot(contexts, ratios, color=look.colour, linestyle=look.dashes, linewidth=1.5)
        for row in scope.reported(model, num_gpus, strategy):
            if row.context_len in tsp_rows:
                _printed_speedup(axes, scope, tsp_rows[row.context_len], row, look)


def _printed_speedup(axes: Axes, scope: Scope, tsp: Row, row: Row, look: Look) -> None:
    ratio = tsp.ttft_s / row.ttft_s
    tsp_off_s, off_s = tsp.rounding_s, row.rounding_s
    least = (tsp.ttft_s - tsp_off_s) / (row.ttft_s + off_s)
    most = (tsp.ttft_s + tsp_off_s) / (row.ttft_s - off_s)
    style: dict[str, Any] = dict(marker=look.marker, markeredgecolor="white", markersize=7.5, linewidth=1.2)
    yerr = [[ratio - least], [most - ratio]]
    axes.errorbar([row.context_len], [ratio], yerr=yerr, color=look.colour, zorder=4, **style)


def _scales(grid: Any, contexts: tuple[int, ...]) -> None:
    """Both axes of TTFT are logarithmic, so that equal shares look equal."""
    first, upper, lower = contexts[0], grid[0, 0], grid[1, 0]
    lower.set_xscale("log", base=2)
    lower.set_xlim(first / 1.12, contexts[-1] * 1.12)
    for axes in grid.flat:
        ticks(axes.xaxis, contexts, [format_tokens(tokens) for tokens in contexts])
        axes.tick_params(axis="x", labelrotation=0)
    upper.set_yscale("log")
    low_s, high_s = upper.get_ylim()
    shown = [value for value in _SECONDS if low_s <= value <= high_s]
    for axes in grid[0]:
        ticks(axes.yaxis, shown, [f"{value:g}" for value in shown])
    upper.set_ylabel("TTFT, seconds")
    lower.set_ylabel("times as fast as TSP")


def _legend(axes: Axes, strategies_with_rows: set[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: dict[str, Any] = {}
    for strategy, look in LOOKS.items():
        marker = look.marker if strategy in strategies_with_rows else ""
        style: dict[str, Any] = dict(linestyle=look.dashes, marker=marker, markersize=7.5, markeredgecolor="white")
        handles[look.label] = Line2D([], [], color=look.colour, **style)
    handles["low to high"] = Patch(color=GREY, alpha=0.22, linewidth=0)
    axes.legend(handles.values(), handles.keys(), loc="upper left", frameon=False, fontsize=9, handlelength=2.6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """All of one number of GPUs."""

    num_gpus: int
    ttft_s: Mapping[str, float]  # by strategy; and of the two bounds
    lower_bound_s: float  # proven, of every KVR partition
    fits: bool  # KVR-S in memory
    reported_s: Mapping[str, float]  # by strategy, where there is a row


def scalings(scope: Scope, predictions: Predictions) -> tuple[Scaling, ...]:
    """One a number of GPUs; the closed form is the paper's, TTFT(1) / 2 x (1/p + 1/p^2)."""
    model, tokens = scope.partition_model, scope.scaling_context_len
    plans = {num_gpus: predictions.plan(model, tokens, num_gpus) for num_gpus in scope.scaling_gpu_counts}
    return tuple(_scaling(scope, plan) for plan in plans.values())


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
    found = scalings(scope, predictions)
    title = f"{scope.partition_model}, {format_tokens(scope.scaling_context_len)} tokens: TTFT by GPUs"
    subtitle = "Lines with small markers: predicted. Large markers: printed. Hollow: would not fit in a GPU's memory."
    figure = new_figure(10.5, 4.5, title, subtitle)
    left, right = figure.subplots(1, 2)
    for name, look in _SERIES.items():
        _scaling_line(left, found, {scaling.num_gpus: scaling.ttft_s[name] for scaling in found}, look)
        above = {scaling.num_gpus: _above(scaling, name) for scaling in found}
        if name != "no-communication":
            _scaling_line(right, found, above, look)
    _printed_points(left, found)
    _scaling_axes(left, right, found)
    right.axhline(0, color=NO_COMMUNICATION.colour, linestyle=NO_COMMUNICATION.dashes, linewidth=1.5)
    most = 100 * printed.kvr_s_above_no_communication
    right.axhline(most, color=LOOKS["kvr-s"].colour, linestyle=(0, (1, 3)), linewidth=1)
    note: dict[str, Any] = dict(xytext=(0, 3), textcoords="offset points", ha="right", fontsize=8.5, color=GREY)
    right.annotate(f"the paper's KVR-S: up to {most:g} %", xy=(found[-1].num_gpus, most), **note)
    left.legend(loc="lower left", frameon=False, fontsize=9, handlelength=2.8, labelcolor=INK)
    return png(figure)


def _above(scaling: Scaling, name: str) -> float:
    """Per cent above TTFT(p)."""
    return 100 * (scaling.ttft_s[name] / scaling.ttft_s["no-communication"] - 1)


def _scaling_line(axes: Axes, found: tuple[Scaling, ...], values: Mapping[int, float], look: Look) -> None:
    axes.plot(
        list(values), list(values.values()), color=look.colour, linestyle=look.dashes, linewidth=1.5, label=look.label
    )
    for scaling in found:
        face = look.colour if scaling.fits else "white"
        style: dict[str, Any] = dict(marker=look.marker, markersize=4, color=look.colour, markerfacecolor=face)
        axes.plot([scaling.num_gpus], [values[scaling.num_gpus]], zorder=3, **style)


def _printed_points(axes: Axes, found: tuple[Scaling, ...]) -> None:
    for scaling in found:
        for strategy, ttft_s in scaling.reported_s.items():
            look = LOOKS[strategy]
            style: dict[str, Any] = dict(marker=look.marker, markersize=9, color=look.colour, markeredgecolor="white")
            axes.plot([scaling.num_gpus], [ttft_s], zorder=4, **style)


def _scaling_axes(left: Axes, right: Axes, found: tuple[Scaling, ...]) -> None:
    counts = [scaling.num_gpus for scaling in found]
    for axes, title in ((left, "TTFT"), (right, "above TTFT(p)")):
        axes.set_xscale("log", base=2)
        ticks(axes.xaxis, counts, [str(count) for count in counts])
        axes.set_xlabel("GPUs, p")
        tidy(axes, title)
    left.set_yscale("log")
    low_s, high_s = left.get_ylim()
    shown = [value for value in (0.2, 0.5, 1.0, 2.0, 5.0, 10.0) if low_s <= value <= high_s]
    ticks(left.yaxis, shown, [f"{value:g}" for value in shown])
    left.set_ylabel("TTFT, seconds")
    right.set_ylabel("per cent above TTFT(p)")
