"""Advice: changes of the question that make the answer faster, or as fast with fewer GPUs, each simulated.

A change is simulated for the strategies that were fastest without it and for strategies of the same kinds. The plan of
the changed question compares these strategies among others, so its TTFT is the one here or a shorter one (within the
2 % inside which a plan prefers what is easier to deploy). The first simulations of all changes together take no more
modelled work than the plan's search budget; changes for which it does not suffice are named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from kvrsim.arguments import SearchArgs
from kvrsim.errors import InputError
from kvrsim.execution import Execution
from kvrsim.executors.access import execution_of
from kvrsim.results.results import NEAR, Advice
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from kvrsim.units import format_tokens
from planner.candidates import Candidate, ComparedStrategies, Search, all_for, could_fit, rare_for, search_all
from planner.estimate import estimate_s
from planner.limits import OPERATIONS
from planner.work import first_s

_SMALL_TYPE = "fp8"  # type with the fastest matrix products
_FAST_KERNEL = "flash"  # the fastest attention kernel
_KINDS = 3  # number of the plan's fastest strategies whose kinds are tried under a change
_MOST_TRIED = 4  # number of strategies of these kinds that are simulated under a change
_KINDS_ON_A_BUS = 1  # the same where ranks share a bus: a simulation of one partition takes 100 times as long
_LEAST_GAIN = NEAR - 1  # a change with a smaller gain is no advice: its plan may prefer what is easier to deploy
_LEAST_GAIN_OF_FEWER_GPUS = 0.01  # the same of a change to fewer GPUs: it is within what a search leaves
# Share of the plan's search budget for the searches of one change, where partitions without a search are far from the
# best: pipelines' even pieces, and chunks on a shared bus. Other analytical chunks are nearly the best.
_BUDGET_SHARE = 0.1


class Change(NamedTuple):
    """The question with other options."""

    options: str  # options to add, as on the command line
    scenario: Scenario
    least_gain: float = _LEAST_GAIN


class Advised(NamedTuple):
    """What simulated changes of the question do to the best candidate's TTFT."""

    faster: tuple[Advice, ...] = ()  # changes with a shorter TTFT
    as_fast: Advice | None = None  # half the GPUs, if they are as fast within 2 %, and not faster
    not_tried: tuple[str, ...] = ()  # options of the changes whose simulations take longer than the search budget


def advice_of(best: Candidate, ranked: Sequence[Candidate], search: Search, *, is_named: bool) -> Advised:
    """The changes that make the best candidate's question faster, those of the engine's launch first; and fewer GPUs.

    ranked: the plan's candidates, what fits first, then the fastest first.
    is_named: whether the user named the strategies; then no others are tried.
    Only strategies of the search's engine count, if the plan's best one is of this engine.
    """
    scenario = best.scenario
    engine = search.engine
    if engine is not None and not engine.has(best.execution):
        engine = None
    is_bus = scenario.cluster.shares_bandwidth
    is_searched = best.strategy.partition_rule == "searched-pieces" or is_bus
    budget_s = _BUDGET_SHARE * search.options.search_budget if is_searched else 0.0
    is_short = search.options.search_budget < SearchArgs().search_budget  # it may end before the advised strategy
    quiet = replace(search, on_progress=None, on_candidate=None)
    left_s = search.options.search_budget
    tried = [one.strategy for one in ranked]
    if not is_named:
        kinds = _KINDS_ON_A_BUS if is_bus else _KINDS
        fit = [one for one in ranked if one.fits]
        tried = [one.strategy for one in fit if engine is None or engine.has(one.execution)][:kinds]
    found = list[Advice]()
    as_fast: Advice | None = None
    not_tried = list[str]()
    for change in changes(best, search.cluster_gpus or scenario.num_gpus):
        executions = _named(change.scenario, tried) if is_named else _alike(change.scenario, tried)
        launched = [one for one in executions if _fits(one) and (engine is None or engine.has(one))]
        if not is_named:
            launched = _likeliest(launched, ranked)
        affordable = list[Execution]()
        for execution in launched:
            if first_s(execution) <= left_s:
                affordable.append(execution)
                left_s -= first_s(execution)
        if launched and not affordable:
            not_tried.append(change.options)
        if not affordable:
            continue
        first_simulations_s = sum(map(first_s, affordable))
        options = SearchArgs(stride=search.options.stride, search_budget=budget_s + first_simulations_s)
        compared = ComparedStrategies(executions=tuple(affordable), limited=True)
        by_name = search_all(compared, replace(quiet, options=options)).by_name
        fitting = [candidate for candidate in by_name.values() if candidate.fits]
        if not fitting:
            continue
        fastest = min(fitting, key=lambda candidate: candidate.ttft_s)
        if fastest.ttft_s < best.ttft_s * (1 - change.least_gain):
            words = change.options
            if is_short and not is_named:
                words += f" --strategies {fastest.strategy.name}"
            found.append(Advice(change=words, ttft_s=fastest.ttft_s))
        elif change.scenario.num_gpus < scenario.num_gpus and fastest.ttft_s <= best.ttft_s * NEAR:
            as_fast = Advice(change=change.options, ttft_s=fastest.ttft_s)
    return Advised(tuple(found), as_fast, tuple(not_tried))


