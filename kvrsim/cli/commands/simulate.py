"""`kvrsim simulate`: one strategy's prefill, rank by rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvrsim.arguments import NoiseArgs, ScenarioArgs, SimulateArgs, UsersArgs
from kvrsim.cli import text as lines
from kvrsim.cli.options import OutputArgs, PageArgs, with_options
from kvrsim.cli.output import print_answer, write_files
from kvrsim.cli.progress import Progress
from kvrsim.errors import InputError
from kvrsim.units import format_bytes, format_seconds
from kvrsim.views.table import Table, columns, format_partition, narrowing, ranks_table

if TYPE_CHECKING:
    from kvrsim.noise import Estimate
    from kvrsim.results.results import SimResult
    from kvrsim.results.timeline import Breakdown


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
    from planner.api import simulation_of

    with Progress() as progress:
        result = simulation_of(args, run, noise, users, timeline=files.is_given, on_progress=progress)
    print_answer(output, result.to_dict, "per_rank", lambda: simulation_screen(result))
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
    partition = None if len(result.partition) < 2 else f"{format_partition(result.partition, room=10**6)} tokens"
    answer = lines.facts(
        ("TTFT:", lines.headline(_ttft(result, limit))),
        lines.users_row(result.users, result.mean_ttft_s),
        ("partition:", partition)
        if result.layers is None
        else ("pipeline:", lines.stages_text(result.partition, result.layers)),
        ("query blocks:", None if result.query_blocks is None else lines.blocks_text(result.query_blocks)),
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
    if result.breakdown is not None:
        parts += [narrowing(_breakdown(result.breakdown), "basis", "roofline"), ""]
    return [*parts, table]


def _ttft(result: SimResult, limit: int) -> str:
    num_gpus = len(result.per_rank)
    peak = max(rank.memory.total for rank in result.per_rank)
    time = lines.likely(result.ttft_low_s, result.ttft_s, result.ttft_high_s, result.interval_coverage)
    text = f"{result.strategy} on {num_gpus} GPU{'s' * (num_gpus != 1)}, {time}"
    return text if peak <= limit else f"{text}; does not fit in memory: {format_bytes(peak - limit)} too much"


def _interval(result: SimResult) -> str:
    """Causes of a wide interval."""
    wide = {name: ends for name, ends in result.interval_causes.items() if max(map(abs, ends)) >= _WIDE}
    causes = ", ".join(f"{name} {low:+.1%} to {high:+.1%}" for name, (low, high) in list(wide.items())[:_MOST_CAUSES])
    return f"from {causes}" if causes else ""


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
    ends = [None if end is None else format_seconds(end) for end in (estimate.low_s, estimate.high_s)]
    if ends == [None, None]:
        return format_seconds(estimate.value_s)
    return f"{format_seconds(estimate.value_s)} ({ends[0] or '?'}–{ends[1] or '?'})"


def _breakdown(breakdown: Breakdown) -> Table:
    """One row per operation: seconds on the first and the last rank, and its share of the time of all ranks."""
    last = max(row.rank for row in breakdown.rows)
    ranks = (0, last) if last else (0,)
    table = columns("operation", "what", *(f">rank {rank}" for rank in ranks), ">share", ">roofline", "basis")
    kinds = list(dict.fromkeys(row.kind for row in breakdown.rows))
    keys = dict.fromkeys((row.kind, row.what) for row in breakdown.rows)
    for key in sorted(keys, key=lambda key: kinds.index(key[0])):
        rows = {row.rank: row for row in breakdown.rows if (row.kind, row.what) == key}
        seconds = [format_seconds(rows[rank].seconds) if rank in rows else "" for rank in ranks]
        share = sum(row.share for row in rows.values()) / (last + 1)
        least = [None if row.roofline_share is None else row.roofline_share * row.seconds for row in rows.values()]
        total_s = sum(row.seconds for row in rows.values())
        roofline = "" if None in least else f"{sum(filter(None, least)) / total_s:.0%}"
        bases = Counter(row.basis for row in rows.values())
        basis = ", ".join(f"{name} ({count})" if len(bases) > 1 else name for name, count in bases.items())
        table.add_row(*key, *seconds, f"{share:.1%}", roofline, basis)
    return table
