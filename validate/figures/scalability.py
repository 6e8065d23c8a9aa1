"""Scalability: the paper's figure 8 (d)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrsim.results import Plan
from kvrsim.units import format_tokens
from validate.figures.predictions import Predictions
from validate.figures.printed import Printed
from validate.figures.scope import Scope
from validate.figures.style import CLOSED_FORM, GREY, INK, LOOKS, NO_COMMUNICATION, Look, new_figure, png, ticks, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SERIES = {**LOOKS, "no-communication": NO_COMMUNICATION, "closed-form": CLOSED_FORM}


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
        lower_bound_s=plan.bounds.lower_bound_s,
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
        _line(left, found, {scaling.num_gpus: scaling.ttft_s[name] for scaling in found}, look)
        above = {scaling.num_gpus: _above(scaling, name) for scaling in found}
        if name != "no-communication":
            _line(right, found, above, look)
    _printed_points(left, found)
    _axes(left, right, found)
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


def _line(axes: Axes, found: tuple[Scaling, ...], values: Mapping[int, float], look: Look) -> None:
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


def _axes(left: Axes, right: Axes, found: tuple[Scaling, ...]) -> None:
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
