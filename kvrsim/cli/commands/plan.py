"""`kvrsim plan`: strategies compared for one prefill, each with its best partition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvrsim.choices import METHODS
from kvrsim.cli.answers import AnswerOptions, DeployOptions
from kvrsim.cli.options import NoiseSpec, Objective, Plot, Samples, ScenarioOptions, Seed, Table, Trace, takes
from kvrsim.cli.outputs import write_beside
from kvrsim.cli.parsing import (
    check_output,
    check_plot,
    parse_choice,
    parse_disturbance,
    parse_objective,
    parse_seed,
    parse_strategies,
    read_table,
    require_table,
)
from kvrsim.cli.pool_options import PoolOptions
from kvrsim.errors import InputError

if TYPE_CHECKING:
    from kvrsim.results.results import Plan
    from kvrsim.scenario import Scenario
    from planner.deploy.emit import Launch


@takes(ScenarioOptions, PoolOptions, DeployOptions, AnswerOptions)
def plan(
    options: ScenarioOptions,
    workers: PoolOptions,
    deploy: DeployOptions,
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
    noise: NoiseSpec = None,
    objective: Objective = None,
    samples: Samples = None,
    trace: Trace = None,
    plot: Plot = None,
    seed: Seed = "0",
) -> None:
    """Compare strategies for one prefill, each at its best.

    KVR-S's partition comes with a proven bound. By default, plan compares KVR-S and the strategies that need no search;
    --strategies all adds the others. The exit code is 1 if no strategy fits in the GPUs' memory.

    Example: kvrsim plan --ctx 16k --gpus 8 --model llama-3-8b --cluster h100-nvlink
    """
    from kvrsim.cli.progress import SearchProgress
    from kvrsim.plots.save import is_page
    from kvrsim.units import parse_tokens

    answers.check(emit=deploy.emit)
    deploy.check()
    names = None if strategies is None else parse_strategies(strategies)
    require_table(names or [], table)
    parse_choice(method, "method", METHODS)
    step = None if stride is None else parse_tokens(stride, "stride")
    number = parse_seed(seed)
    disturbance = parse_disturbance(noise, samples, number)
    figure = parse_objective(objective, disturbance)
    if workers.is_given and disturbance is None:
        raise InputError("jobs", workers.jobs or workers.backend, "with --noise: other processes simulate its samples")
    pool = workers.pool()
    check_output(trace, "trace")
    check_plot(plot, page=True)
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
            timeline=trace is not None or plot is not None,
            every_timeline=is_page(plot),
            disturbance=disturbance,
            objective=figure,
            seed=number,
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
            (trace, lambda path: timeline.write_chrome_trace(path, result.question)),
            (plot, result.write_plot),
        )
    if not result.feasible:
        raise typer.Exit(1)


def _launch(scenario: Scenario, result: Plan, engine: str, model: str) -> Launch:
    """Of the best strategy; InputError where the engine has not got it."""
    from planner.deploy.emit import launch_of

    best = result.best
    return launch_of(scenario, engine, best.strategy, best.partition, model=model, layers=best.layers)
