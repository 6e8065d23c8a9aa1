"""KvBuffer, one layer's K and V as they are stored and sent, and PrefixCache, transformers' view of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from kvrsim.runtime.geometry import Geometry

UpdateEvent = Literal["update", "updated"]
OnUpdate = Callable[[UpdateEvent, int], None]
Exchange = Callable[[int], None]


class KvBuffer:
    """K and V of one layer, token first and contiguous: [S, 2, B, Hkv, D].

    A chunk lies behind its prefix, so that prefix and whole are one message each, received in place and sent
    without a copy. Under TSP tokens after the chunk follow.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        prefix_len: int,
        chunk_len: int,
        batch: int = 1,
        total_len: int | None = None,
        visible_len: int | None = None,
        data: Any = None,
    ) -> None:
        """Room for `total_len` tokens (None: prefix and chunk), of which attention sees the first `visible_len`.

        data: another buffer's, of the same shape, whose tokens this one shares; None: its own.
        """
        self.geometry, self.prefix_len, self.chunk_len, self.batch = geometry, prefix_len, chunk_len, batch
        self.end = prefix_len + chunk_len
        self.total_len = total_len or self.end
        self.visible_len = visible_len or self.total_len
        assert self.end <= self.visible_len <= self.total_len
        shape = (self.total_len, 2, batch, geometry.num_key_value_heads, geometry.head_dim)
        self.data = torch.empty(shape, dtype=geometry.dtype, device=geometry.device) if data is None else data
        assert tuple(self.data.shape) == shape

    def prefix(self) -> Any:
        """The tokens before the chunk, [prefix_len, 2, B, Hkv, D], contiguous: what is received."""
        return self.data[: self.prefix_len]

    def whole(self) -> Any:
        """The tokens up to the end of the chunk, contiguous: what is sent."""
        return self.data[: self.end]

    def write(self, keys: Any, values: Any) -> None:
        """Put the chunk's K and V, as the model gives them, behind the prefix."""
        step = self.geometry.model_heads_per_kv_head
        own = self.data[self.prefix_len : self.end]
        own[:, 0].copy_(keys[:, ::step].permute(2, 0, 1, 3))
        own[:, 1].copy_(values[:, ::step].permute(2, 0, 1, 3))

    def keys_values(self) -> tuple[Any, Any]:
        """K and V that attention sees, [B, H, S, D]: views, but where heads must be repeated (Falcon 40B)."""
        seen = self.data[: self.visible_len].permute(1, 2, 3, 0, 4)
        keys, values = (self._returned(part) for part in seen.unbind())
        return keys, values

    def _returned(self, kv: Any) -> Any:
        times = self.geometry.returned_heads_per_kv_head
        if times == 1:
            return kv
        batch, heads, length, dim = kv.shape
        if heads == 1:
            return kv.expand(batch, times, length, dim)
        return kv.repeat_interleave(times, dim=1)


def kv_room(geometry: Geometry, num_tokens: int, batch: int) -> list[Any]:
    """Memory of every layer's K and V, [num_tokens, 2, B, Hkv, D], for prefills that use it in turn.

    Zeros: what a mask hides must be a number, too.
    """
    shape = (num_tokens, 2, batch, geometry.num_key_value_heads, geometry.head_dim)
    return [torch.zeros(shape, dtype=geometry.dtype, device=geometry.device) for _ in range(geometry.num_hidden_layers)]


class _PrefixLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a PrefixCache; it knows its length before any tensor exists."""

    is_sliding = False

    def __init__(self, cache: PrefixCache, index: int, buffer: KvBuffer) -> None:
        super().__init__()
        self.cache, self.index, self.buffer = cache, index, buffer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Nothing to do: the buffer was there first."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        cache = self.cache
        cache.tell(self.index, "update")
        self.buffer.write(key_states, value_states)
        if cache.exchange is not None:
            cache.exchange(self.index)
        found = self.buffer.keys_values()
        cache.tell(self.index, "updated")
        return found

    def get_seq_length(self) -> int:
        """Where the chunk begins, which masks and rotary embeddings go by."""
        return self.buffer.prefix_len

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Tokens that attention sees, and where the first one stands."""
        return self.buffer.visible_len, 0

    def get_max_length(self) -> int:
        return self.buffer.total_len

    get_max_cache_shape = get_max_length  # its name before transformers 5.10


class PrefixCache(Cache):  # type: ignore[misc]
    """A transformers Cache of a chunk behind a prefix: every forward writes the chunk anew, and nothing grows.

    In each layer's update, after the chunk's K and V are written, `exchange(layer)` may fetch the prefix and
    send what is there. `on_update(event, layer)` is called
    with "update" when a layer enters and with "updated" when it leaves.
    """

    def __init__(
        self, buffers: Sequence[KvBuffer], *, on_update: OnUpdate | None = None, exchange: Exchange | None = None
    ) -> None:
        self.buffers, self.on_update, self.exchange = tuple(buffers), on_update, exchange
        super().__init__(layers=[_PrefixLayer(self, index, buffer) for index, buffer in enumerate(buffers)])

    def tell(self, layer: int, event: UpdateEvent) -> None:
        """Pass an event on to whoever listens."""
        if self.on_update is not None:
            self.on_update(event, layer)

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
        sizes = dict(prefix_len=prefix_len, chunk_len=chunk_len, batch=batch)
        buffers = [KvBuffer(geometry, **sizes) for _ in range(geometry.num_hidden_layers)]
        generator = torch.Generator(device=geometry.device).manual_seed(seed)
        for buffer in buffers:
            buffer.data.normal_(generator=generator)
        return cls(buffers, on_update=on_update)

    def to_dynamic_cache(self) -> Any:
        """A copy of K and V up to the end of the chunk, in the model's own layout, that can grow: for `generate`."""
        grown = DynamicCache()
        for index, (keys, values) in enumerate(self.keys_values()):
            grown.update(keys, values, index)
        return grown

    def keys_values(self) -> Iterator[tuple[Any, Any]]:
        """K and V up to the end of the chunk, in the model's own layout, layer by layer."""
        for buffer in self.buffers:
            keys, values = buffer.whole().permute(1, 2, 3, 0, 4).unbind()
            times = buffer.geometry.model_heads_per_kv_head
            if times > 1:
                keys, values = (part.repeat_interleave(times, dim=1) for part in (keys, values))
            yield keys, values
