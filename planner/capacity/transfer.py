"""The transfer of KV caches from the GPUs that prefill to those that decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrsim.model.spec import ModelSpec
from kvrsim.program import Array
from planner.capacity.workload import Lengths, Workload


def cache_bytes(model: ModelSpec, tokens: Lengths, element_bytes: int) -> Array:
    """Bytes of the caches and states of all layers for these numbers of tokens."""
    width = model.cached_element_bytes(element_bytes)
    mixers = (layer.mixer for layer in model.layers)
    nbytes = (mixer.cache_bytes(tokens.astype(float), width) for mixer in mixers if mixer is not None)
    return sum(nbytes, np.zeros(len(tokens)))


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
        return cache_bytes(self.model, context_len, self.element_bytes)

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
