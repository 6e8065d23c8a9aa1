"""A plan and a simulation for people; imported only where no JSON is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvrsim.cli.noise_options import add_planned, add_simulated
from kvrsim.cli.render.breakdown import breakdown_table
from kvrsim.cli.render.memory import limit_text, over_memory
from kvrsim.cli.render.tables import Shrinkable, columns, facts, show
from kvrsim.units import format_bytes, format_seconds, format_tokens

if TYPE_CHECKING:
    from kvrsim.memory import RankMemory
    from kvrsim.results import Plan, SimResult, StrategyResult
    from kvrsim.scenario import Scenario

# Columns that a narrow terminal does without, the least important first.
_SPARED = ("longest\nwait", "exposed\ncomm.", "low–high\n", "partition\n(tokens)", "peak of")
_SPARED_OF_RANKS = ("sent", "wait", "compute", "tokens")
_MOST_EXPLAINED = 6  # strategies, up to which each one's memory is taken apart where it is too much
_ROUNDING_S = 1e-12  # less than this is what rounding leaves of nothing


def show_plan(plan: Plan) -> None:
    """Header, one row a strategy, and what the figures mean."""
    table, best, search, limit = facts(), plan.best, plan.search, plan.memory_limit
    for number, line in enumerate(_best(plan)):
        table.add_row("" if number else "best:", line)
    for label, line in _kvr(plan):
        table.add_row(label, line)
    if search.evaluations:
        partitions = f"{search.evaluations} partition{'s' * (search.evaluations != 1)}"
        table.add_row("search:", f"{search.method}, {partitions} simulated in {format_seconds(search.seconds)}")
    if plan.not_compared:
        table.add_row("others:", f"not compared: {_listed(plan.not_compared)} (--strategies all)")
    add_planned(table, plan)
    table.add_row("memory:", limit_text(limit))
    for result in plan.strategies if len(plan.strategies) <= _MOST_EXPLAINED or not best.fits else ():
        _add_misfits(table, result.strategy, result.memory, limit.nbytes)
    table.add_row("rests on:", plan.rests_on)
    told = tuple(f"{result.strategy} does not fit" for result in plan.strategies)  # rank by rank, above
    _add_notes(table, [note for note in plan.warnings if not note.startswith(told)])
    show(*_header(plan), "", _strategies(plan, limit.nbytes), "", table)


def show_simulation(result: SimResult, scenario: Scenario) -> None:
    """Header, one row a rank, and TTFT."""
    limit = scenario.memory_limit.nbytes
    table = facts()
    table.add_row("TTFT:", _ttft(result))
    table.add_row("executor:", result.executor)
    add_simulated(table, result)
    table.add_row("memory:", limit_text(scenario.memory_limit))
    _add_misfits(table, result.strategy, [rank.memory for rank in result.per_rank], limit)
    _add_notes(table, result.warnings)
    parts: list[RenderableType | Shrinkable] = [*_header(result), "", _ranks(result, limit), ""]
    if result.breakdown is not None:
        parts += [breakdown_table(result.breakdown), ""]
    show(*parts, table)


def question_line(answer: Plan | SimResult) -> str:
    """The question in one line, for a chart."""
    question = answer.question
    return " · ".join((question.model, question.short(), answer.cluster.describe(), *question.kernels()))


def subtitle(model: str, context_len: int, setting: Iterable[str]) -> str:
    """What was measured, in one line, for a chart."""
    return " · ".join((model, f"{format_tokens(context_len)} tokens", *setting))


def format_interval(low_s: float, high_s: float) -> str:
    """Both ends, in the unit of the upper: "612–771 ms", "0.819–1.05 s"."""
    low, high = format_seconds(low_s), format_seconds(high_s)
    number, unit = low.split(" ")
    if not high.endswith(f" {unit}"):
        number = f"{low_s / high_s * float(high.split(' ')[0]):.3g}"
    return f"{number}–{high}"


def format_partition(chunks: Sequence[int], room: int = 14) -> str:
    """All chunks where there is room, "8 × 2048" where they are equal, else the first and the last."""
    if len(chunks) > 1 and len(set(chunks)) == 1:
        return f"{len(chunks)} × {chunks[0]}"
    full = ", ".join(map(str, chunks))
    return full if len(full) <= room else f"{chunks[0]} … {chunks[-1]}"


def round_up_percent(share: float) -> str:
    """A share in percent with two decimals, never less than it is: it is part of a proof."""
    return f"{math.ceil(max(0.0, share) * 1e4 - 1e-9) / 100:.2f}"


def _header(answer: Plan | SimResult) -> tuple[Text, Text]:
    question = answer.question
    title = Text(f"Prefill of {question.request()} by {question.model}", style="bold")
    return title, Text(" · ".join((answer.cluster.describe(), *question.kernels())), style="dim")


def _strategies(plan: Plan, limit: int) -> Shrinkable:
    """One row a strategy, the best in bold."""
    has_interval = any(result.ttft_low_s < result.ttft_high_s for result in plan.strategies)
    speedup = [] if plan.yardstick is None else [f"vs {_yardstick(plan.yardstick)}\n"]
    table = columns("strategy\n", "partition\n(tokens)")
    columns("TTFT\n", *["low–high\n"] * has_interval, *speedup, numbers=True, into=table)
    columns("exposed\ncomm.", "longest\nwait", f"peak of\n{format_bytes(limit)}", numbers=True, into=table)
    columns("fits\n", into=table)
    for result in plan.strategies:
        row = _strategy_row(result, has_interval=has_interval)
        table.add_row(*row, _fits(result.fits), style="bold" if result is plan.best else None)
    return Shrinkable(table, spared=_SPARED)


def _strategy_row(result: StrategyResult, *, has_interval: bool) -> list[str]:
    row = [result.strategy, format_partition(result.partition), format_seconds(result.ttft_s)]
    if has_interval:
        row.append(format_interval(result.ttft_low_s, result.ttft_high_s))
    if result.speedup is not None:
        row.append(f"{result.speedup:.2f}×")
    peak_bytes = max(rank.total for rank in result.memory)
    return [*row, _seconds(result.exposed_comm_s), _seconds(max(result.wait_s)), format_bytes(peak_bytes)]


def _ranks(result: SimResult, limit: int) -> Shrinkable:
    """One row a rank."""
    peak = f"peak of {format_bytes(limit)}"
    table = columns("rank", "tokens", "compute", "wait", "sent", peak, numbers=True)
    columns("fits", into=table)
    for rank in result.per_rank:
        times = (_seconds(rank.compute_s), _seconds(rank.wait_s))
        sizes = (format_bytes(rank.sent_bytes), format_bytes(rank.memory.total))
        table.add_row(str(rank.rank), str(rank.chunk_len), *times, *sizes, _fits(rank.memory.total <= limit))
    return Shrinkable(table, spared=_SPARED_OF_RANKS)


def _fits(fits: bool) -> Text:
    return Text("yes") if fits else Text("NO", style="red")


def _seconds(seconds: float) -> str:
    return format_seconds(seconds if seconds > _ROUNDING_S else 0.0)


def _ttft(result: SimResult) -> str:
    ttft = f"{result.strategy}, {format_seconds(result.ttft_s)}"
    if result.ttft_low_s == result.ttft_high_s:
        return ttft
    return f"{ttft} ({format_interval(result.ttft_low_s, result.ttft_high_s)})"


def _yardstick(strategy: str) -> str:
    return "1 GPU" if strategy == "single" else strategy.upper()


def _best(plan: Plan) -> Iterator[str]:
    """The winner, what it cannot be told from, and where nothing fits, what may."""
    best = plan.best
    text = f"{best.strategy} ({best.title}), TTFT {format_seconds(best.ttft_s)}"
    if plan.yardstick is not None and best.speedup is not None and round(best.speedup, 2) != 1:
        text += f", {best.speedup:.2f}× as fast as {_yardstick(plan.yardstick)}"
    yield text if best.fits else f"{text}; nothing that was compared fits in memory"
    if not best.fits and plan.not_compared:
        yield f"{_listed(plan.not_compared)} may fit: --strategies all"
    if best.approximate is not None:
        yield f"approximate: {best.approximate}"
    if plan.ties:
        yield f"as fast, within what a prediction can tell (2 %): {', '.join(plan.ties)}"
    if len(set(best.partition)) > 1:
        yield f"partition {', '.join(map(str, best.partition))}"
    bound = plan.bounds.best
    if bound is not None and bound.strategy != "kvr-s":
        lower = format_seconds(bound.lower_bound_s)
        yield f"at most {round_up_percent(bound.gap)} % above the best of its partitions (proven lower bound {lower})"


def _kvr(plan: Plan) -> Iterator[tuple[str, str]]:
    """What KV-Runahead's chain over single GPUs can reach: its own bound, not that of other strategies."""
    bounds, num_gpus = plan.bounds, plan.num_gpus
    lower = f"proven lower bound {format_seconds(bounds.lower_bound_s)}"
    label = "kvr-s:" if bounds.gap is not None else "bounds:"
    chunks = next((result.partition for result in plan.strategies if result.strategy == "kvr-s"), ())
    if plan.best.strategy != "kvr-s" and len(set(chunks)) > 1:
        yield label, f"partition {', '.join(map(str, chunks))}"
        label = ""
    if bounds.gap is not None:
        gap = round_up_percent(bounds.gap)
        yield label, f"at most {gap} % above the best partition of KV-Runahead over single GPUs ({lower})"
    else:
        yield label, f"{lower} of KV-Runahead over single GPUs"
    no_comm = f"TTFT({num_gpus}) without communication {format_seconds(bounds.ttft_no_comm_s)}"
    yield "", f"{no_comm}; TTFT*({num_gpus}) by the paper's formula {format_seconds(bounds.ttft_star_s)}"


def _listed(names: Sequence[str]) -> str:
    """Names, hybrids by their kind: "kvr-direct, pp and hybrids such as tp2+kvr-s"."""
    plain = [name for name in names if "+" not in name]
    hybrids = [name for name in names if "+" in name]
    if not hybrids:
        return ", ".join(plain)
    return f"{', '.join(plain)} and {len(hybrids)} hybrids such as {hybrids[0]}"


def _add_misfits(table: Table, strategy: str, memory: Sequence[RankMemory], limit: int) -> None:
    for line in over_memory(memory, limit):
        table.add_row("", f"{strategy}, {line}")


def _add_notes(table: Table, notes: Iterable[str]) -> None:
    for note in notes:
        table.add_row(Text("note:", style="yellow"), note)
