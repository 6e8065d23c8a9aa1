"""Timelines as the data of a page: columns of whole numbers, lane by lane.

A lane is a rank's compute stream or its way out. Its spans stand in the order of their beginning. Times are in ticks of
at least a nanosecond: each span has the ticks from the end of the one before to its beginning (`gap`; below 0 where
messages move beside each other) and the ticks that it lasts. What spans have in common (operation, receiver, bytes) is
in a table of kinds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrsim.hardware import MemoryLimit
from kvrsim.memory import RankMemory
from kvrsim.results.results import Plan, SimResult, StrategyResult
from kvrsim.results.timeline import Span, Timeline
from kvrsim.text import without
from kvrsim.units import format_bytes, format_seconds
from kvrsim.views.page import (
    Cell,
    Column,
    Html,
    Page,
    Section,
    bytes_cell,
    facts_of,
    interval,
    interval_bar,
    join,
    partition,
    seconds_cell,
    span_of,
    strategy_name,
    table,
    tag,
)
from kvrsim.views.style import OPERATIONS, operation_of, variable, variable_of

SCRIPTS = ("spans.js", "gantt-view.js", "gantt.js", "memory.js", "timeline.js")
_KEYS = (
    "[wheel] [+] [−] zoom; drag or [Page Up] [Page Down] move; [Shift] and drag select; [0] shows all;"
    " [←] [→] [↑] [↓] go from operation to operation."
)
_FINEST_S = 1e-9
_MOST_TICKS = 2**32  # of a timeline, so that a long one is not written with needless digits


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A timeline that a page shows."""

    name: str  # by which a reader chooses it
    title: str  # above its lanes
    timeline: Timeline
    basis: str | None = None  # how all its seconds are known; None: as the timeline has it
    memory: str | None = None  # name under which a page has its memory; None: its own


def gantt_section(*, several: bool) -> Section:
    """The chart, its keys, and a table with the same times; several: a reader chooses two timelines."""
    chart = tag("div", id="gantt", class_="chart")
    times = tag("details", tag("summary", "The same times as a table"), tag("div", id="times"))
    title = "Timelines" if several else "Timeline"
    return Section(
        title=title,
        body=join([chart, tag("p", *_with_keys(_KEYS), class_="hint only-screen"), times]),
        ident="timelines",
    )


def timelines_data(shown: Sequence[Shown]) -> dict[str, Any]:
    """What SCRIPTS draw: the timelines, of which a reader sees two, and their legend."""
    return {"timelines": [to_data(one) for one in shown], "legend": legend(one.timeline for one in shown)}


def to_data(shown: Shown) -> dict[str, Any]:
    """Plain JSON values, as assets/spans.js reads them."""
    timeline = shown.timeline
    tick_s = max(_FINEST_S, timeline.end_s / _MOST_TICKS)
    kinds: dict[tuple[Any, ...], int] = {}
    lanes: dict[tuple[int, bool], list[tuple[Span, str]]] = {}
    bases = timeline.bases if shown.basis is None and timeline.bases else (shown.basis or "",) * len(timeline.spans)
    for span, basis in zip(timeline.spans, bases, strict=True):
        lanes.setdefault((span.rank, span.kind == "transfer"), []).append((span, basis))
    return {
        "name": shown.name,
        "title": shown.title,
        "memory": shown.memory or shown.name,
        "ranks": timeline.num_ranks,
        "rank_names": [timeline.rank_name(rank) for rank in range(timeline.num_ranks)],
        "end_s": timeline.end_s,
        "tick_s": tick_s,
        "first_tokens_s": _first_tokens_s(timeline),
        "lanes": [
            {"rank": rank, "link": link} | _columns(lanes[rank, link], tick_s, kinds) for rank, link in sorted(lanes)
        ],
        "kinds": [dict(zip(("colour", "name", "peer", "bytes", "basis"), kind, strict=True)) for kind in kinds],
    }


def legend(timelines: Iterable[Timeline]) -> list[tuple[str, str]]:
    """Label and CSS variable of every colour in the timelines."""
    found = {(span.kind, span.op) for timeline in timelines for span in timeline.spans}
    shown = {variable_of(kind, op): operation_of(kind, op).label for kind, op in found}
    order = [variable("op", name) for name in OPERATIONS]
    return [(shown[name], name) for name in order if name in shown]


def _with_keys(words: str) -> Iterator[str]:
    """Text in which names of keys stand in brackets."""
    for number, part in enumerate(re.split(r"[][]", words)):
        yield tag("kbd", part) if number % 2 else part


def _columns(
    spans: Sequence[tuple[Span, str]], tick_s: float, kinds: dict[tuple[Any, ...], int]
) -> dict[str, list[int]]:
    """Of one lane."""
    found: dict[str, list[int]] = {"kind": [], "layer": [], "gap": [], "ticks": []}
    clock = 0
    for span, basis in sorted(spans, key=lambda pair: pair[0].start_s):
        kind = (variable_of(span.kind, span.op), span.name, span.peer, span.nbytes, basis)
        start, ticks = round(span.start_s / tick_s), max(1, round(span.duration_s / tick_s))
        found["kind"].append(kinds.setdefault(kind, len(kinds)))
        found["layer"].append(-1 if span.layer is None else span.layer)
        found["gap"].append(start - clock)
        found["ticks"].append(ticks)
        clock = start + ticks
    return found


def _first_tokens_s(timeline: Timeline) -> list[float]:
    """Of each request; of one alone, when the last rank is done."""
    last = timeline.num_ranks - 1
    ends = (span.end_s for span in timeline.spans if span.rank == last and span.kind != "transfer")
    return [max(ends, default=timeline.end_s)]


# -- Pages of prefills: timelines, memory, and the strategies of a plan or the requests of a simulation.

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
    likely = f"{interval_name(result.interval_coverage)} {interval(result.ttft_low_s, result.ttft_high_s)}"
    answer = f"{result.strategy}: TTFT {format_seconds(result.ttft_s)} ({likely})."
    return Page(
        title=f"Prefill of {result.question.request()} by {result.model} on {result.cluster.num_gpus} GPUs",
        answer=answer,
        facts=facts_of(result.question),
        sections=[
            gantt_section(several=False),
            Section(title="Ranks", body=_ranks(result)),
            memory_section(result.memory_limit),
        ],
        notes=result.warnings,
        data=timelines_data(shown)
        | {"memory": memory_data(memory, result.memory_limit), "colour": variable("strategy", result.strategy)},
        scripts=SCRIPTS,
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
