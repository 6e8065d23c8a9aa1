"""How decoding, or the cache on its way to another fleet that decodes, occupies the group of the first token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrsim.model.spec import ModelSpec
from kvrsim.program import Array
from kvrsim.units import format_bandwidth
from planner.capacity.workloads.workload import Lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """The cache leaves layer by layer while later layers are computed, over all GPUs that hold parts of it."""

    model: ModelSpec
    bytes_per_s: float  # of one GPU
    element_bytes: int  # of activations; a model may cache fewer

    def nbytes(self, context_len: Lengths) -> Array:
        """Bytes of the cache of each context."""
        width = self.model.cached_element_bytes(self.element_bytes)
        mixers = (layer.mixer for layer in self.model.layers)
        each = (mixer.cache_bytes(context_len.astype(float), width) for mixer in mixers if mixer is not None)
        return sum(each, np.zeros(len(context_len)))

    def after_s(self, context_len: Lengths, ttft_s: Array, gpus: npt.NDArray[np.int64]) -> Array:
        """From the first token until all of the cache has left.

        The first layer's leaves at the earliest when it is computed, the last one's after the first token.
        """
        whole_s = self.nbytes(context_len) / (self.bytes_per_s * gpus)
        prefill_s = np.where(np.isfinite(ttft_s), ttft_s, 0.0)
        one_layer_s = np.minimum(whole_s, prefill_s) / self.model.num_hidden_layers
        return np.asarray(np.maximum(whole_s, prefill_s) + one_layer_s - prefill_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """How decoding occupies the group that computed the first token."""

    seconds_per_token: float | None = (
        None  # time for which the group's last GPU is occupied; None: another fleet decodes
    )
    transfer: Transfer | None = None  # to that fleet; None: not counted

    def hold_s(self, output_tokens: Lengths) -> Array:
        """Seconds that a group decodes after the first token."""
        if self.seconds_per_token is None:
            return np.zeros(len(output_tokens))
        return self.seconds_per_token * np.maximum(0, output_tokens - 1)  # the first token is the prefill's

    def describe(self) -> str:
        """In words, for every answer."""
        if self.seconds_per_token is not None:
            ms = 1e3 * self.seconds_per_token
            return f"the last GPU of a group decodes, {ms:g} ms a token, and holds the group until its last token"
        if self.transfer is None:
            return (
                "another fleet decodes: a group is free after the first token; moving the KV-cache there is not counted"
            )
        bandwidth = format_bandwidth(self.transfer.bytes_per_s)
        return (
            f"another fleet decodes: the KV-cache leaves layer by layer, {bandwidth} a GPU, and a group is free after"
            " the first token and when the cache has left"
        )
