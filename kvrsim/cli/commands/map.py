"""`kvrsim map`: which strategy on how many GPUs is the fastest, over contexts and bandwidths."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from kvrsim.cli.commands.plan import parse_strategies
from kvrsim.cli.commands.table import lengths_and_counts, of_many
from kvrsim.cli.options import (
    Json,
    ScenarioOptions,
    check_plot,
    parse_list,
    print_json,
    takes_scenario,
)
from kvrsim.cli.outputs import write_beside

MapPlot = Annotated[
    str | None,
    typer.Option(
        "--plot", metavar="FILE", help="Draw the winners over contexts and GPUs: FILE.png, FILE.svg or FILE.pdf."
    ),
]
DEFAULT_STRATEGIES = "single,tsp,kvr-s,ring,zigzag,tp"


@of_many
@takes_scenario
def strategy_map(
    options: ScenarioOptions,
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
        str, typer.Option("--strategies", metavar="NAMES|all", help="What to compare with one GPU.")
    ] = DEFAULT_STRATEGIES,
    plot: MapPlot = None,
    json: Json = False,
) -> None:
    """Find the fastest strategy over contexts and GPUs.

    Also prints from which context on each strategy is faster than one GPU. A gain of less than 2 % of TTFT counts as
    none: then one GPU, or fewer GPUs, win.
    """
    from kvrsim.units import parse_bandwidth

    lengths, counts = lengths_and_counts(options)
    names = parse_strategies(strategies)
    bandwidths = None
    if link_bandwidths is not None:
        parts = parse_list(
            link_bandwidths, "--link-bandwidths", "bandwidths with commas between, such as 10GB/s,100GB/s"
        )
        bandwidths = sorted({parse_bandwidth(part, "--link-bandwidths") for part in parts})
    check_plot(plot)
    scenario, notes = replace(options, ctx=str(lengths[-1]), gpus=str(counts[-1])).scenario()
    from kvrsim.cli.progress import EntryProgress
    from planner.map.build import make_map

    with EntryProgress("places") as progress:
        found = make_map(
            scenario,
            lengths=lengths,
            gpu_counts=counts,
            bandwidths=bandwidths,
            strategies=names,
            warnings=notes,
            on_place=progress,
        )
    if json:
        print_json(found.to_dict())
    else:
        from kvrsim.cli.render.map import show_map

        show_map(found)
    from planner.map.plot import write_map

    write_beside((plot, lambda path: write_map(found, path)))
