"""The plan: every strategy at its best, how fast it could be at all, and what that rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvrsim.errors import InputError
from kvrsim.memory import fits, memory_of
from kvrsim.partition import Partition
from kvrsim.results import Bounds, Plan, StrategyResult
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES, Strategy, get_strategy
from kvrsim.timeline import Timeline
from planner.bound import lower_bound_s
from planner.evaluate import Progress
from planner.interval import interval
from planner.search import Found, search
from planner.simulate import compute_s, execute, partition_of, waited_s

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
    warnings: Sequence[str] = (),
    on_progress: Progress | None = None,
    timeline: bool = False,
) -> Plan:
    """Compare the strategies, each with its best partition; raises InputError for an unknown one.

    timeline: also record every span of the best strategy.
    """
    chosen = [get_strategy(name, "--strategies") for name in dict.fromkeys(strategies)]
    if not chosen:
        raise InputError("--strategies", "", "at least one of " + ", ".join(STRATEGIES))
    kvr = STRATEGIES["kvr-s"]
    found = search(scenario, kvr, method=method, stride=stride, on_progress=on_progress)
    results = [_result(scenario, strategy, found) for strategy in chosen]
    results = _with_speedups(results)
    best = min(results, key=lambda result: (not result.fits, result.ttft_s))
    return Plan(
        model=scenario.model.name,
        profile=scenario.profile_name,
        cluster=scenario.cluster.describe(),
        attention=scenario.kernel,
        num_gpus=scenario.cluster.num_gpus,
        gpu_memory_bytes=scenario.cluster.gpu.memory_bytes,
        context_len=scenario.request.context_len,
        best=best,
        strategies=tuple(results),
        bounds=_bounds(scenario, kvr, found, searched=any(result.strategy == kvr.name for result in results)),
        search=found.report,
        rests_on=rests_on(scenario),
        warnings=(
            *warnings,
            *_even_chunks(results),
            *_fewer_gpus(scenario, kvr, found),
            *_memory_notes(scenario, results),
        ),
        timeline=_replayed(scenario, best, timeline=timeline),
    )


def _result(scenario: Scenario, strategy: Strategy, found: Found) -> StrategyResult:
    placed = _placed(scenario, strategy)
    cut = found.partition if strategy.partition_rule == "search" else partition_of(placed, strategy, None)
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
        wait_s=tuple(waited_s(program, rank, finish) for rank, finish in enumerate(finish_s)),
        memory=memory,
        fits=fits(placed, memory),
    )


def _placed(scenario: Scenario, strategy: Strategy) -> Scenario:
    return scenario.on_gpus(1) if strategy.partition_rule == "whole" else scenario


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
    all_compute_s = sum(compute_s(program, rank) for rank in range(scenario.cluster.num_gpus))
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
    limit = scenario.cluster.gpu.memory_bytes
    notes = []
    for result in results:
        over = [rank for rank, memory in enumerate(result.memory) if memory.total > limit]
        if over:
            worst = max(memory.total for memory in result.memory)
            ranks = ", ".join(map(str, over[:8])) + (", ..." if len(over) > 8 else "")
            notes.append(
                f"{result.strategy} does not fit: rank {ranks} over {limit / 1e9:.0f} GB (worst {worst / 1e9:.1f} GB)"
            )
    return notes


def _replayed(scenario: Scenario, best: StrategyResult, *, timeline: bool) -> Timeline | None:
    """Replay the winner in the event executor, which must agree with what was printed."""
    if not timeline:
        return None
    strategy = STRATEGIES[best.strategy]
    placed = _placed(scenario, strategy)
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
