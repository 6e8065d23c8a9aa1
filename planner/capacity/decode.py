"""The fleet that decodes, and the time for which the transfer of a KV cache to this fleet keeps a group busy.

The fleet that decodes has tensor-parallel groups, which run one batch each. A step computes one token of each sequence
of the batch. It reads the weights once, and the cache of each sequence. The batch of a group is the largest whose step
is within the time per output token (TPOT) and whose caches fit next to the weights. After its first token, a sequence
takes one TPOT per token. The fleet has room for the largest number of sequences at one time. The host issues a step at
once, as a CUDA graph. Steps with fewer sequences, which are faster, and speculation are not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvrsim.errors import InputError
from kvrsim.io.schema import fields_to_json
from kvrsim.memory import RUNTIME_BYTES
from kvrsim.model.spec import ModelSpec
from kvrsim.program import Array
from kvrsim.scenario import MAX_BATCH, Scenario
from planner.capacity.fleet import FleetLimits
from planner.capacity.workload import Lengths, Workload
from planner.decode import decoding_rank, step_s
from planner.grid import largest

MEANING = (
    "each group uses tensor parallelism and the largest batch that fits in memory and meets the TPOT at the mean"
    " context; there are enough groups for the largest number of sequences that decode at the same time"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KvTransfer:
    """Transfer of caches from the fleet that prefills to the fleet that decodes."""

    bytes_per_s_a_gpu: float  # bandwidth per GPU, as given
    mean_bytes: float  # mean size of a request's cache
    max_bytes: float
    mean_bytes_per_s: float | None  # mean rate of all transfers together; None: all requests arrive at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Transfer of a cache from all GPUs that hold a part of it, layer by layer while later layers are computed."""

    model: ModelSpec
    bytes_per_s: float  # bandwidth of one GPU
    element_bytes: int  # bytes of one activation value; a model may cache smaller values

    def nbytes(self, context_len: Lengths) -> Array:
        """Bytes of the cache of each context."""
        width = self.model.cached_element_bytes(self.element_bytes)
        mixers = (layer.mixer for layer in self.model.layers)
        each = (mixer.cache_bytes(context_len.astype(float), width) for mixer in mixers if mixer is not None)
        return sum(each, np.zeros(len(context_len)))

    def after_s(self, context_len: Lengths, ttft_s: Array, gpus: Lengths) -> Array:
        """Seconds from the first token until the whole cache has left a group; `gpus`: GPUs with parts of it.

        The first layer's cache leaves after that layer is computed, the last layer's cache after the first token.
        """
        whole_s = self.nbytes(context_len) / (self.bytes_per_s * gpus)
        prefill_s = np.where(np.isfinite(ttft_s), ttft_s, 0.0)
        one_layer_s = np.minimum(whole_s, prefill_s) / self.model.num_hidden_layers
        return np.asarray(np.maximum(whole_s, prefill_s) + one_layer_s - prefill_s)

    def summary(self, workloads: Sequence[Workload]) -> KvTransfer:
        """Mean and largest size, and mean rate, of the transfers of all requests."""
        nbytes = np.concatenate([self.nbytes(workload.context_len) for workload in workloads])
        duration_s = sum(workload.duration_s for workload in workloads)
        return KvTransfer(
            bytes_per_s_a_gpu=self.bytes_per_s,
            mean_bytes=float(nbytes.mean()),
            max_bytes=float(nbytes.max()),
            mean_bytes_per_s=float(nbytes.sum()) / duration_s if duration_s else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """The sequences that are decoded; arrays of shape (N,)."""

    first_token_s: Array  # time of the first token; inf: never served
    context_len: Lengths
    output_tokens: Lengths

    @property
    def steps(self) -> Array:
        """Decode steps of each sequence, one less than its tokens because prefill computes the first."""
        return np.where(np.isfinite(self.first_token_s), np.maximum(0.0, self.output_tokens - 1.0), 0.0)

    @property
    def mean_context(self) -> int:
        """Mean context of a decode step, tokens."""
        tokens = self.context_len + self.output_tokens / 2
        return math.ceil(float((self.steps * tokens).sum() / self.steps.sum()))

    def most_at_once(self, tpot_s: float) -> int:
        """The largest number of sequences that are decoded at the same time."""
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
    batch: int  # sequences per group
    limited_by: Literal["memory", "tpot", "requests"]  # reason why the batch is not larger
    step_s: float  # time of a step with a full batch
    tpot_s: float  # target of the time per output token
    context_tokens: int  # mean context for which the batch and its step are computed
    sequences_at_once: int  # largest number of sequences at the same time
    tokens_per_s: float  # rate of the whole fleet with full batches
    cost_per_hour: float | None  # None: no price was given

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return fields_to_json(self) | {"meaning": MEANING}


def decode_fleet(scenario: Scenario, limits: FleetLimits, sequences: Sequences, tpot_s: float) -> DecodeFleet | str:
    """The smallest or cheapest fleet that decodes the sequences within the TPOT, or the reason why there is none."""
    context, at_once = sequences.mean_context, sequences.most_at_once(tpot_s)
    fleets: list[DecodeFleet] = []
    fastest_s = math.inf
    for size in limits.sizes:
        try:
            per_rank = decoding_rank(scenario, size)
        except InputError:  # the heads are not divisible by the size, or the group would span nodes
            continue
        width = per_rank.request.dtype_bytes
        free = per_rank.memory_limit.nbytes - RUNTIME_BYTES - per_rank.share.weight_bytes(width)
        room = min(MAX_BATCH, math.floor(free / per_rank.share.cache_bytes(context, width)))
        if room < 1:
            continue
        fastest_s = min(fastest_s, step_s(per_rank, 1, context))

        def is_in_time(batch: int, per_rank: Scenario = per_rank) -> bool:
            return step_s(per_rank, batch, context) <= tpot_s

        batch = largest(is_in_time, min(room, at_once))
        if batch:
            replicas, taken_s = math.ceil(at_once / batch), step_s(per_rank, batch, context)
            fleets.append(
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
    if fleets:
        return min(fleets, key=lambda one: (limits.cost(one.gpus_per_group) * one.replicas, one.gpus_per_group))
    reason = "its cache does not fit beside the weights"
    if math.isfinite(fastest_s):
        reason = f"a step of one sequence takes at least {1e3 * fastest_s:.3g} ms"
    return f"no group decodes at {1e3 * tpot_s:g} ms per token: {reason}"
