"""Attention to blocks of keys, whose results can be merged, with the kernel that the model was loaded with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional

from kvrsim.choices import Attention
from kvrsim.runtime.attention import chunk_attention, cuda_block, flash_cpu, of_prefix, repeated


class Merged:
    """Attention of queries to several blocks of keys: each block's result and the log of its sum of exponentials.

    Both are kept in fp32, [B, H, c, E] and [B, H, c], whatever the model's dtype. The first block is for all queries.
    """

    def __init__(self) -> None:
        self.out: Any = None
        self.lse: Any = None

    def add(self, out: Any, lse: Any, first: int = 0) -> None:
        """Take in a block's result for the queries from `first` on."""
        if self.out is None:
            self.out, self.lse = out.float(), lse
            return
        known, known_lse = self.out[:, :, first:], self.lse[:, :, first:]
        share = torch.sigmoid(lse - known_lse).unsqueeze(-1)
        known.copy_(torch.lerp(known, out.float(), share))
        known_lse.copy_(torch.logaddexp(known_lse, lse))


def block(kernel: Attention, query: Any, key: Any, value: Any, scale: float | None, *, causal: bool) -> tuple[Any, Any]:
    """Attention to one block, [B, H, c, E], and the log of the sums of exponentials, [B, H, c], in fp32.

    Shapes: query [B, H, c, D], key [B, G, S, D], value [B, G, S, E] with G a divisor of H. causal: the first query
    sees the first key, the second two, and so on; S is c then. Else all see all.
    """
    causal = causal and query.shape[2] > 1
    found = cuda_block(query, key, value, scale, causal=causal) if query.is_cuda and kernel != "eager" else None
    if found is not None:
        return found
    if kernel == "eager" or query.is_cuda:
        return _written_out(query, key, value, scale, causal=causal)
    if not causal:
        return of_prefix(query, key, value, scale)
    heads = query.shape[1]
    return flash_cpu(query, repeated(key, heads), repeated(value, heads), scale, causal=True)


def lower_right(kernel: Attention, query: Any, key: Any, value: Any, scale: float | None) -> Any:
    """Attention of the last c tokens of a context to all S of it, causally: [B, H, c, E]; shapes as of `block`."""
    if kernel == "flash":
        return chunk_attention(query, key, value, scale)
    chunk_len, length, heads = query.shape[2], key.shape[2], query.shape[1]
    if kernel == "eager":
        return _written_out(query, key, value, scale, causal=chunk_len > 1)[0]
    mask = None
    if 1 < chunk_len < length:
        mask = torch.ones(chunk_len, length, dtype=torch.bool, device=query.device).tril_(length - chunk_len)
    kwargs: dict[str, Any] = dict(attn_mask=mask, is_causal=1 < chunk_len == length, scale=scale)
    return functional.scaled_dot_product_attention(query, repeated(key, heads), repeated(value, heads), **kwargs)


def _written_out(query: Any, key: Any, value: Any, scale: float | None, *, causal: bool) -> tuple[Any, Any]:
    """With the score matrix in memory, whose masked part is the upper right one; softmax in fp32, as transformers."""
    heads, chunk_len, length = query.shape[1], query.shape[2], key.shape[2]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query @ repeated(key, heads).transpose(-1, -2)).mul_(scale)
    if causal:
        hidden = torch.ones(chunk_len, length, dtype=torch.bool, device=query.device).triu_(length - chunk_len + 1)
        scores.masked_fill_(hidden, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=torch.float32)
    lse = scores.amax(-1).float() - weights.amax(-1).log()  # the largest weight is at least 1 / S
    return weights.to(query.dtype) @ repeated(value, heads), lse
