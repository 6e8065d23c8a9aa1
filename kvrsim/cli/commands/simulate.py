"""`kvrsim simulate`: one strategy's prefill, rank by rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvrsim.arguments import NoiseArgs, ScenarioArgs, SimulateArgs, UsersArgs
from kvrsim.cli import text as lines
from kvrsim.cli.options import OutputArgs, PageArgs, with_options
from kvrsim.cli.output import print_answer, write_files
from kvrsim.cli.progress import Progress
from kvrsim.errors import InputError
from kvrsim.units import format_bytes, format_count, format_seconds
from kvrsim.views.table import Table, columns, format_partition, narrowing, ranks_table

if TYPE_CHECKING:
    from kvrsim.attention_map import PaperCounts
    from kvrsim.noise import Estimate
    from kvrsim.results.results import SimResult
    from kvrsim.results.timeline import Breakdown, BreakdownRow


@with_options()
def simulate(
    args: ScenarioArgs, run: SimulateArgs, users: UsersArgs, noise: NoiseArgs, files: PageArgs, output: OutputArgs
) -> None:
    """Simulate one strategy's prefill, rank by rank.

    Prints what each rank computes, waits for, sends and holds.

    Example: kvrsim simulate --strategy kvr-s --ctx 8k --gpus 4
    """
    output.check()
    if run.executor == "batch" and (files.is_given or run.breakdown):
        raise InputError("executor", run.executor, "event, with --trace, --plot or --breakdown")
    if run.explain and files.is_page:
        raise InputError("plot", files.plot, "a picture with --explain: FILE.png, FILE.svg or FILE.pdf")
    from planner.api import simulation_of

    timed = files.trace is not None or (files.plot is not None and not run.explain)
    with Progress() as progress:
        result = simulation_of(args, run, noise, users, timeline=timed, on_progress=progress)
    print_answer(output, result.to_dict, "per_rank", lambda: simulation_screen(result))
    if (counts := result.counts) is not None:
        from kvrsim.views.attention_map import figure
        from kvrsim.views.figure import save_figure

        write_files((files.plot, lambda path: save_figure(figure(counts), path)))
        files = PageArgs(trace=files.trace)
    if timeline := result.timeline:
        write_files(
            (files.trace, lambda path: timeline.write_chrome_trace(path, result.question)),
            (files.plot, result.write_plot),
        )


_MOST_CAUSES = 4  # largest number of causes of the interval that are listed
_WIDE = 0.005  # smallest share of TTFT for which a cause is listed


def simulation_screen(result: SimResult) -> list[lines.Part]:
    """Screen of a simulation: TTFT, the question, one row per rank, and notes."""
    limit = result.memory_limit.nbytes
    partition = None
    pipeline = None
    if result.layers is not None:
        pipeline = lines.stages_text(result.partition, result.layers)
    elif len(result.partition) > 1:
        partition = f"{format_partition(result.partition, room=10**6)} tokens"
    blocks = None
    if result.query_blocks is not None:
        blocks = lines.blocks_text(result.query_blocks)
    answer = lines.facts(
        ("TTFT:", lines.headline(_ttft(result, limit))),
        lines.users_row(result.users, result.mean_ttft_s),
        ("partition:", partition),
        ("pipeline:", pipeline),
        ("query blocks:", blocks),
        *_noise_rows(result),
    )
    table = lines.facts(
        ("interval:", _interval(result)),
        ("executor:", result.executor),
        ("memory:", lines.limit_text(result.memory_limit)),
        lines.misfit_row(result.strategy, [rank.memory for rank in result.per_rank], limit),
        ("rests on:", lines.rests_on_line(result.question, lines.coverage_text(result.interval_coverage))),
        *lines.note_rows(result.warnings),
    )
    parts: list[lines.Part] = [answer, "", *lines.header(result.question, result.cluster), "", ranks_table(result), ""]
    if result.counts is not None:
        from kvrsim.views.attention_map import counts_table

        parts += [counts_table(result.counts), _counts_facts(result.counts), ""]
    if result.breakdown is not None:
        parts += [narrowing(_breakdown(result.breakdown), "basis", "roofline"), ""]
    return [*parts, table]


def _counts_facts(counts: PaperCounts) -> lines.Facts:
    """The paper's lower limits of TTFT, and the dot products of each rank."""
    products = ", ".join(f"{count:,}" for count in counts.attention.dot_products)
    least = f"TTFT is at least {format_seconds(counts.least_s)} with these chunks"
    return lines.facts(
        ("by rank:", f"{products} dot products"),
        ("Equation 1:", f"{least}, if all work grows as attention does ({format_seconds(counts.single_s)} on one GPU)"),
        ("Equation 4:", f"TTFT*({len(counts.attention.chunks)}) is {format_seconds(counts.ttft_star_s)}: even chunks"),
    )


