"""Plots of a capacity plan: TTFT by length, the queue over time, cost against TTFT, and prompt lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvrsim.interp import percentile_of
from kvrsim.program import Array
from kvrsim.units import format_seconds, format_tokens
from kvrsim.views.figure import Head, drawing
from kvrsim.views.style import INK, styled
from planner.capacity.fleet import Indices
from planner.capacity.result import CapacityPlan, Curves, FleetAnswer, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _ORANGE, _GREY = "#4c78a8", "#ee8434", "#b8bdc6"
_MOST_DOTS = 20_000  # of the scatter plot; with more requests, a sample is drawn
_STEPS = 1000  # time steps of the queue's curve
_WIDTH, _HEIGHT = 12.4, 7.2  # inches of the four panels


def draw(plan: CapacityPlan, title: str, subtitle: str) -> Figure:
    """All panels in one figure, below a title."""
    head = Head(title=title, subtitle=subtitle, width=_WIDTH)
    with styled():
        figure = drawing(_WIDTH, _HEIGHT + head.height, layout="constrained")
        for number, panel in enumerate((ttft_by_length, queue_over_time, cost_against_ttft, lengths), start=1):
            axes = figure.add_subplot(2, 2, number)
            axes.spines[["top", "right"]].set_visible(False)
            axes.spines[["bottom", "left"]].set_color(_GREY)
            panel(axes, plan)
        if (layout := figure.get_layout_engine()) is not None:
            layout.set(rect=(0, 0, 1, _HEIGHT / (_HEIGHT + head.height)))  # type: ignore[call-arg]
        head.draw(figure)
    return figure


def ttft_by_length(axes: Axes, plan: CapacityPlan) -> None:
    """Each request's TTFT over its new tokens, with the running median and percentile."""
    axes.set_title("TTFT by length", loc="left", fontsize=11)
    curves = _curves(plan)
    served = np.flatnonzero(np.isfinite(curves.ttft_s))
    if not len(served):
        _message(axes, "no request is served")
        return
    some = served[:: max(1, len(served) // _MOST_DOTS)]
    style: dict[str, Any] = dict(color=_BLUE, alpha=0.25, markersize=2, rasterized=True)
    axes.plot(curves.new_tokens[some], curves.ttft_s[some], ".", **style)
    for percentile, line in ((50.0, "--"), (plan.percentile, "-")):
        lengths, values = percentile_by_length(curves, served, percentile)
        axes.plot(lengths, values, line, color=INK, linewidth=1.2, label=f"{percentile:g}th percentile")
    axes.axhline(plan.slo_ttft_s, color=_ORANGE, linewidth=1.2, label=f"target {format_seconds(plan.slo_ttft_s)}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("new tokens (context less cached prefix)")
    axes.set_ylabel("TTFT, s")
    _tokens_on_x(axes)
    _plain_on_y(axes)
    axes.legend(frameon=False, fontsize=8)


def queue_over_time(axes: Axes, plan: CapacityPlan) -> None:
    """Waiting requests: the largest number in each time step."""
    axes.set_title("queue over time", loc="left", fontsize=11)
    times_s, most = waiting(_curves(plan), 0, _STEPS)
    axes.fill_between(times_s, most, step="post", color=_BLUE, linewidth=0)
    axes.set_xlim(times_s[0], times_s[-1])
    axes.set_ylim(0, None)
    axes.set_xlabel("time, s")
    axes.set_ylabel("prompts waiting")


def waiting(curves: Curves, most_changes: int, bins: int) -> tuple[Array, Array]:
    """Times in seconds, and how many prompts wait from each on.

    Of more changes than `most_changes`, the largest number in each of `bins` equal parts of the time.
    """
    changes = np.concatenate([curves.arrival_s, curves.begin_s])
    signs = np.concatenate([np.ones(len(curves.arrival_s)), -np.ones(len(curves.begin_s))])
    order = np.lexsort((signs, changes))  # at one instant, requests leave before others arrive
    order = order[np.isfinite(changes[order])]
    times_s, number = changes[order], np.cumsum(signs[order])
    last = np.append(np.diff(times_s) > 0, True)  # of each instant
    if last.sum() <= most_changes:
        return times_s[last], number[last]
    edges = np.linspace(times_s[0], max(times_s[-1], times_s[0] + 1e-9), bins + 1)
    first = np.searchsorted(times_s, edges[:-1])
    most = [number[max(0, a - 1) : b].max(initial=0.0) for a, b in zip(first, [*first[1:], len(number)], strict=True)]
    return edges, np.array([*most, most[-1]])


def cost_against_ttft(axes: Axes, plan: CapacityPlan) -> None:
    """The Pareto front with the answer marked."""
    priced = any(point.cost_per_hour is not None for point in plan.pareto)
    axes.set_title("cost against TTFT" if priced else "GPUs against TTFT", loc="left", fontsize=11)
    if not plan.pareto:
        _message(axes, f"no fleet serves {plan.percentile:g} % of the requests")
        return
    cost = [_cost(point) for point in plan.pareto]
    ttft = [point.ttft_s for point in plan.pareto]
    axes.plot(cost, ttft, "o-", color=_BLUE, markersize=4, linewidth=1, drawstyle="steps-post")
    axes.axhline(plan.slo_ttft_s, color=_ORANGE, linewidth=1.2)
    chosen = plan.first
    if np.isfinite(chosen.target_ttft_s):
        axes.plot([_cost(chosen)], [chosen.target_ttft_s], "o", color=_ORANGE, markersize=9, fillstyle="none")
    axes.set_yscale("log")
    axes.set_xlabel("cost per hour" if priced else "GPUs")
    axes.set_ylabel(f"{plan.percentile:g}th percentile of TTFT, s")
    _plain_on_y(axes)


def lengths(axes: Axes, plan: CapacityPlan) -> None:
    """Share of the requests and of the new tokens, by context in powers of two."""
    axes.set_title("contexts: requests (blue), share of new tokens (orange)", loc="left", fontsize=11)
    rows = plan.workload["histogram"]
    total = sum(row["requests"] for row in rows)
    places = np.arange(len(rows))
    axes.bar(places - 0.2, [100 * row["requests"] / total for row in rows], 0.4, color=_BLUE)
    axes.bar(places + 0.2, [100 * row["share_of_new_tokens"] for row in rows], 0.4, color=_ORANGE)
    axes.set_xticks(places, [format_tokens(row["from_tokens"]) for row in rows], rotation=45, fontsize=8)
    axes.set_xlabel("context from, tokens")
    axes.set_ylabel("%")


def _cost(fleet: FleetAnswer | Point) -> float:
    """The fleet's price where it is known, else its GPUs."""
    return float(fleet.num_gpus) if fleet.cost_per_hour is None else fleet.cost_per_hour


def _curves(plan: CapacityPlan) -> Curves:
    assert plan.first.curves is not None
    return plan.first.curves


def _message(axes: Axes, what: str) -> None:
    """A text instead of an empty panel."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, what, ha="center", va="center", color=INK, transform=axes.transAxes)


def percentile_by_length(curves: Curves, served: Indices, percentile: float) -> tuple[Array, Array]:
    """Percentile of TTFT in half-octave bins with at least 20 requests: lengths and values."""
    step = np.floor(2 * np.log2(curves.new_tokens[served])).astype(np.int64)
    lengths, values = [], []
    for number in np.unique(step):
        here = served[step == number]
        if len(here) >= 20:
            lengths.append(2.0 ** ((number + 0.5) / 2))
            values.append(percentile_of(curves.ttft_s[here], percentile))
    return np.array(lengths), np.array(values)


def _tokens_on_x(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tokens(int(value)) if value >= 1 else ""))


def _plain_on_y(axes: Axes) -> None:
    """Ticks 0.1, 0.2, 0.5, 1 rather than powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
