"""KV cache: buffers of what each layer keeps, as it is stored and sent, and transformers' view of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
import torch.nn.functional as functional
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, LinearAttentionCacheLayerMixin

from kvrsim.runtime.attention import repeat_heads
from kvrsim.runtime.geometry import RECURRENT_BYTES, Geometry, KvLayout, StateLayout

UpdateEvent = Literal["update", "updated", "scan"]
KvPairs = list[tuple[Any, Any] | None]  # K and V of each layer in the model's own layout, or its states
Memory = list[Any]  # bytes of each layer, used in turn by several prefills; None for a layer without a cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """The tokens that a rank computes, and those that it holds."""

    start: int  # first token; the tokens before it are the prefix
    length: int
    batch: int = 1  # prompts of equal length
    total_len: int | None = None  # tokens held, from the first token on; None: what the chunk sees
    visible_len: int | None = None  # tokens that attention sees; None: all that are held

    @property
    def end(self) -> int:
        """The token after the last one."""
        return self.start + self.length

    def nbytes(self, layout: KvLayout | StateLayout, element_bytes: int) -> int:
        """Return the bytes that a layer holds; `element_bytes` is the size of an element of K and V."""
        if isinstance(layout, StateLayout):
            return layout.nbytes(self.batch, element_bytes)
        rows = self.end - layout.first_seen(self.start) if self.total_len is None else self.total_len
        return rows * self.batch * layout.elements * element_bytes


class KvBuffer:
    """K and V of one layer, token first and contiguous: [S, W], a row holding K [B, Hkv, Dk], then V [B, Hkv, Dv].

    A chunk lies behind its prefix, so that one message is received in place, and one is sent without a copy. With a
    window, only the tail of the prefix that the chunk sees is held. Where tokens after
    the chunk follow, as under TSP, all tokens before it are held too.
    """

    def __init__(self, geometry: Geometry, layout: KvLayout, chunk: Chunk, memory: Any = None) -> None:
        """memory: see `memory_of`."""
        self.layout, self.chunk = layout, chunk
        self.first_seen = layout.first_seen(chunk.start)
        self.first = self.first_seen if chunk.total_len is None else 0  # the token in the first row
        self.total_len = chunk.total_len or chunk.end
        reach = self.total_len if layout.sliding_window is None else layout.sliding_window
        # In a window that is shorter than the context, attention sees nothing after the chunk.
        self.visible_len = chunk.end if reach < self.total_len else chunk.visible_len or self.total_len
        assert chunk.end <= self.visible_len <= self.total_len
        memory = memory_of(geometry, layout, chunk, memory)
        self.data = memory.view(geometry.dtype).view(-1, chunk.batch * layout.elements)

    def incoming(self) -> Any:
        """Return the rows of the prefix that the chunk sees: what is received."""
        return self.rows(self.first_seen, self.chunk.start)

    def outgoing(self) -> Any:
        """Return the rows up to the chunk's end that later tokens see: what is sent."""
        return self.rows(self.layout.first_seen(self.chunk.end), self.chunk.end)

    def write(self, keys: Any, values: Any) -> None:
        """Put the chunk's K and V, as the model gives them, behind the prefix."""
        step = self.layout.model_heads_per_kv_head
        for own, new in zip(self.views(self.rows(self.chunk.start, self.chunk.end)), (keys, values), strict=True):
            own.copy_(new[:, ::step])

    def keys_values(self) -> tuple[Any, Any]:
        """Return K and V that attention sees, [B, H, S, D]: views, unless heads are repeated (Falcon 40B)."""
        times = self.layout.returned_heads_per_kv_head
        keys, values = self.views(self.rows(self.first_seen, self.visible_len))
        if keys.shape[1] == 1:
            return keys.expand(-1, times, -1, -1), values.expand(-1, times, -1, -1)
        heads = times * keys.shape[1]
        return repeat_heads(keys, heads), repeat_heads(values, heads)

    def parts(self) -> tuple[Any, Any]:
        """Return K and V up to the end of the chunk in the model's own layout [B, H, S, D]."""
        times = self.layout.model_heads_per_kv_head
        keys, values = self.views(self.rows(self.first_seen, self.chunk.end))
        heads = times * keys.shape[1]
        return repeat_heads(keys, heads), repeat_heads(values, heads)

    def rows(self, start: int, end: int) -> Any:
        """Return the rows of these tokens: contiguous."""
        return self.data[start - self.first : end - self.first]

    def views(self, rows: Any) -> tuple[Any, Any]:
        """Return K and V in rows of this layout (this buffer's or another's): [B, Hkv, S, D]."""
        heads, batch = self.layout.num_key_value_heads, self.chunk.batch
        widths = (self.layout.head_dim, self.layout.v_head_dim)
        columns = rows.split([batch * heads * width for width in widths], dim=1)
        keys, values = (
            part.unflatten(1, (batch, heads, width)).permute(1, 2, 0, 3)
            for part, width in zip(columns, widths, strict=True)
        )
        return keys, values


