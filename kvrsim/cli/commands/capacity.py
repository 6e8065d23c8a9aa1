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
    from planner.capacity.answer import CapacityPlan, FleetAnswer


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

    request = fleet.request(scenario)
    if deploy.emit is not None:
        from planner.capacity.launch import check_emit

        check_emit(request)
    from kvrsim.cli.progress import WorkProgress

    with pool, WorkProgress() as progress:
        result = plan_capacity(
            scenario,
            request,
            strategies=None if strategies is None else parse_strategies(strategies),
            table=read_table(table),
            engines=[name for name in DEPLOY_ENGINES if name in (deploy.emit, deploy.only_deployable)],
            warnings=warnings,
            pool=pool,
            on_stage=progress,
        )
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
