"""`kvrsim capacity`: the fleet that a workload needs for a target of TTFT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from kvrsim.arguments import OF_REQUESTS, TABLE, DeploymentArgs, FleetArgs, PoolArgs, option, strategies
from kvrsim.cli.commands.plan import show_launch
from kvrsim.cli.options import DeployArgs, OutputArgs, picture_or_page, pool_of, takes
from kvrsim.cli.output import print_answer, write_files
from kvrsim.cli.progress import Progress
from kvrsim.cli.text import Part, facts, header, limit_text, rests_on_line
from kvrsim.cli.text import headline as emphasised
from kvrsim.units import format_seconds
from kvrsim.views.table import Table, Text, columns, narrowing

if TYPE_CHECKING:
    from planner.capacity.result import CapacityPlan

_STRATEGIES = "What groups may run, each with the fastest. Default: all without a long search."
_PLOT = "Draw plots: FILE.png, FILE.svg, FILE.pdf, or the page FILE.html."


@dataclass(frozen=True, kw_only=True)
class AnswerArgs(OutputArgs):
    """What groups may run, and how the answer is printed and drawn."""

    strategies: Any = option("NAME,NAME,...|all", _STRATEGIES, "Question", strategies)
    table: Any = TABLE
    plot: Any = option("FILE", _PLOT, check=picture_or_page, spelling=("--plot", "--html"))


@takes(DeploymentArgs, FleetArgs, PoolArgs, DeployArgs, AnswerArgs, fixed=OF_REQUESTS)
def capacity(
    args: DeploymentArgs,
    fleet: FleetArgs,
    workers: PoolArgs,
    deploy: DeployArgs,
    output: AnswerArgs,
) -> None:
    """Find the smallest or cheapest fleet for a TTFT target.

    The answer includes the rule that assigns prompts to groups. If no fleet meets the target, the exit code is 1, and
    the nearest miss and the reasons are printed.

    Example: kvrsim capacity --requests synthetic:poisson,rate=4 --slo-ttft 2s llama-3.1-8b 8xh100
    """
    output.check(emit=deploy.emit)
    from kvrsim.builder import build_scenario
    from planner.api import table_of
    from planner.capacity.launch import check_emit, launch_of_fleet
    from planner.capacity.plan import plan_capacity
    from planner.capacity.request import make_request
    from planner.capacity.times import StrategyPolicy
    from planner.deploy_engines import deploy_engine

    scenario, warnings = build_scenario(args)
    request = make_request(fleet, scenario.cluster.gpus_per_node)
    if deploy.emit is not None:
        check_emit(request)
    policy = StrategyPolicy(
        names=None if output.strategies is None else tuple(output.strategies),
        table=table_of(output.table),
        engines=tuple(map(deploy_engine, filter(None, (deploy.emit, deploy.only_deployable)))),
    )
    with pool_of(workers) as pool, Progress() as progress:
        result = plan_capacity(scenario, request, policy, warnings=warnings, pool=pool, on_progress=progress)
    launch = None
    if deploy.emit is not None and result.answer is not None:
        launch = launch_of_fleet(result, deploy.emit, model=args.model)
    if launch is not None and not output.json:
        show_launch(launch)
    print_answer(output, (launch or result).to_dict, result.rows, lambda: capacity_screen(result))
    write_files((output.plot, lambda path: _write(result, path)))
    if not result.feasible:
        raise typer.Exit(1)


def _write(result: CapacityPlan, path: str) -> None:
    """Write the plot; a page also needs fleets at other rates, which are simulated now."""
    with Progress("plot"):
        result.write_plot(path)


_SHOWN = 5  # alternatives
_BAR = 24  # characters of the longest bar of the histogram


def capacity_screen(plan: CapacityPlan) -> list[Part]:
    """The fleet, the requests, the alternatives, and what the answer rests on."""
    from planner.capacity.page import as_text, details, group_table, headline, verdict

    best = plan.first
    nothing_served = best.unserved == best.requests
    answer, table = facts(), facts()
    answer.add_row("answer:" if plan.feasible else "no answer:", emphasised(verdict(plan)))
    answer.add_row("target:", headline(plan))
    if not nothing_served:
        for tokens, groups, strategies, requests in as_text(group_table(plan)[1]):
            answer.add_row(
                "groups:", f"{tokens} new tokens: {groups}; time by strategy: {strategies}; {requests} requests"
            )
        for label, line in details(plan):
            (answer if label in ("interval", "engines", "traffic", "would meet") else table).add_row(f"{label}:", line)
    for reason in plan.reasons():
        table.add_row("why not:", reason)
    table.add_row("memory:", limit_text(plan.scenario.memory_limit))
    for label in ("decoding", "dispatch"):
        table.add_row(f"{label}:", plan.assumptions()[label])
    table.add_row("search:", f"{plan.simulated_requests} requests simulated in {format_seconds(plan.seconds)}")
    table.add_row("rests on:", rests_on_line(plan.question))
    for note in plan.warnings:
        table.add_row(Text("note:", style="yellow"), note)
    args = header(plan.question, plan.cluster, f"Fleet for {plan.scenario.model.name}")
    fleets = () if nothing_served else (narrowing(_fleets(plan), "utilised", "max", "p50", "p95"), "")
    return [answer, "", *args, "", *fleets, _lengths(plan), "", table]


def _lengths(plan: CapacityPlan) -> Table:
    """Requests by context, with bars."""
    from planner.capacity.page import as_text, length_table

    titles, rows, _ = length_table(plan)
    table = columns(*(one.title for one in titles), numbers=True)
    columns("", into=table)
    most = max(row["requests"] for row in plan.workload["histogram"])
    for cells in as_text(rows):
        table.add_row(*cells, "█" * round(_BAR * int(cells[1]) / most))
    return table


def _fleets(plan: CapacityPlan) -> Table:
    """The answer, or the nearest miss, and alternatives."""
    from planner.capacity.page import as_text, fleet_table

    titles, rows, _ = fleet_table(plan)
    table = columns(titles[0].title)
    columns(titles[1].title, into=table)
    columns(*(one.title for one in titles[2:]), numbers=True, into=table)
    for number, row in enumerate(as_text(rows[: 1 + _SHOWN])):
        table.add_row(*row, style="bold" if number == 0 and plan.answer is not None else None)
    return table
