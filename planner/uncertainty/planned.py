"""Planning under noise: robust partitions, and every strategy on samples that planning has not seen, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvrsim.executors.run import run_partition
from kvrsim.partition import Partition
from kvrsim.results.results import NoiseReport, StrategyResult
from kvrsim.scenario import Scenario
from kvrsim.strategies import KVR_S, Strategy
from planner.access import placed_for
from planner.processes import Pool
from planner.search.search import Found
from planner.uncertainty.disturbed import Disturbance
from planner.uncertainty.robust import RobustPlan, robust_plan


def robust_plans(
    scenario: Scenario,
    chosen: Mapping[str, Strategy],
    found: Mapping[str, Found],
    disturbance: Disturbance,
    objective: str,
    pool: Pool | None,
) -> dict[str, RobustPlan]:
    """Robust partitions of the strategies whose partitions were found, in the order of `chosen`.

    pool: who works; None: this process.
    """
    names = [name for name in chosen if name in found]
    work = [(scenario, chosen[name], found[name], disturbance, objective) for name in names]
    return dict(zip(names, (pool or Pool()).ordered(_robust, work), strict=True))


def all_under_noise(
    scenario: Scenario,
    chosen: Mapping[str, Strategy],
    results: Sequence[StrategyResult],
    disturbance: Disturbance,
    pool: Pool | None,
) -> list[StrategyResult]:
    """The results with their TTFTs on samples that planning has not seen."""
    work = [(scenario, chosen[result.strategy], result, disturbance) for result in results]
    return (pool or Pool()).ordered(_under_noise, work)


def _robust(
    scenario: Scenario, strategy: Strategy, found: Found, disturbance: Disturbance, objective: str
) -> RobustPlan:
    return robust_plan(
        placed_for(scenario, strategy),
        strategy,
        disturbance.noise,
        found.partition,
        objective=objective,
        quiet_s=found.ttft_s,
        seed=disturbance.seed,
    )


def _under_noise(
    scenario: Scenario, strategy: Strategy, result: StrategyResult, disturbance: Disturbance
) -> StrategyResult:
    """The result with its TTFTs on samples that planning has not seen."""
    cut = Partition(chunk_lens=result.partition)
    placed = placed_for(scenario, strategy)
    noisy = disturbance.judged(placed, strategy, cut, result.ttft_s)
    return replace(result, noisy=noisy)


def noise_report(
    scenario: Scenario,
    chosen: Mapping[str, Strategy],
    robust: Mapping[str, RobustPlan],
    disturbance: Disturbance,
    objective: str,
) -> NoiseReport:
    """The robust partition beside the noise-free one, of KVR-S or else of the first strategy that was searched.

    Both are judged on samples that planning has not seen.
    """
    report = NoiseReport(
        noise=disturbance.noise, objective=objective, num_samples=disturbance.num_samples, seed=disturbance.seed
    )
    if not robust:
        return report
    name = KVR_S.name if KVR_S.name in robust else next(iter(robust))
    strategy, plan = chosen[name], robust[name]
    judged = {}
    for partition in (plan.quiet_partition, plan.partition):
        placed = placed_for(scenario, strategy)
        noise_free_s = run_partition(placed, strategy, partition).ttft_s
        judged[partition] = disturbance.judged(placed, strategy, partition, noise_free_s).objective_s(plan.objective)
    return replace(
        report,
        quiet_partition=plan.quiet_partition.chunk_lens,
        quiet_s=judged[plan.quiet_partition],
        robust_partition=plan.partition.chunk_lens,
        robust_s=judged[plan.partition],
    )
