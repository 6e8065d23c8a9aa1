"""The plan: every strategy with its best partition, ranked by TTFT, and a lower bound of TTFT."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from kvrsim.arguments import SearchArgs, TargetArgs
from kvrsim.engine import DEVIATES_OF_80_PERCENT
from kvrsim.errors import InputError
from kvrsim.execution import execute
from kvrsim.executors.access import execution_of
from kvrsim.notes import note, without
from kvrsim.program import AllGather, AllToAll, Op, Program, RingPass
from kvrsim.published import measured_in_paper
from kvrsim.results.question import Question
from kvrsim.results.results import (
    NEAR,
    Advice,
    Bounds,
    ChainBound,
    GridCheck,
    Limit,
    NoiseReport,
    NotTried,
    Plan,
    Promise,
    SearchReport,
    StrategyResult,
)
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import BASELINES, KVR_E, KVR_S, STRATEGIES, Strategy, label_of
from kvrsim.units import format_bytes
from planner.advice import Advised, advice_of
from planner.candidates import (
    Candidate,
    ComparedStrategies,
    ForEngine,
    Search,
    is_rough,
    prefix_access_notes,
    search_all,
    strategies_to_compare,
    ttft_of,
)
from planner.deploy_engines import engines_with, launching_engine
from planner.promise import promise_of
from planner.search.bound import lower_bound_s
from planner.search.minimise import Evaluator
from planner.search.search import search
from planner.uncertainty.intervals import (
    coverage_notes_of,
    is_indistinguishable,
    layout_notes,
    measured_coverage,
    provenance,
    width_notes,
)
from planner.uncertainty.sensitivities import ratio_log_sd_of

# Modules for noise, tables and plans that do not fit are imported on use, because each import slows down every start.
if TYPE_CHECKING:
    from kvrsim.noise import Distribution
    from kvrsim.results.results import Shortfall
    from kvrsim.results.timeline import Timeline
    from planner.uncertainty.noise import Disturbance

MOST_SPANS = 200_000  # maximum number of spans of all timelines except the first; a browser handles this number
MOST_OF_A_TIE = 1.5  # a strategy that takes more than this many times as long is no tie, whatever the errors
_SAME = 1e-9  # relative difference of two executors' TTFTs that is rounding
_MOST_GRID_RANKS = (
    8  # most GPUs of the grid as a check: it simulates a million partitions, with a further GPU five times as many
)
_LEAST_GAIN = 0.0005  # smaller gains are printed as 0.0 %


def make_plan(
    scenario: Scenario,
    *,
    strategies: Sequence[str | Strategy] | None = None,
    search: Search | None = None,
    disturbance: Disturbance | None = None,
    timelines: Literal["best", "all"] | None = None,
    warnings: Sequence[str] = (),
    seed: int = 0,
    target: TargetArgs | None = None,
) -> Plan:
    """Compare the strategies, each with its best partition; raises InputError for an unknown one.

    strategies: names, "FILE.py:NAME" or Strategies; "all" means every strategy that the machine and the model allow,
        None means all that could fit. Results are ranked.
    disturbance: noise; strategies are then ranked by their mean TTFT under it.
    timelines: the strategies whose spans are recorded.
    seed: recorded in the question; a disturbance has its own seed.
    target: load and target TTFT of the promise; None: idle GPUs, no target.
    """
    search = _for_engine(search or Search(), scenario)
    even = scenario
    if disturbance is not None:
        scenario = disturbance.with_fixed_part(even)
    compared = strategies_to_compare(scenario, strategies, noisy=disturbance is not None, engine=search.engine)
    ranking = Ranking.of(compared, search, disturbance, even)
    question = _question(scenario, strategies, search, disturbance, seed)
    paper = measured_in_paper(question)
    results = [ranking.result(one, paper.get(one.strategy.name)) for one in ranking.ranked]
    first = next(one for one in results if one.strategy == ranking.best.strategy.name)
    timed, untimed = ranking.timed(timelines)
    notes = compared.notes if first.fits else without(compared.notes, "cannot fit")  # the shortfall says more
    return Plan(
        question=question,
        first=first,
        strategies=tuple(results),
        baseline=ranking.baseline.strategy.name if ranking.baseline is not None else None,
        not_compared=tuple(name for name in compared.not_compared if name not in ranking.names),
        not_tried=ranking.not_tried,
        engine=None if search.engine is None else search.engine.name,
        search=ranking.search_report(),
        provenance=provenance(scenario),
        warnings=(*warnings, *notes, *ranking.notes(search), *untimed),
        interval_coverage=measured_coverage(scenario),
        noise=_noise_report(disturbance),
        source=_Comparison(
            ranking=ranking,
            search=search,
            target=target or TargetArgs(),
            seed=seed,
            is_named=strategies is not None and "all" not in strategies,
            timed=tuple(timed),
            records=timelines is not None,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """The source of a plan."""

    ranking: Ranking
    search: Search
    target: TargetArgs  # load and target of the promise
    seed: int  # of the arrivals of the promise
    is_named: bool  # whether the user named the strategies
    timed: tuple[Candidate, ...]  # candidates whose timelines are all asked for
    records: bool  # whether the timeline of the best is asked for

    @cached_property
    def bounds(self) -> Bounds:
        return self.ranking.bounds()

    @cached_property
    def grid_check(self) -> GridCheck | None:
        return self.ranking.grid_check()

    @cached_property
    def _advised(self) -> Advised:
        return self.ranking.advice(self.search, is_named=self.is_named)

    @property
    def advice(self) -> tuple[Advice, ...]:
        return self._advised.faster

    @property
    def as_fast(self) -> Advice | None:
        return self._advised.as_fast

    @property
    def advice_not_tried(self) -> tuple[str, ...]:
        return self._advised.not_tried

    @property
    def limits(self) -> tuple[Limit, ...]:
        return self.ranking.best.limits

    @cached_property
    def promise(self) -> Promise | None:
        ranking = self.ranking
        if not ranking.best.fits:
            return None
        return promise_of(ranking.best, self.target, ranking.noisy.get(ranking.best.strategy.name), seed=self.seed)

    @cached_property
    def shortfall(self) -> Shortfall | None:
        if self.ranking.best.fits:
            return None
        from planner.shortfall import shortfall_of  # this import is only for plans that do not fit

        return shortfall_of(self.ranking.candidates, self.search.cluster_gpus)

    @property
    def timeline(self) -> Timeline | None:
        if not self.records:
            return None
        return self.ranking.best.timeline

    @cached_property
    def timelines(self) -> dict[str, Timeline]:
        return {candidate.strategy.name: candidate.timeline for candidate in self.timed}


def _for_engine(search: Search, scenario: Scenario) -> Search:
    """The search for the engine that launches the plan: the one that is asked for, or the one of the question.

    Raises InputError if they differ.
    """
    asked = search.engine
    if asked is not None:
        launching_engine(scenario, asked.name, "only_deployable" if asked.only else "emit")
        return search
    name = launching_engine(scenario)
    return search if name is None else replace(search, engine=ForEngine(name))


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The candidates of a plan in the user's order, and results of comparing them."""

    candidates: tuple[Candidate, ...]
    unsearched: tuple[str, ...]  # strategies that could be the best but exceeded the search budget
    not_tried: tuple[NotTried, ...]  # strategies that could fit and were not compared
    engine: ForEngine | None  # engine of the plan's launch
    is_default: bool  # whether the comparison is limited by the search budget, because the user named no strategies
    noisy: Mapping[str, Distribution]  # distribution of TTFT under noise, by strategy; empty: no noise

    @classmethod
    def of(
        cls,
        compared: ComparedStrategies,
        search: Search,
        disturbance: Disturbance | None = None,
        even: Scenario | None = None,
    ) -> Ranking:
        """Search the partition of every strategy; strategies near KVR's chain start from its partition.

        even: the scenario without the slow GPUs and links of the disturbance; None: without a disturbance.
        """
        for execution in compared.executions:  # raise errors before the first search
            if disturbance is not None:
                disturbance.check(execution.strategy)
            if execution.strategy.partition_rule == "table":
                search.candidate(execution)
        comparison = search_all(compared, search)
        candidates = tuple(comparison.by_name.values())
        noisy: Mapping[str, Distribution] = {}
        if disturbance is not None and even is not None:
            noisy = _under_noise(even, candidates, disturbance, search)
        return cls(
            candidates=candidates,
            unsearched=comparison.unsearched,
            not_tried=comparison.not_tried,
            engine=search.engine,
            is_default=compared.limited,
            noisy=noisy,
        )

    @property
    def scenario(self) -> Scenario:
        """The question; the candidates have it in common."""
        return self.candidates[0].scenario

    @property
    def names(self) -> set[str]:
        """Names of the compared strategies."""
        return {one.strategy.name for one in self.candidates}

    @cached_property
    def ranked(self) -> tuple[Candidate, ...]:
        """Candidates that fit first, then in order of TTFT."""
        return tuple(sorted(self.candidates, key=lambda one: (not one.fits, self._ranking_s(one))))

    @cached_property
    def best(self) -> Candidate:
        """The fastest exact candidate that fits, on the plan's engine if possible; else the one with the least memory.

        Of the candidates that tie with the fastest within 2 %, this is one that some engine has, and of these the one
        with the least effort of deployment (Layout.effort).
        """
        ranked = self.ranked
        engine = self.engine
        if engine is not None:
            has = [one for one in ranked if one.fits and engine.has(one.execution)]
            ranked = tuple(has) or ranked
        fastest, *others = ranked
        if not fastest.fits:
            return min(self.candidates, key=lambda one: max(rank.total for rank in one.memory))
        most_s = self._ranking_s(fastest) * NEAR
        near = [one for one in others if self._ranking_s(one) <= most_s and self.is_tied(fastest, one)]
        return min((fastest, *near), key=self._effort)

    def _effort(self, one: Candidate) -> tuple[bool, tuple[int, int, bool]]:
        """Sort key for the effort of deployment: whether no engine has the strategy, then its layout's effort."""
        return not engines_with(one.execution), one.execution.layout.effort

    def _ranking_s(self, one: Candidate) -> float:
        return self.noisy[one.strategy.name].mean.value_s if self.noisy else one.ttft_s

    @cached_property
    def baseline(self) -> Candidate | None:
        """Baseline of speed-ups: the first of BASELINES that fits, else the fastest candidate that fits.

        With a serving engine, only strategies that engines have are considered, if one of them fits.
        """
        feasible = {one.strategy.name: one for one in self.candidates if one.fits}
        if self.scenario.engine is not None:
            launched = {name: one for name, one in feasible.items() if engines_with(one.execution)}
            feasible = launched or feasible
        for name in BASELINES:
            if name in feasible:
                return feasible[name]
        return min(feasible.values(), key=lambda one: one.ttft_s, default=None)

    def is_tied(self, one: Candidate, other: Candidate) -> bool:
        """Whether the difference of two candidates is within the interval of differences."""
        if other.fits != one.fits:
            return False
        faster, slower = sorted((one, other), key=self._ranking_s)
        ratio = self._ranking_s(slower) / self._ranking_s(faster)
        if ratio > MOST_OF_A_TIE:
            return False
        if math.log(ratio) <= DEVIATES_OF_80_PERCENT * ratio_log_sd_of(faster.execution.placed):
            return True  # other sources only widen the interval
        return is_indistinguishable_from(faster, slower, ratio)

    def result(self, one: Candidate, paper_ttft_s: float | None) -> StrategyResult:
        """The plan's results for one strategy. paper_ttft_s: the TTFT that the KV-Runahead paper measured."""
        tsp = next((other for other in self.candidates if other.strategy.name == "tsp"), None)
        return StrategyResult(
            strategy=one.strategy.name,
            title=one.strategy.title,
            partition=one.partition.chunk_lens,
            ttft_s=one.ttft_s,
            memory=one.memory,
            fits=one.fits,
            speedup_over_tsp=None if tsp is None else tsp.ttft_s / one.ttft_s,
            speedup=None if self.baseline is None else self.baseline.ttft_s / one.ttft_s,
            noisy=self.noisy.get(one.strategy.name),
            layers=one.execution.stage_layers,
            prefix_access=one.prefix_access,
            layout=one.execution.layout,
            searched=not is_rough(one),
            engines=engines_with(one.execution),
            method=None if one.search is None else one.search.report.method,
            evaluations=None if one.search is None else one.search.report.evaluations,
            lower_bound_s=None if one.search is None else one.search.lower_bound_s,
            paper_ttft_s=paper_ttft_s,
            source=_RankedCandidate(candidate=one, ranking=self),
        )

    # -- bounds

    @cached_property
    def _kvr(self) -> Candidate | None:
        """The candidate for KVR-S; if the user named other strategies, its analytical plan, which costs one evaluation.

        None: KVR-S does not run here, or is not compared and has no proven bound.
        """
        compared = {one.strategy.name: one for one in self.candidates}
        if KVR_S.name in compared:
            return compared[KVR_S.name]
        if self.is_default:
            return None
        try:
            execution = execution_of(self.scenario, KVR_S)
        except InputError:  # for example, the experts do not divide over the GPUs
            return None
        if not execution.placed.chain_is_proven:
            return None
        return Search(options=SearchArgs(method="analytical")).candidate(execution)

    @property
    def _compares_kvr(self) -> bool:
        return any(one is self._kvr for one in self.candidates)

    def bounds(self) -> Bounds:
        """The bound of KV-Runahead chains over single GPUs, and the bound of the best strategy if that is such a chain.

        There is no proof for ranks that exchange tokens for their experts. All values are None if KVR-S does not run
        here, or if a default comparison leaves it out.
        """
        kvr = self._kvr
        if kvr is None:
            best = _chain_bound(self.best, None)
            return Bounds(ttft_star_s=None, ttft_no_comm_s=None, lower_bound_s=None, gap=None, best=best)
        execution = kvr.execution.by(KVR_S)
        placed = execution.placed
        num_ranks = placed.cluster.num_gpus
        whole = Partition(chunk_lens=(placed.request.new_tokens,))
        single_s = ttft_of(execute(placed.on_gpus(1), STRATEGIES["single"]), whole)
        # Without communication, the balanced plan is optimal except for the wait in the first layer.
        balanced_s = search(execution.on(placed.without_communication), method="analytical").ttft_s
        lower_s = None
        if placed.chain_is_proven:
            found_s = None if kvr.search is None else kvr.search.lower_bound_s
            lower_s = found_s or lower_bound_s(execution, kvr.ttft_s)
        return Bounds(
            ttft_star_s=single_s / 2 * (1 / num_ranks + 1 / num_ranks**2),
            ttft_no_comm_s=min(balanced_s, kvr.ttft_without_communication_s),
            lower_bound_s=lower_s,
            gap=kvr.ttft_s / lower_s - 1 if self._compares_kvr and lower_s is not None else None,
            best=_chain_bound(self.best, lower_s),
        )

    def grid_check(self) -> GridCheck | None:
        """Search KVR-S's partition with the paper's grid, too; None: no pattern search, or the grid is slow."""
        kvr = next((one for one in self.candidates if one.strategy.name == KVR_S.name and one.fits), None)
        if kvr is None or kvr.search is None or kvr.search.report.method != "auto":
            return None
        is_small = 1 < kvr.execution.cluster.num_gpus <= _MOST_GRID_RANKS
        if not is_small or not Evaluator(kvr.execution).is_fast:
            return None
        grid = search(kvr.execution, method="grid")
        return GridCheck(ttft_s=grid.ttft_s, searched_s=kvr.ttft_s, evaluations=grid.report.evaluations)

    def search_report(self) -> SearchReport:
        """The method of KVR-S's search (or of the first search), and the effort of all searches together."""
        searches = {one.strategy.name: one.search for one in self.candidates if one.search is not None}
        over_ranks = [one for one in searches.values() if one.execution.strategy.partition_rule == "search"]
        first = searches.get(KVR_S.name) or (over_ranks[0] if over_ranks else None)
        return SearchReport(
            method="analytical" if first is None else first.report.method,
            evaluations=sum(one.report.evaluations for one in searches.values()),
            seconds=sum(one.report.seconds for one in searches.values()),
            unsearched=self.unsearched,
        )

    def timed(self, which: Literal["best", "all"] | None) -> tuple[list[Candidate], list[str]]:
        """Candidates with a timeline, the best first, if all are wanted; a note on those with too many spans."""
        timed = list[Candidate]()
        missing = list[str]()
        room = MOST_SPANS
        for one in sorted(self.ranked, key=lambda one: one is not self.best) if which == "all" else ():
            count = span_count(one.program)
            if timed and count > room:
                missing.append(one.strategy.name)
            else:
                room -= count
                timed.append(one)
        notes = [note("timelines", strategies=", ".join(missing), most=MOST_SPANS)] if missing else []
        recorded = timed if which == "all" else [self.best] if which == "best" else []
        return timed, [*notes, *self._timeline_notes(recorded)]

    def _timeline_notes(self, timed: Sequence[Candidate]) -> list[str]:
        """A note if rounding errors make timelines on a bus differ from the TTFTs."""
        if not self.scenario.cluster.shares_bandwidth:
            return []
        errors = {one.strategy.name: abs(one.timeline_error) for one in timed}
        far = [name for name, error in errors.items() if error > _SAME]
        if not far:
            return []
        return [note("timeline error", strategies=", ".join(far), error=f"{100 * max(errors.values()):.1g} %")]

    def advice(self, search: Search, *, is_named: bool) -> Advised:
        """Simulated changes of the question; none under noise, or if no candidate fits."""
        if self.noisy or not self.best.fits:
            return Advised()
        return advice_of(self.best, self.ranked, search, is_named=is_named)

    # -- notes

    def notes(self, search: Search) -> list[str]:
        """Warnings about tables, near-ties, and strategies that exceed memory."""
        return [
            *self._table_notes(search),
            *coverage_notes_of(self.scenario),
            *layout_notes(self.best.execution),
            *width_notes(self.best.execution, self.best.interval),
            *prefix_access_notes(self.candidates),
            *self._even_chunks_note(),
            *(_memory_note(one) for one in self.candidates if not one.fits),
        ]

    def _table_notes(self, search: Search) -> list[str]:
        lookups = [one.execution for one in self.candidates if one.strategy.partition_rule == "table"]
        table = search.table
        if table is None:
            return []
        return [text for execution in lookups for text in table.notes_for(execution)]

    def _even_chunks_note(self) -> list[str]:
        """A note if KVR-S's search gains too little to be certain, for example if the host is the bottleneck."""
        several = {one.strategy.name: one for one in self.candidates if len(one.partition.chunk_lens) > 1}
        even = several.get(KVR_E.name)
        best = several.get(KVR_S.name)
        if even is None or best is None:
            return []
        if even.ttft_s > best.ttft_s * NEAR:  # avoid the slow computation of sensitivities
            return []
        if not is_indistinguishable_from(best, even, even.ttft_s / best.ttft_s):
            return []
        gain = even.ttft_s / best.ttft_s - 1
        return [note("even chunks" if gain < _LEAST_GAIN else "even chunks, tied", gain=gain)]


