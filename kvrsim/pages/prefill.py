"""Pages of prefills: timelines, memory, and the strategies of a plan or the requests of a simulation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvrsim.hardware.gpu import MemoryLimit
from kvrsim.memory import RankMemory
from kvrsim.pages.colours import variable
from kvrsim.pages.html import Cell, Column, Html, join, table, tag
from kvrsim.pages.page import CHARTS, Page, Section
from kvrsim.pages.timeline import SCRIPTS, Shown, gantt_section, timelines_data
from kvrsim.pages.words import (
    bytes_cell,
    facts_of,
    interval,
    interval_bar,
    partition,
    seconds_cell,
    span_of,
    strategy_name,
)
from kvrsim.results.results import Plan, SimResult, StrategyResult
from kvrsim.results.stream import StreamResult
from kvrsim.text import without
from kvrsim.units import format_bytes, format_seconds

_PARTS = ("weights", "KV cache", "KV in flight", "activations, scores, logits", "runtime")


def plan_page(plan: Plan) -> Page:
    """Of a plan that has the timelines of all its strategies."""
    shown = [
        Shown(
            name=one.strategy, title=f"{one.strategy}, TTFT {format_seconds(one.ttft_s)}: {one.title}", timeline=found
        )
        for one in plan.strategies
        if (found := plan.timelines.get(one.strategy)) is not None
    ]
    memory = {one.strategy: one.memory for one in plan.strategies}
    return Page(
        title=f"Prefill of {plan.question.request()} by {plan.model} on {plan.num_gpus} GPUs",
        answer=_answer(plan),
        facts=facts_of(plan.question),
        sections=[
            gantt_section(several=len(shown) > 1),
            Section(title="Strategies", lead=_bounds(plan), body=_strategies(plan)),
            memory_section(plan.memory_limit),
        ],
        notes=[plan.rests_on, *without(plan.warnings, "memory")],  # the table says what does not fit
        data=timelines_data(shown) | {"memory": memory_data(memory, plan.memory_limit)},
        scripts=SCRIPTS,
        strategies=[one.strategy for one in plan.strategies],
    )


def simulation_page(result: SimResult, title: str) -> Page:
    """Of a simulation that has a timeline; title: what its lanes show."""
    assert result.timeline is not None, "the page shows a timeline"
    shown = [Shown(name=result.strategy, title=title, timeline=result.timeline)]
    memory = {result.strategy: [rank.memory for rank in result.per_rank]}
    stream = result.stream
    likely = f"{interval_name(result.interval_coverage)} {interval(result.ttft_low_s, result.ttft_high_s)}"
    answer = f"{result.strategy}: TTFT {format_seconds(result.ttft_s)} ({likely})."
    return Page(
        title=f"Prefill of {result.question.request()} by {result.model} on {result.cluster.num_gpus} GPUs",
        answer=answer if stream is None else _served(result.strategy, stream),
        facts=facts_of(result.question),
        sections=[
            gantt_section(several=False),
            *([] if stream is None else [Section(title="Requests", body=tag("div", id="requests", class_="chart"))]),
            Section(title="Ranks", body=_ranks(result)),
            memory_section(result.memory_limit),
        ],
        notes=result.warnings,
        data=timelines_data(shown)
        | {"memory": memory_data(memory, result.memory_limit), "colour": variable("strategy", result.strategy)}
        | ({} if stream is None else {"requests": _requests(stream)}),
        scripts=SCRIPTS if stream is None else (*CHARTS, "requests.js", *SCRIPTS),
        strategies=[result.strategy],
    )


def interval_name(coverage: float | None) -> str:
    """What an interval may be called. coverage: share of held-out TTFTs that such intervals held; None: not checked."""
    return "80 % interval" if coverage is not None and 0.7 <= coverage <= 0.9 else "prediction interval"


def _answer(plan: Plan) -> str:
    best = plan.best
    if not plan.feasible:
        return _shortfall(plan)
    words = f"{best.strategy} is the fastest: TTFT {format_seconds(best.ttft_s)}"
    words += f" ({interval_name(plan.interval_coverage)} {interval(best.ttft_low_s, best.ttft_high_s)})"
    if plan.yardstick is not None and best.speedup is not None and plan.yardstick != best.strategy:
        words += f", {best.speedup:.2f} times as fast as {plan.yardstick}"
    if plan.ties:
        words += f". The difference to {' and '.join(plan.ties)} is within the error of prediction"
    return f"{words}."


def _shortfall(plan: Plan) -> str:
    """How much is missing, and what would fit."""
    short = plan.shortfall
    if short is None:
        return "No strategy fits in memory."
    needs, limit = format_bytes(short.peak_bytes), format_bytes(plan.memory_limit.nbytes)
    words = f"No strategy fits in memory. The nearest, {short.strategy}, needs {needs} of {limit} on a GPU."
    if short.would_fit:
        fits = "; ".join(f"{one.strategy} with {one.change}" for one in short.would_fit)
        words += f" What would fit: {fits}."
    return words


def _bounds(plan: Plan) -> str:
    bounds = plan.bounds
    if bounds.lower_bound_s is None:
        return ""
    gap = "" if bounds.gap is None else f"; KVR-S is at most {math.ceil(1e4 * bounds.gap - 1e-9) / 100:.2f} % above"
    return f"No partition of KV-Runahead over these GPUs is faster than {format_seconds(bounds.lower_bound_s)}{gap}."


def _strategies(plan: Plan) -> Html:
    """The table, best first as the plan has it."""
    span = span_of([(one.ttft_low_s, one.ttft_high_s) for one in plan.strategies])
    over = plan.yardstick
    columns = [
        Column(title="strategy"),
        Column(title="TTFT", number=True, hint="time to first token"),
        Column(title=interval_name(plan.interval_coverage), hint="of the TTFT; sorted by its upper end"),
        *([] if over is None else [Column(title=f"over {over}", number=True, hint=f"TTFT of {over} over its", rank=2)]),
        Column(title="exposed comm.", number=True, hint="TTFT less that over links that cost nothing", rank=2),
        Column(title="peak memory", number=True, hint="of the rank that needs most"),
        Column(title="fits", hint=plan.memory_limit.describe()),
        Column(title="tokens a rank or piece", rank=2),
    ]
    rows = [_row(plan, one, span) for one in plan.strategies]
    return table(
        columns,
        rows,
        caption="Strategies with their TTFT and memory",
        ident="strategies",
        row_names=[one.strategy for one in plan.strategies],
    )


def _row(plan: Plan, one: StrategyResult, span: tuple[float, float]) -> list[str | Cell]:
    bar = interval_bar(one.ttft_low_s, one.ttft_s, one.ttft_high_s, span, variable("strategy", one.strategy))
    mark = " fastest" if one is plan.best and plan.feasible else " tied" if one.strategy in plan.ties else ""
    if one.approximate is not None:
        mark += " approximate"
    named = join([strategy_name(one.strategy), tag("em", mark, class_="mark", title=one.approximate)])
    return [
        Cell(shown=tag("span", named, title=one.title, class_="named"), value=one.strategy),
        seconds_cell(one.ttft_s),
        Cell(shown=tag("span", bar, interval(one.ttft_low_s, one.ttft_high_s), class_="range"), value=one.ttft_high_s),
        *([] if one.speedup is None else [Cell(shown=f"{one.speedup:.2f}×", value=one.speedup)]),
        seconds_cell(one.exposed_comm_s),
        bytes_cell(max(rank.total for rank in one.memory)),
        "yes" if one.fits else tag("span", "NO", class_="bad"),
        partition(one.partition),
    ]


def _ranks(result: SimResult) -> Html:
    """What each rank computes, waits for, sends and holds."""
    columns = (
        Column(title="rank" if result.timeline is None or result.timeline.gpus_per_rank == 1 else "GPU", number=True),
        Column(title="tokens", number=True),
        Column(title="computes", number=True),
        Column(title="waits", number=True),
        Column(title="sends", number=True, rank=2),
        Column(title="peak memory", number=True),
    )
    rows: list[list[str | Cell]] = [
        [
            str(rank.rank),
            str(rank.chunk_len),
            seconds_cell(rank.compute_s),
            seconds_cell(rank.wait_s),
            bytes_cell(rank.sent_bytes),
            bytes_cell(rank.memory.total),
        ]
        for rank in result.per_rank
    ]
    return table(columns, rows, caption="Ranks with their times and memory", ident="ranks")


def memory_section(limit: MemoryLimit) -> Section:
    """Memory of the strategies whose timelines are shown."""
    lead = f"Peak of each GPU, by what it is for. The dashed line is the {limit.describe()}."
    return Section(title="Memory", lead=lead, body=tag("div", id="memory"))


def memory_data(memory: Mapping[str, Sequence[RankMemory]], limit: MemoryLimit) -> dict[str, Any]:
    """Of each strategy, ranks that need the same together: first rank, last rank and the bytes of each part."""
    return {
        "limit": limit.nbytes,
        "limit_words": format_bytes(limit.nbytes),
        "parts": list(_PARTS),
        "of": {name: list(_grouped(ranks)) for name, ranks in memory.items()},
    }


def _grouped(ranks: Sequence[RankMemory]) -> Iterator[list[Any]]:
    first, held = 0, [_parts(rank) for rank in ranks]
    for rank in range(1, len(held) + 1):
        if rank == len(held) or held[rank] != held[first]:
            yield [first, rank - 1, held[first]]
            first = rank


def _parts(held: RankMemory) -> list[int]:
    """In the order of _PARTS; of what is not alive together, the largest."""
    moment = max(held.scores, held.activations, held.logits)
    return [held.weights, held.kv_cache, held.gathered, moment, held.runtime]


def _served(strategy: str, stream: StreamResult) -> str:
    p50_s, p99_s = (float(value) for value in np.quantile(stream.ttft_s, (0.5, 0.99)))
    count = f"{len(stream.ttft_s)} requests, {stream.arrivals}"
    return (
        f"{strategy} serves {count}: {stream.throughput_per_s:.3g} requests a second,"
        f" TTFT {format_seconds(p50_s)} (median), {format_seconds(p99_s)} (99th percentile), each from its arrival."
    )


def _requests(stream: StreamResult) -> dict[str, Any]:
    """Of each request, in the order of arrival."""
    return {
        "arrival_s": list(stream.arrivals_s),
        "ttft_s": list(stream.ttft_s),
        "queue_s": list(stream.queue_s),
        "context_len": list(stream.context_lens),
    }
