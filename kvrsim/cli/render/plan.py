"""A plan for people; imported only where no JSON is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from kvrsim.cli.render.format import (
    INTERVAL_TITLES,
    add_misfits,
    add_notes,
    blocks_text,
    fits_text,
    format_interval,
    format_partition,
    format_wait,
    header,
    interval_title,
    limit_text,
    mean_change,
    round_up_percent,
    stages_text,
)
from kvrsim.cli.render.layout import Shrinkable, columns, facts, show
from kvrsim.text import without
from kvrsim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from kvrsim.noise.statistics import Distribution
    from kvrsim.results.results import Plan, StrategyResult

# Columns that a narrow terminal does without, the least important first.
_OPTIONAL = ("longest\nwait", "exposed\ncomm.", *INTERVAL_TITLES, "partition\n(tokens)", "peak\nmemory")
_MOST_EXPLAINED = 6  # strategies, up to which the memory of each one that does not fit is listed


def show_plan(plan: Plan) -> None:
    """Header, one row per strategy, then the best one, bounds, search, memory and notes."""
    table, best, search, limit = facts(), plan.best, plan.search, plan.memory_limit
    for number, line in enumerate(_best(plan)):
        table.add_row("" if number else "best:", line)
    table.add_row("engines:", _engines(plan))
    for label, line in (*_pipelines(plan), *_kvr(plan)):
        table.add_row(label, line)
    if search.evaluations:
        partitions = f"{search.evaluations} partition{'s' * (search.evaluations != 1)}"
        table.add_row("search:", f"{search.method}, {partitions} simulated in {format_seconds(search.seconds)}")
    if plan.not_compared:
        table.add_row("others:", f"not compared: {_listed(plan.not_compared)} (--strategies all)")
    _add_noise(table, plan)
    table.add_row("memory:", limit_text(limit))
    for result in plan.strategies if len(plan.strategies) <= _MOST_EXPLAINED or not best.fits else ():
        add_misfits(table, result.strategy, result.memory, limit.nbytes)
    table.add_row("rests on:", plan.rests_on)
    add_notes(table, without(plan.warnings, "memory"))  # the table and the lines above say what does not fit
    show(*header(plan), "", _strategies(plan), "", table)


def _strategies(plan: Plan) -> Shrinkable:
    """One row per strategy, the best in bold."""
    has_interval = any(result.ttft_low_s < result.ttft_high_s for result in plan.strategies)
    speedup = [] if plan.yardstick is None else [f"vs {_yardstick(plan.yardstick)}\n"]
    table = columns("strategy\n", "partition\n(tokens)")
    columns("TTFT\n", *[interval_title(plan.interval_coverage)] * has_interval, *speedup, numbers=True, into=table)
    columns("exposed\ncomm.", "longest\nwait", "peak\nmemory", numbers=True, into=table)
    columns("fits\n", into=table)
    for result in plan.strategies:
        row = _strategy_row(result, has_interval=has_interval)
        table.add_row(*row, fits_text(result.fits), style="bold" if result is plan.best else None)
    return Shrinkable(table, optional=_OPTIONAL)


def _strategy_row(result: StrategyResult, *, has_interval: bool) -> list[str]:
    row = [result.strategy, format_partition(result.partition), format_seconds(result.ttft_s)]
    if has_interval:
        row.append(format_interval(result.ttft_low_s, result.ttft_high_s))
    if result.speedup is not None:
        row.append(f"{result.speedup:.2f}×")
    peak_bytes = max(rank.total for rank in result.memory)
    return [*row, format_wait(result.exposed_comm_s), format_wait(max(result.wait_s)), format_bytes(peak_bytes)]


def _yardstick(strategy: str) -> str:
    return "1 GPU" if strategy == "single" else strategy.upper()


def _best(plan: Plan) -> Iterator[str]:
    """The fastest strategy, its ties, and its bound; where nothing fits, which strategies may fit."""
    best = plan.best
    text = f"{best.strategy} ({best.title}), TTFT {format_seconds(best.ttft_s)}"
    if plan.yardstick is not None and best.speedup is not None and round(best.speedup, 2) != 1:
        text += f", {best.speedup:.2f}× as fast as {_yardstick(plan.yardstick)}"
    yield text if best.fits else f"{text}; none of the compared strategies fits in memory"
    if not best.fits and plan.not_compared:
        yield f"{_listed(plan.not_compared)} may fit: --strategies all"
    if best.approximate is not None:
        yield f"approximate: {best.approximate}"
    if plan.ties:
        yield f"ties (the difference is within its prediction interval): {', '.join(plan.ties)}"
    if len(set(best.partition)) > 1 and best.layers is None:
        yield f"partition {', '.join(map(str, best.partition))}"
    if best.query_blocks is not None:
        yield blocks_text(best.query_blocks)
    bound = plan.bounds.best
    if bound is not None and bound.strategy != "kvr-s":
        gap, lower = round_up_percent(bound.gap), format_seconds(bound.lower_bound_s)
        yield f"at most {gap} % slower than the best of its partitions (proven lower bound {lower})"


def _engines(plan: Plan) -> str:
    """Which engines have the best strategy; where none does, the fastest one that some have."""
    best = plan.best
    if best.engines:
        return f"{_named(best)}: --emit {'|'.join(best.engines)} prints the launch"
    can = [one for one in plan.strategies if one.engines and one.fits and one.approximate is None]
    if not can:
        return f"none that was looked at has {best.strategy}"
    other = min(can, key=lambda one: one.ttft_s)
    return f"none that was looked at has {best.strategy}; {_named(other)}, TTFT {format_seconds(other.ttft_s)}"


def _named(result: StrategyResult) -> str:
    return f"{result.strategy} is in {', '.join(f'{name} ({version})' for name, version in result.engines.items())}"


def _pipelines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Pieces and stages of the searched pipelines and of the best strategy, and the bound of the searched ones."""
    for result in plan.strategies:
        if result.layers is None or (result.bound is None and result is not plan.best):
            continue
        yield f"{result.strategy}:", stages_text(result.partition, result.layers)
        if (bound := result.bound) is not None:
            gap, lower = round_up_percent(bound.gap), format_seconds(bound.lower_bound_s)
            text = f"at most {gap} % slower than the best pieces and stages (proven lower bound {lower})"
            if bound.gap_as_chosen != bound.gap:
                text += f"; {round_up_percent(bound.gap_as_chosen)} % for the mean step, which it was searched for"
            yield "", text


