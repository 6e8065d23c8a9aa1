"""The first screen of a plan as plain values: its sentences and its table. Terminal, notebooks and pages share them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvrsim.choices import DEPLOY_ENGINES
from kvrsim.strategies import KVR_S, usual_names
from kvrsim.strategies.kv_runahead import KVR_P
from kvrsim.units import format_bytes, format_seconds
from kvrsim.views.table import (
    CLAIMED_COVERAGE,
    TIED,
    Cell,
    Column,
    Table,
    baseline_title,
    bytes_cell,
    fits_text,
    format_interval,
    format_partition,
    interval_title,
    pieces_text,
    seconds_cell,
)

if TYPE_CHECKING:
    from kvrsim.results.results import Plan, Promise, PromptShare, StrategyResult

ROUGH = "*"  # mark of a strategy whose partition was not searched
FASTEST_ROWS = 5  # largest number of the fastest strategies on the first screen
_FASTER_ROWS = 3  # largest number of strategies outside the paper on the first screen of the paper's question
_PAPER_PROFILE = "a100-eager"  # profile of the KV-Runahead paper's machine
_SEARCHES = {  # what a search did, by its method
    "auto": "pattern search from balanced chunks",
    "grid": "the paper's hierarchical grid search",
}


# The table


class RowGroup(NamedTuple):
    """Rows of the table of strategies that have a heading together."""

    heading: str  # empty: no heading
    rows: list[StrategyResult]


def row_groups(plan: Plan) -> list[RowGroup]:
    """The rows of the first screen, all of which fit.

    The paper's question: the paper's strategies, what is faster, and the fastest that an engine launches; all, if there
    are few.
    Every other question: the fastest, the baseline, kvr-s, and what was measured. With an engine, the fastest are
    those that it launches and the fastest of all.
    """
    fitting = [result for result in plan.strategies if result.fits]
    if _answers_the_paper(plan):
        return _groups_of_paper(plan, fitting)
    fastest = fitting
    if plan.engine is not None and plan.deployable is not None:
        fastest = [result for result in fitting if plan.engine in result.engines or result is plan.fastest]
    names = {result.strategy for result in fastest[:FASTEST_ROWS]}
    if plan.first.strategy not in names:
        names = {result.strategy for result in fastest[: FASTEST_ROWS - 1]} | {plan.first.strategy}
    names |= {KVR_S.name, plan.baseline or KVR_S.name, *plan.measured_s}
    return [RowGroup("", [result for result in fitting if result.strategy in names])]


def _groups_of_paper(plan: Plan, fitting: Sequence[StrategyResult]) -> list[RowGroup]:
    in_paper = {*usual_names("paper"), KVR_P.name}
    paper = [result for result in fitting if result.strategy in in_paper]
    others = [result for result in fitting if result.strategy not in in_paper]
    faster = [result for result in others if result.ttft_s < paper[0].ttft_s]
    shown = faster[:_FASTER_ROWS]
    if plan.first in faster[_FASTER_ROWS:]:
        shown[-1] = plan.first
    shown += [result for result in faster if result.strategy in plan.measured_s and result not in shown]
    groups = [RowGroup("", paper)]
    if shown:
        groups.append(RowGroup("faster, not in the paper:", shown))
    launched = plan.deployable
    if launched is not None and launched not in shown:
        groups.append(RowGroup("the best that today's engines launch:", [launched]))
    listed = {result.strategy for group in groups for result in group.rows}
    rest = [result for result in others if result.strategy not in listed]
    if rest and len(fitting) <= FASTEST_ROWS:
        groups.append(RowGroup("not faster, not in the paper:", rest))
    return groups


def first_rows(plan: Plan) -> list[StrategyResult]:
    """The rows of the first screen, in its order."""
    return [result for group in row_groups(plan) for result in group.rows]


def strategies_table(plan: Plan, *, short: bool = False) -> Table:
    """Table of strategies, the best in bold.

    short: the rows of the first screen, each explained; else all strategies, in the plan's order. All TTFTs have the
    unit of the first screen's rows.
    """
    groups = row_groups(plan) if short else [RowGroup("", list(plan.strategies))]
    rows = [result for group in groups for result in group.rows]
    longest_s = max((result.ttft_s for result in first_rows(plan)), default=plan.first.ttft_s)
    unit = format_seconds(longest_s).split(" ")[1]
    shown = [entry for entry in _columns(plan, rows, unit, short=short) if entry.is_shown]
    columns = [entry.column for entry in shown]
    if short:
        columns = [column._replace(title=column.label) for column in columns]
    table = Table(columns=columns)
    for group in groups:
        if group.heading:
            table.headings[len(table.rows)] = group.heading
        for result in group.rows:
            style = "bold" if result is plan.first else None
            table.add_row(*(entry.cell_of(result) for entry in shown), style=style)
    return table


class PlanColumn(NamedTuple):
    """A column of the table of strategies, with its cell for each strategy."""

    column: Column
    cell_of: Callable[[StrategyResult], str | Cell]
    is_shown: bool = True


def _columns(plan: Plan, rows: Sequence[StrategyResult], unit: str, *, short: bool) -> list[PlanColumn]:
    """The columns of the table of strategies, in order; rows: the strategies that it shows."""

    def seconds(value_s: float | None) -> Cell:
        return Cell(shown="" if value_s is None else _in_unit(unit, value_s), value=value_s)

    def interval(result: StrategyResult) -> Cell:
        return Cell(shown=_in_unit(unit, result.ttft_low_s, result.ttft_high_s), value=result.ttft_high_s)

    def speedup(result: StrategyResult) -> Cell:
        return Cell(shown="" if result.speedup is None else f"{result.speedup:.2f}×", value=result.speedup)

    chunks_title = "partition\n(tokens)"
    memory_title = "peak\nmemory"
    if short:
        chunks_title = "chunks\n(tokens)"
        memory_title = "memory"
    over = "" if plan.baseline is None else baseline_title(plan.baseline)
    return [
        PlanColumn(Column(title="strategy\n"), lambda result: _marked(plan, result)),
        PlanColumn(
            Column(title=chunks_title, rank=4, hint="tokens of each rank or piece"),
            lambda result: format_partition(result.partition),
        ),
        PlanColumn(
            Column(title="TTFT\n", number=True, hint="time to first token"), lambda result: seconds(result.ttft_s)
        ),
        PlanColumn(
            Column(title=interval_title(plan.interval_coverage), number=True, rank=2, hint="of the TTFT"),
            interval,
            is_shown=any(result.ttft_low_s < result.ttft_high_s for result in rows),
        ),
        PlanColumn(
            Column(title="paper\n", number=True, rank=5, hint="TTFT that the KV-Runahead paper measured"),
            lambda result: seconds(result.paper_ttft_s),
            is_shown=any(result.paper_ttft_s is not None for result in rows),
        ),
        PlanColumn(
            Column(title="measured\n", number=True, hint="median TTFT of the confirmation"),
            lambda result: seconds(plan.measured_s.get(result.strategy)),
            is_shown=bool(plan.measured_s),
        ),
        PlanColumn(
            Column(title=f"vs {over}\n", number=True, hint=f"TTFT of {plan.baseline} divided by this TTFT"),
            speedup,
            is_shown=plan.baseline is not None,
        ),
        PlanColumn(
            Column(title="exposed\ncomm.", number=True, rank=5, hint="TTFT minus TTFT with free communication"),
            lambda result: seconds_cell(result.exposed_comm_s),
            is_shown=not short,
        ),
        PlanColumn(
            Column(title="longest\nwait", number=True, rank=6, hint="of the rank that waits longest"),
            lambda result: seconds_cell(max(result.wait_s)),
            is_shown=not short,
        ),
        PlanColumn(
            Column(title=memory_title, number=True, rank=7, hint="peak of the rank that needs the most"),
            lambda result: bytes_cell(max(rank.total for rank in result.memory)),
        ),
        PlanColumn(
            Column(title="fits\n", hint=plan.memory_limit.describe()),
            lambda result: fits_text(result.fits),
            is_shown=not short,
        ),
        PlanColumn(
            Column(title="engines\n", rank=4, hint="engines that launch it"),
            _engines_text,
            is_shown=short and not _answers_the_paper(plan),
        ),
        PlanColumn(Column(title="what it is\n", rank=3, wraps=True), lambda result: result.title, is_shown=short),
    ]


def _engines_text(result: StrategyResult) -> str:
    """The engines that launch a strategy."""
    if len(result.engines) == len(DEPLOY_ENGINES):
        return f"all {len(DEPLOY_ENGINES)}"
    return ", ".join(result.engines) or "none"


def tie_text(plan: Plan, rows: Sequence[StrategyResult]) -> str | None:
    """What the mark of ties means, if one of these rows has it; and why a row that is nearer to the best has none."""
    best = plan.first
    tied = [result for result in rows if result.is_tied]
    if not plan.feasible or not tied:
        return None
    meaning = f"{TIED} ties with {best.strategy}: the error of the prediction can explain the difference."
    largest_s = max(abs(result.ttft_s - best.ttft_s) for result in tied)
    others = [result for result in rows if result is not best and not result.is_tied]
    nearer = [result.strategy for result in others if abs(result.ttft_s - best.ttft_s) < largest_s]
    if not nearer:
        return meaning
    names = " and ".join(nearer)
    certain = f"The smaller difference to {names} is certain, because it shares more of that error"
    if len(nearer) > 1:
        certain = f"The smaller differences to {names} are certain, because these share more of that error"
    return f"{meaning} {certain} with {best.strategy}."


def _marked(plan: Plan, result: StrategyResult) -> str:
    """The strategy's name with its marks."""
    name = result.strategy
    if plan.feasible and result.is_tied:
        name += f" {TIED}"
    if not result.searched:
        name += f" {ROUGH}"
    return name


