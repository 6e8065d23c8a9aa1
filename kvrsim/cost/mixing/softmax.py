"""Costs of softmax attention over K and V of heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvrsim.cost.merges import PYTORCH_SHARE, cast, measured_merge, merge
from kvrsim.cost.mixing.base import BlockMixing, Setting
from kvrsim.cost.traffic import attention_kernels
from kvrsim.model.mixers import Attention, LatentAttention
from kvrsim.profile.rates.attention import AttentionCall
from kvrsim.profile.rates.elementwise import Traffic
from kvrsim.program import Array

_FP32_BYTES = 4
_NOT_COUNTED = np.full(1, np.nan)


class MergedMixing(BlockMixing):
    """Blocks are merged in fp32, weighted by their log-sum-exp."""

    mixer: Attention | LatentAttention

    def merge_s(self, chunk: Array, *, part: bool = False) -> Array:
        """As measured, or as kvrsim/cost/merges.py counts it."""
        if self.cost.measures_merge:
            return self.cost.traffic_s(chunk, (measured_merge(self.mixer),))
        return self._merging_s(chunk, merge(self.mixer, fused=self.cost.fused_merge, part=part))

    def cast_s(self, chunk: Array) -> Array:
        """As kvrsim/cost/merges.py counts it; measured results are in fp32 already where the request is."""
        if self.cost.measures_merge and self.setting.element_bytes == _FP32_BYTES:
            return 0.0 * chunk
        return self._merging_s(chunk, cast(self.mixer))

    @property
    def merge_kernels(self) -> int:
        """As kvrsim/cost/merges.py counts them."""
        return merge(self.mixer, fused=self.cost.fused_merge, part=False).kernels

    def score_elements(self, chunk: Array, keys: Array) -> Array:
        """All heads, masked or not."""
        return chunk * keys * float(self.setting.batch * self.mixer.num_attention_heads)

    def gathered_prefix(self, chunk: Array, start: Array, total: Array) -> Array:
        """An eager or masked kernel covers all, masked or not; a causal flash kernel stops at the chunk's end."""
        return start if self.setting.kernel == "flash" else total - chunk

    def _merging_s(self, chunk: Array, step: Traffic) -> Array:
        """No faster than PyTorch's kernels, unless results are merged by one kernel of an engine's."""
        seconds = self.cost.traffic_s(chunk, (step,))
        if self.cost.fused_merge:
            return seconds
        nbytes = chunk * (step.nbytes * self.setting.batch * self.setting.element_bytes / 2)
        start_s = self.cost.traffic_s(0.0 * chunk, (step,))
        return np.maximum(seconds, start_s + nbytes / (PYTORCH_SHARE * self.setting.hbm_bytes_per_s))


