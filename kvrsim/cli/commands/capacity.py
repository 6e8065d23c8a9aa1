"""`kvrsim capacity`: the fleet that a workload needs for a target of TTFT."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvrsim.choices import DEPLOY_ENGINES
from kvrsim.cli.answers import AnswerOptions, DeployOptions
from kvrsim.cli.fleet_options import FleetOptions
from kvrsim.cli.options import Table as TableFile
from kvrsim.cli.options import WorkloadOptions, takes
from kvrsim.cli.outputs import write_beside
from kvrsim.cli.parsing import check_output, check_plot, parse_strategies, read_table
from kvrsim.cli.pool_options import PoolOptions
from kvrsim.cli.text import Table, Text, columns, facts, header, limit_text, narrowing, rests_on_line, show
from kvrsim.cli.text import headline as emphasised
from kvrsim.units import format_seconds, format_tokens

if TYPE_CHECKING:
    from planner.capacity.result import CapacityPlan


@takes(WorkloadOptions, FleetOptions, PoolOptions, DeployOptions, AnswerOptions)
def capacity(
    options: WorkloadOptions,
    fleet: FleetOptions,
    workers: PoolOptions,
    deploy: DeployOptions,
    answers: AnswerOptions,
    *,
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategies",
            metavar="NAME,NAME,...|all",
            help="What groups may run, each with the fastest. Default: all without a long search.",
        ),
    ] = None,
    table: TableFile = None,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write an interactive page in one HTML file.")
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE", help="Draw plots: FILE.png, FILE.svg, FILE.pdf, or the page FILE.html."),
    ] = None,
) -> None:
    """Find the smallest or cheapest fleet for a TTFT target.

    The answer includes the rule that assigns prompts to groups. If no fleet meets the target, the exit code is 1, and
    the nearest miss and the reasons are printed.

    Example: kvrsim capacity --requests synthetic:poisson,rate=4 --slo-ttft 2s --cluster h100-nvlink
    """
    answers.check(emit=deploy.emit)
    deploy.check()
    check_output(html, "html")
    check_plot(plot, page=True)
    pool = workers.pool()
    scenario, warnings = options.scenario()
    from planner.capacity.plan import plan_capacity
    from planner.capacity.times import StrategyPolicy
    from planner.deploy import deploy_engine

    request = fleet.request(scenario)
    if deploy.emit is not None:
        from planner.capacity.launch import check_emit

        check_emit(request)
    from kvrsim.cli.progress import WorkProgress

    asked_engines = (deploy.emit, deploy.only_deployable)
    with pool, WorkProgress() as progress:
        policy = StrategyPolicy(
            names=None if strategies is None else tuple(parse_strategies(strategies)),
            table=read_table(table),
            engines=tuple(deploy_engine(name) for name in DEPLOY_ENGINES if name in asked_engines),
        )
        result = plan_capacity(scenario, request, policy, warnings=warnings, pool=pool, on_stage=progress)
    launch = None
    if deploy.emit is not None and result.answer is not None:
        from planner.capacity.launch import launch_of_fleet

        launch = launch_of_fleet(scenario, request, result, deploy.emit, model=options.model)
    if not answers.printed((launch or result).to_dict, result.rows):
        if launch is not None:
            from kvrsim.cli.commands.plan import show_launch

            show_launch(launch)
        from kvrsim.cli.commands.capacity import show_capacity

        show_capacity(result)
    write_beside((html, lambda path: _write_page(result, path)), (plot, result.write_plot))
    if not result.feasible:
        raise typer.Exit(1)


def _write_page(result: CapacityPlan, path: str) -> None:
    """With what the page alone needs, simulated now."""
    from kvrsim.cli.progress import WorkProgress
    from kvrsim.views.page import write_page
    from planner.capacity.page import capacity_page

    with WorkProgress() as progress:
        progress("fleets at other rates")
        explored = result.explored()
    write_page(capacity_page(explored), path, argument="html")


# -- A capacity plan for people; imported only where no JSON is asked for.

_SHOWN = 5  # alternatives
_BAR = 24  # characters of the longest bar of the histogram


def show_capacity(plan: CapacityPlan) -> None:
    """The fleet, the requests, the alternatives, and what the answer rests on."""
    from planner.capacity.page import details, group_rows, headline, verdict

    best = plan.first
    nothing_served = best.unserved == best.requests
    answer, table = facts(), facts()
    answer.add_row("answer:" if plan.feasible else "no answer:", emphasised(verdict(plan)))
    answer.add_row("target:", headline(plan))
    if not nothing_served:
        for tokens, groups, strategies, requests in group_rows(best):
            answer.add_row(
                "groups:", f"{tokens} new tokens: {groups}; time by strategy: {strategies}; {requests} requests"
            )
        for label, line in details(plan):
            (answer if label == "interval" else table).add_row(f"{label}:", line)
    for reason in plan.reasons():
        table.add_row("why not:", reason)
    table.add_row("memory:", limit_text(plan.scenario.memory_limit))
    for label in ("decoding", "dispatch"):
        table.add_row(f"{label}:", plan.assumptions()[label])
    table.add_row("search:", f"{plan.simulated_requests} requests simulated in {format_seconds(plan.seconds)}")
    table.add_row("rests on:", rests_on_line(plan.question))
    for note in plan.warnings:
        table.add_row(Text("note:", style="yellow"), note)
    asked = header(plan.question, plan.cluster, f"Fleet for {plan.scenario.model.name}")
    fleets = () if nothing_served else (narrowing(_fleets(plan), "utilised", "max", "p50", "p95"), "")
    show(answer, "", *asked, "", *fleets, _lengths(plan), "", table)


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
    from planner.capacity.page import as_text, fleet_table

    titles, rows = fleet_table(plan)
    table = columns(titles[0].title)
    columns(*(one.title for one in titles[1:]), numbers=True, into=table)
    for number, row in enumerate(as_text(rows[: 1 + _SHOWN])):
        table.add_row(*row, style="bold" if number == 0 and plan.answer is not None else None)
    return table
