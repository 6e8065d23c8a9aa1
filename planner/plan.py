"""The plan: every strategy at its best, how fast it could be at all, and what that rests on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvrsim.compile import for_strategy
from kvrsim.executors.run import run_partition
from kvrsim.memory import fits, memory_of
from kvrsim.partition import Partition
from kvrsim.question import Question
from kvrsim.results import NoiseReport, Plan, SearchReport, StrategyResult
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES, Strategy, get_strategy
from kvrsim.timeline import Timeline
from planner.evaluate import Evaluator, Progress
from planner.plan_bounds import bounds_of
from planner.plan_notes import TELLABLE, approximate_notes, even_chunks, fewer_gpus, memory_notes, rests_on
from planner.search.search import Found, search
from planner.simulate import computes_s, partition_of, waited_s
from planner.strategies_for import choose
from planner.uncertainty.interval import interval

# Noise and tables are imported where they are asked for: each costs the start of every plan some milliseconds.
if TYPE_CHECKING:
    from planner.table.table import PartitionTable
    from planner.uncertainty.disturbed import Disturbance
    from planner.uncertainty.robust import RobustPlan

OnStage = Callable[[str, int, int], None]  # a strategy, its number from 1, and how many there are
_AGREE = 1e-9  # relative; the executors agree to rounding
_YARDSTICKS = ("tsp", "tp", "kvr-e", "single")  # the first that was compared and fits


def make_plan(
    scenario: Scenario,
    *,
    strategies: Sequence[str] | None = None,
    method: str = "auto",
    stride: int | None = None,
    table: PartitionTable | None = None,
    warnings: Sequence[str] = (),
    on_progress: Progress | None = None,
    on_stage: OnStage | None = None,
    timeline: bool = False,
    disturbance: Disturbance | None = None,
    objective: str = "mean",
    seed: int = 0,
) -> Plan:
    """Compare the strategies, each with its best partition; raises InputError for an unknown one.

    strategies: names, or "all" for every one that the machine and the model allow; None: those that take no search
        of their own, and KVR-S. "all" and None are ranked.
    table: where kvr-p looks its partition up; InputError where it is asked for without one.
    timeline: also record every span of the best strategy.
    disturbance: noise; KVR-S's partition is the one with the least objective under it ("mean", "p50", "p95" or
        "p99"), and the best strategy is chosen by that objective, on samples that planning has not seen.
    seed: as it was asked, for the answer; the noise has its own.
    """
    asked = _question(scenario, strategies, method, stride, disturbance, objective, seed)
    choice = choose(scenario, strategies, noisy=disturbance is not None)
    chosen = [get_strategy(name, "strategies") for name in choice.names]
    searches = _Searches(scenario, chosen, method=method, stride=stride, table=table, on_progress=on_progress)
    if disturbance is not None:
        for strategy in chosen:
            disturbance.check(strategy)
        searches.scenario = disturbance.fixed(scenario)
    scenario = searches.scenario
    robust, results = None, []
    for number, strategy in enumerate(chosen, start=1):
        if on_stage is not None:
            on_stage(strategy.name, number, len(chosen))
        cut = searches.partition(strategy)
        if strategy.name == "kvr-s" and disturbance is not None:
            robust = _robust(scenario, strategy, searches.kvr, disturbance, objective)
            cut = robust.partition
            searches.found = replace(searches.kvr, partition=cut, ttft_s=run_partition(scenario, strategy, cut).ttft_s)
        results.append(_result(scenario, strategy, cut))
    results = _with_speedups(results)
    if disturbance is not None:
        results = [_under_noise(scenario, result, disturbance) for result in results]
    ranked = sorted(
        results, key=lambda result: (not result.fits, result.approximate is not None, _judged_s(result, objective))
    )
    best = ranked[0]
    searched, kvr = searches.found is not None, STRATEGIES["kvr-s"]
    notes = (
        *choice.notes,
        *(_table_notes(table, scenario) if table is not None and "kvr-p" in choice.names else ()),
        *searches.notes(),
        *approximate_notes(results, best),
        *even_chunks(results),
        *(fewer_gpus(scenario, kvr, searches.kvr) if searched else ()),
        *memory_notes(scenario, results),
    )
    return Plan(
        question=asked,
        model=scenario.model.name,
        profile=scenario.profile_name,
        cluster=scenario.cluster,
        attention=scenario.kernel,
        num_gpus=scenario.cluster.num_gpus,
        memory_limit=scenario.memory_limit,
        context_len=scenario.request.context_len,
        best=best,
        ties=_ties(ranked, objective),
        strategies=tuple(ranked if choice.ranked else results),
        yardstick=next((result.strategy for result in results if result.speedup == 1.0), None),
        not_compared=choice.not_compared,
        bounds=bounds_of(scenario, kvr, searches.kvr, best, searched=searched),
        search=searches.report(),
        rests_on=rests_on(scenario),
        warnings=(*warnings, *notes),
        timeline=_replayed(scenario, best, timeline=timeline),
        noise=None if disturbance is None else _noise_report(scenario, kvr, robust, disturbance, objective),
    )


def _question(
    scenario: Scenario,
    strategies: Sequence[str] | None,
    method: str,
    stride: int | None,
    disturbance: Disturbance | None,
    objective: str,
    seed: int,
) -> Question:
    about = {"strategies": None if strategies is None else list(strategies), "method": method, "stride": stride}
    if disturbance is None:
        return Question.of(scenario, seed=seed, **about)
    noise = {"noise": disturbance.noise.name, "objective": objective, "samples": disturbance.num_samples}
    return Question.of(scenario, seed=disturbance.seed, **about, **noise)


@dataclass(slots=True)
class _Searches:
    """The partitions of a plan's strategies, and what all of them together took to find."""

    scenario: Scenario
    chosen: Sequence[Strategy]
    method: str
    stride: int | None
    table: PartitionTable | None
    on_progress: Progress | None
    found: Found | None = None  # KVR-S's, once it was searched
    evaluations: int = 0
    seconds: float = 0.0
    limits: dict[str, int] = field(default_factory=dict)  # of strategies whose search was cut short
    _analytical: Found | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for strategy in self.chosen:  # what is missing is missed before the first search
            if strategy.partition_rule == "table":
                partition_of(self.scenario, strategy, None, self.table)

    def partition(self, strategy: Strategy) -> Partition:
        """The strategy's best partition: searched, looked up, or its only one."""
        begin_s = time.perf_counter()
        placed = for_strategy(self.scenario, strategy)
        if strategy.partition_rule == "search":
            own = {"method": self.method, "stride": self.stride} if strategy.name == "kvr-s" else {}
            found = search(placed, strategy, on_progress=self.on_progress, **own)  # type: ignore[arg-type]
            self.found = found if strategy.name == "kvr-s" else self.found
            cut, evaluations = found.partition, found.report.evaluations
            if found.report.limit is not None:
                self.limits[strategy.name] = found.report.limit
        elif strategy.partition_rule == "pieces":
            from planner.strategies_for import best_pieces

            evaluator = Evaluator(placed, strategy, self.on_progress)
            cut, evaluations = best_pieces(evaluator), evaluator.evaluations
        else:
            return partition_of(placed, strategy, None, self.table)
        self.evaluations += evaluations
        self.seconds += time.perf_counter() - begin_s
        return cut

    @property
    def kvr(self) -> Found:
        """KVR-S's partition; where it was not asked for, the analytical plan, which one evaluation gives."""
        if self.found is not None:
            return self.found
        if self._analytical is None:
            self._analytical = search(self.scenario, STRATEGIES["kvr-s"], method="analytical")
        return self._analytical

    def report(self) -> SearchReport:
        """How KVR-S was searched, and what all searches took."""
        method = self.kvr.report.method
        limit = max(self.limits.values(), default=None)
        return SearchReport(method=method, evaluations=self.evaluations, seconds=self.seconds, limit=limit)

    def notes(self) -> list[str]:
        """Which searches were cut short."""
        return [
            f"{name}: its search on a bus ended at {most} partitions, the most for so many GPUs and layers;"
            " a better one may exist"
            for name, most in self.limits.items()
        ]