class SoftmaxMixing(MergedMixing):
    """Multi-head, grouped-query or multi-query attention."""

    mixer: Attention

    def __init__(self, setting: Setting, mixer: Attention) -> None:
        super().__init__(setting, mixer)
        self._is_eager = setting.kernel == "eager"
        shares = mixer.num_key_value_heads != mixer.num_attention_heads
        self._repeats = self._is_eager and not self.cost.whole_attention and shares

    @property
    def kernels(self) -> int:
        """As kvrsim/cost/traffic.py counts them."""
        return attention_kernels(
            self.setting.model, self.mixer, self.setting.kernel, repeats=self._repeats, copies=self.cost.copies
        )

    def mix_s(self, chunk: Array, prefix: Array) -> Array:
        """The chunk's queries against prefix and chunk; eager code repeats shared KV heads for all queries."""
        return self._called_s(self._call(chunk, self.seen(prefix), self._causal(chunk, prefix), own=True))

    def in_blocks_s(self, chunk: Array, prefix: Array, blocks: int) -> Array:
        """The calls, and one copy that joins their outputs; eager code repeats shared KV heads once for all of them.

        Where the chunk begins the context, kernels that are told so skip the masked half in one call.
        """
        if blocks == 1:
            return self.mix_s(chunk, prefix)
        mixer, number = self.mixer, np.arange(float(blocks))
        if self.cost.least and mixer.reach is None:  # then in proportion to the keys before the block: all as the mean
            number = number.mean(keepdims=True)
        number = number.reshape(-1, *[1] * np.ndim(chunk + prefix))
        before = prefix + number * (chunk / blocks)
        queries = np.broadcast_to(chunk / blocks, before.shape)
        calls = self._call(queries, self.seen(before), self._causal(queries, before), own=True)
        joined = Traffic("copy", 4.0 * mixer.num_attention_heads * mixer.v_head_dim, 1)
        calls_s = np.asarray(blocks * self.cost.attention_s(replace(calls, part=True)).mean(axis=0))
        seconds = calls_s + self.cost.traffic_s(chunk, (joined,))
        if self._repeats:
            seconds = seconds + self._repeat_s(self.seen(prefix) + chunk)
        if self._is_eager:
            return seconds
        if self.cost.least:
            return np.asarray(np.minimum(seconds, self.mix_s(prefix + chunk, 0.0 * prefix)))
        begins = (prefix == 0) & (chunk <= (np.inf if mixer.reach is None else mixer.reach))
        return np.where(begins, self.mix_s(chunk, prefix), seconds)

    def decode_s(self, keys: Array) -> Array:
        """Decoding kernels split keys over the device and read K and V once."""
        keys = self.seen(keys)
        bytes_s = self.cost.traffic_s(keys, (Traffic("copy", self._half_token_bytes, 1),))
        one = np.ones_like(keys)
        return np.minimum(bytes_s, self._called_s(self._call(one, keys - one, keys, own=True)))

    def block_s(self, chunk: Array, start: Array, keys: Array, end: Array, *, part: bool = False) -> Array:
        """A block outside of the window takes no time."""
        reach = self.mixer.reach
        seen = keys if reach is None else np.clip(reach - (start - end), 0.0, keys)
        attention_s = self._called_s(self._call(chunk, seen, chunk * seen, own=False))
        return np.asarray(np.where(seen > 0, attention_s + self.merge_s(chunk, part=part), 0.0))

    def share_s(self, chunk: Array, start: Array, prefix: Array, share: float) -> Array:
        """One call over all keys that the first query sees."""
        reach = self.mixer.reach
        seen = share * (prefix if reach is None else np.clip(reach - (start - prefix), 0.0, prefix))
        attention_s = self._called_s(self._call(chunk, seen, chunk * seen, own=False))
        return np.where(seen * chunk > 0, attention_s, 0.0)

    def _call(self, chunk: Array, prefix: Array, causal: Array, *, own: bool) -> AttentionCall:
        mixer = self.mixer
        return AttentionCall(
            chunk=chunk,
            prefix=prefix,
            causal=causal,
            num_attention_heads=mixer.num_attention_heads,
            num_key_value_heads=mixer.num_key_value_heads,
            head_dim=mixer.head_dim,
            v_head_dim=mixer.v_head_dim,
            reach=mixer.reach,
            score_bytes=self.cost.score_bytes(self.setting.model),
            own=own,
        )

    def _called_s(self, call: AttentionCall) -> Array:
        seconds = self.cost.attention_s(call)
        return seconds + self._repeat_s(call.keys) if self._repeats else seconds

    def _repeat_s(self, keys: Array) -> Array:
        """K and V of so many keys, with each head as often as query heads share it."""
        mixer = self.mixer
        heads = mixer.num_key_value_heads + mixer.num_attention_heads
        # Read few heads, write all; two bytes an element.
        nbytes = 2.0 * heads * (mixer.head_dim + mixer.v_head_dim)
        return self.cost.traffic_s(keys, (Traffic("copy", nbytes, 2),))

    def _causal(self, chunk: Array, prefix: Array) -> Array:
        """Score elements of one head that are not masked; nobody counts them where the kernel is eager."""
        mixer = self.mixer
        if self._is_eager:
            return _NOT_COUNTED
        if mixer.attention_chunk is not None:
            return _in_chunks(prefix + chunk, mixer.attention_chunk) - _in_chunks(prefix, mixer.attention_chunk)
        if mixer.sliding_window is not None:
            return _in_window(prefix + chunk, mixer.sliding_window) - _in_window(prefix, mixer.sliding_window)
        return chunk * (prefix + 0.5 * chunk)


def _in_window(tokens: Array, window: int) -> Array:
    """Score elements of the first `tokens` queries when each sees at most `window` keys."""
    inside = np.minimum(tokens, window)
    return 0.5 * inside * inside + (tokens - inside) * window


def _in_chunks(tokens: Array, size: int) -> Array:
    """Score elements of the first `tokens` queries when each sees only its own chunk of `size` tokens."""
    whole = np.floor(tokens / size)
    rest = tokens - whole * size
    return np.asarray(0.5 * (whole * size * size + rest * rest))
