"""KV cache: buffers in which each layer's K, V or states are stored and sent, and transformers' view of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
import torch.nn.functional as functional
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, LinearAttentionCacheLayerMixin

from kvrsim.runtime.attention import repeat_heads
from kvrsim.runtime.geometry import RECURRENT_BYTES, Geometry, KvLayout, StateLayout

UpdateEvent = Literal["update", "updated", "scan"]
Memory = list[Tensor | None]  # bytes of each layer, for several prefills in turn; None for a layer without a cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """The tokens that a rank computes, and the tokens that it holds."""

    start: int  # position of the first token; earlier tokens are the prefix
    length: int
    batch: int = 1  # number of prompts of equal length
    total_len: int | None = None  # tokens in memory, from the context's start; None: those that the chunk attends to
    visible_len: int | None = None  # tokens that attention sees; None: all tokens that are held
    room: int = 0  # tokens after those that are held for which there is memory, because they will be decoded

    @property
    def end(self) -> int:
        """Position after the chunk's last token."""
        return self.start + self.length

    def nbytes(self, layout: KvLayout | StateLayout, element_bytes: int) -> int:
        """Return the bytes that a layer holds; `element_bytes` is the size of an element of K and V."""
        if isinstance(layout, StateLayout):
            return layout.nbytes(self.batch, element_bytes)
        rows = self.total_len
        if rows is None:
            rows = self.end - layout.first_seen(self.start)
        return (rows + self.room) * self.batch * layout.elements * element_bytes


class KvBuffer:
    """K and V of one layer, token first and contiguous: [S, W]; a row has K [B, Hkv, Dk], then V [B, Hkv, Dv].

    A chunk comes after its prefix, so a message is received in place and sent without a copy. With a window, the buffer
    has only the last tokens of the prefix, which the chunk sees. If it also has tokens after the chunk, as in TSP, it
    has all tokens before the chunk.
    """

    def __init__(self, geometry: Geometry, layout: KvLayout, chunk: Chunk, memory: Tensor | None = None) -> None:
        """memory: see `memory_of`."""
        self.layout = layout
        self.chunk = chunk
        self.first_seen = layout.first_seen(chunk.start)
        self.first = 0  # position of the token in the first row
        if chunk.total_len is None:
            self.first = self.first_seen
        self.total_len = chunk.total_len or chunk.end
        self.visible_len = chunk.visible_len or self.total_len
        if layout.sliding_window is not None and layout.sliding_window < self.total_len:
            self.visible_len = chunk.end  # the window ends at the query: attention sees no tokens after the chunk
        assert chunk.end <= self.visible_len <= self.total_len
        memory = memory_of(geometry, layout, chunk, memory)
        self.data = memory.view(geometry.dtype).view(-1, chunk.batch * layout.elements)

    def incoming(self) -> Tensor:
        """Return the rows to receive: the part of the prefix that the chunk attends to."""
        return self.rows(self.first_seen, self.chunk.start)

    def outgoing(self) -> Tensor:
        """Return the rows to send: the part of the tokens up to the chunk's end that later tokens attend to."""
        return self.rows(self.layout.first_seen(self.chunk.end), self.chunk.end)

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Write the chunk's K and V, in the model's layout, after the prefix."""
        step = self.layout.model_heads_per_kv_head
        stored_keys, stored_values = self.views(self.rows(self.chunk.start, self.chunk.end))
        stored_keys.copy_(keys[:, ::step])
        stored_values.copy_(values[:, ::step])

    def keys_values(self) -> tuple[Tensor, Tensor]:
        """Return the K and V that attention sees, [B, H, S, D]: views, unless heads are repeated (Falcon 40B)."""
        heads = self.layout.returned_heads_per_kv_head * self.layout.num_key_value_heads
        keys, values = self.views(self.rows(self.first_seen, self.visible_len))
        return repeat_heads(keys, heads), repeat_heads(values, heads)

    def advance(self) -> None:
        """Move on to the next token, which attends to all tokens before it and to itself."""
        self.chunk = replace(self.chunk, start=self.chunk.end, length=1)
        self.first_seen = self.layout.first_seen(self.chunk.start)
        self.visible_len = self.chunk.end
        self.total_len = max(self.total_len, self.chunk.end)

    def rows(self, start: int, end: int) -> Tensor:
        """Return the contiguous rows of these tokens."""
        return self.data[start - self.first : end - self.first]

    def views(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V of rows in this layout (of this buffer or another): [B, Hkv, S, D]."""
        shape = (self.chunk.batch, self.layout.num_key_value_heads, -1)
        columns = rows.tensor_split((prod(shape[:2]) * self.layout.head_dim,), dim=1)
        keys, values = [part.unflatten(1, shape).permute(1, 2, 0, 3) for part in columns]
        return keys, values


