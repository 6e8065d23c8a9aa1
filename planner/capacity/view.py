"""A capacity plan as a figure, as a page, and in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrsim.units import format_seconds
from kvrsim.views.page import Column, Summary
from planner.capacity.answer import CapacityPlan, FleetAnswer
from planner.capacity.page import capacity_page
from planner.capacity.plots import draw_panels
from planner.capacity.report import headline, verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvrsim.views.page import Page

__all__ = ["figure", "page", "summary"]

_TITLES = ("fleet", "GPUs", "p50 TTFT", "p99 TTFT", "in time", "utilisation", "cost per hour")


def page(plan: CapacityPlan) -> Page:
    """Target, price and rate are moved, and the fleet is read off."""
    return capacity_page(plan.explored())


def figure(plan: CapacityPlan) -> Figure:
    """TTFT by length, the queue over time, the Pareto front and the lengths."""
    return draw_panels(plan, verdict(plan), _question(plan))


def summary(plan: CapacityPlan) -> Summary:
    """Fleets that meet the target, the answer first; where none does, the nearest miss."""
    fleets = [*([] if plan.first is None else [plan.first]), *plan.alternatives]
    return Summary(
        answer=verdict(plan),
        question=_question(plan),
        caption="fleets",
        columns=[Column(title=title, number=place > 0) for place, title in enumerate(_TITLES)],
        rows=[_row(fleet) for fleet in fleets],
        notes=[*plan.reasons(), plan.interval_meaning, plan.rests_on, *plan.warnings],
    )


def _question(plan: CapacityPlan) -> str:
    return " · ".join((headline(plan), plan.model, plan.cluster.describe(), *plan.question.kernels()))


def _row(fleet: FleetAnswer) -> tuple[str, ...]:
    return (
        fleet.describe(),
        str(fleet.num_gpus),
        _time(fleet.p50_ttft_s),
        _time(fleet.p99_ttft_s),
        f"{fleet.in_time:.1%}",
        f"{fleet.utilisation:.0%}",
        "" if fleet.cost_per_hour is None else f"{fleet.cost_per_hour:.2f}",
    )


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds < float("inf") else "never"
