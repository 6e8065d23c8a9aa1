"""A prefill in chunks through PrefixCache, in one process."""

from __future__ import annotations

from typing import Any

import torch

from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.kv_cache import Chunk, PrefixCache, make_buffers

CHUNKS = (7, 1, 12, 5)


def prompt(batch: int = 2, length: int = sum(CHUNKS)) -> torch.Tensor:
    return torch.randint(0, 101, (batch, length), generator=torch.Generator().manual_seed(3))


def forward(model: Any, ids: torch.Tensor, cache: Any, start: int) -> torch.Tensor:
    positions = torch.arange(start, start + ids.shape[1]).unsqueeze(0)
    with torch.inference_mode():
        return model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True).logits


def in_chunks(
    model: Any, ids: torch.Tensor, spoil: str = "", chunks: tuple[int, ...] = CHUNKS
) -> tuple[torch.Tensor, PrefixCache]:
    """Last logits and last cache of a prefill in chunks, each behind the one before; `spoil` breaks the last."""
    geometry, start, logits, cache = Geometry.of(model), 0, None, None
    for chunk in chunks:
        buffers = make_buffers(geometry, Chunk(start=start, length=chunk, batch=ids.shape[0]))
        for buffer, before in zip(buffers, cache.buffers if cache else buffers, strict=True):
            if buffer is None:
                continue
            if cache is not None:
                buffer.incoming().copy_(before.outgoing())
            if spoil == "prefix":
                buffer.incoming().zero_()
        cache = PrefixCache(buffers)
        shift = 3 if spoil == "positions" and start else 0
        logits = forward(model, ids[:, start : start + chunk], cache, start + shift)
        start += chunk
    assert cache is not None
    assert logits is not None
    return logits[:, -1], cache