class StateBuffer:
    """The state of one recurrent layer, as bytes of one message: received before the chunk, sent after the chunk.

    `recurrent`: fp32, [B, *recurrent]; `conv`: the convolution's last inputs, [B, channels, tokens]. Both are views.
    """

    def __init__(self, geometry: Geometry, layout: StateLayout, chunk: Chunk, memory: Tensor | None = None) -> None:
        """memory: see `memory_of`."""
        self.layout = layout
        self.chunk = chunk
        self.data = memory_of(geometry, layout, chunk, memory)
        split = chunk.batch * prod(layout.recurrent) * RECURRENT_BYTES
        self.recurrent = self.data[:split].view(torch.float32).view(chunk.batch, *layout.recurrent)
        self.conv = self.data[split:].view(geometry.dtype).view(chunk.batch, layout.conv_channels, layout.conv_tokens)

    def advance(self) -> None:
        """Move on to the next token."""
        self.chunk = replace(self.chunk, start=self.chunk.end, length=1)

    def incoming(self) -> Tensor:
        """Return the memory of the state before the chunk."""
        if self.chunk.start:
            return self.data
        return self.data[:0]

    def outgoing(self) -> Tensor:
        """Return the memory of the state after the chunk."""
        return self.data


Buffer = KvBuffer | StateBuffer | None  # None: the layer has no cache


def make_buffers(
    geometry: Geometry, chunk: Chunk, memory: Memory | None = None, kv_buffer: type[KvBuffer] = KvBuffer
) -> list[Buffer]:
    """Return the buffers of all layers; kv_buffer: class of the buffers of K and V."""
    memory = memory or [None] * geometry.num_hidden_layers
    buffers: list[Buffer] = []
    for layout, layer_memory in zip(geometry.layouts, memory, strict=True):
        if layout is None:
            buffers.append(None)
        elif isinstance(layout, StateLayout):
            buffers.append(StateBuffer(geometry, layout, chunk, layer_memory))
        else:
            buffers.append(kv_buffer(geometry, layout, chunk, layer_memory))
    return buffers


def allocate(geometry: Geometry, chunk: Chunk) -> Memory:
    """Allocate memory for a chunk in each layer, which several prefills use in turn."""
    memory: Memory = []
    for layout in geometry.layouts:
        if layout is None:
            memory.append(None)
        else:
            memory.append(memory_of(geometry, layout, chunk))
    return memory


def memory_of(geometry: Geometry, layout: KvLayout | StateLayout, chunk: Chunk, memory: Tensor | None = None) -> Tensor:
    """Return memory for a layer: part of `memory`, or new memory if `memory` is None or too small.

    New memory is zeroed, because even masked values must be numbers.
    """
    nbytes = chunk.nbytes(layout, geometry.dtype.itemsize)
    if memory is None or len(memory) < nbytes:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=geometry.device)
    return memory[:nbytes]


class CacheListener:
    """Base of listeners to the cache updates of a model; its methods do nothing."""

    def on_update(self, event: UpdateEvent, layer: int) -> None:
        """Called when a layer begins ("update") or ends ("updated") to write its cache, or begins its scan ("scan")."""

    def before_attention(self, layer: int) -> None:
        """Called when the chunk's K and V are written, or before a scan: now the prefix is needed."""

    def after_scan(self, layer: int) -> None:
        """Called when the scan has ended and the state after the chunk is written."""


