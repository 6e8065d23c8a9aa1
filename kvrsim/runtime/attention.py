"""Attention of a chunk to its prefix and itself, without the masked half, and to blocks of keys.

Models compute all chunk x (prefix + chunk) scores, and mask those to the right of the diagonal.
`chunk_attention` computes attention to the prefix in full and to the chunk causally. On the CPU these are two calls,
merged by the logarithms of their softmax sums; on CUDA it is one kernel whose causal mask is aligned to the lower right
corner. In a window, blocks of queries attend to the keys that they can see.

Shapes: query [B, H, c, D], key [B, G, S, D], value [B, G, S, E] with G a divisor of H and E <= D; the result is
[B, H, c, E]. Queries are the last c of S tokens, unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from kvrsim.choices import Attention
from kvrsim.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The name must not contain "flash": transformers reserves such names for its own kernels.
INTERFACE_NAME = "kvrsim_chunk_attention"
_OWN_NAME = "kvrsim_own_attention"
_LEAST_BLOCK = 128  # least queries per block in a window: kernels for fewer queries are no faster
_FLASH_WIDTH = 8  # FlashAttention needs a head width that is a multiple of this number

Attend = Callable[[Tensor, float | None], Tensor]  # attention of queries at a scale; K and V are in the cache
# Attention from Q, K, V, a scale and a window.
Compute = Callable[[Tensor, Tensor, Tensor, float | None, int | None], Tensor]


def use_flash(model: PreTrainedModel) -> None:
    """Make a model that was loaded with "sdpa" run `chunk_attention`.

    Raises InputError naming `attention` for ALiBi, because these kernels do not support its biases.
    """
    if getattr(model.config, "alibi", False):
        raise InputError("attention", "flash", "eager or sdpa for a model with ALiBi")
    _replace_attention(model, INTERFACE_NAME, lambda *parts: chunk_attention(*parts))
    model.kvrsim_attention = "flash"


@contextmanager
def attending(model: PreTrainedModel, attend: Attend) -> Iterator[None]:
    """Replace the model's attention by `attend(query, scale)`, without a mask, while the context lasts.

    The result of `attend` has the width of V. K and V are in the cache.
    """
    before = model.config._attn_implementation
    remove = _replace_attention(model, _OWN_NAME, lambda query, key, value, scale, window: attend(query, scale))
    try:
        yield
    finally:
        model.config._attn_implementation = before
        remove()


def _replace_attention(model: PreTrainedModel, name: str, compute: Compute) -> Callable[[], object]:
    """Make the model compute attention by `compute`, registered as `name`, without a mask.

    Falcon does not use transformers' AttentionInterface: instead, it gets a mask object that runs `compute`. Return a
    function that removes this mask.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    def interface(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **others: object,
    ) -> tuple[Tensor, None]:
        out = compute(query, key, value, scaling, sliding_window)
        return out.transpose(1, 2).contiguous(), None

    def pass_mask(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        _no_mask(attention_mask=kwargs.get("attention_mask"))
        return args, kwargs | {"attention_mask": mask}

    if model.config.model_type == "falcon":
        model.config._attn_implementation = "sdpa"
        device = next(model.parameters()).device
        mask: _ComputingMask = torch.ones(1, 1, 1, 1, device=device).as_subclass(_ComputingMask)
        mask.compute = compute
        hook = model.base_model.register_forward_pre_hook(pass_mask, with_kwargs=True)
        remove: Callable[[], object] = hook.remove
        return remove
    AttentionInterface.register(name, interface)
    AttentionMaskInterface.register(name, _no_mask)
    model.config._attn_implementation = name
    return lambda: None


def chunk_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Return causal attention of the chunk to all tokens. window: number of tokens that a query sees; None: all."""
    if value.shape[-1] != key.shape[-1]:  # expanded latent attention: kernels need equal widths
        if scale is None:
            scale = query.shape[-1] ** -0.5
        padded = functional.pad(value, (0, key.shape[-1] - value.shape[-1]))
        return chunk_attention(query, key, padded, scale, window)[..., : value.shape[-1]]
    if window is not None and window < key.shape[2]:
        return _in_window(query, key, value, scale, window)
    if query.is_cuda:
        return _on_cuda(query, key, value, scale)
    prefix_len = key.shape[2] - query.shape[2]
    merged = Merged()
    own_key = key[:, :, prefix_len:]
    own_value = value[:, :, prefix_len:]
    merged.add(*_flash_cpu(query, own_key, own_value, scale, causal=query.shape[2] > 1))
    if prefix_len:
        merged.add(*_flash_cpu(query, key[:, :, :prefix_len], value[:, :, :prefix_len], scale, causal=False))
    return merged.out.to(query.dtype)


def lower_right(
    kernel: Attention, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None = None
) -> Tensor:
    """Return causal attention of the last c of S tokens with the kernel that the model was loaded with."""
    if kernel == "flash":
        return chunk_attention(query, key, value, scale, window)
    chunk_len = query.shape[2]
    length = key.shape[2]
    if kernel == "eager":
        return _eager(query, key, value, scale, _mask(query, length, window))[0]
    is_in_window = window is not None and window < length
    mask = None
    if is_in_window or 1 < chunk_len < length:
        mask = _mask(query, length, window)
    key = repeat_heads(key, query.shape[1])
    value = repeat_heads(value, query.shape[1])
    causal = mask is None and chunk_len > 1
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=scale)


def in_query_blocks(
    kernel: Attention, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, blocks: int
) -> Tensor:
    """Compute `lower_right` in several calls: each attends with one of `blocks` blocks of queries to the keys before.

    A chunk without a prefix takes one call of SDPA, which leaves out the masked half itself.
    """
    num_queries = query.shape[2]
    prefix_len = key.shape[2] - query.shape[2]
    if prefix_len == 0 and kernel != "eager":
        blocks = 1
    ends = sorted({num_queries * number // blocks for number in range(blocks + 1)})
    parts = []
    for start, end in pairwise(ends):
        stop = prefix_len + end
        parts.append(lower_right(kernel, query[:, :, start:end], key[:, :, :stop], value[:, :, :stop], scale, window))
    return torch.cat(parts, dim=2)


def block_attention(
    kernel: Attention, query: Tensor, key: Tensor, value: Tensor, scale: float | None, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return attention to one block of keys, and the logarithm of the sums of exponentials, [B, H, c], in fp32.

    causal: query i sees the first i keys, and S = c. Otherwise every query sees every key.
    """
    if query.shape[2] == 1:
        causal = False
    if kernel == "eager" or (query.is_cuda and not _takes_flash(query, key, value)):
        mask = None
        if causal:
            mask = _mask(query, key.shape[2])
        return _eager(query, key, value, scale, mask)
    if query.is_cuda:
        return _flash_cuda(query, key, value, scale, causal=causal)
    return _flash_cpu(query, key, value, scale, causal=causal)


class Merged:
    """Attention of queries to several blocks of keys: its value and the logarithm of its sum of exponentials.

    Both are in fp32, [B, H, c, E] and [B, H, c], whatever the model's dtype. All queries see the first block.
    """

    def __init__(self) -> None:
        self.out: Tensor = None
        self.lse: Tensor = None

    def add(self, out: Tensor, lse: Tensor, first: int = 0) -> None:
        """Merge a block's result for the queries from `first` on."""
        if self.out is None:
            self.out = out.float()
            self.lse = lse
            return
        earlier = self.out[:, :, first:]
        earlier_lse = self.lse[:, :, first:]
        share = torch.sigmoid(lse - earlier_lse).unsqueeze(-1)
        earlier.copy_(torch.lerp(earlier, out.float(), share))
        earlier_lse.copy_(torch.logaddexp(earlier_lse, lse))


def _mask(query: Tensor, length: int, window: int | None = None) -> Tensor:
    """Return a mask [c, S] that is True where a query sees a key; queries are the last c tokens."""
    prefix_len = length - query.shape[2]
    mask = torch.ones(query.shape[2], length, dtype=torch.bool, device=query.device).tril_(prefix_len)
    if window is not None:
        mask.triu_(prefix_len - window + 1)
    return mask


def _in_window(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int) -> Tensor:
    """Attend in blocks of about one window of queries; each block uses the keys that its queries see."""
    prefix_len = key.shape[2] - query.shape[2]
    parts = []
    block_len = max(window, _LEAST_BLOCK)
    for start in range(0, query.shape[2], block_len):
        block = query[:, :, start : start + block_len]
        end = prefix_len + start + block.shape[2]
        first = max(0, prefix_len + start - window + 1)
        keys = repeat_heads(key[:, :, first:end], query.shape[1])
        values = repeat_heads(value[:, :, first:end], query.shape[1])
        mask = _mask(block, end - first, window)
        parts.append(functional.scaled_dot_product_attention(block, keys, values, attn_mask=mask, scale=scale))
    return torch.cat(parts, dim=2)


def _eager(query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attend with the score matrix in memory and softmax in fp32, as transformers does."""
    if scale is None:
        scale = query.shape[-1] ** -0.5
    key = repeat_heads(key, query.shape[1])
    value = repeat_heads(value, query.shape[1])
    scores = (query @ key.transpose(-1, -2)).mul_(scale)
    if mask is not None:
        scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=torch.float32)
    lse = scores.amax(-1).float() - weights.amax(-1).log()  # log of the sum: the largest weight is at least 1 / S
    return weights.to(query.dtype) @ value, lse


def _flash_cpu(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Run torch's flash kernel for the CPU; also return the logarithm of the sums of exponentials, [B, H, c].

    Without a mask, all query heads of a KV head are joined along the token axis, so that K and V are not repeated.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    shape = query.shape
    if causal:
        key = repeat_heads(key, shape[1])
        value = repeat_heads(value, shape[1])
    else:
        query = query.reshape(shape[0], key.shape[1], -1, shape[3])
    out, lse = kernel(query, key, value, dropout_p=0.0, is_causal=causal, attn_mask=None, scale=scale)
    return out.reshape(shape), lse.reshape(shape[:3])


def _on_cuda(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Run FlashAttention, whose causal mask is aligned to the lower right corner, or a kernel with the mask.

    The kernel is called directly, because torch.nn.attention.bias.CausalBias, which calls the same kernel, allocates 2
    c S floats of host memory in each call.
    """
    if _takes_flash(query, key, value):
        return _flash_cuda(query, key, value, scale, causal=True)[0]
    mask = _mask(query, key.shape[2])
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)


def _takes_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the GPU, the dtype and the head's width allow FlashAttention."""
    from torch.backends.cuda import SDPAParams, can_use_flash_attention

    fits = query.shape[-1] % _FLASH_WIDTH == 0
    return fits and bool(can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, True)))


