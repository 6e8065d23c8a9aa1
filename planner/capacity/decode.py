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
from kvrsim.placement import PlacedScenario
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

    def most_at_once(self, tpot_s: float) -> int:
        """The largest number of sequences that are decoded at the same time."""
        decoded = self.steps > 0
        begin_s = np.sort(self.first_token_s[decoded])
        end_s = np.sort((self.first_token_s + self.steps * tpot_s)[decoded])
        at_once = np.arange(1, len(begin_s) + 1) - np.searchsorted(end_s, begin_s, side="right")
        return int(at_once.max(initial=0))


def mean_context(workloads: Sequence[Sequences]) -> int:
    """Mean context of a decode step over all workloads, tokens; at least one sequence needs a step."""
    tokens = sum(
        float((sequences.steps * (sequences.context_len + sequences.output_tokens / 2)).sum())
        for sequences in workloads
    )
    return math.ceil(tokens / sum(float(sequences.steps.sum()) for sequences in workloads))


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _DecodeGroup:
    """Groups of one size that decode, at one mean context."""

    gpus: int
    per_rank: PlacedScenario
    room: int  # sequences whose caches fit in memory beside the weights
    in_time: int  # the largest batch of these whose step is within the TPOT; 0: none


class Decoding:
    """Sizes the fleets that decode within a TPOT. The batches of groups are kept per mean context."""

    def __init__(self, scenario: Scenario, limits: FleetLimits, tpot_s: float) -> None:
        self.scenario = scenario
        self.limits = limits
        self.tpot_s = tpot_s
        self._groups: dict[int, list[_DecodeGroup]] = {}
        self._step_s: dict[tuple[int, int, int], float] = {}  # key: GPUs, batch, context

    def fleet(self, workloads: Sequence[Sequences]) -> DecodeFleet | str:
        """The smallest or cheapest fleet that decodes each workload's sequences, or the reason why there is none.

        The fleet has room for the workload with the most sequences at one time, at the mean context of all. At least
        one sequence needs a decode step.
        """
        context = mean_context(workloads)
        at_once = max(sequences.most_at_once(self.tpot_s) for sequences in workloads)
        groups = self._groups_at(context)
        fleets = [self._fleet(group, context, at_once) for group in groups if group.in_time]
        if fleets:
            return min(fleets, key=lambda one: (self.limits.cost(one.gpus_per_group) * one.replicas, one.num_gpus))
        reason = "its cache does not fit beside the weights"
        if groups:
            least_s = min(self._seconds(group, 1, context) for group in groups)
            reason = f"a step of one sequence takes at least {1e3 * least_s:.3g} ms"
        return f"no group decodes at {1e3 * self.tpot_s:g} ms per token: {reason}"

    def least_tpot_s(self, workloads: Sequence[Sequences]) -> float | None:
        """The shortest step of one sequence at the mean context; None: no sequence fits in memory."""
        context = mean_context(workloads)
        return min((self._seconds(group, 1, context) for group in self._groups_at(context)), default=None)

    def _groups_at(self, context: int) -> list[_DecodeGroup]:
        """Groups of each size in whose memory a sequence fits."""
        if context not in self._groups:
            groups = (self._group(size, context) for size in self.limits.sizes)
            self._groups[context] = [group for group in groups if group is not None]
        return self._groups[context]

    def _group(self, size: int, context: int) -> _DecodeGroup | None:
        """None: the model cannot be split over these GPUs, or no sequence fits."""
        try:
            per_rank = decoding_rank(self.scenario, size)
        except InputError:  # the heads are not divisible by the size, or the group would span nodes
            return None
        width = per_rank.request.dtype_bytes
        free = per_rank.memory_limit.nbytes - RUNTIME_BYTES - per_rank.share.weight_bytes(width)
        room = min(MAX_BATCH, math.floor(free / per_rank.share.cache_bytes(context, width)))
        if room < 1:
            return None
        in_time = largest(lambda batch: step_s(per_rank, batch, context) <= self.tpot_s, room)
        return _DecodeGroup(gpus=size, per_rank=per_rank, room=room, in_time=in_time)

    def _seconds(self, group: _DecodeGroup, batch: int, context: int) -> float:
        key = group.gpus, batch, context
        if key not in self._step_s:
            self._step_s[key] = step_s(group.per_rank, batch, context)
        return self._step_s[key]

    def _fleet(self, group: _DecodeGroup, context: int, at_once: int) -> DecodeFleet:
        batch = min(group.in_time, at_once)
        limited_by: Literal["memory", "tpot", "requests"] = "tpot"
        if batch == group.room:
            limited_by = "memory"
        elif batch == at_once:
            limited_by = "requests"
        replicas = math.ceil(at_once / batch)
        taken_s = self._seconds(group, batch, context)
        prices = self.limits.prices
        return DecodeFleet(
            num_gpus=group.gpus * replicas,
            gpus_per_group=group.gpus,
            replicas=replicas,
            strategy="single" if group.gpus == 1 else "tp",
            batch=batch,
            limited_by=limited_by,
            step_s=taken_s,
            tpot_s=self.tpot_s,
            context_tokens=context,
            sequences_at_once=at_once,
            tokens_per_s=replicas * batch / taken_s,
            cost_per_hour=prices[group.gpus] * group.gpus * replicas if prices else None,
        )