def changes(best: Candidate, most_gpus: int) -> Iterator[Change]:
    """Changes of the best candidate's question that the question does not already have and that it allows.

    most_gpus: number of GPUs of the whole cluster.
    """
    scenario = best.scenario
    request = scenario.request
    has_experts = any(layer.num_experts for layer in scenario.model.layer_kinds)
    if has_experts and not scenario.expert_parallel and scenario.num_gpus > 1:
        with suppress(InputError):
            yield Change("--expert-parallel", replace(scenario, expert_parallel=True))
    dtypes = tuple(scenario.cluster.gpu.peak_flops) if scenario.profile is None else scenario.profile.dtypes
    if request.dtype != _SMALL_TYPE and _SMALL_TYPE in dtypes and scenario.model.quantization is None:
        yield Change(f"--dtype {_SMALL_TYPE}", replace(scenario, request=replace(request, dtype=_SMALL_TYPE)))
    kernels = () if scenario.profile is None else scenario.profile.attention_kernels
    if scenario.kernel != _FAST_KERNEL and _FAST_KERNEL in kernels:
        yield Change(f"--attention {_FAST_KERNEL}", replace(scenario, kernel=_FAST_KERNEL))
    fewer = scenario.num_gpus // 2
    if fewer >= 1:
        with suppress(InputError):
            yield Change(f"--gpus {fewer}", scenario.on_gpus(fewer), _LEAST_GAIN_OF_FEWER_GPUS)
    more = 2 * scenario.num_gpus
    if more <= most_gpus:
        with suppress(InputError):
            yield Change(f"--gpus {more}", scenario.on_gpus(more))
    if not request.cached_prefix and request.context_len > 1 and _is_limited_by_attention(best):
        half = request.context_len // 2
        cached = replace(request, cached_prefix=half)
        with suppress(InputError):
            yield Change(f"--cached-prefix {format_tokens(half)}", replace(scenario, request=cached))


def _is_limited_by_attention(best: Candidate) -> bool:
    attention = {OPERATIONS[kind] for kind in ("attention", "latent", "sparse")}
    return bool(best.limits) and best.limits[0].operation in attention


def _alike(scenario: Scenario, strategies: Sequence[Strategy]) -> list[Execution]:
    """The strategies that run here, the rare ones as well, that differ from these in their sizes only."""
    kinds = {_kind(strategy.name) for strategy in strategies}

    def is_alike(name: str) -> bool:
        return _kind(name) in kinds

    return [*all_for(scenario, is_alike)[0], *rare_for(scenario, is_alike)]


def _named(scenario: Scenario, strategies: Sequence[Strategy]) -> list[Execution]:
    """Those of these strategies that run here and need no table."""
    executions = list[Execution]()
    for strategy in strategies:
        if strategy.partition_rule != "table":
            with suppress(InputError):
                executions.append(execution_of(scenario, replace(strategy, stage_layers=None)))  # layers are searched
    return executions


def _fits(execution: Execution) -> bool:
    """Whether some partition could fit in memory; False also if there are fewer tokens than ranks."""
    try:
        return could_fit(execution)
    except InputError:
        return False


def _likeliest(executions: Sequence[Execution], ranked: Sequence[Candidate]) -> list[Execution]:
    """Those with the shortest estimates; an estimate is off by as much as for the plan's best of its kind."""
    first = dict[str, Candidate]()  # the plan's best, by kind
    for candidate in ranked:
        first.setdefault(_kind(candidate.strategy.name), candidate)

    @cache
    def factor(kind: str) -> float:
        return first[kind].ttft_s / estimate_s(first[kind].execution)

    def likely_s(execution: Execution) -> float:
        return factor(_kind(execution.strategy.name)) * estimate_s(execution)

    return sorted(executions, key=likely_s)[:_MOST_TRIED]


def _kind(name: str) -> str:
    """A strategy's name without sizes: "tp+kvr-s" for tp2+kvr-s."""
    return re.sub(r"\d+", "", name)