def is_indistinguishable_from(faster: Candidate, slower: Candidate, ratio: float) -> bool:
    """Whether the interval of the ratio of two TTFTs contains 1; both by simulations, or both by estimates."""
    if faster.is_slow or slower.is_slow:
        return is_indistinguishable(faster.estimated_sensitivities, slower.estimated_sensitivities, 1.0, ratio)
    return is_indistinguishable(faster.sensitivities, slower.sensitivities, 1.0, ratio)


@dataclass(frozen=True, kw_only=True)
class _RankedCandidate:
    """The source of a row of a plan."""

    candidate: Candidate
    ranking: Ranking

    @cached_property
    def is_tied(self) -> bool:
        best = self.ranking.best
        return self.candidate is not best and self.ranking.is_tied(best, self.candidate)

    @property
    def ttft_low_s(self) -> float:
        return self.candidate.interval.low_s

    @property
    def ttft_high_s(self) -> float:
        return self.candidate.interval.high_s

    @property
    def exposed_comm_s(self) -> float:
        return self.candidate.exposed_comm_s

    @cached_property
    def wait_s(self) -> tuple[float, ...]:
        return self.candidate.waits

    @property
    def query_blocks(self) -> tuple[int, ...] | None:
        return self.candidate.query_blocks


def _question(
    scenario: Scenario,
    strategies: Sequence[str | Strategy] | None,
    search: Search,
    disturbance: Disturbance | None,
    seed: int,
) -> Question:
    names = None if strategies is None else [label_of(strategy) for strategy in strategies]
    options = {"strategies": names, "method": search.options.method, "stride": search.options.stride}
    if disturbance is None:
        return Question.of(scenario, seed=seed, **options)
    noise = {"noise": disturbance.noise.name, "samples": disturbance.num_samples}
    return Question.of(scenario, seed=disturbance.seed, **options, **noise)


