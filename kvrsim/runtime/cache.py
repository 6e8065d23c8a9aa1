"""PrefixCache: transformers' view of the buffers that hold what each layer keeps of the tokens before a chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as functional
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.kept.buffers import Buffer, KvBuffer, StateBuffer, buffers_of
from kvrsim.runtime.kept.query_blocks import in_query_blocks

UpdateEvent = Literal["update", "updated", "scan"]
OnUpdate = Callable[[UpdateEvent, int], None]
Exchange = Callable[[int], None]


class _PrefixLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of K and V; it knows its length before any tensor exists."""

    def __init__(self, cache: PrefixCache, index: int, buffer: KvBuffer) -> None:
        super().__init__()
        self.cache, self.index, self.buffer = cache, index, buffer
        self.is_initialized, self.is_sliding = True, buffer.kept.sliding_window is not None

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Nothing to do: the buffer was there first."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        cache = self.cache
        cache.tell(self.index, "update")
        self.buffer.write(key_states, value_states)
        if cache.exchange is not None:
            cache.exchange(self.index)
        keys, values = self.buffer.keys_values()
        cache.tell(self.index, "updated")
        blocks = cache.query_blocks[self.index] if cache.query_blocks else 1
        return in_query_blocks(keys, min(blocks, self.buffer.chunk_len)), values

    def get_seq_length(self) -> int:
        """Where the chunk begins, which masks and rotary embeddings go by."""
        return self.buffer.prefix_len

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Tokens that attention sees, and where the first one stands."""
        return self.buffer.visible_len - self.buffer.first_seen, self.buffer.first_seen

    def get_max_length(self) -> int:
        return self.buffer.total_len


class _StateLayer(LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """One recurrent layer: its state is received before its scan and sent after it."""

    def __init__(self, cache: PrefixCache, index: int, buffer: StateBuffer) -> None:
        super().__init__()
        self.cache, self.index, self.buffer = cache, index, buffer
        if buffer.prefix_len:
            self.conv_states[0], self.recurrent_states[0] = buffer.conv, buffer.recurrent
            self.has_previous_state[0] = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the buffer was there first."""

    def fetch(self) -> None:
        """Receive the state of the tokens before the chunk."""
        self.cache.tell(self.index, "update")
        if self.cache.exchange is not None:
            self.cache.exchange(self.index)
        self.cache.tell(self.index, "scan")

    def update_conv_state(self, conv_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        self.fetch()
        kept, tokens = self.buffer.conv, self.buffer.kept.conv_tokens
        found = torch.cat([kept, conv_states], dim=-1) if self.buffer.prefix_len else conv_states
        short = tokens - found.shape[-1]
        kept.copy_(functional.pad(found, (short, 0)) if short > 0 else found[..., found.shape[-1] - tokens :])
        return found

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        self.buffer.recurrent.copy_(recurrent_states)
        if self.cache.pass_on is not None:
            self.cache.pass_on(self.index)
        return self.buffer.recurrent


class PrefixCache(Cache):  # type: ignore[misc]
    """A transformers Cache of a chunk behind a prefix: every forward writes the chunk anew, and nothing grows.

    In each layer's update `exchange(layer)` may fetch the prefix and send what is there: after the chunk's K and V are
    written, or before a recurrent layer's scan, after which `pass_on(layer)` may send its state. `on_update(event,
    layer)` is called with "update" when a layer enters and with "updated" when it leaves, or "scan" before its scan.
    `query_blocks`: by layer, calls of attention, whose K must end with the chunk; empty: one.
    """

    def __init__(
        self,
        buffers: Sequence[Buffer],
        *,
        on_update: OnUpdate | None = None,
        exchange: Exchange | None = None,
        pass_on: Exchange | None = None,
        query_blocks: Sequence[int] = (),
    ) -> None:
        self.query_blocks = tuple(query_blocks)
        self.buffers, self.on_update, self.exchange, self.pass_on = tuple(buffers), on_update, exchange, pass_on
        super().__init__(layers=[self._layer(index, buffer) for index, buffer in enumerate(buffers)])

    def _layer(self, index: int, buffer: Buffer) -> Any:
        if buffer is None:
            return DummyLayer()
        return _PrefixLayer(self, index, buffer) if isinstance(buffer, KvBuffer) else _StateLayer(self, index, buffer)

    @property
    def visible_len(self) -> int:
        """Tokens that attention sees, in the layer where they are the most."""
        return max(buffer.visible_len for buffer in self.buffers if isinstance(buffer, KvBuffer))

    def tell(self, layer: int, event: UpdateEvent) -> None:
        """Pass an event on to whoever listens."""
        if self.on_update is not None:
            self.on_update(event, layer)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """As transformers: the convolution's inputs before the chunk, None where there are none."""
        layer = self.layers[layer_idx]
        # For a single token, models update them in place; else they look at them later, in `update_conv_state`.
        if layer.has_previous_state[state_idx] and layer.buffer.chunk_len == 1:
            layer.fetch()
        return super().get_conv_state(layer_idx, state_idx)

    @classmethod
    def stub(
        cls,
        geometry: Geometry,
        *,
        prefix_len: int,
        chunk_len: int,
        batch: int = 1,
        seed: int = 0,
        on_update: OnUpdate | None = None,
    ) -> PrefixCache:
        """A cache whose prefix is random: for measuring a chunk's time without computing its prefix."""
        buffers = buffers_of(geometry, prefix_len=prefix_len, chunk_len=chunk_len, batch=batch)
        generator = torch.Generator(device=geometry.device).manual_seed(seed)
        for buffer in buffers:
            if buffer is not None:
                buffer.fill_randomly(generator)
        return cls(buffers, on_update=on_update)

    def to_dynamic_cache(self) -> Any:
        """A copy of what is kept up to the end of the chunk, in layers of transformers that grow: for `generate`."""
        grown = DynamicCache()
        grown.layers, grown.layer_class_to_replicate = [_grown(buffer) for buffer in self.buffers], None
        return grown

    def parts(self) -> Iterator[tuple[Any, Any] | None]:
        """What each layer keeps up to the end of the chunk: K and V in the model's own layout, or its states."""
        for buffer in self.buffers:
            yield None if buffer is None else buffer.parts()


def _grown(buffer: Buffer) -> Any:
    """The buffer as a layer of transformers' dynamic cache."""
    if buffer is None:
        return DummyLayer()
    if isinstance(buffer, StateBuffer):
        layer = LinearAttentionLayer()
        kernel = buffer.kept.conv_tokens + 1  # transformers keeps one input more, which no token needs
        layer.update_conv_state(functional.pad(buffer.conv, (1, 0)), conv_kernel_size=kernel)
        layer.update_recurrent_state(buffer.recurrent)
        return layer
    window = buffer.kept.sliding_window
    layer = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
    layer.update(*buffer.parts())
    if window is not None:
        layer.cumulative_length = buffer.end
    return layer
