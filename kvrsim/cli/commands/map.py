"""`kvrsim map`: which strategy on how many GPUs is the fastest, over contexts and bandwidths."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from kvrsim.choices import MAP_STRATEGIES
from kvrsim.cli.answers import AnswerOptions
from kvrsim.cli.options import ManyOptions, takes
from kvrsim.cli.outputs import write_beside
from kvrsim.cli.parsing import check_plot, parse_list, parse_strategies
from kvrsim.cli.pool_options import PoolOptions
from kvrsim.cli.text import TIED, Part, Table, Text, columns, facts, header, headline, limit_text, show
from kvrsim.units import format_bandwidth, format_seconds, format_tokens

if TYPE_CHECKING:
    from planner.map.map import BreakEven, StrategyMap, Winner

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
    from planner.map.map import make_map

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
        from kvrsim.cli.commands.map import show_map

        show_map(found)
    write_beside((plot, found.write_plot))


# -- A map of strategies for people.

ALONE = "single"


def show_map(found: StrategyMap) -> None:
    """The best by context for each bandwidth; then the fastest strategies and the break-even contexts."""
    answer, winners, best, even = facts(), list(found.winners()), list(found.best()), list(found.break_evens())
    for bandwidth in found.bandwidths:
        here = [one for one in best if one.link_bandwidth_bytes_per_s == bandwidth]
        answer.add_row(f"best, {format_bandwidth(bandwidth)}:", headline("; ".join(_best_by_context(here))))
    parts: list[Part] = [answer, "", *header(found.question, found.cluster, f"Fastest strategy for {found.model}")]
    for bandwidth in found.bandwidths:
        parts += ["", Text(f"links of {format_bandwidth(bandwidth)}", style="bold")]
        parts.append(
            _winners(found, bandwidth, [one for one in winners if one.link_bandwidth_bytes_per_s == bandwidth], best)
        )
        here_even = [one for one in even if one.link_bandwidth_bytes_per_s == bandwidth]
        if here_even:
            parts += ["", _break_evens(found, here_even)]
    notes = facts()
    if any(winner.ties and winner.pays for winner in winners):
        what = f"{TIED}N: N others tie, the difference is within its prediction interval (--json says which)"
        notes.add_row("ties:", what)
    notes.add_row("memory:", limit_text(found.memory_limit))
    for note in (*_always_alone(found, best), *_too_long_alone(found), *found.warnings):
        notes.add_row(Text("note:", style="yellow"), note)
    show(*parts, "", notes)


def _best_by_context(best: list[Winner]) -> Iterator[str]:
    """Neighbouring contexts with one best together: "kvr-s on 8 GPUs from 4k to 8k, 104 ms to 228 ms"."""
    for (strategy, count), group in groupby(best, key=lambda one: (one.strategy, one.num_gpus)):
        first, *others = group
        last = (first, *others)[-1]
        on = f"{strategy} on {count} GPUs" if first.pays else "1 GPU"
        span = f"at {format_tokens(first.context_len)}, {format_seconds(first.ttft_s)}"
        if others:
            span = f"from {format_tokens(first.context_len)} to {format_tokens(last.context_len)}"
            span += f", {format_seconds(first.ttft_s)} to {format_seconds(last.ttft_s)}"
        yield f"{on} {span}" + ("" if first.fits and last.fits else " (does not fit)")


def _winners(found: StrategyMap, bandwidth: float, winners: list[Winner], best: list[Winner]) -> Table:
    """A row per context, a column per number of GPUs: the fastest strategy, its TTFT, its speedup over one GPU."""
    table = columns("context")
    several = [count for count in found.gpu_counts if count > 1]
    columns("best", *(f"{count} GPUs" for count in several), into=table)
    for context_len in found.lengths:
        here = [one for one in winners if one.context_len == context_len]
        planned = [count for count in found.gpu_counts if found.at(context_len, bandwidth, count)]
        cells = dict(zip(planned, map(_cell, here), strict=True))
        if not here:
            continue
        fastest = next(
            one for one in best if (one.context_len, one.link_bandwidth_bytes_per_s) == (context_len, bandwidth)
        )
        on = f"{fastest.strategy} on {fastest.num_gpus}" if fastest.pays else "one GPU"
        table.add_row(format_tokens(context_len), Text(on, style="bold"), *(cells.get(one, "") for one in several))
    return table


def _cell(winner: Winner) -> str:
    if not winner.pays:
        what = f"no gain ({format_seconds(winner.ttft_s)})"
    else:
        ties = f" {TIED}{len(winner.ties)}" if winner.ties else ""
        what = f"{winner.strategy} {format_seconds(winner.ttft_s)} {winner.speedup_over_single:.2f}×{ties}"
    return what if winner.fits else f"{what} (does not fit)"


def _break_evens(found: StrategyMap, even: list[BreakEven]) -> Table:
    """The context from which each strategy is faster than another."""
    table = columns("faster from context")
    columns(*(f"{count} GPUs" for count in found.gpu_counts if count > 1), into=table)
    for name, over in dict.fromkeys((one.strategy, one.over) for one in even):
        cells = []
        for count in found.gpu_counts:
            here = [one for one in even if (one.num_gpus, one.strategy, one.over) == (count, name, over)]
            if count > 1:
                cells.append(_length(found, here[0]) if here else "")
        table.add_row(f"{name} than {over}", *cells)
    return table


def _length(found: StrategyMap, even: BreakEven) -> str:
    if even.context_len is None:
        return f"beyond {format_tokens(found.lengths[-1])}"
    if even.known == "interpolated":
        return f"{even.context_len} tokens"
    return f"at most {format_tokens(even.context_len)}"


def _too_long_alone(found: StrategyMap) -> Iterator[str]:
    """From which context on one GPU has too little memory."""
    lengths = [point.context_len for point in found.points if point.strategy == ALONE and not point.fits]
    if lengths:
        shortest = format_tokens(min(lengths))
        yield f"from {shortest} on, one GPU has too little memory; there the fastest strategy that fits wins"


def _always_alone(found: StrategyMap, best: list[Winner]) -> Iterator[str]:
    """Where more GPUs never help."""
    for bandwidth in found.bandwidths:
        here = [one for one in best if one.link_bandwidth_bytes_per_s == bandwidth]
        if found.gpu_counts[-1] > 1 and not any(one.pays for one in here):
            links = f"links of {format_bandwidth(bandwidth)}"
            yield f"with {links}, more than one GPU is not faster at any of these contexts"