def _ties(ranked: Sequence[StrategyResult], objective: str) -> tuple[str, ...]:
    """Which others are as fast as the best, as far as a prediction can tell, and as exact and feasible as it."""
    best = ranked[0]
    return tuple(
        other.strategy
        for other in ranked[1:]
        if (other.fits, other.approximate is None) == (best.fits, best.approximate is None)
        and _judged_s(other, objective) <= _judged_s(best, objective) * (1 + TELLABLE)
    )


def _table_notes(table: PartitionTable, scenario: Scenario) -> tuple[str, ...]:
    from planner.table.lookup import notes_on_table

    return notes_on_table(table, scenario)


def _robust(scenario: Scenario, kvr: Strategy, found: Found, disturbance: Disturbance, objective: str) -> RobustPlan:
    from planner.uncertainty.robust import robust_plan

    return robust_plan(
        scenario,
        kvr,
        disturbance.noise,
        found.partition,
        objective=objective,
        quiet_s=found.ttft_s,
        seed=disturbance.seed,
    )


def _under_noise(scenario: Scenario, result: StrategyResult, disturbance: Disturbance) -> StrategyResult:
    """The result with its TTFTs on samples that planning has not seen."""
    strategy = get_strategy(result.strategy)
    cut = Partition(chunk_lens=result.partition)
    placed = for_strategy(scenario, strategy)
    noisy = disturbance.judged(placed, strategy, cut, result.ttft_s)
    return replace(result, noisy=noisy)


