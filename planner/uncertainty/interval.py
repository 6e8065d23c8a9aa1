"""How sure a predicted TTFT is: an interval that 80 % of measurements should fall into.

Where a profile was fitted to whole TTFTs, its own errors on models left out of the fit say it. Where it was fitted
operation by operation, each operation's errors on rows left out are carried through the simulation: what TTFT does
when that operation alone is slower by one standard deviation. Operations err independently of each other; so do
matrix products of different shapes. Two things come on top: TTFTs differ from run to run, and errors grow outside
of what was measured; so they do over links that nobody measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from kvrsim.compile import build_program, columns
from kvrsim.cost.sensitivity import Part, WeightedCost, listing
from kvrsim.executors.run import run_program
from kvrsim.partition import Partition
from kvrsim.profile.profile import DEVIATES_OF_80_PERCENT, CalibrationProfile, ValidRange
from kvrsim.program.operations import Array, Program
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy

_RUN_TO_RUN = 0.014 / 0.6745  # log standard deviation: medians of repeated serving runs differ by 1.4 %
_PER_DOUBLING = 0.02  # more log standard deviation for each doubling outside of what was measured
_NOMINAL_LINKS = 0.2  # log standard deviation of a bandwidth that nobody measured: NVLink 3 reaches 78 % of its own
_ROOFLINE_FACTOR = 3.0  # how far above the datasheet's limits a real TTFT may lie


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Low and high of a TTFT, and what makes it wide."""

    low_s: float
    high_s: float
    log_sd: Mapping[str, float]  # by cause, standard deviations of log TTFT


def interval(scenario: Scenario, strategy: Strategy, partition: Partition, ttft_s: float) -> Interval:
    """The 80 % interval of a predicted TTFT."""
    profile = scenario.profile
    if profile is None:
        return Interval(low_s=ttft_s, high_s=ttft_s * _ROOFLINE_FACTOR, log_sd={})
    if profile.residual is not None:
        log_sd = {"published TTFTs": math.log1p(profile.residual.p80_ape) / DEVIATES_OF_80_PERCENT}
    else:
        log_sd = _propagated(scenario, strategy, partition, profile) | {"run to run": _run_to_run(profile)}
    links_log_sd = _links_log_sd(scenario, profile)
    if links_log_sd:
        log_sd["links"] = _moved_by_links(scenario, strategy, partition, links_log_sd)
    beyond = doublings_beyond(scenario, profile.valid)
    if beyond:
        log_sd["extrapolation"] = _PER_DOUBLING * beyond
    spread = math.exp(DEVIATES_OF_80_PERCENT * math.sqrt(sum(sd * sd for sd in log_sd.values())))
    return Interval(low_s=ttft_s / spread, high_s=ttft_s * spread, log_sd=log_sd)


def _run_to_run(profile: CalibrationProfile) -> float:
    """As measured where the profile's layers were timed again and again; else as serving engines were seen to do."""
    measured = profile.run_to_run_log_sd
    return _RUN_TO_RUN if measured is None else max(measured, _RUN_TO_RUN)


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


def _propagated(
    scenario: Scenario, strategy: Strategy, partition: Partition, profile: CalibrationProfile
) -> dict[str, float]:
    """For each cause, how much log TTFT moves when it is off by one standard deviation."""
    chunks = columns(partition.chunk_lens)
    cost, parts = listing(scenario.cost)
    build_program(scenario, strategy, chunks, cost)
    devices = [part for part in parts if _log_sd(profile, part)]
    weights = 1.0 + np.zeros((len(parts), len(devices) + 1))
    names = list(parts)
    for column, part in enumerate(devices, start=1):
        weights[names.index(part), column] = math.exp(_log_sd(profile, part))
    weighted = WeightedCost(cost=scenario.cost, weights=dict(zip(names, weights, strict=True)))
    wide = [np.repeat(chunk, weights.shape[1]) for chunk in chunks]
    ttft = _ttft_s(scenario, build_program(scenario, strategy, wide, weighted))
    moved = np.abs(np.log(ttft[1:] / ttft[0]))
    squares: dict[str, float] = {}
    for part, move in zip(devices, moved, strict=True):
        squares[part.kind] = squares.get(part.kind, 0.0) + float(move) ** 2
    log_sd = {kind: math.sqrt(square) for kind, square in squares.items()}
    slower = _slower_host(scenario, profile)
    if slower is not None:
        log_sd["host"] = abs(math.log(_ttft_s(slower, build_program(slower, strategy, chunks))[0] / ttft[0]))
    return log_sd


def _log_sd(profile: CalibrationProfile, part: Part) -> float:
    """Of one part of the device's time; products whose shape was measured are known better."""
    fit = profile.operations.get(part.kind)
    if fit is None:
        return 0.0
    known = part.product is not None and profile.kernels.gemm.is_measured(part.product)
    return fit.interpolated_log_sd if known and fit.interpolated_log_sd is not None else fit.log_sd


def _slower_host(scenario: Scenario, profile: CalibrationProfile) -> Scenario | None:
    """The scenario with a host that is slower by one standard deviation; None where that is not known."""
    fit = profile.operations.get("host")
    host = profile.host
    if fit is None or not host.layer_s + host.kernel_s:
        return None
    factor = math.exp(fit.log_sd)
    host = replace(
        host,
        layer_s=host.layer_s * factor,
        kernel_s=host.kernel_s * factor,
        gather_piece_s=host.gather_piece_s * factor,
    )
    return replace(scenario, profile=replace(profile, host=host))


def _links_log_sd(scenario: Scenario, profile: CalibrationProfile) -> float:
    """How little the links are known; 0 where there are none, or where errors of whole TTFTs hold it already."""
    if scenario.num_gpus == 1:
        return 0.0
    if not scenario.links_are_measured:
        return _NOMINAL_LINKS
    fits = [profile.operations[kind] for kind in ("send_recv", "all_gather") if kind in profile.operations]
    return 0.0 if profile.residual is not None else max((fit.log_sd for fit in fits), default=0.0)


def _moved_by_links(scenario: Scenario, strategy: Strategy, partition: Partition, log_sd: float) -> float:
    """How much log TTFT moves when links are slower by that."""
    chunks = columns(partition.chunk_lens)
    before, after = (
        _ttft_s(one, build_program(one, strategy, chunks))[0]
        for one in (scenario, scenario.with_slower_links(math.exp(log_sd)))
    )
    return abs(math.log(after / before))


def _ttft_s(scenario: Scenario, program: Program) -> Array:
    """TTFT of each column. Flows that share a bus are taken to have a fair share each: only ratios count here."""
    cluster = scenario.cluster
    if cluster.shares_bandwidth:
        flows = max(1, cluster.num_gpus - 1)
        cluster = scenario.with_own_links(cluster.link.bandwidth_bytes_per_s / flows).cluster
    return np.asarray(run_program(program, cluster)[-1])