def _ttft(result: SimResult, limit: int) -> str:
    num_gpus = len(result.per_rank)
    peak = max(rank.memory.total for rank in result.per_rank)
    time = lines.likely(result.ttft_low_s, result.ttft_s, result.ttft_high_s, result.interval_coverage)
    text = f"{result.strategy} on {format_count(num_gpus, 'GPU')}, {time}"
    if peak > limit:
        text += f"; does not fit in memory: {format_bytes(peak - limit)} too much"
    return text


def _interval(result: SimResult) -> str:
    """Causes of a wide interval."""
    causes = []
    for name, (low, high) in result.interval_causes.items():
        if max(abs(low), abs(high)) >= _WIDE:
            causes.append(f"{name} {low:+.1%} to {high:+.1%}")
    if not causes:
        return ""
    return f"from {', '.join(causes[:_MOST_CAUSES])}"


def _noise_rows(result: SimResult) -> Iterator[lines.Row]:
    """The distribution of TTFT under noise."""
    if result.noise is None or (noisy := result.noisy) is None:
        return
    yield "noise:", result.noise.describe()
    yield "", f"{noisy.num_samples} samples: mean {_limits(noisy.mean)}; {lines.mean_change(noisy)}"
    limits = ", ".join(f"{name} {_limits(getattr(noisy, name))}" for name in ("p50", "p95", "p99"))
    yield "", f"{limits}, worst {format_seconds(noisy.worst_s)}"


def _limits(estimate: Estimate) -> str:
    """Format an estimate and its confidence limits."""
    value = format_seconds(estimate.value_s)
    if estimate.low_s is None and estimate.high_s is None:
        return value
    return f"{value} ({_end(estimate.low_s)}–{_end(estimate.high_s)})"


def _end(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return format_seconds(seconds)


def _breakdown(breakdown: Breakdown) -> Table:
    """One row per operation: seconds on the first and the last rank, and its share of the time of all ranks."""
    last = max(row.rank for row in breakdown.rows)
    ranks = sorted({0, last})
    table = columns("operation", "what", *(f">rank {rank}" for rank in ranks), ">share", ">roofline", "basis")
    kinds = list(dict.fromkeys(row.kind for row in breakdown.rows))
    rows_of: dict[tuple[str, str], dict[int, BreakdownRow]] = {}
    for row in breakdown.rows:
        rows_of.setdefault((row.kind, row.what), {})[row.rank] = row
    for kind, what in sorted(rows_of, key=lambda key: kinds.index(key[0])):
        rows = rows_of[kind, what]
        seconds = [""] * len(ranks)
        for place, rank in enumerate(ranks):
            if rank in rows:
                seconds[place] = format_seconds(rows[rank].seconds)
        share = sum(row.share for row in rows.values()) / (last + 1)
        table.add_row(kind, what, *seconds, f"{share:.1%}", *_roofline_and_basis(list(rows.values())))
    return table


def _roofline_and_basis(rows: Sequence[BreakdownRow]) -> tuple[str, str]:
    """The share of the roofline that an operation reaches on all ranks, and the basis of its times."""
    roofline = ""
    least_s = 0.0
    for row in rows:
        if row.roofline_share is None:
            break
        least_s += row.roofline_share * row.seconds
    else:
        roofline = f"{least_s / sum(row.seconds for row in rows):.0%}"
    bases = Counter(row.basis for row in rows)
    if len(bases) == 1:
        return roofline, rows[0].basis
    return roofline, ", ".join(f"{name} ({count})" for name, count in bases.items())