def _under_noise(
    even: Scenario, candidates: Sequence[Candidate], disturbance: Disturbance, search: Search
) -> dict[str, Distribution]:
    from planner.processes import Pool

    pool = disturbance.pool or Pool()
    alone = replace(disturbance, pool=None)
    even_s = [one.ttft_s for one in candidates]
    if not disturbance.is_even:
        even_s = [search.candidate(execution_of(even, one.strategy)).ttft_s for one in candidates]
    work = [(*pair, alone) for pair in zip(candidates, even_s, strict=True)]
    each = pool.run_in_order(_distribution, work, "strategies under noise", search.on_progress)
    return {one.strategy.name: noisy for one, noisy in zip(candidates, each, strict=True)}


def _distribution(one: Candidate, even_s: float, disturbance: Disturbance) -> Distribution:
    from planner.uncertainty.noise import FIRST_PLAN_SAMPLE

    return disturbance.distribution(one.execution, one.partition, one.ttft_s, even_s=even_s, first=FIRST_PLAN_SAMPLE)


def _noise_report(disturbance: Disturbance | None) -> NoiseReport | None:
    if disturbance is None:
        return None
    return NoiseReport(noise=disturbance.noise, num_samples=disturbance.num_samples, seed=disturbance.seed)


def _chain_bound(best: Candidate, kvr_lower_s: float | None) -> ChainBound | None:
    """The bound of the best strategy over all its partitions; None if there is no proof."""
    strategy = best.strategy
    if not strategy.chains or not best.execution.placed.chain_is_proven:
        return None
    is_kvr = (strategy.group_size, strategy.layer, strategy.query_blocks) == (1, KVR_S.layer, KVR_S.query_blocks)
    lower_s = kvr_lower_s if is_kvr else None
    lower_s = lower_s or lower_bound_s(best.execution, best.ttft_s)
    return ChainBound(strategy=strategy.name, lower_bound_s=lower_s, gap=best.ttft_s / lower_s - 1)


