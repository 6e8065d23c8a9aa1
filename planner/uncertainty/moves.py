"""How a TTFT moves when something that it rests on is off by one standard deviation, cause by cause.

The strategy is simulated again with each cause below and above its central value. A cause that the strategies of a
plan share (a table, a link, the host) is the same error for all of them, so the moves of two strategies may be
subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvrsim.compile import build_program, columns
from kvrsim.cost.sensitivity import Part, WeightedCost, listing
from kvrsim.executors.run import run_program
from kvrsim.partition import Partition
from kvrsim.profile.profile import DEVIATES_OF_80_PERCENT, CalibrationProfile, ValidRange
from kvrsim.program.operations import Array, Program
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy

RUN_TO_RUN = 0.014 / 0.6745  # log standard deviation: medians of repeated serving runs differ by 1.4 %
_PER_DOUBLING = 0.02  # more log standard deviation for each doubling outside of what was measured
_NOMINAL_LINKS = 0.2  # log standard deviation of a bandwidth that nobody measured: NVLink 3 reaches 78 % of its own
_ROOFLINE_FACTOR = 3.0  # how far above the datasheet's limits a real TTFT may lie
_SD_OF_MEAN_ERROR = math.sqrt(math.pi / 2)  # standard deviation over mean absolute error, of a normal distribution
_NOTHING = 1e-9  # of log TTFT

Cause = Part | str  # a part of the device's time, or the name of what concerns several parts


class Move(NamedTuple):
    """What is added to log TTFT when a cause is one standard deviation below, and above, its central value."""

    low: float
    high: float

    @classmethod
    def even(cls, log_sd: float) -> Move:
        """As far on both sides."""
        return cls(-log_sd, log_sd)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moves:
    """How one strategy's TTFT moves, and what keeps two strategies' TTFTs apart that share every cause."""

    of: Mapping[Cause, Move]
    apart_log_sd: float  # of the ratio of two TTFTs, besides the causes


UNKNOWN = Moves(of={}, apart_log_sd=RUN_TO_RUN)  # where nothing but the variation between runs is known


def moves(scenario: Scenario, strategy: Strategy, partition: Partition) -> Moves:
    """The moves of log TTFT by cause.

    scenario: as the strategy sees it (see for_strategy).
    """
    profile = scenario.profile
    if profile is None:
        above = math.log(_ROOFLINE_FACTOR) / DEVIATES_OF_80_PERCENT
        return replace(UNKNOWN, of={"datasheet": Move(0.0, above)})
    chunks = columns(partition.chunk_lens)

    def log_ttft(one: Scenario) -> float:
        return math.log(_ttft_s(one, build_program(one, strategy, chunks))[0])

    found: dict[Cause, Move] = {}
    log_s: float | None = None
    if profile.residual is not None:
        whole = math.log1p(profile.residual.p80_ape) / DEVIATES_OF_80_PERCENT
        found["published TTFTs"] = Move.even(whole)
        apart = profile.residual.cross_validated_speedup_mape * _SD_OF_MEAN_ERROR
    else:
        log_s, found = _device(scenario, strategy, chunks, profile)
        if changed := _host(scenario, profile):
            found["host"] = _moved(changed, log_s, log_ttft)
        apart = _run_to_run(profile)
        found["run to run"] = Move.even(apart)
    if links := _links_log_sd(scenario, profile):
        log_s = log_ttft(scenario) if log_s is None else log_s
        found["links"] = _moved(lambda sign: scenario.with_slower_links(math.exp(sign * links)), log_s, log_ttft)
    if beyond := doublings_beyond(scenario, profile.valid):
        found["extrapolation"] = Move.even(_PER_DOUBLING * beyond)
    return Moves(of=found, apart_log_sd=apart)


def doublings_beyond(scenario: Scenario, valid: ValidRange) -> float:
    """By how many doublings in all the scenario lies outside of what the profile was measured on."""
    sizes = {
        "context_len": scenario.request.context_len,
        "num_gpus": scenario.num_gpus,
        "hidden_size": scenario.model.hidden_size,
        "head_dim": scenario.model.head_dim,
    }
    spans = {key: getattr(valid, key) for key in sizes}
    return sum(
        max(0.0, math.log2(low / sizes[key]), math.log2(sizes[key] / high)) for key, (low, high) in spans.items()
    )


def _run_to_run(profile: CalibrationProfile) -> float:
    """As measured where the profile's layers were timed again and again; else as serving engines were seen to do."""
    measured = profile.run_to_run_log_sd
    return RUN_TO_RUN if measured is None else max(measured, RUN_TO_RUN)


