"""The calls of ring-flash-attention's benchmarks, as operations of each GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvrsim.cost.layer import LayerCosts
from kvrsim.profile.rates.elementwise import Traffic
from kvrsim.program import AllGather, Array, Compute, Op, RingPass, beside_message_s
from kvrsim.scenario import Scenario
from kvrsim.strategies import Step, get_strategy

GPUS, TOKENS = 8, 8192  # of the benchmark; tokens a GPU
Packing = tuple[int, ...]  # lengths of the sequences on one GPU
# What benchmark_varlen_kvpacked_func.py packs in turn; over all GPUs the sequences are 8 times as long.
WHOLE: tuple[Packing, ...] = ((TOKENS,),)
PACKED: tuple[Packing, ...] = (*WHOLE, (256, 7392, 544), (4096, 4096), (3104, 3200, 1600, 160, 128))
_HEAD_GROUPS = 2  # heads_k_stride = 4 of 8 KV heads
Layer = tuple[tuple[Op, ...], ...]  # operations of each rank
Ops = Callable[[Scenario, Packing], Layer]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to run attention over all GPUs, and its published row."""

    title: str
    strategy: str  # as the row has it
    packed: bool
    ops: Ops  # of one call

    @property
    def packings(self) -> tuple[Packing, ...]:
        """Of the calls of its benchmark, in turn."""
        return PACKED if self.packed else WHOLE


def ring(strategy: str) -> Ops:
    """The attention of a ring; every packed sequence is split over all GPUs, and they share kernels and messages."""

    def ops(scenario: Scenario, packing: Packing) -> Layer:
        parts = [_attention(scenario, strategy, tokens) for tokens in packing]
        return tuple(tuple(map(_together, zip(*rank, strict=True))) for rank in zip(*parts, strict=True))

    return ops


def _attention(scenario: Scenario, strategy: str, tokens: int) -> Layer:
    (costs,) = scenario.layer_costs()
    chunks = (np.array([float(tokens)]),) * GPUS
    step = Step(costs, chunks, tuple(rank * chunks[0] for rank in range(GPUS)))
    layers = (get_strategy(strategy).layer(step, rank) for rank in range(GPUS))
    return tuple(tuple(op for op in layer if getattr(op, "kind", None) in ("attention", "merge")) for layer in layers)


def _together(ops: Sequence[Op]) -> Op:
    """The same operation of several sequences as one."""
    works = [op for op in ops if isinstance(op, Compute | RingPass)]
    device_s = np.sum([op.device_s for op in works], axis=0)
    if isinstance(works[0], Compute):
        return replace(works[0], device_s=device_s)
    nbytes = np.sum([op.nbytes for op in works if isinstance(op, RingPass)], axis=0)
    return replace(works[0], device_s=device_s, nbytes=nbytes)


def tsp(scenario: Scenario, packing: Packing) -> Layer:
    """kvrsim's own all-gather: K and V whole, then one call; packed sequences lie one after another over all GPUs."""
    (costs,) = scenario.layer_costs()
    gather = AllGather(nbytes=costs.kv_bytes(tokens()))
    return tuple((gather, _compute(_call_s(scenario, costs, packing, rank))) for rank in range(GPUS))


def by_heads(scenario: Scenario, packing: Packing) -> Layer:
    """llama3_flash_attn_varlen: a call a group of heads, K and V of the next group gathered beside it.

    K and V of a group's heads are picked before they are sent, and the groups' outputs joined, by copies.
    """
    (costs,) = scenario.layer_costs()
    group = costs.on_heads(_HEAD_GROUPS)
    gather = AllGather(nbytes=group.kv_bytes(tokens()) / 2)  # of K; another of V
    path = scenario.cluster.path(0, 1)
    gather_s = 2 * (path.gather_launch_s + (GPUS - 1) * path.gather_step_s(gather.nbytes, GPUS))
    output = costs.model.num_attention_heads * costs.model.head_dim
    joined = _copy(costs, 1, output)
    picked = _copy(costs, 2, 2 * group.model.num_key_value_heads * costs.model.head_dim)

    def rank_ops(rank: int) -> tuple[Op, ...]:
        call_s = _call_s(scenario, group, packing, rank)
        beside = _compute(beside_message_s(call_s, gather_s, costs.message_share))
        return picked, gather, gather, *[picked, beside] * (_HEAD_GROUPS - 1), _compute(call_s), joined

    return tuple(map(rank_ops, range(GPUS)))


def _call_s(scenario: Scenario, costs: LayerCosts, packing: Packing, rank: int) -> Array:
    """One call with a rank's tokens of packed sequences, each against all tokens of its sequence before it."""
    begin, end = rank * TOKENS, (rank + 1) * TOKENS
    seconds, first = np.zeros(1), 0
    for tokens in packing:
        last = first + GPUS * tokens
        start, stop = max(first, begin), min(last, end)
        if stop > start:
            seconds = seconds + costs.attention_s(np.array([stop - start + 0.0]), np.array([start - first + 0.0]))
        first = last
    return seconds


def _copy(costs: LayerCosts, kernels: int, elements: int) -> Compute:
    """So many elements a token, read and written."""
    return _compute(costs.cost.traffic_s(tokens(), (Traffic("copy", 4.0 * elements, kernels),)))


def _compute(device_s: Array) -> Compute:
    return Compute(name="attention", device_s=device_s, kind="attention")


def tokens() -> Array:
    """Of one GPU, as costs take them."""
    return np.array([float(TOKENS)])


VARIANTS = (
    Variant(title="ring", strategy="ring", packed=False, ops=ring("ring")),
    Variant(title="striped", strategy="striped", packed=False, ops=ring("striped")),
    Variant(title="zigzag ring", strategy="zigzag-ring", packed=False, ops=ring("zigzag-ring")),
    Variant(title="all-gather, packed", strategy="all-gather", packed=True, ops=by_heads),
    Variant(title="all-gather as `tsp`, packed", strategy="all-gather", packed=True, ops=tsp),
    Variant(title="ring, packed", strategy="ring", packed=True, ops=ring("ring")),
    Variant(title="zigzag ring, packed", strategy="zigzag-ring", packed=True, ops=ring("zigzag-ring")),
)
