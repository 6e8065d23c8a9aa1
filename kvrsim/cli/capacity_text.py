"""A capacity plan for people; imported only where no JSON is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from kvrsim.cli.tables import columns, facts, show
from kvrsim.units import format_seconds, format_tokens

if TYPE_CHECKING:
    from planner.capacity.answer import CapacityPlan, FleetAnswer

_SHOWN = 5  # alternatives
_BAR = 24  # characters of the longest bar of the histogram


def show_capacity(plan: CapacityPlan) -> None:
    """What was read, the fleets, and what they rest on."""
    from planner.capacity.report import headline, verdict

    setting = f"{plan.model} · {plan.cluster} · profile {plan.profile}"
    table = facts()
    table.add_row("answer:" if plan.feasible else "no answer:", verdict(plan))
    best = plan.answer or plan.nearest_miss
    assert best is not None
    for group in best.groups:
        low, high = group.context_range
        strategies = ", ".join(f"{name} {share:.0%}" for name, share in group.strategies.items())
        groups = f"{group.replicas} × {group.gpus_per_group} GPU{'s' * (group.gpus_per_group > 1)}"
        table.add_row(
            "", f"{low} to {high} new tokens: {groups}, {strategies} of their time, {group.requests} requests"
        )
    if best.target.low_s is not None and best.target.high_s is not None:
        ends = f"{format_seconds(best.target.low_s)} to {format_seconds(best.target.high_s)}"
        table.add_row("interval:", f"{ends}. {best.target.meaning}")
    for one in plan.infeasible:
        table.add_row("no:", one.why)
    table.add_row("decoding:", plan.decoding)
    table.add_row("dispatch:", plan.dispatch)
    if best.retried or best.unserved:
        table.add_row("requests:", f"{best.retried} begun anew after a failure, {best.unserved} never served")
    table.add_row("search:", f"{plan.simulated_requests} requests simulated in {format_seconds(plan.seconds)}")
    table.add_row("rests on:", plan.rests_on)
    for note in plan.warnings:
        table.add_row(Text("note:", style="yellow"), note)
    show(
        Text(headline(plan), style="bold"), Text(setting, style="dim"), "", _lengths(plan), "", _fleets(plan), "", table
    )


def _lengths(plan: CapacityPlan) -> Table:
    """Requests by context."""
    table = columns("contexts from")
    columns("requests", "share of new tokens", numbers=True, into=table)
    columns("", into=table)
    rows = plan.workload["histogram"]
    most = max(row["requests"] for row in rows)
    for row in rows:
        bar = "█" * round(_BAR * row["requests"] / most)
        share = f"{row['share_of_new_tokens']:.1%}"
        table.add_row(format_tokens(row["from_tokens"]), str(row["requests"]), share, bar)
    return table


def _fleets(plan: CapacityPlan) -> Table:
    """The answer, or the nearest miss, and alternatives."""
    table = columns("GPUs", numbers=True)
    table.add_column("fleet")
    columns("p50", "p95", "p99", "longest", "in time", "used", numbers=True, into=table)
    first = plan.answer or plan.nearest_miss
    fleets = [one for one in (first, *plan.alternatives[:_SHOWN]) if one is not None]
    priced = any(one.cost_per_hour is not None for one in fleets)
    columns(*["an hour"] * priced, numbers=True, into=table)
    for one in fleets:
        table.add_row(*_row(one, priced=priced), style="bold" if one is plan.answer else None)
    return table


def _row(fleet: FleetAnswer, *, priced: bool) -> list[str]:
    times = (fleet.p50_ttft_s, fleet.p95_ttft_s, fleet.p99_ttft_s, fleet.max_ttft_s)
    shown = [format_seconds(time) if time < float("inf") else "never" for time in times]
    shares = [f"{fleet.in_time:.2%}", f"{fleet.utilisation:.0%}"]
    cost = [f"{fleet.cost_per_hour:.2f}"] if priced and fleet.cost_per_hour is not None else []
    return [str(fleet.num_gpus), fleet.describe(), *shown, *shares, *cost]
