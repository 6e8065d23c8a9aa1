"""KvBuffer and StateBuffer: what one layer keeps of tokens, as it is stored, received and sent."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from kvrsim.runtime.kept.layers import RECURRENT_BYTES, KeptState, KeptTokens

if TYPE_CHECKING:
    from kvrsim.runtime.geometry import Geometry


class KvBuffer:
    """K and V of one layer, token first and contiguous: [S, W], a row holding K [B, Hkv, Dk], then V [B, Hkv, Dv].

    A chunk lies behind its prefix, so that what is received and what is sent are one message each, received in place
    and sent without a copy. Of a window only the tail of the prefix is there that the chunk sees. Where tokens after
    the chunk follow, as under TSP, all tokens before it are there too.
    """

    def __init__(
        self,
        geometry: Geometry,
        kept: KeptTokens,
        *,
        prefix_len: int,
        chunk_len: int,
        batch: int = 1,
        total_len: int | None = None,
        visible_len: int | None = None,
        data: Any = None,
    ) -> None:
        """Room for `total_len` tokens (None: what the chunk sees), of which attention sees the first `visible_len`.

        data: memory for at least so many tokens, which others use in turn; None: its own.
        """
        self.kept, self.prefix_len, self.chunk_len, self.batch = kept, prefix_len, chunk_len, batch
        self.end = prefix_len + chunk_len
        self.first_seen = kept.first_seen(prefix_len)
        self.first = self.first_seen if total_len is None else 0  # the token in the first row
        self.total_len = total_len or self.end
        reach = self.total_len if kept.sliding_window is None else kept.sliding_window
        # In a window that is shorter than the context, attention looks at nothing behind the chunk.
        self.visible_len = self.end if reach < self.total_len else visible_len or self.total_len
        assert self.end <= self.visible_len <= self.total_len
        shape = (self.total_len - self.first, batch * kept.elements)
        own = data is None
        self.data = torch.empty(shape, dtype=geometry.dtype, device=geometry.device) if own else data[: shape[0]]
        assert tuple(self.data.shape) == shape

    def incoming(self) -> Any:
        """What the chunk sees of the tokens before it, contiguous rows: what is received."""
        return self.rows(self.first_seen, self.prefix_len)

    def outgoing(self) -> Any:
        """What tokens after the chunk see of those up to its end, contiguous rows: what is sent."""
        return self.rows(self.kept.first_seen(self.end), self.end)

    def write(self, keys: Any, values: Any) -> None:
        """Put the chunk's K and V, as the model gives them, behind the prefix."""
        step = self.kept.model_heads_per_kv_head
        for own, given in zip(self._parts(self.prefix_len, self.end), (keys, values), strict=True):
            own.copy_(given[:, ::step])

    def keys_values(self) -> tuple[Any, Any]:
        """K and V that attention sees, [B, H, S, D]: views, but where heads must be repeated (Falcon 40B)."""
        keys, values = self._parts(self.first_seen, self.visible_len)
        return self._returned(keys), self._returned(values)

    def parts(self) -> tuple[Any, Any]:
        """K and V up to the end of the chunk, in the model's own layout [B, H, S, D]."""
        keys, values = self._parts(self.first_seen, self.end)
        times = self.kept.model_heads_per_kv_head
        return (keys, values) if times == 1 else (keys.repeat_interleave(times, 1), values.repeat_interleave(times, 1))

    def fill_randomly(self, generator: torch.Generator) -> None:
        """As if there were a prefix."""
        self.data.normal_(generator=generator)

    def rows(self, start: int, end: int) -> Any:
        """What is kept of these tokens: contiguous."""
        return self.data[start - self.first : end - self.first]

    def _parts(self, start: int, end: int) -> tuple[Any, Any]:
        """K and V of these tokens, [B, Hkv, S, D]: views."""
        return self.views(self.rows(start, end))

    def views(self, rows: Any) -> tuple[Any, Any]:
        """K and V in rows of this layout, this buffer's or another's: [B, Hkv, S, D]."""
        heads, widths = self.kept.num_key_value_heads, (self.kept.head_dim, self.kept.v_head_dim)
        columns = rows.split([self.batch * heads * width for width in widths], dim=1)
        keys, values = (
            part.unflatten(1, (self.batch, heads, width)).permute(1, 2, 0, 3)
            for part, width in zip(columns, widths, strict=True)
        )
        return keys, values

    def _returned(self, kv: Any) -> Any:
        times = self.kept.returned_heads_per_kv_head
        if times == 1:
            return kv
        batch, heads, length, dim = kv.shape
        if heads == 1:
            return kv.expand(batch, times, length, dim)
        return kv.repeat_interleave(times, dim=1)