class PrefixCache(Cache):  # type: ignore[misc]
    """A transformers Cache of a prefix and a chunk; every forward overwrites the chunk.

    A prefill can therefore be repeated. To decode after it, `for_decoding` returns a cache that grows.
    """

    def __init__(self, buffers: Sequence[Buffer], listener: CacheListener | None = None) -> None:
        self.buffers = tuple(buffers)
        self.listener = listener or CacheListener()
        super().__init__(layers=[self._layer(index, buffer) for index, buffer in enumerate(buffers)])

    def _layer(self, index: int, buffer: Buffer) -> DummyLayer | _StateLayer | _PrefixLayer:
        if buffer is None:
            return DummyLayer()
        if isinstance(buffer, StateBuffer):
            return _StateLayer(self.listener, index, buffer)
        return _PrefixLayer(self.listener, index, buffer)

    def for_decoding(self) -> PrefixCache:
        """Return a cache in the same memory for the token after the chunk; `advance` moves it on to the next token."""
        buffers = [copy.copy(buffer) for buffer in self.buffers]
        for buffer in buffers:
            if buffer is not None:
                buffer.advance()
        return PrefixCache(buffers)

    def advance(self) -> None:
        """Move on to the next token, after a forward has written the K and V of this one."""
        for buffer in self.buffers:
            if buffer is not None:
                buffer.advance()

    @property
    def visible_len(self) -> int:
        """Largest number of tokens that attention sees in any layer."""
        return max(buffer.visible_len for buffer in self.buffers if isinstance(buffer, KvBuffer))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Return the convolution's inputs before the chunk, None if there are none; transformers calls this."""
        layer = self.layers[layer_idx]
        # For a single token, models update these inputs in place; otherwise they read them later, in
        # `update_conv_state`.
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


class _PrefixLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of K and V, whose length is known before any tensor exists."""

    def __init__(self, listener: CacheListener, index: int, buffer: KvBuffer) -> None:
        super().__init__()
        self.listener = listener
        self.index = index
        self.buffer = buffer
        self.is_initialized = True
        self.is_sliding = buffer.layout.sliding_window is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffer exists already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.listener.on_update("update", self.index)
        self.buffer.write(key_states, value_states)
        self.listener.before_attention(self.index)
        keys, values = self.buffer.keys_values()
        self.listener.on_update("updated", self.index)
        return keys, values

    def get_seq_length(self) -> int:
        """Return the position of the chunk's first token, which determines masks and rotary embeddings."""
        return self.buffer.chunk.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of tokens that attention sees, and the position of the first one."""
        return self.buffer.visible_len - self.buffer.first_seen, self.buffer.first_seen

    def get_max_length(self) -> int:
        return self.buffer.total_len


class _StateLayer(LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """One recurrent layer: its state is received before its scan and sent after it."""

    def __init__(self, listener: CacheListener, index: int, buffer: StateBuffer) -> None:
        super().__init__()
        self.listener = listener
        self.index = index
        self.buffer = buffer
        if buffer.chunk.start:
            self.conv_states[0] = buffer.conv
            self.recurrent_states[0] = buffer.recurrent
            self.has_previous_state[0] = True

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Do nothing: the buffer exists already."""

    def fetch(self) -> None:
        """Receive the state of the tokens before the chunk."""
        self.listener.on_update("update", self.index)
        self.listener.before_attention(self.index)
        self.listener.on_update("scan", self.index)

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        self.fetch()
        conv = self.buffer.conv
        tokens = self.buffer.layout.conv_tokens
        inputs = conv_states
        if self.buffer.chunk.start:
            inputs = torch.cat([conv, conv_states], dim=-1)
        missing = tokens - inputs.shape[-1]
        if missing > 0:
            conv.copy_(functional.pad(inputs, (missing, 0)))
        else:
            conv.copy_(inputs[..., inputs.shape[-1] - tokens :])
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        self.buffer.recurrent.copy_(recurrent_states)
        self.listener.after_scan(self.index)
        return self.buffer.recurrent
