"""`kvrsim simulate`: one strategy's prefill, rank by rank."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrsim.choices import EXECUTORS
from kvrsim.cli.answers import AnswerOptions
from kvrsim.cli.options import PackTokens, StreamOptions, Table, takes
from kvrsim.cli.outputs import write_beside
from kvrsim.cli.parsing import (
    parse_choice,
    parse_chunks,
    parse_pack_tokens,
    parse_requests,
    parse_strategy,
    read_table,
    require_table,
)
from kvrsim.cli.run_options import NoiseOptions, PageOptions
from kvrsim.errors import InputError


@takes(StreamOptions, NoiseOptions, PageOptions, AnswerOptions)
def simulate(
    options: StreamOptions,
    random: NoiseOptions,
    files: PageOptions,
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
    parse_choice(executor, "executor", EXECUTORS)
    if executor == "batch" and (files.wanted or breakdown):
        raise InputError("executor", executor, "event, where --trace, --plot or --breakdown is asked for")
    seed, disturbance = random.seed_number, random.disturbance()
    arrivals = parse_requests(requests, every, seed)
    budget = parse_pack_tokens(pack_tokens)
    files.check()
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
            timeline=files.wanted,
            with_breakdown=breakdown,
            disturbance=disturbance,
            arrivals=arrivals,
            pack_tokens=budget,
            seed=seed,
            warnings=warnings,
            on_progress=progress,
        )
    if not answers.printed(result.to_dict, "per_rank", without=("memory",)):
        from kvrsim.cli.render.simulation import show_simulation

        show_simulation(result, scenario)
    if timeline := result.timeline:
        write_beside(
            (files.trace, lambda path: timeline.write_chrome_trace(path, result.question)),
            (files.plot, result.write_plot),
        )
