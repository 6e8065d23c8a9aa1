"""`kvrsim plan`: strategies compared for one prefill, each with its best partition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvrsim.choices import METHODS
from kvrsim.cli.answers import AnswerOptions, DeployOptions
from kvrsim.cli.options import ScenarioOptions, Table, takes
from kvrsim.cli.outputs import write_beside
from kvrsim.cli.parsing import (
    parse_choice,
    parse_strategies,
    read_table,
    require_table,
)
from kvrsim.cli.pool_options import PoolOptions
from kvrsim.cli.run_options import PageOptions, PlanNoiseOptions
from kvrsim.errors import InputError

if TYPE_CHECKING:
    from kvrsim.results.results import Plan
    from kvrsim.scenario import Scenario
    from planner.deploy.emit import Launch


@takes(ScenarioOptions, PlanNoiseOptions, PoolOptions, DeployOptions, PageOptions, AnswerOptions)
def plan(
    options: ScenarioOptions,
    random: PlanNoiseOptions,
    workers: PoolOptions,
    deploy: DeployOptions,
    files: PageOptions,
    answers: AnswerOptions,
    *,
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategies",
            metavar="NAMES|all|FILE.py:NAME",
            help="Strategies to compare, such as tsp,kvr-s,./mine.py:STRATEGY. Default: kvr-s and all that need no"
            " search; all adds pipelines and hybrids.",
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            metavar="|".join(METHODS),
            help="Search method of partitions over single GPUs; grid is the paper's.",
        ),
    ] = "auto",
    stride: Annotated[
        str | None,
        typer.Option("--stride", metavar="LEN", help="Search only chunk boundaries that are multiples of LEN."),
    ] = None,
    table: Table = None,
) -> None:
    """Compare strategies for one prefill, each at its best.

    KVR-S's partition comes with a proven bound. By default, plan compares KVR-S and the strategies that need no search;
    --strategies all adds the others. The exit code is 1 if no strategy fits in the GPUs' memory.

    Example: kvrsim plan --ctx 16k --gpus 8 --model llama-3-8b --cluster h100-nvlink
    """
    from kvrsim.cli.progress import SearchProgress
    from kvrsim.units import parse_tokens
    from kvrsim.views.figure import is_page

    answers.check(emit=deploy.emit)
    deploy.check()
    names = None if strategies is None else parse_strategies(strategies)
    require_table(names or [], table)
    parse_choice(method, "method", METHODS)
    step = None if stride is None else parse_tokens(stride, "stride")
    seed, disturbance, statistic = random.seed_number, random.disturbance(), random.statistic()
    if workers.is_given and disturbance is None:
        raise InputError("jobs", workers.jobs or workers.backend, "with --noise: other processes simulate its samples")
    pool = workers.pool()
    files.check()
    lookup = read_table(table)
    scenario, warnings = options.scenario()
    within = deploy.only_deployable or (deploy.emit if names is None else None)
    if within is not None:
        from planner.deploy.emit import only_deployable

        names = list(only_deployable(scenario, within, names, "only_deployable" if deploy.only_deployable else "emit"))
    from planner.plan import make_plan

    with pool, SearchProgress() as progress:
        result = make_plan(
            scenario,
            strategies=names,
            method=method,
            stride=step,
            table=lookup,
            warnings=warnings,
            on_progress=progress,
            on_stage=progress.stage,
            timeline=files.wanted,
            every_timeline=is_page(files.plot),
            disturbance=disturbance,
            objective=statistic,
            seed=seed,
            pool=pool,
        )
    launch = None if deploy.emit is None else _launch(scenario, result, deploy.emit, options.model)
    if not answers.printed((launch or result).to_dict, "strategies"):
        if launch is not None:
            from kvrsim.cli.render.launch import show_launch

            show_launch(launch)
        from kvrsim.cli.render.plan import show_plan

        show_plan(result)
    if timeline := result.timeline:
        write_beside(
            (files.trace, lambda path: timeline.write_chrome_trace(path, result.question)),
            (files.plot, result.write_plot),
        )
    if not result.feasible:
        raise typer.Exit(1)


def _launch(scenario: Scenario, result: Plan, engine: str, model: str) -> Launch:
    """Of the best strategy; InputError where the engine has not got it."""
    from planner.deploy.emit import launch_of

    best = result.best
    return launch_of(scenario, engine, best.strategy, best.partition, model=model, layers=best.layers)
