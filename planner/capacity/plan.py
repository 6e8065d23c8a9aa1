"""plan_capacity: from requests and a target to a fleet, its alternatives, and what does not meet the target."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from kvrsim.errors import InputError
from kvrsim.results.question import Question
from kvrsim.scenario import Scenario
from kvrsim.strategies import KVR_S, Strategy, label_of
from kvrsim.text import without
from planner.capacity.answer import CapacityPlan, FleetAnswer, Infeasible, KvTransfer, groups_of
from planner.capacity.confidence import MEANING_OF_DRAWN, MEANING_OF_TRACE
from planner.capacity.decode_fleet import Decoded, DecodeFleet, decode_fleet
from planner.capacity.designs import DesignSearch, Limits
from planner.capacity.fleet.decoding import Decoding, Transfer
from planner.capacity.fleet.layouts import WHOLE, Choice
from planner.capacity.fleet.packed_times import PackedTimes
from planner.capacity.fleet.times import ServiceTimes
from planner.capacity.fleet_search import FleetSearch, evaluations_of
from planner.capacity.front import Fleets
from planner.capacity.request import CapacityRequest
from planner.capacity.workloads.workload import Workload
from planner.deploy import deploy_engine
from planner.processes import Pool
from planner.table.table import PartitionTable
from planner.uncertainty.intervals import provenance

LONG = 60_000  # requests, above which designs are searched on a stretch of the workload
_STRETCH = 40_000  # requests of that stretch
_ALTERNATIVES = 8
DISPATCH = {
    "first-come": "each range of lengths has its own queue, first come, first served",
    "shortest-first": "each range of lengths has its own queue, fewest new tokens first",
}


def plan_capacity(
    scenario: Scenario,
    request: CapacityRequest,
    *,
    strategies: Sequence[str | Strategy] | None = None,
    table: PartitionTable | None = None,
    engines: Sequence[str] = (),
    warnings: Sequence[str] = (),
    pool: Pool | None = None,
    on_progress: Callable[[str], None] | None = None,
    on_stage: Callable[[Callable[[], str]], None] | None = None,
) -> CapacityPlan:
    """Search the cheapest fleet that meets the target.

    strategies: what groups may run, as in make_plan; None: the usual ones. table: partitions of KVR-S, as KVR-P; None:
        they are searched. engines: that must have the strategies. pool: who simulates groups;
        None: this process. on_progress: called with each stage in words. on_stage: in its place, with what says how far
        the stage is.
        Raises InputError where no group size has a strategy, or the table has no entries for a group size.
    """
    begin_s = time.perf_counter()
    named = None if strategies is None else tuple(strategies)
    packs = request.pack_tokens is not None
    choice = Choice(asked=named, table=table, engines=tuple(map(deploy_engine, engines)), packs=packs)
    request = replace(request, limits=_limits(scenario, choice, request.limits))
    tell = on_stage or (lambda stage: None if on_progress is None else on_progress(stage()))
    count = request.replications if request.source.is_random else 1
    workloads = [request.source.workload(request.seed, number) for number in range(count)]
    notes = [*_about_setting(warnings), *_about_table(scenario, choice, request.limits.sizes)]
    request = replace(request, decoding=_decoding(scenario, request))
    times = _times(scenario, request, workloads, choice)
    tell(lambda: f"prefill times of groups: {times.num_kinds} kinds of group done")
    if pool is not None and not pool.is_here:
        times.fill(request.limits.sizes, pool)
    evaluations = evaluations_of(request, workloads, times)
    search = FleetSearch(request, evaluations, DesignSearch(evaluations, request.limits))
    tell(lambda: f"fleets: {evaluations.simulated} requests simulated")
    fits = search.fits(_stretch(workloads), times)
    answers = [(fit, search.answer(fit.plans)) for fit in fits]
    made = [search.with_confidence(fit, answer) if request.needs_confidence else answer for fit, answer in answers]
    met = [answer for answer in made if answer is not None and answer.meets]
    met.sort(key=lambda answer: (search.cost(answer), answer.target.value_s))
    tell(lambda: f"Pareto front: {evaluations.simulated} requests simulated")
    fleets = Fleets.of(evaluations, request.limits, fits, search.largest())
    tried = fleets.tried()
    pareto = fleets.points(fleets.front(tried))
    longest = max(int(workload.context_len.max()) for workload in workloads)
    asked = replace(scenario.request, context_len=longest, cached_prefix=0)
    largest = replace(scenario.on_gpus(max(request.limits.sizes)), request=asked)
    infeasible = tuple(search.infeasible(fits))
    decodes = _decode_fleet(scenario, request, workloads[0], met[0]) if met else None
    if isinstance(decodes, str):
        infeasible = (*infeasible, Infeasible(gpus_per_group=None, code="decode", reason=decodes))
    unnamed = [size for size in request.limits.sizes if (size, "memory") not in _causes(infeasible)]
    notes += [*_notes(scenario, workloads[0], times, request.limits.sizes), *_about_memory(workloads, times, unnamed)]
    if left_out := choice.left_out(largest):
        notes.append(f"not tried: {', '.join(left_out)}; --strategies tries those that it names, or all")
    objective: Literal["cost", "gpus"] = "cost" if request.limits.by_cost else "gpus"
    return CapacityPlan(
        question=Question.of(
            largest,
            seed=request.seed,
            strategies=None if strategies is None else [label_of(one) for one in strategies],
            slo_ttft_s=request.target.slo_s,
            percentile=request.target.percentile,
            objective=objective,
            group_sizes=list(request.limits.sizes),
            deployable_on=list(engines),
        ),
        model=scenario.model.name,
        profile=scenario.profile_name,
        cluster=largest.cluster,
        memory_limit=scenario.memory_limit,
        slo_ttft_s=request.target.slo_s,
        percentile=request.target.percentile,
        objective=objective,
        answer=met[0] if met else None,
        nearest_miss=None if met else search.nearest_miss(),
        alternatives=tuple(replace(answer, curves=None) for answer in met[1 : 1 + _ALTERNATIVES]),
        infeasible=infeasible,
        pareto=pareto,
        percentiles=fleets.percentiles,
        tried=tuple(tried),
        explore=partial(fleets.explored, tried),
        workload=workloads[0].summary(),
        kv_transfer=_transfer(request.decoding, workloads),
        decode_fleet=decodes if isinstance(decodes, DecodeFleet) else None,
        decoding=request.decoding.describe(),
        dispatch=_dispatch(request),
        interval_meaning=MEANING_OF_DRAWN if request.source.is_random else MEANING_OF_TRACE,
        simulated_requests=evaluations.simulated,
        seconds=time.perf_counter() - begin_s,
        rests_on=provenance(scenario),
        warnings=tuple(notes),
    )


def _stretch(workloads: Sequence[Workload]) -> Workload | None:
    """The busiest stretch of a long workload, on which designs are searched; None: the workload is short."""
    first = workloads[0]
    if len(workloads) == 1 and len(first) <= LONG:
        return None
    if len(first) <= _STRETCH:
        return first
    return first.busiest(_STRETCH)


def _dispatch(request: CapacityRequest) -> str:
    rule = DISPATCH[request.conditions.order]
    if request.pack_tokens is not None:
        rule += f"; waiting prompts share steps of up to {request.pack_tokens} new tokens, and longer ones are cut"
    return rule


def _times(scenario: Scenario, request: CapacityRequest, workloads: Sequence[Workload], choice: Choice) -> ServiceTimes:
    """What groups take, with prompts one by one or packed."""
    if request.pack_tokens is None:
        return ServiceTimes.for_workloads(scenario, workloads, choice=choice)
    longest_new = max(int(workload.new_tokens.max()) for workload in workloads)
    longest_prefix = max(int(workload.cached_prefix.max()) for workload in workloads)
    return PackedTimes(scenario, longest_new, longest_prefix, choice, request.pack_tokens)


def _about_setting(notes: Sequence[str]) -> list[str]:
    """Notes on the scenario, except on its context length: a workload has many."""
    return without(notes, "context-range")


def _decoding(scenario: Scenario, request: CapacityRequest) -> Decoding:
    """As asked, with the model's cache where its transfer counts."""
    if request.kv_transfer_bytes_per_s is None:
        return request.decoding
    width = scenario.request.dtype_bytes
    transfer = Transfer(model=scenario.model, bytes_per_s=request.kv_transfer_bytes_per_s, element_bytes=width)
    return replace(request.decoding, transfer=transfer)


