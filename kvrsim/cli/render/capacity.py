"""A capacity plan for people; imported only where no JSON is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from kvrsim.cli.guide.next_step import again, was_typed
from kvrsim.cli.render.format import header, limit_text, rests_on_line
from kvrsim.cli.render.format import headline as emphasised
from kvrsim.cli.render.layout import Hint, Shrinkable, columns, facts, show
from kvrsim.units import format_seconds, format_tokens

if TYPE_CHECKING:
    from planner.capacity.answer import CapacityPlan, FleetAnswer

_SHOWN = 5  # alternatives
_BAR = 24  # characters of the longest bar of the histogram


def show_capacity(plan: CapacityPlan) -> None:
    """The fleet, the requests, the alternatives, and what the answer rests on."""
    from planner.capacity.report import decodes, groups_of_fleet, headline, interval, losses, transfers, verdict

    best = plan.first
    nothing_served = best.unserved == best.requests
    answer, table = facts(), facts()
    answer.add_row("answer:" if plan.feasible else "no answer:", emphasised(verdict(plan)))
    answer.add_row("target:", headline(plan))
    if not nothing_served:
        if (sure := interval(plan)) is not None:
            answer.add_row("interval:", sure)
        for tokens, groups, strategies, requests in groups_of_fleet(best):
            answer.add_row(
                "groups:", f"{tokens} new tokens: {groups}; time by strategy: {strategies}; {requests} requests"
            )
        told = (("requests:", losses(best)), ("KV-cache:", transfers(plan)), ("decodes:", decodes(plan)))
        for label, text in told:
            if text is not None:
                table.add_row(label, text)
    for reason in plan.reasons():
        table.add_row("why not:", reason)
    table.add_row("memory:", limit_text(plan.memory_limit))
    table.add_row("decoding:", plan.decoding)
    table.add_row("dispatch:", plan.dispatch)
    table.add_row("search:", f"{plan.simulated_requests} requests simulated in {format_seconds(plan.seconds)}")
    table.add_row("rests on:", rests_on_line(plan.question))
    for note in plan.warnings:
        table.add_row(Text("note:", style="yellow"), note)
    asked = header(plan.question, plan.cluster, f"Fleet for {plan.model}")
    fleets = () if nothing_served else (Shrinkable(_fleets(plan), optional=("utilised", "max", "p50", "p95")), "")
    show(answer, "", *asked, "", *fleets, _lengths(plan), "", table, *_next())


def _next() -> tuple[Hint, ...]:
    """The page, unless it was asked for."""
    return () if was_typed("--html") else (Hint(again("capacity", "--html", "fleet.html")),)


def _lengths(plan: CapacityPlan) -> Table:
    """Requests by context."""
    table = columns("contexts\nfrom")
    columns("requests\n", "share of\nnew tokens", numbers=True, into=table)
    columns("\n", into=table)
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
    columns("p50", "p95", "p99", "max", "in target", "utilised", numbers=True, into=table)
    fleets = [plan.first, *plan.alternatives[:_SHOWN]]
    priced = any(one.cost_per_hour is not None for one in fleets)
    columns(*["cost/hour"] * priced, numbers=True, into=table)
    for one in fleets:
        table.add_row(*_row(one, priced=priced), style="bold" if one is plan.answer else None)
    return table


def _row(fleet: FleetAnswer, *, priced: bool) -> list[str]:
    from planner.capacity.report import format_time

    times = (fleet.p50_ttft_s, fleet.p95_ttft_s, fleet.p99_ttft_s, fleet.max_ttft_s)
    shown = map(format_time, times)
    shares = [f"{fleet.in_time:.2%}", f"{fleet.utilisation:.0%}"]
    cost = [f"{fleet.cost_per_hour:.2f}"] if priced and fleet.cost_per_hour is not None else []
    return [str(fleet.num_gpus), fleet.describe(), *shown, *shares, *cost]
