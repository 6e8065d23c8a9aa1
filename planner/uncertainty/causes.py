"""What a prediction rests on that may be off, and by how much: log standard deviations by cause.

Four kinds of causes: parts of the device's time, alone or all together; what delays a prefill as a whole; what
changes it in places, such as a slower host; and whole TTFTs, where a profile or an engine was compared with some.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from kvrsim.engine import Engine
from kvrsim.kernels.coverage import head_dims
from kvrsim.kernels.profile import DEVIATES_OF_80_PERCENT, CalibrationProfile, Residual, ValidRange
from kvrsim.kernels.sensitivity import Part
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy

RUN_TO_RUN = 0.014 / 0.6745  # log standard deviation: medians of repeated serving runs differ by 1.4 %
_PER_DOUBLING = 0.02  # more log standard deviation for each doubling outside of what was measured
_NOMINAL_LINKS = 0.2  # log standard deviation of a bandwidth that nobody measured: NVLink 3 reaches 78 % of its own
# No whole prefill that an engine was compared with had any of these; without measurements they are counted.
UNCOMPARED_KINDS = ("latent", "sparse", "experts", "recurrence")
_COUNTED = 0.5  # their log standard deviation then
_ISSUED = ("layer_s", "kernel_s", "gather_piece_s")  # what a slower host takes longer for
_NAMES = {  # of an engine's terms, as causes
    "request_s": "request",
    "token_s": "tokens",
    "step_s": "step",
    "layer_s": "host",
    "collective_s": "collectives",
}
_SECONDS = {"layer_s": _ISSUED, "step_s": ("step_s",), "collective_s": ("collective_s",)}  # by term of an engine

Cause = Part | str  # a part of the device's time, or the name of what concerns several parts


class Delay(NamedTuple):
    """What the whole prefill waits for before it begins."""

    name: str
    seconds: float
    log_sd: float


class Change(NamedTuple):
    """What changes a prefill in places: `by` gives the scenario in which it takes so many times as long."""

    name: str
    log_sd: float
    by: Callable[[float], Scenario]


def compared_whole(scenario: Scenario) -> Residual | None:
    """Errors of the profile's whole TTFTs; None: it was compared with none, or with those of other software."""
    profile = scenario.profile
    if profile is None or scenario.host != profile.host or scenario.kernel_scale != 1:
        return None
    return profile.residual


def engine_sides(engine: Engine | None) -> tuple[float, float] | None:
    """By how much the logarithm of whole TTFTs may be less and more than predicted, at the ends of an 80 % interval.

    From rows that were left out of the engine's fit; else from the rows around it. None: it was compared with none.
    """
    if engine is None:
        return None
    fit = engine.fit
    if fit is not None and fit.shorter_log is not None and fit.longer_log is not None:
        return fit.shorter_log, fit.longer_log
    log_sd = engine.spread.get("model") if fit is None else fit.log_sd
    return None if log_sd is None else (DEVIATES_OF_80_PERCENT * log_sd,) * 2


def parts_alone(profile: CalibrationProfile, parts: Iterable[Part]) -> dict[Cause, Mapping[Part, float]]:
    """Errors of the parts of the device's time, each independent of the others."""
    return {part: {part: log_sd} for part in parts if (log_sd := _log_sd(profile, part))}


def parts_together(scenario: Scenario, parts: Iterable[Part]) -> dict[Cause, Mapping[Part, float]]:
    """The error that all parts have in common: of an engine's kernels over the profile's, or of the profile's tables.

    An engine's own rows have the tables' error in them; those of other engines may have run other kernels. No rows had
    any of UNCOMPARED_KINDS.
    """
    engine, operations = scenario.engine, {} if scenario.profile is None else scenario.profile.operations
    whole = engine is not None and engine.fit is not None and engine.fit.longer_log is not None
    if whole:  # other engines left out have had other kernels, too
        parts = [part for part in parts if part.kind in UNCOMPARED_KINDS]
    of_table = {part: operations[part.kind].systematic_log_sd or 0.0 for part in parts if part.kind in operations}
    if engine is not None and not whole and scenario.profile and (log_sd := engine.scale_log_sd(scenario.profile.gpu)):
        own = engine.fit is not None and engine.fit.left_out != "engine"
        return {"kernels": {part: log_sd if own else max(log_sd, of_table.get(part, 0.0)) for part in parts}}
    found = {part: log_sd for part, log_sd in of_table.items() if log_sd}
    return {"table and clock": found} if found else {}


