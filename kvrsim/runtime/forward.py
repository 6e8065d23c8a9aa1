"""A forward over one chunk: a model's, or one that only takes as long."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from kvrsim.runtime.cache import PrefixCache
from kvrsim.runtime.geometry import Geometry

_BLOCK = 2**16  # weights that share a checksum
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a weight


class Forward(Protocol):
    """What a rank computes."""

    geometry: Geometry

    def __call__(self, ids: Any, start: int, cache: PrefixCache, *, is_last: bool) -> Any:
        """Run the tokens [B, c] that stand at `start`; returns the last logits [B, vocabulary] on the last rank."""

    def digest(self) -> str:
        """What tells this forward from others, the same on every rank."""


class ModelForward:
    """The forward of a Hugging Face model, unchanged; only the last rank computes logits, of the last token."""

    def __init__(self, model: Any) -> None:
        self.model, self.geometry = model, Geometry.of(model)
        self.alibi = bool(getattr(model.config, "alibi", False))
        self._digest: str | None = None  # once asked for: it reads all weights

    def __call__(self, ids: Any, start: int, cache: PrefixCache, *, is_last: bool) -> Any:
        positions = torch.arange(start, start + ids.shape[1], device=ids.device).unsqueeze(0)
        inputs: dict[str, Any] = dict(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        visible_len = cache.buffers[0].visible_len
        if self.alibi or (start == 0 and visible_len > ids.shape[1]):
            # ALiBi's biases are as long as the mask. And under TSP, transformers would let the first rank off: from
            # position 0 on, without a mask, it takes what follows the chunk for room that is not filled yet.
            inputs["attention_mask"] = torch.ones(ids.shape[0], visible_len, dtype=torch.long, device=ids.device)
        with torch.inference_mode():
            if is_last:
                return self.model(**inputs, logits_to_keep=1).logits[:, -1]
            self.model.base_model(**inputs)
        return None

    def digest(self) -> str:
        """Of the configuration and of every weight."""
        if self._digest is None:
            found = hashlib.sha256(self.model.config.to_json_string().encode())
            for name, parameter in self.model.named_parameters():
                found.update(f"{name} {tuple(parameter.shape)} {_checksums(parameter.detach())}".encode())
            self._digest = found.hexdigest()[:16]
        return self._digest


def _checksums(weights: Any) -> list[int]:
    """Sums of the bits of every _BLOCK weights as whole numbers: exact, in any order of summation, on any device."""
    bits = weights.flatten().view(_BITS[weights.element_size()])
    whole = bits.numel() // _BLOCK * _BLOCK
    blocks = bits[:whole].view(-1, _BLOCK).sum(1, dtype=torch.int64)
    return [*blocks.tolist(), int(bits[whole:].sum(dtype=torch.int64))]


class SleepForward:
    """Sleeps in the place of computing, with real messages: for more ranks than there are cores or GPUs."""

    def __init__(self, geometry: Geometry, layer_s: Callable[[int, int], tuple[float, float]]) -> None:
        """`layer_s(chunk, prefix)`: seconds of one layer before its K and V are exchanged, and after."""
        self.geometry, self.layer_s = geometry, layer_s

    def __call__(self, ids: Any, start: int, cache: PrefixCache, *, is_last: bool) -> Any:
        before_s, after_s = self.layer_s(ids.shape[1], cache.buffers[0].visible_len - ids.shape[1])
        for layer in range(self.geometry.num_hidden_layers):
            time.sleep(before_s)
            cache.tell(layer, "update")
            if cache.exchange is not None:
                cache.exchange(layer)
            cache.tell(layer, "updated")
            time.sleep(after_s)

    def digest(self) -> str:
        """All that sleep are alike."""
        return "sleeps"
