"""Remedies if no compared strategy fits in memory: another strategy, more GPUs, another dtype, more memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from kvrsim.errors import InputError
from kvrsim.execution import Execution
from kvrsim.hardware import larger_size, load_cluster
from kvrsim.results.results import Remedy, Shortfall
from kvrsim.scenario import Scenario
from planner.candidates import Candidate, Search, all_for, least_bytes, rare_for

_MOST_GPUS = 1024  # most GPUs that are tried
_RULES = ("whole", "even", "pieces")  # partition rules without a long search
_DTYPE = "fp8"  # dtype with the smallest weights


def shortfall_of(candidates: Sequence[Candidate], cluster_gpus: int | None) -> Shortfall:
    """The memory that the nearest candidate lacks if none of the candidates fits, and remedies that would fit.

    The remedies are another strategy on the same GPUs, if not all were compared; if there is none, more GPUs (doubled
    until a strategy fits, up to 1024), and FP8 weights if the profile has them; and the memory fraction that the
    nearest candidate needs.

    cluster_gpus: number of GPUs of the whole cluster; None: those that take part.
    """
    nearest = min(candidates, key=_peak)
    scenario = nearest.scenario
    peak = _peak(nearest)
    compared = {one.strategy.name for one in candidates}
    remedies = _first_that_fits(scenario, compared, "")
    most_gpus = scenario.num_gpus
    if not remedies:
        remedies, most_gpus = _more_gpus(scenario, cluster_gpus or scenario.num_gpus)
        remedies = (*remedies, *_smaller_weights(scenario))
    return Shortfall(
        strategy=nearest.strategy.name,
        peak_bytes=peak,
        over_bytes=peak - scenario.memory_limit.nbytes,
        most_gpus_tried=most_gpus,
        would_fit=(*remedies, *_more_memory(nearest.execution, peak)),
    )


def _peak(one: Candidate) -> int:
    return max(rank.total for rank in one.memory)


def _more_gpus(scenario: Scenario, cluster_gpus: int) -> tuple[tuple[Remedy, ...], int]:
    """The remedy with the fewest GPUs that were tried, and the most GPUs that were tried.

    A switch has as many ports as its cluster has GPUs: more GPUs need a larger cluster. Other clusters grow.
    """
    tried = scenario.num_gpus
    while 2 * tried <= _MOST_GPUS:
        try:
            larger, change = _on_more_gpus(scenario, 2 * tried, cluster_gpus)
        except InputError:  # exceeds the limit of a cluster, or no built-in cluster has these GPUs
            break
        tried = larger.num_gpus
        if remedies := _first_that_fits(larger, (), change):
            return remedies, tried
    return (), tried


def _on_more_gpus(scenario: Scenario, num_gpus: int, cluster_gpus: int) -> tuple[Scenario, str]:
    """The scenario on more GPUs, and the options that say so; raises InputError if there is no such cluster."""
    if scenario.cluster.topology != "switch" or num_gpus <= cluster_gpus:
        return scenario.on_gpus(num_gpus), f"--gpus {num_gpus}"
    size = larger_size(scenario.cluster, num_gpus)
    cluster = replace(load_cluster(size), num_gpus=num_gpus)
    return replace(scenario, cluster=cluster), f"--cluster {size} --gpus {num_gpus}"


def _smaller_weights(scenario: Scenario) -> tuple[Remedy, ...]:
    profile = scenario.profile
    model = scenario.model
    has = list(scenario.cluster.gpu.peak_flops) if profile is None else profile.dtypes
    if _DTYPE not in has or scenario.request.dtype == _DTYPE or model.quantization is not None:
        return ()
    smaller = replace(scenario, request=replace(scenario.request, dtype=_DTYPE))
    return _first_that_fits(smaller, (), f"--dtype {_DTYPE}")


def _more_memory(execution: Execution, peak: int) -> Iterator[Remedy]:
    fraction = math.ceil(100 * peak / execution.cluster.gpu.memory_bytes) / 100
    if fraction <= 1:
        remedy = _remedy(execution, peak, f"--memory-fraction {fraction:g}")
        yield replace(remedy, memory_fraction=fraction)


def _first_that_fits(scenario: Scenario, compared: Iterable[str], change: str) -> tuple[Remedy, ...]:
    """The strategy with the least peak among other strategies whose partition is not searched, if it fits.

    A pipeline needs the least memory with the largest number of even pieces. Its peak is that of the fastest pieces
    that fit, except on a bus, where these take long to find.
    """
    smallest: Execution | None = None
    peak = scenario.memory_limit.nbytes + 1
    for execution in (*all_for(scenario)[0], *rare_for(scenario)):
        strategy = execution.strategy
        if strategy.partition_rule not in _RULES or strategy.name in compared:
            continue
        with suppress(InputError):  # for example, fewer tokens than GPUs
            if least_bytes(execution) < peak:
                peak = least_bytes(execution)
                smallest = execution
    if smallest is None:
        return ()
    strategy = smallest.strategy
    if strategy.partition_rule == "pieces" and not scenario.cluster.shares_bandwidth:
        peak = _peak(Search().candidate(smallest))
    return (_remedy(smallest, peak, f"{change} --strategies {strategy.name}".strip()),)


def _remedy(execution: Execution, peak: int, change: str) -> Remedy:
    scenario = execution.scenario
    return Remedy(
        change=change,
        strategy=execution.strategy.name,
        num_gpus=scenario.num_gpus,
        dtype=scenario.request.dtype,
        memory_fraction=scenario.memory_fraction,
        peak_bytes=peak,
    )