def _judged_s(result: StrategyResult, objective: str) -> float:
    return result.ttft_s if result.noisy is None else result.noisy.objective_s(objective)


def _noise_report(
    scenario: Scenario, kvr: Strategy, robust: RobustPlan | None, disturbance: Disturbance, objective: str
) -> NoiseReport:
    """The robust partition beside the quiet one, where KVR-S was asked for, on samples that planning has not seen."""
    judge = NoiseReport(
        noise=disturbance.noise, objective=objective, num_samples=disturbance.num_samples, seed=disturbance.seed
    )
    if robust is None:
        return judge
    judged = {}
    for partition in (robust.quiet_partition, robust.partition):
        noise_free_s = run_partition(scenario, kvr, partition).ttft_s
        judged[partition] = disturbance.judged(scenario, kvr, partition, noise_free_s).objective_s(robust.objective)
    return replace(
        judge,
        quiet_partition=robust.quiet_partition.chunk_lens,
        quiet_s=judged[robust.quiet_partition],
        robust_partition=robust.partition.chunk_lens,
        robust_s=judged[robust.partition],
    )


def _result(scenario: Scenario, strategy: Strategy, cut: Partition) -> StrategyResult:
    placed = for_strategy(scenario, strategy)
    run = run_partition(placed, strategy, cut)
    free_s = run_partition(placed.without_communication(), strategy, cut).ttft_s
    sure = interval(placed, strategy, cut, run.ttft_s)
    memory = memory_of(placed, strategy, cut)
    return StrategyResult(
        strategy=strategy.name,
        title=strategy.title,
        partition=cut.chunk_lens,
        ttft_s=run.ttft_s,
        ttft_low_s=sure.low_s,
        ttft_high_s=sure.high_s,
        speedup_over_tsp=None,
        speedup=None,
        exposed_comm_s=max(0.0, run.ttft_s - free_s),
        wait_s=tuple(
            waited_s(computed, finish)
            for computed, finish in zip(computes_s(run.program), run.finish_s, strict=True)
            for _ in range(placed.gpus_per_rank)
        ),
        memory=memory,
        fits=fits(placed, memory),
        approximate=strategy.approximate,
    )


def _with_speedups(results: list[StrategyResult]) -> list[StrategyResult]:
    """Over TSP, as the paper has it; and over the yardstick, which is something that can run."""
    compared = {result.strategy: result for result in results}
    tsp = compared.get("tsp")
    can_run = [name for name in _YARDSTICKS if name in compared and compared[name].fits]
    yard = compared[can_run[0]] if can_run else None
    return [
        replace(
            result,
            speedup_over_tsp=None if tsp is None else tsp.ttft_s / result.ttft_s,
            speedup=None if yard is None else 1.0 if result is yard else yard.ttft_s / result.ttft_s,
        )
        for result in results
    ]


def _replayed(scenario: Scenario, best: StrategyResult, *, timeline: bool) -> Timeline | None:
    """Replay the winner in the event executor, which must agree with what was printed."""
    if not timeline:
        return None
    strategy = get_strategy(best.strategy)
    placed = for_strategy(scenario, strategy)
    cut = Partition(chunk_lens=best.partition)
    run = run_partition(placed, strategy, cut, timeline=True)
    assert abs(run.ttft_s - best.ttft_s) <= _AGREE * best.ttft_s, "the executors disagree"
    return run.timeline
