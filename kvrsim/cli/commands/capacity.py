"""`kvrsim capacity`: the fleet that a workload needs for a target of TTFT."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvrsim.choices import DEPLOY_ENGINES
from kvrsim.cli.answers import AnswerOptions, DeployOptions
from kvrsim.cli.fleet_options import FleetOptions
from kvrsim.cli.options import Table, WorkloadOptions, takes
from kvrsim.cli.outputs import write_beside
from kvrsim.cli.parsing import check_output, check_plot, parse_strategies, read_table
from kvrsim.cli.pool_options import PoolOptions

if TYPE_CHECKING:
    from planner.capacity.answer import CapacityPlan


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
    table: Table = None,
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
            from kvrsim.cli.render.launch import show_launch

            show_launch(launch)
        from kvrsim.cli.render.capacity import show_capacity

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
