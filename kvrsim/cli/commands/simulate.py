"""`kvrsim simulate`: one strategy's prefill, rank by rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvrsim.cli.commands.table import Table, needs_table, read_table
from kvrsim.cli.noise_options import NoiseOption, Samples, parse_disturbance
from kvrsim.cli.options import (
    Json,
    Plot,
    ScenarioOptions,
    Seed,
    Trace,
    check_output,
    check_plot,
    parse_choice,
    parse_chunks,
    parse_seed,
    print_json,
    takes_scenario,
)
from kvrsim.cli.outputs import write_beside
from kvrsim.errors import InputError

if TYPE_CHECKING:
    from kvrsim.results import SimResult
    from kvrsim.stream import Arrivals
    from kvrsim.timeline import Timeline

EXECUTORS = ("batch", "event")


@takes_scenario
def simulate(
    options: ScenarioOptions,
    *,
    strategy: Annotated[str, typer.Option("--strategy", metavar="NAME", help="Such as tsp, kvr-s, zigzag, tp8+kvr-s.")],
    partition: Annotated[
        str | None,
        typer.Option(
            "--partition",
            metavar="LEN,LEN,...",
            help="New tokens of each rank, such as 5000,3192. Default: the strategy's own (kvr-s searches).",
        ),
    ] = None,
    table: Table = None,
    executor: Annotated[
        str | None,
        typer.Option(
            "--executor",
            metavar="|".join(EXECUTORS),
            help="event simulates every queue on every link. Default: the one that is needed.",
        ),
    ] = None,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Seconds of every operation on every rank, and how they are known.")
    ] = False,
    noise: NoiseOption = None,
    samples: Samples = None,
    requests: Annotated[
        str | None,
        typer.Option("--requests", metavar="N", help="So many prompts alike behind each other on the same GPUs."),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(
            "--every", metavar="TIME", help="Between requests: 500ms, or poisson:500ms. Default: all at once."
        ),
    ] = None,
    trace: Trace = None,
    plot: Plot = None,
    seed: Seed = "0",
    json: Json = False,
) -> None:
    """Simulate one strategy's prefill, rank by rank.

    Prints what each rank computes, waits for, sends and holds.
    """
    from kvrsim.cli.commands.plan import parse_strategies

    if parse_strategies(strategy, "--strategy") != [strategy]:
        raise InputError("--strategy", strategy, "one name")
    needs_table([strategy], table, otherwise=partition is not None)
    chunks = parse_chunks(partition)
    wants_timeline = trace is not None or plot is not None
    parse_choice(executor, "--executor", EXECUTORS)
    if executor == "batch" and (wants_timeline or breakdown):
        raise InputError("--executor", executor, "event, where --trace, --plot or --breakdown is asked for")
    number = parse_seed(seed)
    disturbance = parse_disturbance(noise, samples, number)
    arrivals = _parse_arrivals(requests, every)
    check_output(trace, "--trace")
    check_plot(plot)
    lookup = read_table(table)
    scenario, warnings = options.scenario()
    from kvrsim.cli.progress import SearchProgress
    from planner.simulate import run_simulation

    with SearchProgress() as progress:
        progress.stage(strategy, 1, 1)
        result = run_simulation(
            scenario,
            strategy=strategy,
            partition=chunks,
            table=lookup,
            executor=executor,
            timeline=wants_timeline,
            with_breakdown=breakdown,
            disturbance=disturbance,
            arrivals=arrivals,
            seed=number,
            warnings=warnings,
            on_progress=progress,
        )
    if json:
        print_json(result.to_dict())
    else:
        from kvrsim.cli.render.plan import show_simulation

        show_simulation(result, scenario)
    if timeline := result.timeline:
        write_beside((trace, timeline.write_chrome_trace), (plot, lambda path: _draw(result, timeline, path)))


def _parse_arrivals(requests: str | None, every: str | None) -> Arrivals | None:
    from kvrsim.stream import MAX_REQUESTS, Arrivals
    from kvrsim.units import parse_count

    if requests is None:
        if every is not None:
            raise InputError("--every", every, "with --requests N")
        return None
    return Arrivals.parse(parse_count(requests, "--requests", maximum=MAX_REQUESTS), every or "0s")


def _draw(result: SimResult, timeline: Timeline, path: str) -> None:
    """What each rank does when; of several requests, which are shown."""
    from kvrsim.cli.render.plan import question_line
    from kvrsim.plots.gantt import write_gantt
    from kvrsim.strategies import get_strategy

    line = question_line(result)
    title = f"{result.strategy}: {get_strategy(result.strategy).title}"
    if result.stream is not None:
        shown, count = len(timeline.first_tokens_s), len(result.stream.ttft_s)
        title += f"; {count} requests" if shown == count else f"; the first {shown} of {count} requests"
    write_gantt(timeline, path, title=title, subtitle=line)