class StateBuffer:
    """The state of one recurrent layer: bytes of one message, received in place of the prefix and sent after the chunk.

    `recurrent`: fp32, [B, *recurrent]; `conv`: the convolution's last inputs, [B, channels, tokens]. Both are views.
    """

    def __init__(self, geometry: Geometry, layout: StateLayout, chunk: Chunk, memory: Any = None) -> None:
        """memory: see `memory_of`."""
        self.layout, self.chunk, self.data = layout, chunk, memory_of(geometry, layout, chunk, memory)
        split = chunk.batch * prod(layout.recurrent) * RECURRENT_BYTES
        self.recurrent = self.data[:split].view(torch.float32).view(chunk.batch, *layout.recurrent)
        self.conv = self.data[split:].view(geometry.dtype).view(chunk.batch, layout.conv_channels, layout.conv_tokens)

    def incoming(self) -> Any:
        """Return the memory of the state before the chunk."""
        return self.data if self.chunk.start else self.data[:0]

    def outgoing(self) -> Any:
        """Return the memory of the state after the chunk."""
        return self.data

    def parts(self) -> tuple[Any, Any]:
        """Return the recurrent state and the convolution's inputs."""
        return self.recurrent, self.conv


Buffer = KvBuffer | StateBuffer | None  # None: the layer keeps nothing


def make_buffers(geometry: Geometry, chunk: Chunk, memory: Memory | None = None) -> list[Buffer]:
    """Return the buffers of all layers."""
    buffers: list[Buffer] = []
    for layout, one in zip(geometry.layouts, memory or [None] * geometry.num_hidden_layers, strict=True):
        if isinstance(layout, KvLayout):
            buffers.append(KvBuffer(geometry, layout, chunk, one))
        else:
            buffers.append(None if layout is None else StateBuffer(geometry, layout, chunk, one))
    return buffers


def allocate(geometry: Geometry, chunk: Chunk) -> Memory:
    """Allocate memory of each layer that holds a chunk, for prefills that use it in turn."""
    return [None if layout is None else memory_of(geometry, layout, chunk) for layout in geometry.layouts]


def memory_of(geometry: Geometry, layout: KvLayout | StateLayout, chunk: Chunk, memory: Any = None) -> Any:
    """Return memory of the size that a layer holds: of `memory`, or new where that is None or too small.

    New memory is zeroed: what a mask hides must be a number, too.
    """
    nbytes = chunk.nbytes(layout, geometry.dtype.itemsize)
    if memory is None or len(memory) < nbytes:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=geometry.device)
    return memory[:nbytes]


class CacheListener:
    """Base of what is called while a model updates its cache; does nothing by default."""

    def on_update(self, event: UpdateEvent, layer: int) -> None:
        """A layer begins ("update") or ends ("updated") to write its cache, or its scan begins ("scan")."""

    def before_attention(self, layer: int) -> None:
        """The chunk's K and V are written, or a scan is about to begin: the prefix is needed now."""

    def after_scan(self, layer: int) -> None:
        """The scan has ended: the state after the chunk is written."""


