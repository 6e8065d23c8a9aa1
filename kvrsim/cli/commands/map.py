"""`kvrsim map`: which strategy on how many GPUs is the fastest, over contexts and bandwidths."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvrsim.arguments import MapArgs, PoolArgs, ScenariosArgs, option
from kvrsim.cli.options import OutputArgs, picture_or_page, pool_of, takes
from kvrsim.cli.output import print_answer, write_files
from kvrsim.cli.progress import Progress
from kvrsim.cli.text import Part, facts, header, headline, limit_text
from kvrsim.units import format_bandwidth, format_bytes, format_seconds, format_tokens
from kvrsim.views.table import TIED, Table, Text, columns

if TYPE_CHECKING:
    from planner.map.map import BreakEven, StrategyMap, Winner

_PLOT = "Draw the fastest strategies over contexts and GPUs: FILE.png, FILE.svg, FILE.pdf, or a page FILE.html."


@takes(ScenariosArgs, MapArgs, PoolArgs, OutputArgs, fixed={"link_bandwidth": None})
def strategy_map(
    args: ScenariosArgs,
    compared: MapArgs,
    workers: PoolArgs,
    output: OutputArgs,
    *,
    plot: Any = option("FILE", _PLOT, check=picture_or_page),
) -> None:
    """Find the fastest strategy over contexts and GPUs.

    Also prints the context from which each strategy is faster than one GPU. A gain below 2 % of TTFT is ignored: one
    GPU, or fewer GPUs, win.

    Example: kvrsim map --ctx 1k:64k:x4 --gpus 2,4,8 --cluster h100-nvlink
    """
    output.check()
    from planner.api import map_of

    with pool_of(workers) as pool, Progress() as progress:
        result = map_of(args, compared, pool=pool, on_progress=progress)
    print_answer(output, result.to_dict, "points", lambda: map_screen(result))
    write_files((plot, result.write_plot))


ALONE = "single"


def map_screen(result: StrategyMap) -> list[Part]:
    """The best by context for each bandwidth; then the fastest strategies and the break-even contexts."""
    answer, winners, best, even = facts(), list(result.winners()), list(result.best()), list(result.break_evens())
    for bandwidth in result.bandwidths:
        here = [one for one in best if one.link_bandwidth_bytes_per_s == bandwidth]
        line = "; ".join(_best_by_context(here)) or "nothing fits in memory"
        answer.add_row(f"best, {format_bandwidth(bandwidth)}:", headline(line))
    parts: list[Part] = [answer, "", *header(result.question, result.cluster, f"Fastest strategy for {result.model}")]
    for bandwidth in result.bandwidths:
        parts += ["", Text(f"links of {format_bandwidth(bandwidth)}", style="bold")]
        parts.append(_winners(result, bandwidth, best))
        here_even = [one for one in even if one.link_bandwidth_bytes_per_s == bandwidth]
        if here_even:
            parts += ["", _break_evens(result, here_even)]
    notes = facts()
    if any(winner.ties and winner.pays for winner in winners):
        what = f"{TIED}N: N others tie, the difference is within its prediction interval (--json says which)"
        notes.add_row("ties:", what)
    notes.add_row("memory:", limit_text(result.memory_limit))
    for note in (*_always_alone(result, best), *_too_long_alone(result), *result.warnings):
        notes.add_row(Text("note:", style="yellow"), note)
    return [*parts, "", notes]


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
        yield f"{on} {span}"


def _winners(result: StrategyMap, bandwidth: float, best: list[Winner]) -> Table:
    """A row per context, a column per number of GPUs: the fastest strategy, its TTFT, its speedup over one GPU."""
    table = columns("context")
    several = [count for count in result.gpu_counts if count > 1]
    columns("best", *(f"{count} GPUs" for count in several), into=table)
    for context_len in result.lengths:
        here = (one for one in best if (one.context_len, one.link_bandwidth_bytes_per_s) == (context_len, bandwidth))
        fastest = next(here, None)
        on = "nothing fits" if fastest is None else "one GPU"
        if fastest is not None and fastest.pays:
            on = f"{fastest.strategy} on {fastest.num_gpus}"
        cells = (_cell(result, context_len, bandwidth, count) for count in several)
        table.add_row(format_tokens(context_len), Text(on, style="bold"), *cells)
    return table


def _cell(result: StrategyMap, context_len: int, bandwidth: float, num_gpus: int) -> str:
    """The winner in a place; where nothing fits, what the nearest needs."""
    winner = result.winner(context_len, bandwidth, num_gpus)
    if winner is None:
        points = result.at(context_len, bandwidth, num_gpus).values()
        nearest = min(points, key=lambda point: point.peak_bytes, default=None)
        limit = format_bytes(result.memory_limit.nbytes)
        return "" if nearest is None else f"{nearest.strategy} needs {format_bytes(nearest.peak_bytes)} of {limit}"
    if not winner.pays:
        return f"no gain ({format_seconds(winner.ttft_s)})"
    ties = f" {TIED}{len(winner.ties)}" if winner.ties else ""
    return f"{winner.strategy} {format_seconds(winner.ttft_s)} {winner.speedup_over_single:.2f}×{ties}"


def _break_evens(result: StrategyMap, even: list[BreakEven]) -> Table:
    """The context from which each strategy is faster than another."""
    table = columns("faster from context")
    columns(*(f"{count} GPUs" for count in result.gpu_counts if count > 1), into=table)
    for name, over in dict.fromkeys((one.strategy, one.over) for one in even):
        cells = []
        for count in result.gpu_counts:
            here = [one for one in even if (one.num_gpus, one.strategy, one.over) == (count, name, over)]
            if count > 1:
                cells.append(_length(result, here[0]) if here else "")
        table.add_row(f"{name} than {over}", *cells)
    return table


def _length(result: StrategyMap, even: BreakEven) -> str:
    if even.context_len is None:
        return f"beyond {format_tokens(result.lengths[-1])}"
    if even.known == "interpolated":
        return f"{even.context_len} tokens"
    return f"at most {format_tokens(even.context_len)}"


def _too_long_alone(result: StrategyMap) -> Iterator[str]:
    """From which context on one GPU has too little memory."""
    lengths = [point.context_len for point in result.points if point.strategy == ALONE and not point.fits]
    if lengths:
        shortest = format_tokens(min(lengths))
        yield f"from {shortest} on, one GPU has too little memory; there the fastest strategy that fits wins"


def _always_alone(result: StrategyMap, best: list[Winner]) -> Iterator[str]:
    """Where more GPUs never help."""
    for bandwidth in result.bandwidths:
        here = [one for one in best if one.link_bandwidth_bytes_per_s == bandwidth]
        if result.gpu_counts[-1] > 1 and not any(one.pays for one in here):
            links = f"links of {format_bandwidth(bandwidth)}"
            yield f"with {links}, more than one GPU is not faster at any of these contexts"
