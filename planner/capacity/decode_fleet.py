"""The fleet that decodes, beside one that prefills: groups of tensor parallelism that run one batch each.

A step takes one token of every sequence of a batch through all layers: it reads the weights once, and the cache of
every sequence. The largest batch whose step keeps the time per output token, and whose caches fit beside the weights,
is a group's. A sequence is decoded from its first token on, for the time per output token each further one; the fleet
holds as many sequences as are decoded at once at most. The host issues a step at once, as a CUDA graph. Left out: what
a step gains where fewer sequences run, and tokens that speculation adds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from kvrsim.compile import for_strategy
from kvrsim.ends import head
from kvrsim.errors import InputError
from kvrsim.io.schema import fields_to_json
from kvrsim.memory import RUNTIME_BYTES
from kvrsim.program import Array, work_s
from kvrsim.scenario import MAX_BATCH, Request, Scenario
from kvrsim.strategies import STRATEGIES
from planner.capacity.designs import Limits
from planner.capacity.workloads.workload import Lengths
from planner.grid import largest

MEANING = (
    "a group of tensor parallelism decodes the largest batch whose caches fit beside the weights and whose step keeps"
    " the TPOT, at the mean context of decoding; the fleet holds the most sequences that are decoded at once"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """The sequences that are decoded; arrays of shape (N,)."""

    first_token_s: Array  # inf: never
    context_len: Lengths
    output_tokens: Lengths

    @property
    def steps(self) -> Array:
        """Steps of each sequence: the first token is the prefill's."""
        return np.where(np.isfinite(self.first_token_s), np.maximum(0.0, self.output_tokens - 1.0), 0.0)

    @property
    def mean_context(self) -> int:
        """Tokens that a step attends to, of an average step."""
        tokens = self.context_len + self.output_tokens / 2
        return math.ceil(float((self.steps * tokens).sum() / self.steps.sum()))

    def most_at_once(self, tpot_s: float) -> int:
        """The most sequences that are decoded at one time."""
        some = self.steps > 0
        begin_s = np.sort(self.first_token_s[some])
        end_s = np.sort((self.first_token_s + self.steps * tpot_s)[some])
        return int((np.arange(1, len(begin_s) + 1) - np.searchsorted(end_s, begin_s, side="right")).max())


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeFleet:
    """Equal groups that decode."""

    num_gpus: int
    gpus_per_group: int
    replicas: int
    strategy: str
    batch: int  # sequences of a group
    limited_by: Literal["memory", "tpot", "requests"]  # what keeps the batch from being larger
    step_s: float  # of a full batch
    tpot_s: float  # the target
    context_tokens: int  # mean, that the batch and its step are for
    sequences_at_once: int  # at most
    tokens_per_s: float  # of the whole fleet with full batches
    cost_per_hour: float | None  # None: no price was given

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return fields_to_json(self) | {"meaning": MEANING}


def decode_fleet(scenario: Scenario, limits: Limits, decoded: Decoded, tpot_s: float) -> DecodeFleet | str:
    """The smallest or cheapest such fleet, or why there is none."""
    context, at_once = decoded.mean_context, decoded.most_at_once(tpot_s)
    found: list[DecodeFleet] = []
    fastest_s = math.inf
    for size in limits.sizes:
        try:
            placed = _placed(scenario, size)
        except InputError:  # heads that do not divide, or a group over several nodes
            continue
        room = _room(placed, context)
        if room < 1:
            continue
        fastest_s = min(fastest_s, step_s(placed, 1, context))
        batch = _largest(placed, min(room, at_once), context, tpot_s)
        if batch:
            replicas = math.ceil(at_once / batch)
            taken_s = step_s(placed, batch, context)
            found.append(
                DecodeFleet(
                    num_gpus=size * replicas,
                    gpus_per_group=size,
                    replicas=replicas,
                    strategy="single" if size == 1 else "tp",
                    batch=batch,
                    limited_by="memory" if batch == room else "requests" if batch == at_once else "tpot",
                    step_s=taken_s,
                    tpot_s=tpot_s,
                    context_tokens=context,
                    sequences_at_once=at_once,
                    tokens_per_s=replicas * batch / taken_s,
                    cost_per_hour=limits.prices[size] * size * replicas if limits.prices else None,
                )
            )
    if not found:
        what = (
            f"a step of one sequence takes at least {1e3 * fastest_s:.3g} ms"
            if math.isfinite(fastest_s)
            else ("its cache does not fit beside the weights")
        )
        return f"no group decodes at {1e3 * tpot_s:g} ms a token: {what}"
    return min(found, key=lambda one: (limits.cost(one.gpus_per_group) * one.replicas, one.gpus_per_group))


def step_s(placed: Scenario, batch: int, context: int) -> float:
    """Seconds of one step: a token of each of `batch` sequences behind `context` tokens each."""
    asked = replace(placed.request, context_len=context, cached_prefix=context - 1, batch=batch)
    scenario = replace(placed, request=asked)
    one, keys, cost = np.ones(1), np.full(1, float(context)), scenario.cost
    layers, group, host = scenario.layer_costs(cost), scenario.group, scenario.host
    device_s = 0.0
    for kind in scenario.share.layer_kind_index:
        costs = layers[kind]
        device_s += float((costs.qkv_s(one) + costs.decode_attention_s(keys) + costs.output_mlp_s(one))[0])
        if group is not None:
            nbytes = one * float(batch * scenario.share.hidden_size * asked.dtype_bytes)
            device_s += costs.num_sums * float((host.collective_s + group.all_reduce_s(nbytes))[0])
    return host.step_s + device_s + sum(float(work_s(op)[0]) for op in head(scenario, one, cost))


def _placed(scenario: Scenario, size: int) -> Scenario:
    request = Request(context_len=1, dtype=scenario.request.dtype)
    strategy = STRATEGIES["single" if size == 1 else "tp"]
    return for_strategy(replace(scenario.on_gpus(size), request=request), strategy)


def _room(placed: Scenario, context: int) -> int:
    """Sequences whose caches fit beside the weights."""
    width = placed.request.dtype_bytes
    free = placed.memory_limit.nbytes - RUNTIME_BYTES - placed.share.weight_bytes(width)
    return min(MAX_BATCH, max(0, math.floor(free / placed.share.cache_bytes(context, width))))


def _largest(placed: Scenario, room: int, context: int, tpot_s: float) -> int:
    """The most sequences, at most `room`, whose step keeps the target; 0: not even one."""
    return largest(lambda sequences: step_s(placed, sequences, context) <= tpot_s, room)