class PrefixCache(Cache):  # type: ignore[misc]
    """A transformers Cache of a chunk behind a prefix: every forward writes the chunk anew, and nothing grows."""

    def __init__(self, buffers: Sequence[Buffer], listener: CacheListener | None = None) -> None:
        self.buffers, self.listener = tuple(buffers), listener or CacheListener()
        super().__init__(layers=[self._layer(index, buffer) for index, buffer in enumerate(buffers)])

    def _layer(self, index: int, buffer: Buffer) -> Any:
        if buffer is None:
            return DummyLayer()
        if isinstance(buffer, KvBuffer):
            return _PrefixLayer(self.listener, index, buffer)
        return _StateLayer(self.listener, index, buffer)

    @property
    def visible_len(self) -> int:
        """Most tokens that attention sees in any layer."""
        return max(buffer.visible_len for buffer in self.buffers if isinstance(buffer, KvBuffer))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """The convolution's inputs before the chunk, None if there are none; transformers calls this."""
        layer = self.layers[layer_idx]
        # For a single token, models update them in place; otherwise they read them later, in `update_conv_state`.
        if layer.has_previous_state[state_idx] and layer.buffer.chunk.length == 1:
            layer.fetch()
        return super().get_conv_state(layer_idx, state_idx)

    @classmethod
    def stub(
        cls, geometry: Geometry, chunk: Chunk, listener: CacheListener | None = None, *, seed: int = 0
    ) -> PrefixCache:
        """Return a cache of K and V with a random prefix, to time a chunk without computing its prefix."""
        buffers = make_buffers(geometry, chunk)
        generator = torch.Generator(device=geometry.device).manual_seed(seed)
        for buffer in buffers:
            assert isinstance(buffer, KvBuffer)
            buffer.data.normal_(generator=generator)
        return cls(buffers, listener)

    def parts(self) -> Iterator[tuple[Any, Any] | None]:
        """Yield the cache of each layer up to the end of the chunk: K and V in the model's layout, or its states."""
        for buffer in self.buffers:
            yield None if buffer is None else buffer.parts()


class _PrefixLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of K and V, which knows its length before any tensor exists."""

    def __init__(self, listener: CacheListener, index: int, buffer: KvBuffer) -> None:
        super().__init__()
        self.listener, self.index, self.buffer = listener, index, buffer
        self.is_initialized, self.is_sliding = True, buffer.layout.sliding_window is not None

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Do nothing: the buffer exists already."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.listener.on_update("update", self.index)
        self.buffer.write(key_states, value_states)
        self.listener.before_attention(self.index)
        keys, values = self.buffer.keys_values()
        self.listener.on_update("updated", self.index)
        return keys, values

    def get_seq_length(self) -> int:
        """Return where the chunk begins, which determines masks and rotary embeddings."""
        return self.buffer.chunk.start

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return how many tokens attention sees, and the position of the first one."""
        return self.buffer.visible_len - self.buffer.first_seen, self.buffer.first_seen

    def get_max_length(self) -> int:
        return self.buffer.total_len


class _StateLayer(LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """One recurrent layer: its state is received before its scan and sent after it."""

    def __init__(self, listener: CacheListener, index: int, buffer: StateBuffer) -> None:
        super().__init__()
        self.listener, self.index, self.buffer = listener, index, buffer
        if buffer.chunk.start:
            self.conv_states[0], self.recurrent_states[0] = buffer.conv, buffer.recurrent
            self.has_previous_state[0] = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the buffer exists already."""

    def fetch(self) -> None:
        """Receive the state of the tokens before the chunk."""
        self.listener.on_update("update", self.index)
        self.listener.before_attention(self.index)
        self.listener.on_update("scan", self.index)

    def update_conv_state(self, conv_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        self.fetch()
        conv, tokens = self.buffer.conv, self.buffer.layout.conv_tokens
        inputs = torch.cat([conv, conv_states], dim=-1) if self.buffer.chunk.start else conv_states
        missing = tokens - inputs.shape[-1]
        conv.copy_(functional.pad(inputs, (missing, 0)) if missing > 0 else inputs[..., inputs.shape[-1] - tokens :])
        return inputs

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        self.buffer.recurrent.copy_(recurrent_states)
        self.listener.after_scan(self.index)
        return self.buffer.recurrent