def _in_unit(unit: str, *ends_s: float) -> str:
    """Seconds, or both ends of an interval, with three significant digits in a unit."""
    values = [seconds / {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit] for seconds in ends_s]
    digits = [f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0" for value in values]
    return f"{'–'.join(digits)} {unit}"


# The sentences


def sentences(plan: Plan) -> Iterator[str]:
    """The answer in sentences.

    The paper's question: KV-Runahead with its chunks, TTFT and bound, then what is faster. Every other question: what
    to run, then KV-Runahead. Both: the TTFT that the plan promises, what limits it, what helps, and today's engines.
    """
    promise = plan.promise
    if promise is None:
        yield f"{plan.misfit[0].upper()}{plan.misfit[1:]}."
        yield from _would_fit(plan)
        return
    answers_the_paper = _answers_the_paper(plan)
    if answers_the_paper:
        yield from _runahead(plan)
    else:
        yield f"{_run_text(plan)}."
        yield from _beyond_the_engine(plan)
    promised = promise_sentences(plan, promise)
    if answers_the_paper and plan.first.strategy != KVR_S.name:
        whose = "" if plan.first.strategy in usual_names("paper") else ", which the paper does not have"
        yield f"Faster: {named(plan.first)}{whose}. {next(promised)}"
    yield from promised
    yield from _measured(plan)
    if plan.limits:
        top = plan.limits[0]
        verb = "limit" if top.operation.endswith("s") else "limits"
        helps = "; ".join(f"{advice.change}: {format_seconds(advice.ttft_s)}" for advice in plan.advice)
        faster = f" Faster, simulated: {helps}." if helps else ""
        operation = f"{top.operation[0].upper()}{top.operation[1:]}"
        yield f"{operation} {verb} the TTFT ({top.share * 100:.0f} % of the critical path).{faster}"
    if plan.as_fast is not None:
        fewer = f"{plan.as_fast.change}: {format_seconds(plan.as_fast.ttft_s)}"
        yield f"Half of the GPUs are as fast within 2 %, simulated: {fewer}."
    if plan.advice_not_tried:
        yield f"Not simulated, because it takes longer than --search-budget: {'; '.join(plan.advice_not_tried)}."
    if not answers_the_paper:
        yield from _runahead(plan)
    yield from _launchers(plan)


def _measured(plan: Plan) -> Iterator[str]:
    """Which of the plan's strategies was the fastest in the confirmation."""
    if not plan.measured_s:
        return
    fastest = min(plan.measured_s, key=plan.measured_s.__getitem__)
    ttft = format_seconds(plan.measured_s[fastest])
    if fastest == plan.first.strategy:
        yield f"Measured: it was the fastest of {len(plan.measured_s)}, {ttft}."
    else:
        yield f"Measured: {fastest} was the fastest of {len(plan.measured_s)}, {ttft}."


def _answers_the_paper(plan: Plan) -> bool:
    """Whether the screen leads with KV-Runahead: the question is about the paper's machine, and kvr-s fits."""
    kvr = _kvr_s(plan)
    return kvr is not None and plan.engine is None and plan.question.profile == _PAPER_PROFILE


def _kvr_s(plan: Plan) -> StrategyResult | None:
    """KV-Runahead with searched chunks, if it is compared on several GPUs and fits."""
    for result in plan.strategies:
        if result.strategy == KVR_S.name and result.fits and len(result.partition) > 1:
            return result
    return None


def _runahead(plan: Plan) -> Iterator[str]:
    """KV-Runahead: its chunks and its TTFT, unless it is what to run anyway; and its bound and its search."""
    kvr = _kvr_s(plan)
    if kvr is None:
        return
    if kvr is not plan.first or _answers_the_paper(plan):
        gpus = f"{kvr.layout.num_gpus} GPUs"
        chunks = pieces_text(kvr.partition, is_pipeline=False)
        ttft = format_seconds(kvr.ttft_s)
        if kvr.ttft_low_s < kvr.ttft_high_s:
            title = " ".join(interval_title(plan.interval_coverage).split())
            ttft += f" ({title} {format_interval(kvr.ttft_low_s, kvr.ttft_high_s)})"
        yield f"KV-Runahead (kvr-s) on {gpus}: {chunks}; first token after {ttft}{_gain(plan, kvr)}."
    lower_s = kvr.lower_bound_s
    parts = list[str]()
    if lower_s is not None:
        parts.append(f"No partition of KV-Runahead is below {format_seconds(lower_s)} in this model (proven).")
    if kvr.method is not None and kvr.searched:
        method = _SEARCHES.get(kvr.method, kvr.method)
        parts.append(f"The search tried {kvr.evaluations} partitions: {method}.")
    if parts:
        yield " ".join(parts)


def _gain(plan: Plan, kvr: StrategyResult) -> str:
    """KV-Runahead's gain over the baseline, and what the paper measured of both."""
    baseline = next((result for result in plan.strategies if result.strategy == plan.baseline), None)
    gain = ""
    measured = kvr.paper_ttft_s
    if baseline is not None and baseline is not kvr and kvr.speedup is not None:
        title = baseline_title(baseline.strategy)
        gain = f", {kvr.speedup:.2f}× as fast as {title} ({format_seconds(baseline.ttft_s)})"
        if measured is not None and baseline.paper_ttft_s is not None:
            both = f"{format_seconds(measured)} and {format_seconds(baseline.paper_ttft_s)}"
            return f"{gain}. The paper measured {both}"
    if measured is not None:
        gain += f". The paper measured {format_seconds(measured)}"
    return gain


def promise_sentences(plan: Plan, promise: Promise) -> Iterator[str]:
    """Sentences on the TTFT: expected and sure on idle GPUs, of most prompts under noise and in a queue, and a target.

    The first half of each sentence is about the estimate, and "90 % sure" about the error of the prediction.
    """
    best = plan.first
    coverage = plan.interval_coverage
    is_kept = coverage is None or coverage >= CLAIMED_COVERAGE[0]
    sure = f"{promise.confidence * 100:g} % sure" if is_kept else "at the upper end of the interval"
    noise = "" if promise.under_noise is None else ", on average under the noise"
    faster = ""
    if plan.baseline is not None and best.speedup is not None and round(best.speedup, 2) != 1:
        faster = f", {best.speedup:.2f}× as fast as {baseline_title(plan.baseline)}"
    expected = f"Expect {format_seconds(promise.expected_s)} idle{noise}{faster}"
    if coverage is None or is_kept:
        yield f"{expected}; {sure} that it is below {format_seconds(promise.high_s)}."
    else:
        held = f"such intervals held only {coverage * 100:.0f} % of published TTFTs"
        yield f"{expected}; {sure} {format_seconds(promise.high_s)}, but {held}."
    if (noisy := promise.under_noise) is not None:
        yield f"{_share_text(noisy)} under the noise; {_sure_text(noisy, sure)}."
    if (rated := promise.at_rate) is not None:
        rate = f"{rated.rate_per_s:g} a second"
        if rated.expected_s is None:
            yield f"At {rate}, prompts arrive faster than one group prefills them: the queue grows for ever."
        else:
            yield f"{_share_text(rated)} at {rate}; {_sure_text(rated, sure)}."
    if promise.slo_s is not None:
        yield f"{_target_text(promise, sure)}."


def _share_text(share: PromptShare) -> str:
    assert share.expected_s is not None, "the queue grows for ever"
    return f"{share.percentile:g} % of prompts within {format_seconds(share.expected_s)}"


def _sure_text(share: PromptShare, sure: str) -> str:
    if share.high_s is None:
        return f"not {sure}: if the machine is as slow as the interval's upper end, the queue grows for ever"
    return f"{sure}: within {format_seconds(share.high_s)}"


def _target_text(promise: Promise, sure: str) -> str:
    """Whether a target is met: for sure, only as expected, or not; and up to which rates."""
    assert promise.slo_s is not None
    assert promise.most_rate_per_s is not None
    assert promise.expected_most_rate_per_s is not None
    target = f"the target of {format_seconds(promise.slo_s)}"
    if promise.meets:
        verdict = f"This meets {target}, {sure}"
    elif promise.expected_meets:
        verdict = f"This is expected to meet {target}, but not {sure}"
    else:
        verdict = f"This misses {target}"
    if not promise.expected_most_rate_per_s:
        return f"{verdict} at any rate"
    rates = f"expected up to {promise.expected_most_rate_per_s:.3g} prompts a second"
    most = promise.most_rate_per_s
    rates += f", {sure} up to {most:.3g}" if most else f", {sure} at no rate"
    return f"{verdict}; {rates}"


def named(result: StrategyResult) -> str:
    """A strategy's name with its title: "tp2 (tensor parallelism by 2)"."""
    return f"{result.strategy} ({result.title})"


def _run_text(plan: Plan) -> str:
    """What to run; if no engine has it, also the fastest that engines launch."""
    best = plan.first
    gpus = f"{best.layout.num_gpus} GPU{'s' * (best.layout.num_gpus != 1)}"
    chunks = f": {pieces_text(best.partition, best.layers is not None)}" if len(best.partition) > 1 else ""
    run = f"Run {named(best)} on {gpus}{chunks}"
    if plan.engine is not None and plan.deployable is None:
        return f"{run}; {plan.engine} launches none of the compared strategies that fit"
    if best.engines:
        return run
    if plan.deployable is None:
        return f"{run}; no engine launches it"
    fastest = f"{named(plan.deployable)}, {format_seconds(plan.deployable.ttft_s)}"
    return f"{run}; no engine launches it, and the fastest that engines launch is {fastest}"


def _beyond_the_engine(plan: Plan) -> Iterator[str]:
    """What would be faster than the best that the plan's engine launches."""
    fastest = plan.passed_over
    if fastest is None:
        return
    others = ", ".join(fastest.engines) or "no engine"
    verb = "have" if len(fastest.engines) > 1 else "has"
    yield f"{plan.engine} lacks the fastest, {named(fastest)}: {format_seconds(fastest.ttft_s)}; {others} {verb} it."


def _launchers(plan: Plan) -> Iterator[str]:
    """The engines that launch the plan, or the fastest strategy that one of them has."""
    launched = plan.deployable
    if launched is None:
        return
    engines = {name: version for name, version in launched.engines.items() if plan.engine in (None, name)}
    versions = ", ".join(f"{name} {version.split()[0]}" for name, version in engines.items())
    which = "" if launched is plan.first else f" with {launched.strategy}, {format_seconds(launched.ttft_s)}"
    yield f"Engines today{which}: {versions} (--emit {'|'.join(engines)} prints the launch)."


def _would_fit(plan: Plan) -> Iterator[str]:
    """One line per change of the question after which a strategy fits."""
    assert plan.shortfall is not None
    for remedy in plan.shortfall.would_fit:
        gpus = f"{remedy.num_gpus} GPU{'s' * (remedy.num_gpus != 1)}"
        needs = f"{format_bytes(remedy.peak_bytes)} per GPU"
        yield f"Would fit: {remedy.strategy} on {gpus}, {remedy.dtype}, {needs}: {remedy.change}"
    if not plan.shortfall.would_fit:
        tried = plan.shortfall.most_gpus_tried
        if tried > plan.num_gpus:
            yield f"No strategy fits on up to {tried} GPUs."
        else:
            yield "More GPUs were not tried."