def _flash_cuda(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Run FlashAttention, which accepts fewer heads of K and V than of Q; also return the log of the sums."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = kernel(query, key, value, dropout_p=0.0, is_causal=causal, return_debug_mask=False, scale=scale)
    return out, lse


def repeat_heads(kv: Tensor, heads: int) -> Tensor:
    """Repeat each head of K or V, [B, G, S, D], for the query heads that share it; one head alone is not copied."""
    if kv.shape[1] == 1:
        return kv.expand(-1, heads, -1, -1)
    if kv.shape[1] == heads:
        return kv
    return kv.repeat_interleave(heads // kv.shape[1], dim=1)


def _no_mask(*args: object, attention_mask: Tensor | None = None, **others: object) -> None:
    """Make no mask, for transformers' AttentionMaskInterface: `chunk_attention` needs none and supports no padding."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise InputError("attention_mask", "padding", "prompts of equal length, without padding, under flash attention")


class _ComputingMask(Tensor):  # type: ignore[misc]
    """A mask that makes scaled_dot_product_attention run `compute` instead.

    Falcon does not use the AttentionInterface, but it passes a mask of four dimensions to
    scaled_dot_product_attention unchanged. torch.nn.attention.bias.CausalBias works the same way.
    """

    compute: Compute

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func is functional.scaled_dot_product_attention:
            query, key, value = args
            assert kwargs is not None
            return kwargs["attn_mask"].compute(query, key, value, kwargs.get("scale"), None)
        return super().__torch_function__(func, types, args, kwargs or {})