class StateBuffer:
    """The state of one recurrent layer: bytes of one message, received in place of the prefix and sent after the chunk.

    `recurrent`: fp32, [B, *recurrent]; `conv`: the convolution's last inputs, [B, channels, tokens]. Both are views.
    """

    def __init__(
        self, geometry: Geometry, kept: KeptState, *, prefix_len: int, chunk_len: int, batch: int = 1, data: Any = None
    ) -> None:
        """data: memory of the same size, which others use in turn; None: its own."""
        self.kept, self.prefix_len, self.chunk_len, self.batch = kept, prefix_len, chunk_len, batch
        nbytes = kept.nbytes(batch, geometry.dtype.itemsize)
        self.data = torch.zeros(nbytes, dtype=torch.uint8, device=geometry.device) if data is None else data
        assert tuple(self.data.shape) == (nbytes,)
        split = batch * prod(kept.recurrent) * RECURRENT_BYTES
        self.recurrent = self.data[:split].view(torch.float32).view(batch, *kept.recurrent)
        self.conv = self.data[split:].view(geometry.dtype).view(batch, kept.conv_channels, kept.conv_tokens)

    def incoming(self) -> Any:
        """The state before the chunk."""
        return self.data if self.prefix_len else self.data[:0]

    def outgoing(self) -> Any:
        """The state after the chunk, in the same memory."""
        return self.data

    def parts(self) -> tuple[Any, Any]:
        """The recurrent state and the convolution's inputs."""
        return self.recurrent, self.conv

    def fill_randomly(self, generator: torch.Generator) -> None:
        """As if there were a prefix."""
        self.recurrent.normal_(generator=generator)
        self.conv.normal_(generator=generator)


Buffer = KvBuffer | StateBuffer | None  # None: the layer keeps nothing


def buffers_of(
    geometry: Geometry,
    *,
    prefix_len: int,
    chunk_len: int,
    batch: int = 1,
    total_len: int | None = None,
    visible_len: int | None = None,
    room: list[Any] | None = None,
) -> list[Buffer]:
    """Every layer's buffer, as KvBuffer takes it; room: their memory, as `kv_room` makes it; None: their own."""

    def made() -> Iterator[Buffer]:
        sizes: dict[str, Any] = dict(prefix_len=prefix_len, chunk_len=chunk_len, batch=batch)
        for layer, kept in enumerate(geometry.kept):
            data = None if room is None else room[layer]
            if isinstance(kept, KeptTokens):
                yield KvBuffer(geometry, kept, **sizes, total_len=total_len, visible_len=visible_len, data=data)
            else:
                yield None if kept is None else StateBuffer(geometry, kept, **sizes, data=data)

    return list(made())


def borrowed_room(geometry: Geometry, num_tokens: int, batch: int, room: list[Any] | None) -> list[Any]:
    """As `kv_room`, in another geometry's `room` where its layers are as large; else memory of its own."""
    if room is None:
        return kv_room(geometry, num_tokens, batch)

    def made() -> Iterator[Any]:
        for kept, data in zip(geometry.kept, room, strict=True):
            if not isinstance(kept, KeptTokens):
                yield data
            elif data.numel() >= num_tokens * batch * kept.elements:
                yield data.view(-1)[: num_tokens * batch * kept.elements].view(num_tokens, batch * kept.elements)
            else:
                shape = (num_tokens, batch * kept.elements)
                yield torch.zeros(shape, dtype=geometry.dtype, device=geometry.device)

    return list(made())


def kv_room(geometry: Geometry, num_tokens: int | list[int], batch: int) -> list[Any]:
    """Every layer's memory for so many tokens (by layer, or in each), for prefills that use it in turn.

    Zeros: what a mask hides must be a number, too. None where a layer keeps nothing.
    """
    counts = [num_tokens] * geometry.num_hidden_layers if isinstance(num_tokens, int) else num_tokens

    def made() -> Iterator[Any]:
        for count, kept in zip(counts, geometry.kept, strict=True):
            if isinstance(kept, KeptTokens):
                yield torch.zeros((count, batch * kept.elements), dtype=geometry.dtype, device=geometry.device)
            elif kept is not None:
                nbytes = kept.nbytes(batch, geometry.dtype.itemsize)
                yield torch.zeros(nbytes, dtype=torch.uint8, device=geometry.device)
            else:
                yield None

    return list(made())
