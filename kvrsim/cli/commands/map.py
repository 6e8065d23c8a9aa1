"""`kvrsim map`: which strategy on how many GPUs is the fastest, over contexts and bandwidths."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrsim.choices import MAP_STRATEGIES
from kvrsim.cli.answers import AnswerOptions
from kvrsim.cli.options import ManyOptions, takes
from kvrsim.cli.outputs import write_beside
from kvrsim.cli.parsing import check_plot, parse_list, parse_strategies
from kvrsim.cli.pool_options import PoolOptions

MapPlot = Annotated[
    str | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw the fastest strategies over contexts and GPUs: FILE.png, FILE.svg, FILE.pdf, or a page FILE.html.",
    ),
]


@takes(ManyOptions, PoolOptions, AnswerOptions)
def strategy_map(
    options: ManyOptions,
    workers: PoolOptions,
    answers: AnswerOptions,
    *,
    link_bandwidths: Annotated[
        str | None,
        typer.Option(
            "--link-bandwidths",
            metavar="RATE,RATE,...",
            help="Link bandwidths to compare, such as 10GB/s,200GB/s. Default: the cluster's own.",
        ),
    ] = None,
    strategies: Annotated[
        str, typer.Option("--strategies", metavar="NAMES|all|FILE.py:NAME", help="Strategies to compare with one GPU.")
    ] = ",".join(MAP_STRATEGIES),
    plot: MapPlot = None,
) -> None:
    """Find the fastest strategy over contexts and GPUs.

    Also prints the context from which each strategy is faster than one GPU. A gain below 2 % of TTFT is ignored: one
    GPU, or fewer GPUs, win.

    Example: kvrsim map --ctx 1k:64k:x4 --gpus 2,4,8 --cluster h100-nvlink
    """
    from kvrsim.units import parse_bandwidth

    answers.check()
    names = parse_strategies(strategies)
    bandwidths = None
    if link_bandwidths is not None:
        parts = parse_list(link_bandwidths, "link_bandwidths", "bandwidths with commas between, such as 10GB/s,100GB/s")
        bandwidths = sorted({parse_bandwidth(part, "link_bandwidths") for part in parts})
    check_plot(plot, page=True)
    pool = workers.pool()
    scenario, notes, lengths, counts = options.scenarios()
    from kvrsim.cli.progress import EntryProgress
    from planner.map.build import make_map

    with pool, EntryProgress("points") as progress:
        found = make_map(
            scenario,
            lengths=lengths,
            gpu_counts=counts,
            bandwidths=bandwidths,
            strategies=names,
            warnings=notes,
            pool=pool,
            on_place=progress,
        )
    if not answers.printed(found.to_dict, "points"):
        from kvrsim.cli.render.map import show_map

        show_map(found)
    write_beside((plot, found.write_plot))
