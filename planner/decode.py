"""Duration of a decode step, and mean TTFT of users of an engine that prefills and decodes on the same GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvrsim.closed_loop import OUTPUT_TOKENS, ClosedLoop
from kvrsim.errors import InputError
from kvrsim.execution import place
from kvrsim.placement import PlacedScenario
from kvrsim.program import work_s
from kvrsim.results.results import Plan, SimResult
from kvrsim.scenario import Request, Scenario
from kvrsim.strategies import STRATEGIES
from kvrsim.strategies.layers import head

if TYPE_CHECKING:
    from kvrsim.arguments import UsersArgs

_Result = TypeVar("_Result", Plan, SimResult)


def with_users(result: _Result, scenario: Scenario, args: UsersArgs) -> _Result:
    """The result with the mean TTFT of closed-loop users.

    Raises InputError where a prefill has several sequences: users send one prompt each.
    """
    assert args.users is not None
    if scenario.request.batch > 1:
        raise InputError("users", args.users, "with --batch 1: each user sends one prompt")
    loop = closed_loop(scenario, args.users, args.output_tokens or OUTPUT_TOKENS)
    options = (*result.question.options, ("users", loop.users), ("output_tokens", round(loop.output_tokens)))
    question = replace(result.question, options=options)
    if isinstance(result, SimResult):
        return replace(result, question=question, users=loop, mean_ttft_s=loop.mean_ttft_s(result.ttft_s))
    results = {one.strategy: replace(one, mean_ttft_s=loop.mean_ttft_s(one.ttft_s)) for one in result.strategies}
    first = results[result.first.strategy]
    return replace(result, question=question, users=loop, strategies=tuple(results.values()), first=first)


def closed_loop(scenario: Scenario, users: int, output_tokens: int) -> ClosedLoop:
    """Closed-loop users of the scenario's GPUs, which decode with the widest possible tensor parallelism.

    TPOT is the time of a decode step with one sequence per user, at the mean context of decoding.
    """
    context = scenario.request.context_len + output_tokens // 2
    for size in range(scenario.num_gpus, 0, -1):
        try:
            per_rank = decoding_rank(scenario, size)
        except InputError:  # the heads are not divisible by the size, or the group would span nodes
            continue
        break
    return ClosedLoop(
        users=users,
        tpot_s=step_s(per_rank, users, context),
        output_tokens=output_tokens,
        prompt_tokens=scenario.request.context_len,
    )


def step_s(per_rank: PlacedScenario, batch: int, context: int) -> float:
    """Seconds of one step, which computes one token for each of `batch` sequences of `context` tokens.

    Engines replay a graph of the step's kernels, so kernel launches cost no extra time. Its products and experts mainly
    read weights, and its attention reads the caches.
    """
    request = replace(per_rank.request, context_len=context, cached_prefix=context - 1, batch=batch)
    scenario = replace(per_rank, request=request)
    if scenario.host.launch_s:
        scenario = scenario.with_host(replace(scenario.host, launch_s=0.0, collective_s=0.0))
    keys = np.full(1, float(context))
    cost = scenario.decode_cost
    layers = scenario.layer_costs(cost)
    group = scenario.group
    host = scenario.host
    device_s = 0.0
    for kind in scenario.share.layer_kind_index:
        costs = layers[kind]
        device_s += float(costs.decode_s(keys)[0])
        if group is not None:
            nbytes = np.full(1, float(batch * scenario.share.hidden_size * request.dtype_bytes))
            device_s += costs.num_sums * float((host.collective_s + group.all_reduce_s(nbytes))[0])
    return host.step_s + device_s + sum(float(work_s(op)[0]) for op in head(scenario, np.ones(1), cost))


def decoding_rank(scenario: Scenario, size: int) -> PlacedScenario:
    """The scenario per rank, where `size` GPUs decode with tensor parallelism."""
    request = Request(context_len=1, dtype=scenario.request.dtype)
    return place(replace(scenario.on_gpus(size), request=request), STRATEGIES["single" if size == 1 else "tp"]).placed
