"""The plan: every strategy at its best, how fast it could be at all, and what that rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvrsim.errors import InputError
from kvrsim.memory import fits, memory_of
from kvrsim.partition import Partition
from kvrsim.results import Bounds, NoiseReport, Plan, StrategyResult
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES, Strategy, get_strategy
from kvrsim.timeline import Timeline
from kvrsim.units import format_bytes
from planner.bound import lower_bound_s
from planner.evaluate import Progress
from planner.interval import interval
from planner.search import Found, search
from planner.simulate import computes_s, execute, partition_of, waited_s

# Noise, tables and the choice among all strategies are imported where they are asked for: each costs the start of
# every plan some milliseconds.
if TYPE_CHECKING:
    from planner.disturbed import Disturbance
    from planner.robust import RobustPlan
    from planner.table import PartitionTable

DEFAULT_STRATEGIES = ("single", "tsp", "kvr-e", "kvr-s")
_AGREE = 1e-9  # relative; the executors agree to rounding
_SURELY_SLOWER = 1.5  # compute alone over TTFT, beyond which fewer GPUs cannot be as fast
_AS_FAST = 0.01  # fewer GPUs within this share of TTFT are worth a note
_TELLABLE = 0.02  # less than which no profile tells two partitions of one context apart


def make_plan(
    scenario: Scenario,
    *,
    strategies: Sequence[str] = DEFAULT_STRATEGIES,
    method: str = "auto",
    stride: int | None = None,
    table: PartitionTable | None = None,
    warnings: Sequence[str] = (),
    on_progress: Progress | None = None,
    timeline: bool = False,
    disturbance: Disturbance | None = None,
    objective: str = "mean",
) -> Plan:
    """Compare the strategies, each with its best partition; raises InputError for an unknown one.

    strategies: names, or "all" for every one that the machine and the model allow, which are then ranked.
    table: where kvr-p looks its partition up; InputError where it is asked for without one.
    timeline: also record every span of the best strategy.
    disturbance: noise; KVR-S's partition is the one with the least objective under it ("mean", "p50", "p95" or
        "p99"), and the best strategy is chosen by that objective, on samples that planning has not seen.
    """
    everything = "all" in strategies
    names, misfits = _names(scenario, strategies)
    chosen = [get_strategy(name, "strategies") for name in dict.fromkeys(names)]
    if not chosen:
        raise InputError("strategies", "", "at least one of " + ", ".join(STRATEGIES))
    looked_up = {
        strategy.name: partition_of(scenario, strategy, None, table)
        for strategy in chosen
        if strategy.partition_rule == "table"
    }
    kvr = STRATEGIES["kvr-s"]
    if disturbance is not None:
        for strategy in chosen:
            disturbance.check(strategy)
        scenario = disturbance.fixed(scenario)
    found = search(scenario, kvr, method=method, stride=stride, on_progress=on_progress)
    robust = None if disturbance is None else _robust(scenario, kvr, found, disturbance, objective)
    if robust is not None:
        found = replace(found, partition=robust.partition, ttft_s=_ttft_s(scenario, kvr, robust.partition))
    results = [_result(scenario, strategy, looked_up.get(strategy.name), found) for strategy in chosen]
    results = _with_speedups(results)
    if disturbance is not None:
        results = [_under_noise(scenario, result, disturbance) for result in results]
    ranked = sorted(results, key=lambda result: (not result.fits, _judged_s(result, objective)))
    best, results = ranked[0], ranked if everything else results
    return Plan(
        model=scenario.model.name,
        profile=scenario.profile_name,
        cluster=scenario.cluster.describe(),
        attention=scenario.kernel,
        num_gpus=scenario.cluster.num_gpus,
        memory_limit=scenario.memory_limit,
        context_len=scenario.request.context_len,
        best=best,
        strategies=tuple(results),
        bounds=_bounds(scenario, kvr, found, searched=any(result.strategy == kvr.name for result in results)),
        search=found.report,
        rests_on=rests_on(scenario),
        warnings=(
            *warnings,
            *misfits,
            *(_table_notes(table, scenario) if table is not None and looked_up else ()),
            *_even_chunks(results),
            *_fewer_gpus(scenario, kvr, found),
            *_memory_notes(scenario, results),
        ),
        timeline=_replayed(scenario, best, timeline=timeline),
        noise=None if robust is None or disturbance is None else _noise_report(scenario, kvr, robust, disturbance),
    )


def _names(scenario: Scenario, strategies: Sequence[str]) -> tuple[Sequence[str], tuple[str, ...]]:
    """The strategies asked for, and why others of "all" were left away."""
    if "all" not in strategies:
        return strategies, ()
    from planner.which import names_for_all

    return names_for_all(scenario)


def _table_notes(table: PartitionTable, scenario: Scenario) -> tuple[str, ...]:
    from planner.lookup import notes_on_table

    return notes_on_table(table, scenario)


def _robust(scenario: Scenario, kvr: Strategy, found: Found, disturbance: Disturbance, objective: str) -> RobustPlan:
    from planner.robust import robust_plan

    return robust_plan(
        scenario,
        kvr,
        disturbance.noise,
        found.partition,
        objective=objective,
        quiet_s=found.ttft_s,
        seed=disturbance.seed,
    )


def _ttft_s(scenario: Scenario, strategy: Strategy, partition: Partition) -> float:
    """Of one partition, undisturbed."""
    executor = "event" if scenario.cluster.shares_bandwidth else "batch"
    return execute(scenario, strategy, partition, executor=executor)[1][-1]


def _under_noise(scenario: Scenario, result: StrategyResult, disturbance: Disturbance) -> StrategyResult:
    """The result with its TTFTs on samples that planning has not seen."""
    strategy = get_strategy(result.strategy)
    cut = Partition(chunk_lens=result.partition)
    placed = scenario.for_strategy(strategy)
    noisy = disturbance.judged(placed, strategy, cut, result.ttft_s)
    return replace(result, noisy=noisy)


def _judged_s(result: StrategyResult, objective: str) -> float:
    return result.ttft_s if result.noisy is None else result.noisy.objective_s(objective)


def _noise_report(scenario: Scenario, kvr: Strategy, robust: RobustPlan, disturbance: Disturbance) -> NoiseReport:
    """The robust partition beside the quiet one, on samples that planning has not seen."""
    judged = {
        partition: disturbance.judged(scenario, kvr, partition, _ttft_s(scenario, kvr, partition)).objective_s(
            robust.objective
        )
        for partition in (robust.quiet_partition, robust.partition)
    }
    return NoiseReport(
        noise=disturbance.noise,
        objective=robust.objective,
        num_samples=disturbance.num_samples,
        seed=disturbance.seed,
        quiet_partition=robust.quiet_partition.chunk_lens,
        quiet_s=judged[robust.quiet_partition],
        robust_partition=robust.partition.chunk_lens,
        robust_s=judged[robust.partition],
    )


def _result(scenario: Scenario, strategy: Strategy, looked_up: Partition | None, found: Found) -> StrategyResult:
    placed = scenario.for_strategy(strategy)
    searched = found.partition if strategy.name == "kvr-s" else None
    cut = looked_up or searched or partition_of(placed, strategy, None)
    executor = "event" if placed.cluster.shares_bandwidth else "batch"
    program, finish_s, _ = execute(placed, strategy, cut, executor=executor)
    _, free_s, _ = execute(placed.without_communication(), strategy, cut, executor="batch")
    sure = interval(placed, strategy, cut, finish_s[-1])
    memory = memory_of(placed, strategy, cut)
    return StrategyResult(
        strategy=strategy.name,
        title=strategy.title,
        partition=cut.chunk_lens,
        ttft_s=finish_s[-1],
        ttft_low_s=sure.low_s,
        ttft_high_s=sure.high_s,
        speedup_over_tsp=None,
        exposed_comm_s=max(0.0, finish_s[-1] - free_s[-1]),
        wait_s=tuple(
            waited_s(computed, finish)
            for computed, finish in zip(computes_s(program), finish_s, strict=True)
            for _ in range(placed.gpus_per_rank)
        ),
        memory=memory,
        fits=fits(placed, memory),
    )


def _with_speedups(results: list[StrategyResult]) -> list[StrategyResult]:
    tsp_s = next((result.ttft_s for result in results if result.strategy == "tsp"), None)
    if tsp_s is None:
        return results
    return [replace(result, speedup_over_tsp=tsp_s / result.ttft_s) for result in results]


def _bounds(scenario: Scenario, kvr: Strategy, found: Found, *, searched: bool) -> Bounds:
    num_ranks = scenario.cluster.num_gpus
    alone = scenario.on_gpus(1)
    single = STRATEGIES["single"]
    whole = Partition(chunk_lens=(scenario.request.new_tokens,))
    single_s = execute(alone, single, whole, executor="batch")[1][-1]
    # Without communication the balanced plan is the best but for the first layer's fill.
    quiet = scenario.without_communication()
    free_s = search(quiet, kvr, method="analytical").ttft_s
    same_s = execute(quiet, kvr, found.partition, executor="batch")[1][-1]
    lower_s = found.lower_bound_s or lower_bound_s(scenario, kvr, found.ttft_s)
    return Bounds(
        ttft_star_s=single_s / 2 * (1 / num_ranks + 1 / num_ranks**2),
        ttft_no_comm_s=min(free_s, same_s),
        lower_bound_s=lower_s,
        gap=found.ttft_s / lower_s - 1 if searched else None,
    )


def _fewer_gpus(scenario: Scenario, kvr: Strategy, found: Found) -> list[str]:
    """Whether smaller groups would be as fast: halves of the group, down to one GPU.

    Halves that would have to spend the group's compute in too little time are not tried.
    """
    program, _, _ = execute(scenario.without_communication(), kvr, found.partition, executor="batch")
    all_compute_s = sum(computes_s(program))
    method = "auto" if scenario.cluster.shares_bandwidth else "analytical"
    as_fast: dict[int, float] = {}
    num_gpus = scenario.cluster.num_gpus // 2
    while num_gpus >= 1 and all_compute_s / num_gpus < _SURELY_SLOWER * found.ttft_s:
        ttft_s = search(scenario.on_gpus(num_gpus), kvr, method=method).ttft_s
        if ttft_s <= found.ttft_s * (1 + _AS_FAST):
            as_fast[num_gpus] = ttft_s
        num_gpus //= 2
    if not as_fast:
        return []
    fewest = min(as_fast)
    how = "as fast as" if as_fast[fewest] > found.ttft_s * (1 - _AS_FAST) else "faster than"
    verb = f"{fewest} GPUs are" if fewest > 1 else "1 GPU is"
    return [
        f"{verb} {how} {scenario.cluster.num_gpus} with KVR-S: {as_fast[fewest]:.3g} s against {found.ttft_s:.3g} s"
    ]


def _even_chunks(results: Sequence[StrategyResult]) -> list[str]:
    """Whether the search has gained too little to be sure of, as where the host sets the pace."""
    ttft_s = {result.strategy: result.ttft_s for result in results if len(result.partition) > 1}
    if not {"kvr-e", "kvr-s"} <= set(ttft_s):
        return []
    gain = ttft_s["kvr-e"] / ttft_s["kvr-s"] - 1
    if gain >= _TELLABLE:
        return []
    return [f"even chunks are {gain:.1%} slower than KVR-S's: less than a prediction can tell, so take either"]


def _memory_notes(scenario: Scenario, results: Sequence[StrategyResult]) -> list[str]:
    limit = scenario.memory_limit.nbytes
    notes = []
    for result in results:
        over = [rank for rank, memory in enumerate(result.memory) if memory.total > limit]
        if over:
            worst = max(memory.total for memory in result.memory)
            ranks = ", ".join(map(str, over[:8])) + (", ..." if len(over) > 8 else "")
            notes.append(
                f"{result.strategy} does not fit: rank {ranks} over {format_bytes(limit)} (worst {format_bytes(worst)})"
            )
    return notes


def _replayed(scenario: Scenario, best: StrategyResult, *, timeline: bool) -> Timeline | None:
    """Replay the winner in the event executor, which must agree with what was printed."""
    if not timeline:
        return None
    strategy = get_strategy(best.strategy)
    placed = scenario.for_strategy(strategy)
    cut = Partition(chunk_lens=best.partition)
    _, finish_s, spans = execute(placed, strategy, cut, executor="event", timeline=True)
    assert abs(finish_s[-1] - best.ttft_s) <= _AGREE * best.ttft_s, "the executors disagree"
    return spans


def rests_on(scenario: Scenario) -> str:
    """What the profile was measured on, what it does not cover, and how far it was off."""
    profile = scenario.profile
    if profile is None:
        return f"the datasheet of {scenario.cluster.gpu.name}: no measurement"
    text = f"{profile.name}: {profile.description}"
    if profile.residual is not None:
        text += (
            f" Off by {profile.residual.cross_validated_mape:.1%} on average on models left out of the fit, by"
            f" {profile.residual.other_family_mape:.1%} on other families, four in five by less than"
            f" {profile.residual.p80_ape:.1%}."
        )
    return f"{text} {profile.not_covered}"
