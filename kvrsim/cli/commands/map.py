"""`kvrsim map`: the fastest strategy and number of GPUs for each context and bandwidth."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated

from kvrsim.arguments import Help, MapArgs, PoolArgs, ScenariosArgs
from kvrsim.cli.options import OutputArgs, PictureOrPagePath, pool_of, with_options
from kvrsim.cli.output import print_answer, write_files
from kvrsim.cli.progress import Progress
from kvrsim.cli.text import Part, Row, facts, header, headline, limit_text, note_rows
from kvrsim.units import format_bandwidth, format_seconds, format_tokens
from kvrsim.views.table import TIED

if TYPE_CHECKING:
    from planner.map.map import StrategyMap, Winner

_PLOT = "Draw the fastest strategies over contexts and GPUs: FILE.png, FILE.svg, FILE.pdf, or a page FILE.html."
_MOST_NAMES = 24  # most strategies whose names are printed


@with_options(fixed={"link_bandwidth": None})
def strategy_map(
    args: ScenariosArgs,
    options: MapArgs,
    workers: PoolArgs,
    output: OutputArgs,
    *,
    plot: Annotated[PictureOrPagePath | None, Help(_PLOT, metavar="FILE")] = None,
) -> None:
    """Find the fastest strategy over contexts and GPUs.

    Also prints the context from which each strategy is faster than one GPU. A gain below 2 % of TTFT is ignored: the
    answer is then one GPU, or fewer GPUs.

    Example: kvrsim map --ctx 1k:64k:x4 --gpus 2,4,8 --cluster h100-nvlink
    """
    output.check()
    from planner.api import map_of

    with pool_of(workers) as pool, Progress() as progress:
        result = map_of(args, options, pool=pool, on_progress=progress)
    print_answer(output, result.to_dict, "points", lambda: map_screen(result))
    write_files((plot, result.write_plot))


def map_screen(result: StrategyMap) -> list[Part]:
    """Screen of a map: the best by context and bandwidth, the fastest strategies, the break-even contexts."""
    from kvrsim.views.map import break_even_table, winners_table

    answer = list[Row]()
    notes = list[str]()
    for bandwidth in result.bandwidths:
        here = [winner for winner in result.best() if winner.link_bandwidth_bytes_per_s == bandwidth]
        line = "; ".join(_best_by_context(here)) or "nothing fits in memory"
        answer.append((f"best, {format_bandwidth(bandwidth)}:", headline(line)))
        if result.gpu_counts[-1] > 1 and not any(winner.pays for winner in here):
            links = f"links of {format_bandwidth(bandwidth)}"
            notes.append(f"with {links}, more than one GPU is not faster at any of these contexts")
    too_long = [point.context_len for point in result.points if point.strategy == "single" and not point.fits]
    if too_long:
        shortest = format_tokens(min(too_long))
        notes.append(
            f"from {shortest} on, one GPU has too little memory: there, gains (×) are over a time as if it fitted"
        )
    ties = None
    if any(winner.ties and winner.pays for winner in result.winners()):
        ties = f"{TIED}N: N others tie, the difference is within its prediction interval (--json says which)"
    table = facts(
        ("ties:", ties),
        ("memory:", limit_text(result.memory_limit)),
        ("compared:", compared_text(result)),
        *note_rows((*notes, *result.warnings)),
    )
    head = header(result.question, result.cluster, f"Fastest strategy for {result.model}")
    parts: list[Part] = [facts(*answer), "", *head, "", winners_table(result)]
    if (break_evens := break_even_table(result)).rows:
        parts += ["", break_evens]
    return [*parts, "", table]


def compared_text(result: StrategyMap) -> str:
    """The strategies on the map, and whether plan compares more."""
    names = result.strategies
    text = ", ".join(names)
    if len(names) > _MOST_NAMES:
        text = f"{len(names)} strategies (--json names them)"
    asked = dict(result.question.options)["strategies"]
    if asked is not None and "all" in asked:
        return text
    return f"{text}; kvrsim plan compares more of them: so does --strategies all"


def _best_by_context(best: list[Winner]) -> Iterator[str]:
    """Merge neighbouring contexts with the same best: "kvr-s on 8 GPUs from 4k to 8k, 104 ms to 228 ms"."""
    for (strategy, count), group in groupby(best, key=attrgetter("strategy", "num_gpus")):
        first, *others = group
        on = "1 GPU"
        if first.pays:
            on = f"{strategy} on {count} GPUs"
        span = f"at {format_tokens(first.context_len)}, {format_seconds(first.ttft_s)}"
        if others:
            last = others[-1]
            span = f"from {format_tokens(first.context_len)} to {format_tokens(last.context_len)}"
            span += f", {format_seconds(first.ttft_s)} to {format_seconds(last.ttft_s)}"
        yield f"{on} {span}"
