"""Remedies if no compared strategy fits in memory: another strategy, more GPUs, another dtype, more memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from kvrsim.errors import InputError
from kvrsim.hardware import Cluster, builtin_clusters, load_cluster
from kvrsim.memory import memory_of
from kvrsim.results.results import Remedy, Shortfall
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import Strategy
from kvrsim.strategies.pipeline import context_ranks
from planner.candidates import Candidate, all_for, choose_partition, distinct, per_rank_scenario, takes_long

_MOST_TIMES, _MOST_GPUS = 16, 512  # largest factor on the GPUs, and largest number of GPUs, that are tried
_RULES = ("whole", "even", "pieces")  # partition rules without a long search
_TRIED = 2  # number of strategies that are tried, in order of their estimated peaks
_DTYPE = "fp8"  # dtype with the smallest weights


def shortfall_of(scenario: Scenario, candidates: Sequence[Candidate]) -> Shortfall:
    """The memory that the nearest candidate lacks if none of the candidates fits, and remedies that would fit.

    The remedies are another strategy without a long search on the same GPUs; if there is none, more GPUs (doubled until
    a strategy fits), and FP8 weights if the profile has them; and the memory fraction that the nearest candidate needs.
    """
    nearest = min(candidates, key=_peak)
    peak = _peak(nearest)
    compared = {one.strategy.name for one in candidates}
    remedies = _first_that_fits(scenario, compared, "")
    if not remedies:
        remedies = (*_more_gpus(scenario), *_smaller_weights(scenario))
    return Shortfall(
        strategy=nearest.strategy.name,
        peak_bytes=peak,
        over_bytes=peak - scenario.memory_limit.nbytes,
        would_fit=(*remedies, *_more_memory(scenario, nearest.strategy.name, peak)),
    )


def _peak(one: Candidate) -> int:
    return max(rank.total for rank in one.memory)


def _more_gpus(scenario: Scenario) -> tuple[Remedy, ...]:
    has, times = _ports(scenario.cluster), 2
    while times <= min(_MOST_TIMES, _MOST_GPUS // scenario.num_gpus):
        try:
            larger = scenario.on_gpus(times * scenario.num_gpus)
        except InputError:  # exceeds the limit of a cluster
            return ()
        num_gpus = larger.num_gpus
        change = f"--gpus {num_gpus}" if num_gpus <= has else f"a cluster of {num_gpus} GPUs,"
        if remedies := _first_that_fits(larger, (), change):
            return remedies
        times *= 2
    return ()


def _ports(cluster: Cluster) -> float:
    """The most GPUs that --gpus accepts; a switch has as many ports as its cluster has GPUs."""
    if cluster.topology != "switch":
        return math.inf
    return load_cluster(cluster.name).num_gpus if cluster.name in builtin_clusters() else cluster.num_gpus


def _smaller_weights(scenario: Scenario) -> tuple[Remedy, ...]:
    profile, model = scenario.profile, scenario.model
    has = list(scenario.cluster.gpu.peak_flops) if profile is None else profile.dtypes
    if _DTYPE not in has or scenario.request.dtype == _DTYPE or model.quantization is not None:
        return ()
    smaller = replace(scenario, request=replace(scenario.request, dtype=_DTYPE))
    return _first_that_fits(smaller, (), f"--dtype {_DTYPE}")


def _more_memory(scenario: Scenario, strategy: str, peak: int) -> Iterator[Remedy]:
    fraction = math.ceil(100 * peak / scenario.cluster.gpu.memory_bytes) / 100
    if fraction <= 1:
        yield _remedy(replace(scenario, memory_fraction=fraction), strategy, peak, f"--memory-fraction {fraction:g}")


def _first_that_fits(scenario: Scenario, compared: Iterable[str], change: str) -> tuple[Remedy, ...]:
    """The strategy with the least peak, if it fits, among other strategies that need no long search.

    Pipelines are ordered by their peak with two pieces per GPU; whether a pipeline fits depends on its own pieces.
    """
    candidates = []
    for strategy in distinct(all_for(scenario)[0]):
        if strategy.partition_rule in _RULES and strategy.name not in compared:
            with suppress(InputError):  # for example, fewer tokens than GPUs
                if not takes_long(scenario, strategy):
                    candidates.append((_rough_peak(scenario, strategy), strategy.name, strategy))
    for rough, name, strategy in sorted(candidates)[:_TRIED]:
        per_rank = per_rank_scenario(scenario, strategy)
        memory = rough
        if strategy.partition_rule == "pieces":
            memory = max(rank.total for rank in memory_of(per_rank, *choose_partition(per_rank, strategy)))
        if memory <= scenario.memory_limit.nbytes:
            return (_remedy(scenario, name, memory, f"{change} --strategies {name}".strip()),)
    return ()


def _rough_peak(scenario: Scenario, strategy: Strategy) -> int:
    per_rank = per_rank_scenario(scenario, strategy)
    tokens, ranks = per_rank.request.new_tokens, per_rank.cluster.num_gpus
    number = min(2 * ranks, tokens // context_ranks(strategy)) if strategy.pipeline is not None else ranks
    partition = Partition.even(tokens, max(1, number))
    return max(rank.total for rank in memory_of(per_rank, strategy, partition))


def _remedy(scenario: Scenario, strategy: str, peak: int, change: str) -> Remedy:
    return Remedy(
        change=change,
        strategy=strategy,
        num_gpus=scenario.num_gpus,
        dtype=scenario.request.dtype,
        memory_fraction=scenario.memory_fraction,
        peak_bytes=peak,
    )
