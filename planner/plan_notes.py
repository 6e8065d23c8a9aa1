"""What has to be said beside a plan: where its advice matters little, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrsim.engine import Engine
from kvrsim.executors.run import run_partition
from kvrsim.program import computes_s
from kvrsim.results.results import StrategyResult
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from kvrsim.text import Note
from kvrsim.units import format_bytes
from planner.search.search import Found, search
from planner.uncertainty.causes import compared_whole
from planner.uncertainty.interval import measured_coverage, tied
from planner.uncertainty.moves import Moves

_SURELY_SLOWER = 1.5  # compute alone over TTFT, beyond which fewer GPUs cannot be as fast
_SHOWN = 0.0005  # gains below it would be shown as 0.0 %
_AS_FAST = 0.01  # fewer GPUs within this share of TTFT are worth a note


def fewer_gpus(scenario: Scenario, kvr: Strategy, found: Found) -> list[str]:
    """Whether smaller groups would be as fast: halves of the group, down to one GPU.

    Halves that would have to spend the group's compute in too little time are not tried.
    """
    if scenario.expert_parallel:  # fewer GPUs would hold more experts each
        return []
    program = run_partition(scenario.without_communication(), kvr, found.partition).program
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


def even_chunks(results: Sequence[StrategyResult], moved: Mapping[str, Moves]) -> list[str]:
    """Whether the search has gained too little to be sure of, as where the host sets the pace.

    moved: how the TTFT of each strategy moves with what it rests on.
    """
    ttft_s = {result.strategy: result.ttft_s for result in results if len(result.partition) > 1}
    if not {"kvr-e", "kvr-s"} <= set(ttft_s):
        return []
    if not tied(moved["kvr-s"], moved["kvr-e"], ttft_s["kvr-s"], ttft_s["kvr-e"]):
        return []
    gain = ttft_s["kvr-e"] / ttft_s["kvr-s"] - 1
    if gain < _SHOWN:
        return ["even chunks are as fast as KVR-S's"]
    return [f"even chunks are {gain:.1%} slower than KVR-S's: less than a prediction can tell, so take either"]


def memory_notes(scenario: Scenario, results: Sequence[StrategyResult]) -> list[str]:
    limit = scenario.memory_limit.nbytes
    notes: list[str] = []
    for result in results:
        over = [rank for rank, memory in enumerate(result.memory) if memory.total > limit]
        if over:
            worst = max(memory.total for memory in result.memory)
            ranks = ", ".join(map(str, over[:8])) + (", ..." if len(over) > 8 else "")
            over_limit = f"rank {ranks} over {format_bytes(limit)} (worst {format_bytes(worst)})"
            notes.append(Note(f"{result.strategy} does not fit: {over_limit}", "memory"))
    return notes


def approximate_notes(results: Sequence[StrategyResult], best: StrategyResult) -> list[str]:
    """Which strategies compute something else than the model's own prefill, so that none of them is the best."""
    notes = []
    for result in results:
        if result.approximate is not None:
            faster = (
                f", {result.ttft_s:.3g} s, is faster than {best.strategy} but" if result.ttft_s < best.ttft_s else ""
            )
            notes.append(f"{result.strategy}{faster} is approximate: {result.approximate}")
    return notes


def rests_on(scenario: Scenario) -> str:
    """What the profile and the engine were measured on, what the profile does not cover, and how far they were off."""
    profile = scenario.profile
    if profile is None:
        return f"the datasheet of {scenario.cluster.gpu.name}: no measurement"
    parts = [f"{profile.name}: {profile.description}"]
    if compared_whole(scenario) is not None and profile.residual is not None:
        parts.append(
            f"Off by {profile.residual.cross_validated_mape:.1%} on average on models left out of the fit, 80 % of"
            f" their errors below {profile.residual.p80_ape:.1%}; by {profile.residual.other_family_mape:.1%} on"
            " average on other families."
        )
    elif scenario.engine is not None:
        parts.append(_of_engine(scenario.engine))
    coverage = measured_coverage(scenario)
    held = "were not checked on whole prefills" if coverage is None else f"held {coverage:.0%} of the held-out ones"
    parts += [f"Intervals made to hold 80 % of TTFTs {held}.", profile.not_covered]
    return " ".join(parts)


def _of_engine(engine: Engine) -> str:
    text = f"Engine {engine.name}: {engine.title}"
    fit = engine.fit
    if fit is None:
        return f"{text}, never compared with whole prefills."
    return (
        f"{text}, from {fit.num_rows} prefills; half of those of a further {fit.left_out} are off by less than"
        f" {fit.left_out_median_ape:.1%}."
    )