def _transfer(decoding: Decoding, workloads: Sequence[Workload]) -> KvTransfer | None:
    if decoding.transfer is None:
        return None
    nbytes = np.concatenate([decoding.transfer.nbytes(workload.context_len) for workload in workloads])
    duration_s = sum(workload.duration_s for workload in workloads)
    return KvTransfer(
        bytes_per_s_a_gpu=decoding.transfer.bytes_per_s,
        mean_bytes=float(nbytes.mean()),
        max_bytes=float(nbytes.max()),
        mean_bytes_per_s=float(nbytes.sum()) / duration_s if duration_s else None,
    )


def _decode_fleet(
    scenario: Scenario, request: CapacityRequest, workload: Workload, prefills: FleetAnswer
) -> DecodeFleet | str | None:
    """The fleet that decodes what another one prefilled, or why there is none; None: it was not asked for."""
    if request.tpot_s is None:
        return None
    assert prefills.curves is not None
    decoded = Decoded(
        first_token_s=workload.arrival_s + prefills.curves.ttft_s,
        context_len=workload.context_len,
        output_tokens=workload.output_tokens,
    )
    if not decoded.steps.any():
        raise InputError("tpot", request.tpot_s, "with requests of more than one output token")
    return decode_fleet(scenario, request.limits, decoded, request.tpot_s)


