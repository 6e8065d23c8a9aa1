"""The plan: every strategy at its best, how fast it could be at all, and what that rests on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvrsim.executors.run import run_partition
from kvrsim.memory import fits, memory_of
from kvrsim.partition import Partition
from kvrsim.program import computes_s, waited_s
from kvrsim.results.question import Question
from kvrsim.results.results import Plan, StrategyResult
from kvrsim.scenario import Scenario
from kvrsim.strategies import KVR_S, Strategy, label_of
from kvrsim.strategies.pipeline import layers_of
from planner.access import access_notes, has_choice, placed_for, told_access
from planner.deploy import engines_with
from planner.evaluate import Progress
from planner.partitions import PlanPartitions
from planner.plan_bounds import bound_of_pipeline, bounds_of
from planner.plan_notes import approximate_notes, even_chunks, fewer_gpus, memory_notes, rests_on
from planner.strategies_for import choose
from planner.uncertainty.interval import interval_of, measured_coverage, tied
from planner.uncertainty.moves import Moves, moves

# Noise and tables are imported where they are asked for: each costs the start of every plan some milliseconds.
if TYPE_CHECKING:
    from kvrsim.results.shortfall import Shortfall
    from kvrsim.results.timeline import Timeline
    from planner.processes import Pool
    from planner.table.table import PartitionTable
    from planner.uncertainty.disturbed import Disturbance
    from planner.uncertainty.robust import RobustPlan

OnStage = Callable[[str, int, int], None]  # a strategy, its number from 1, and how many there are
_YARDSTICKS = ("tsp", "tp", "kvr-e", "single")  # the first that was compared and fits


def make_plan(
    scenario: Scenario,
    *,
    strategies: Sequence[str | Strategy] | None = None,
    method: str = "auto",
    stride: int | None = None,
    table: PartitionTable | None = None,
    warnings: Sequence[str] = (),
    on_progress: Progress | None = None,
    on_stage: OnStage | None = None,
    timeline: bool = False,
    every_timeline: bool = False,
    disturbance: Disturbance | None = None,
    objective: str = "mean",
    seed: int = 0,
    pool: Pool | None = None,
) -> Plan:
    """Compare the strategies, each with its best partition; raises InputError for an unknown one.

    strategies: names, "FILE.py:NAME" or Strategies; "all" stands for every one that the machine and the model allow,
        None for KVR-S and those that need no search. "all" and None are ranked.
    method, stride: of the search of chunks over single GPUs.
    table: where kvr-p looks its partition up; InputError where it is asked for without one.
    timeline: also record every span of the best strategy. every_timeline: of the others, too.
    disturbance: noise; searched partitions are those with the least objective under it ("mean", "p50", "p95" or
        "p99"), and the best strategy is chosen by that objective, on samples that planning has not seen.
    seed: as it was asked, for the answer; the noise has its own.
    pool: who simulates noise; None: this process.
    """
    asked = _question(scenario, strategies, method, stride, disturbance, objective, seed)
    choice = choose(scenario, strategies, noisy=disturbance is not None)
    chosen = {strategy.name: strategy for strategy in choice.strategies}
    if disturbance is not None:
        for strategy in choice.strategies:
            disturbance.check(strategy)
        scenario = disturbance.fixed(scenario)
    partitions = PlanPartitions(
        scenario=scenario,
        chosen=choice.strategies,
        method=method,
        stride=stride,
        table=table,
        on_progress=on_progress,
    )
    robust: dict[str, RobustPlan] = {}
    cuts: dict[str, Partition] = {}
    results = []
    moved: dict[str, Moves] = {}
    for number, strategy in enumerate(choice.strategies, start=1):
        if on_stage is not None:
            on_stage(strategy.name, number, len(chosen))
        strategy, cut = partitions.settled(strategy)
        chosen[strategy.name] = strategy
        cuts[strategy.name] = cut
    if disturbance is not None:
        from planner.uncertainty.planned import robust_plans

        robust = robust_plans(scenario, chosen, partitions.found, disturbance, objective, pool)
        for name, plan in robust.items():
            cuts[name], placed = plan.partition, placed_for(scenario, chosen[name])
            ttft_s = run_partition(placed, chosen[name], plan.partition).ttft_s
            partitions.found[name] = replace(partitions.found[name], partition=plan.partition, ttft_s=ttft_s)
    for name, cut in cuts.items():
        moved[name] = moves(placed_for(scenario, chosen[name]), chosen[name], cut)
        results.append(_result(scenario, chosen[name], cut, moved[name]))
    (results, yardstick), report = _with_speedups(results), None
    if disturbance is not None:
        from planner.uncertainty.planned import all_under_noise, noise_report

        results = all_under_noise(scenario, chosen, results, disturbance, pool)
        report = noise_report(scenario, chosen, robust, disturbance, objective)
    ranked = sorted(
        results, key=lambda result: (not result.fits, result.approximate is not None, _judged_s(result, objective))
    )
    best = ranked[0]
    searched = KVR_S.name in partitions.found
    shown = ranked if every_timeline else ranked[:1] if timeline else []
    timelines, untimed = dict[str, "Timeline"](), list[str]()
    if shown:
        from planner.replays import replays

        timelines, untimed = replays(scenario, chosen, shown)
    notes = (
        *choice.notes,
        *_table_notes(table, scenario, choice.strategies),
        *partitions.notes(),
        *access_notes(
            {result.strategy: result.prefix_access for result in results},
            had_choice=any(has_choice(scenario, strategy) for strategy in chosen.values()),
        ),
        *approximate_notes(results, best),
        *even_chunks(results, moved),
        *(fewer_gpus(placed_for(scenario, KVR_S), KVR_S, partitions.kvr) if searched else ()),
        *memory_notes(scenario, results),
        *untimed,
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
        ties=_ties(ranked, moved, objective),
        strategies=tuple(ranked if choice.ranked else results),
        yardstick=yardstick,
        not_compared=choice.not_compared,
        bounds=bounds_of(scenario, partitions.kvr, chosen[best.strategy], best, searched=searched),
        search=partitions.report(),
        rests_on=rests_on(scenario),
        warnings=(*warnings, *notes),
        interval_coverage=measured_coverage(scenario),
        timeline=timelines.get(best.strategy),
        timelines=timelines if every_timeline else {},
        noise=report,
        shortfall=None if best.fits else _shortfall(scenario, results),
    )


def _shortfall(scenario: Scenario, results: Sequence[StrategyResult]) -> Shortfall:
    from planner.shortfall import shortfall_of  # only where nothing fits

    return shortfall_of(scenario, results)


def _question(
    scenario: Scenario,
    strategies: Sequence[str | Strategy] | None,
    method: str,
    stride: int | None,
    disturbance: Disturbance | None,
    objective: str,
    seed: int,
) -> Question:
    names = None if strategies is None else [label_of(strategy) for strategy in strategies]
    about = {"strategies": names, "method": method, "stride": stride}
    if disturbance is None:
        return Question.of(scenario, seed=seed, **about)
    noise = {"noise": disturbance.noise.name, "objective": objective, "samples": disturbance.num_samples}
    return Question.of(scenario, seed=disturbance.seed, **about, **noise)


def _ties(ranked: Sequence[StrategyResult], moved: Mapping[str, Moves], objective: str) -> tuple[str, ...]:
    """Which others a prediction cannot tell from the best, of those as exact and feasible as it."""
    best = ranked[0]
    return tuple(
        other.strategy
        for other in ranked[1:]
        if (other.fits, other.approximate is None) == (best.fits, best.approximate is None)
        and tied(moved[best.strategy], moved[other.strategy], _judged_s(best, objective), _judged_s(other, objective))
    )


def _table_notes(table: PartitionTable | None, scenario: Scenario, strategies: Sequence[Strategy]) -> tuple[str, ...]:
    lookups = [strategy for strategy in strategies if strategy.partition_rule == "table"]
    if table is None or not lookups:
        return ()
    from planner.table.lookup import notes_on_table

    return tuple(note for strategy in lookups for note in notes_on_table(table, scenario, strategy))


def _judged_s(result: StrategyResult, objective: str) -> float:
    return result.ttft_s if result.noisy is None else result.noisy.objective_s(objective)


def _result(scenario: Scenario, strategy: Strategy, cut: Partition, moved: Moves) -> StrategyResult:
    placed = placed_for(scenario, strategy)
    run = run_partition(placed, strategy, cut)
    free_s = run_partition(placed.without_communication(), strategy, cut).ttft_s
    sure = interval_of(moved, run.ttft_s)
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
        layers=layers_of(placed, strategy),
        prefix_access=told_access(placed, strategy),
        query_blocks=run.program.most_query_blocks,
        bound=bound_of_pipeline(placed, strategy, cut, run.ttft_s),
        engines=engines_with(strategy, scenario),
    )


def _with_speedups(results: list[StrategyResult]) -> tuple[list[StrategyResult], str | None]:
    """Over TSP, as the paper has it; and over the yardstick, which is something that can run, and its name."""
    compared = {result.strategy: result for result in results}
    tsp = compared.get("tsp")
    can_run = [result for result in results if result.fits]
    usual = [compared[name] for name in _YARDSTICKS if name in compared and compared[name].fits]
    yard = next(iter((*usual, *sorted(can_run, key=lambda one: (one.approximate is not None, one.ttft_s)))), None)
    return [
        replace(
            result,
            speedup_over_tsp=None if tsp is None else tsp.ttft_s / result.ttft_s,
            speedup=None if yard is None else yard.ttft_s / result.ttft_s,
        )
        for result in results
    ], None if yard is None else yard.strategy
