"""`kvrsim simulate`: one strategy's prefill, rank by rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvrsim.choices import EXECUTORS
from kvrsim.cli.answers import AnswerOptions
from kvrsim.cli.options import NoiseSpec, PackTokens, Plot, Samples, Seed, StreamOptions, Table, Trace, takes
from kvrsim.cli.outputs import write_beside
from kvrsim.cli.parsing import (
    check_output,
    check_plot,
    parse_choice,
    parse_chunks,
    parse_disturbance,
    parse_pack_tokens,
    parse_requests,
    parse_seed,
    parse_strategy,
    read_table,
    require_table,
)
from kvrsim.errors import InputError

if TYPE_CHECKING:
    pass


@takes(StreamOptions, AnswerOptions)
def simulate(
    options: StreamOptions,
    answers: AnswerOptions,
    *,
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy", metavar="NAME|FILE.py:NAME", help="Strategy, such as tsp, kvr-s, zigzag, tp8+kvr-s."
        ),
    ],
    partition: Annotated[
        str | None,
        typer.Option(
            "--partition",
            metavar="LEN,LEN,...",
            help="New tokens of each rank, such as 5000,3192. Default: the strategy's own; kvr-s searches it.",
        ),
    ] = None,
    table: Table = None,
    executor: Annotated[
        str | None,
        typer.Option(
            "--executor",
            metavar="|".join(EXECUTORS),
            help="event simulates the queue of every link. Default: batch where it suffices.",
        ),
    ] = None,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Print the seconds of every operation, and whether they were measured.")
    ] = False,
    noise: NoiseSpec = None,
    samples: Samples = None,
    requests: Annotated[
        str | None,
        typer.Option(
            "--requests",
            metavar="N|LEN,LEN,...|FILE|synthetic:SPEC",
            help="Run several prompts on the same GPUs: N equal ones, contexts such as 2k,8k, or those of a trace.",
        ),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(
            "--every",
            metavar="TIME",
            help="Time between --requests: 500ms, or poisson:500ms. Default: all arrive at once.",
        ),
    ] = None,
    pack_tokens: PackTokens = None,
    trace: Trace = None,
    plot: Plot = None,
    seed: Seed = "0",
) -> None:
    """Simulate one strategy's prefill, rank by rank.

    Prints what each rank computes, waits for, sends and holds.

    Example: kvrsim simulate --strategy kvr-s --ctx 8k --gpus 4
    """
    answers.check()
    parse_strategy(strategy)
    if partition is None:
        require_table([strategy], table)
    chunks = parse_chunks(partition)
    wants_timeline = trace is not None or plot is not None
    parse_choice(executor, "executor", EXECUTORS)
    if executor == "batch" and (wants_timeline or breakdown):
        raise InputError("executor", executor, "event, where --trace, --plot or --breakdown is asked for")
    number = parse_seed(seed)
    disturbance = parse_disturbance(noise, samples, number)
    arrivals = parse_requests(requests, every, number)
    budget = parse_pack_tokens(pack_tokens)
    check_output(trace, "trace")
    check_plot(plot, page=True)
    lookup = read_table(table)
    scenario, warnings = options.scenario_of(arrivals)
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
            pack_tokens=budget,
            seed=number,
            warnings=warnings,
            on_progress=progress,
        )
    if not answers.printed(result.to_dict, "per_rank", without=("memory",)):
        from kvrsim.cli.render.simulation import show_simulation

        show_simulation(result, scenario)
    if timeline := result.timeline:
        write_beside(
            (trace, lambda path: timeline.write_chrome_trace(path, result.question)),
            (plot, result.write_plot),
        )