def _limits(scenario: Scenario, choice: Choice, limits: Limits) -> Limits:
    """The limits with the group sizes that some strategy can run on; raises InputError where there are none."""
    sizes = tuple(size for size in limits.sizes if choice.layouts(scenario.on_gpus(size)))
    if not sizes:
        named = ",".join(label_of(one) for one in choice.asked or ())
        where = "".join(f" and that {engine.title} has" for engine in choice.engines)
        raise InputError("strategies", named, f"a strategy that runs on {groups_of(limits.sizes)}{where}")
    return replace(limits, sizes=sizes)


def _about_table(scenario: Scenario, choice: Choice, sizes: Sequence[int]) -> list[str]:
    """A note where the table has another setting; raises InputError where it lacks a group size."""
    table = choice.table
    if table is None:
        return []
    if missing := [size for size in sizes if size > 1 and size not in table.gpu_counts]:
        has = ", ".join(map(str, table.gpu_counts))
        raise InputError("group_sizes", missing[0], f"1 and the numbers of GPUs that the table has: {has}")
    asked = replace(scenario, request=replace(scenario.request, cached_prefix=table.setting.cached_prefix))
    layouts = choice.layouts(scenario.on_gpus(max(sizes))).get(WHOLE, ())
    searched = [one.name for one in layouts if one.partition_rule == "search"] or [KVR_S.name]
    others = table.setting.differences(asked, searched[0])
    name = "kvr-p" if searched[0] == KVR_S.name else searched[0]
    return [f"{name}: the table was made for another setting: {'; '.join(others)}"] if others else []


def _causes(infeasible: Sequence[Infeasible]) -> set[tuple[int | None, str]]:
    return {(one.gpus_per_group, one.code) for one in infeasible}


def _about_memory(workloads: Sequence[Workload], times: ServiceTimes, sizes: Sequence[int]) -> Iterator[str]:
    """Contexts that do not fit in the memory of some groups, one note for all sizes with the same contexts."""
    found: dict[str, list[int]] = {}
    for size in sizes:
        over = [
            workload.context_len[np.isinf(times.least_s(size, workload.new_tokens, workload.cached_prefix))]
            for workload in workloads
        ]
        lengths = np.concatenate(over)
        if len(lengths):
            said = f"{len(lengths)} contexts, from {int(lengths.min())} tokens on, do not fit in the memory of"
            found.setdefault(said, []).append(size)
    for said, alike in found.items():
        yield f"{said} {groups_of(alike)}"


def _notes(scenario: Scenario, workload: Workload, times: ServiceTimes, sizes: Sequence[int]) -> list[str]:
    """Notes on the requests: repairs, contexts too long for the model, values outside the calibrated range."""
    notes = list(workload.notes)
    trained = scenario.model.max_position_embeddings
    longest = int(workload.context_len.max())
    if trained is not None and longest > trained:
        count = int((workload.context_len > trained).sum())
        notes.append(
            f"{count} contexts are longer than the {trained} tokens that {scenario.model.name} supports"
            f" (the longest {longest}); they are simulated anyway"
        )
    if scenario.profile is not None:
        low, high = scenario.profile.valid.context_len
        if longest > high:
            notes.append(f"extrapolated: contexts up to {longest}; profile {scenario.profile_name} has {low} to {high}")
        most = scenario.profile.valid.num_gpus[1]
        if max(sizes) > most:
            notes.append(f"extrapolated: groups of {max(sizes)} GPUs; profile {scenario.profile_name} has up to {most}")
    return notes