def _log_sd(profile: CalibrationProfile, part: Part) -> float:
    """Of one part of the device's time; products whose shape was measured are known better."""
    fit = profile.operations.get(part.kind)
    if fit is None:
        return _COUNTED if part.kind in UNCOMPARED_KINDS else 0.0
    if part.variant is not None and (rates := profile.kernels.recurrence) and part.variant not in rates.kinds:
        return math.hypot(fit.log_sd, rates.alike_log_sd)
    known = part.product is not None and profile.kernels.is_measured(part.product)
    return fit.interpolated_log_sd if known and fit.interpolated_log_sd is not None else fit.log_sd


def software(scenario: Scenario, strategy: Strategy) -> Iterator[Delay | Change]:
    """The terms of the engine, or the host that the profile has, as far as they are not known exactly."""
    host, request = scenario.host, scenario.request
    for term, log_sd in _spread(scenario).items():
        if not log_sd:
            continue
        if term == "request_s":
            yield Delay(_NAMES[term], host.request_s, log_sd)
        elif term == "token_s":
            yield Delay(_NAMES[term], host.token_s * request.batch * request.context_len, log_sd)
        elif term == "step_s" and strategy.pipeline is None and host.prepare_s is None:
            yield Delay(_NAMES[term], host.step_s, log_sd)  # one pass through the layers
        elif term in _SECONDS and (term != "collective_s" or scenario.group is not None):
            seconds = {name: getattr(host, name) for name in _SECONDS[term]}
            if any(seconds.values()):
                yield Change(_NAMES[term], log_sd, _slower_host(scenario, seconds))


def _spread(scenario: Scenario) -> Mapping[str, float]:
    """Log standard deviations of the software's terms."""
    if scenario.engine is not None:
        return scenario.engine.spread
    fit = None if scenario.profile is None else scenario.profile.operations.get("host")
    return {} if fit is None else {"layer_s": fit.log_sd}


def _slower_host(scenario: Scenario, seconds: Mapping[str, float]) -> Callable[[float], Scenario]:
    def by(factor: float) -> Scenario:
        longer = {name: value * factor for name, value in seconds.items()}
        return scenario.with_host(replace(scenario.host, **longer))

    return by


def links(scenario: Scenario) -> Change:
    """Latency and bandwidth of all links; without any on one GPU."""
    if scenario.num_gpus == 1:
        log_sd = 0.0
    elif not scenario.links_are_measured or scenario.profile is None:
        log_sd = _NOMINAL_LINKS
    else:
        fits = scenario.profile.operations
        log_sd = max((fits[kind].log_sd for kind in ("send_recv", "all_gather") if kind in fits), default=0.0)
    return Change("links", log_sd, scenario.with_slower_links)


def prefix_source(scenario: Scenario) -> Change:
    """The bandwidth that a cached prefix is loaded at, which nobody measured; without any where it lies on the GPUs."""
    placement = scenario.prefix_placement

    def by(factor: float) -> Scenario:
        return replace(scenario, prefix_placement=placement.slower(scenario.cluster, factor))

    return Change("prefix link", 0.0 if scenario.prefix_access_plan.source is None else _NOMINAL_LINKS, by)


def run_to_run_log_sd(profile: CalibrationProfile) -> float:
    """As measured where the profile's layers were timed again and again; else as serving engines were seen to do."""
    measured = profile.run_to_run_log_sd
    return RUN_TO_RUN if measured is None else max(measured, RUN_TO_RUN)


def beyond_log_sd(scenario: Scenario, valid: ValidRange) -> float:
    """What is added outside of what the profile was measured on."""
    return _PER_DOUBLING * doublings_beyond(scenario, valid)


def doublings_beyond(scenario: Scenario, valid: ValidRange) -> float:
    """By how many doublings in all the scenario lies outside of what the profile was measured on."""
    sizes = {
        "context_len": scenario.request.context_len,
        "num_gpus": scenario.num_gpus,
        "hidden_size": scenario.model.hidden_size,
    }
    found = [(size, getattr(valid, key)) for key, size in sizes.items()]
    if scenario.profile is not None:
        beyond = [(width, valid.head_dim) for width in head_dims(scenario.model, scenario.profile.kernels)]
        found += sorted(beyond, key=lambda one: _doublings(*one))[-1:]  # the width that is furthest from it
    return sum(_doublings(size, span) for size, span in found)


def _doublings(size: float, span: tuple[int, int]) -> float:
    low, high = span
    return max(0.0, math.log2(low / size), math.log2(size / high))