def _memory_note(one: Candidate) -> str:
    limit = one.execution.placed.memory_limit.nbytes
    over = [rank for rank, memory in enumerate(one.memory) if memory.total > limit]
    ranks = ", ".join(map(str, over[:8])) + (", ..." if len(over) > 8 else "")
    worst = format_bytes(max(memory.total for memory in one.memory))
    return note("memory", strategy=one.strategy.name, ranks=ranks, limit=format_bytes(limit), worst=worst)


def span_count(program: Program) -> int:
    """An upper bound of the number of spans that the event executor records for a program."""

    def block(ops: Sequence[Op]) -> int:
        return sum(_spans_of(op, program.num_ranks) for op in ops)

    counts = program.layer_counts
    return sum(
        block(program.prologue[rank])
        + sum(int(count) * block(kind[rank]) for count, kind in zip(counts, program.layers, strict=True))
        + block(program.epilogue[rank])
        for rank in range(program.num_ranks)
    )


def _spans_of(op: Op, num_ranks: int) -> int:
    """The number of spans of one operation on one rank: its work, its waiting and its messages."""
    if isinstance(op, AllGather):
        return 1 + (op.among or num_ranks) - 1
    if isinstance(op, RingPass):
        return 4 * len(op.host_s)
    if isinstance(op, AllToAll):
        return 1 + len(op.nbytes)
    return 2