def _moved(changed: Callable[[int], Scenario], log_s: float, log_ttft: Callable[[Scenario], float]) -> Move:
    """By the scenario that a sign changes: +1 to what takes longer.

    What nothing waits for when it takes longer is not waited for when it takes less.
    """
    high = log_ttft(changed(1)) - log_s
    return Move(log_ttft(changed(-1)) - log_s if abs(high) > _NOTHING else 0.0, high)


def _device(
    scenario: Scenario, strategy: Strategy, chunks: list[Array], profile: CalibrationProfile
) -> tuple[float, dict[Cause, Move]]:
    """Log TTFT, and its moves with each part of the device's time: two columns of weights a cause, in one run."""
    cost, parts = listing(scenario.cost)
    build_program(scenario, strategy, chunks, cost)
    causes: dict[Cause, dict[Part, float]] = {part: {part: sd} for part in parts if (sd := _log_sd(profile, part))}
    if together := {part: sd for part in parts if (sd := _systematic_log_sd(profile, part))}:
        causes["table and clock"] = together
    weights = {part: np.ones(2 * len(causes) + 1) for part in parts}
    for index, log_sds in enumerate(causes.values()):
        for part, log_sd in log_sds.items():
            weights[part][2 * index + 1 : 2 * index + 3] = math.exp(-log_sd), math.exp(log_sd)
    wide = [np.repeat(chunk, 2 * len(causes) + 1) for chunk in chunks]
    program = build_program(scenario, strategy, wide, WeightedCost(cost=scenario.cost, weights=weights))
    log_s = np.log(_ttft_s(scenario, program))
    pairs = (log_s[1:] - log_s[0]).reshape(-1, 2)
    return float(log_s[0]), {cause: Move(*map(float, pair)) for cause, pair in zip(causes, pairs, strict=True)}


def _log_sd(profile: CalibrationProfile, part: Part) -> float:
    """Of one part of the device's time; products whose shape was measured are known better."""
    fit = profile.operations.get(part.kind)
    if fit is None:
        return 0.0
    known = part.product is not None and profile.kernels.gemm.is_measured(part.product)
    return fit.interpolated_log_sd if known and fit.interpolated_log_sd is not None else fit.log_sd


def _systematic_log_sd(profile: CalibrationProfile, part: Part) -> float:
    """What all parts have in common: the table that they come from, and the clock that it was measured at."""
    fit = profile.operations.get(part.kind)
    return 0.0 if fit is None else fit.systematic_log_sd or 0.0


def _host(scenario: Scenario, profile: CalibrationProfile) -> Callable[[int], Scenario] | None:
    """The scenario with a slower or faster host; None where its error is not known."""
    fit = profile.operations.get("host")
    host = scenario.host
    if fit is None or not fit.log_sd or not host.layer_s + host.kernel_s:
        return None
    log_sd = fit.log_sd

    def changed(sign: int) -> Scenario:
        factor = math.exp(sign * log_sd)
        other = replace(
            host,
            layer_s=host.layer_s * factor,
            kernel_s=host.kernel_s * factor,
            gather_piece_s=host.gather_piece_s * factor,
        )
        return scenario.with_host(other)

    return changed


def _links_log_sd(scenario: Scenario, profile: CalibrationProfile) -> float:
    """How little the links are known; 0 where there are none, or where errors of whole TTFTs hold it already."""
    if scenario.num_gpus == 1:
        return 0.0
    if not scenario.links_are_measured:
        return _NOMINAL_LINKS
    fits = [profile.operations[kind] for kind in ("send_recv", "all_gather") if kind in profile.operations]
    return 0.0 if profile.residual is not None else max((fit.log_sd for fit in fits), default=0.0)


def _ttft_s(scenario: Scenario, program: Program) -> Array:
    """TTFT of each column. Flows that share a bus are taken to have a fair share each: only ratios count here."""
    cluster = scenario.cluster
    if cluster.shares_bandwidth:
        flows = max(1, cluster.num_gpus - 1)
        cluster = scenario.with_own_links(cluster.link.bandwidth_bytes_per_s / flows).cluster
    return np.asarray(run_program(program, cluster)[-1])