def _kvr(plan: Plan) -> Iterator[tuple[str, str]]:
    """The bound of KV-Runahead over single GPUs; other strategies may be faster than it."""
    bounds, num_gpus = plan.bounds, plan.num_gpus
    lower = None if bounds.lower_bound_s is None else f"proven lower bound {format_seconds(bounds.lower_bound_s)}"
    label = "kvr-s:" if bounds.gap is not None else "bounds:"
    chunks = next((result.partition for result in plan.strategies if result.strategy == "kvr-s"), ())
    if plan.best.strategy != "kvr-s" and len(set(chunks)) > 1:
        yield label, f"partition {', '.join(map(str, chunks))}"
        label = ""
    if bounds.gap is not None:
        gap = round_up_percent(bounds.gap)
        yield label, f"at most {gap} % slower than the best partition of KV-Runahead over single GPUs ({lower})"
        label = ""
    elif lower is not None:
        yield label, f"{lower} of KV-Runahead over single GPUs"
        label = ""
    no_comm = f"TTFT({num_gpus}) without communication {format_seconds(bounds.ttft_no_comm_s)}"
    yield label, f"{no_comm}; TTFT*({num_gpus}) by the paper's formula {format_seconds(bounds.ttft_star_s)}"


def _listed(names: Sequence[str]) -> str:
    """Names, hybrids by their kind: "kvr-direct, pp and 8 hybrids such as tp2+kvr-s"."""
    plain = [name for name in names if "+" not in name]
    hybrids = [name for name in names if "+" in name]
    if not hybrids:
        return ", ".join(plain)
    return f"{', '.join(plain)} and {len(hybrids)} hybrids such as {hybrids[0]}"


def _add_noise(table: Table, plan: Plan) -> None:
    """The distributions of TTFT under noise, and what planning for it gains."""
    if (report := plan.noise) is None:
        return
    table.add_row("noise:", report.noise.describe())
    for result in plan.strategies:
        if result.noisy is not None:
            table.add_row("", f"{result.strategy}: {_summary(result.noisy)}")
    if report.quiet_s is None or report.robust_s is None:
        return
    quiet, robust = format_seconds(report.quiet_s), format_seconds(report.robust_s)
    same = report.quiet_partition == report.robust_partition
    gained = (
        f"{robust}; the partition planned without noise takes {quiet} ({1 - report.robust_s / report.quiet_s:+.2%})"
    )
    said = "the partition planned without random noise is the best" if same else gained
    table.add_row("", f"kvr-s, {report.objective} over {report.num_samples} held-out samples: {said}")


def _summary(noisy: Distribution) -> str:
    parts = (f"{name} {format_seconds(getattr(noisy, name).value_s)}" for name in ("mean", "p50", "p95", "p99"))
    return f"{', '.join(parts)}; {mean_change(noisy)}"
