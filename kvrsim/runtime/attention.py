"""Attention of a chunk to its prefix and itself that leaves out the masked half.

Models mask: they compute all chunk × (prefix + chunk) scores, then hide those to the right of the diagonal.
Here the prefix is attended to in full, the chunk causally. On the CPU these are two calls, joined by the
log of their softmax sums; on CUDA it is one kernel whose causal mask is aligned to the lower right corner.
In a window, blocks of queries attend to the keys that they can see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as functional

from kvrsim.errors import InputError
from kvrsim.runtime.kept.query_blocks import KeysInBlocks

# Without the word "flash", by which transformers knows its own kernels.
INTERFACE_NAME = "kvrsim_chunk_attention"
_ATTENDING_NAME = "kvrsim_attending"
_LEAST_BLOCK = 128  # queries in a block of attention in a window: kernels for fewer are no faster
_FLASH_WIDTH = 8  # of which a head's width must be a multiple
_CAUSAL_FROM_BOTTOM_RIGHT = 2  # CustomMaskType of torch's memory-efficient kernel


def use_flash(model: Any) -> None:
    """Let a model, loaded with "sdpa", run `chunk_attention`.

    Raises InputError naming `attention` for ALiBi, whose biases these kernels do not take.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if getattr(model.config, "alibi", False):
        raise InputError("attention", "flash", "eager or sdpa for a model with ALiBi")
    if model.config.model_type == "falcon":
        model.base_model.register_forward_pre_hook(_hand_in_mask, with_kwargs=True)
    else:
        AttentionInterface.register(INTERFACE_NAME, _interface)
        AttentionMaskInterface.register(INTERFACE_NAME, _no_mask)
        model.set_attn_implementation(INTERFACE_NAME)
    model.kvrsim_attention = "flash"


@contextmanager
def attending(model: Any, attend: Callable[[Any, float | None], Any]) -> Iterator[None]:
    """While the context lasts, the model's attention is `attend(query, scale)`, without a mask.

    query: [B, H, c, D], as is the result, whose width is that of V. K and V have gone to the cache.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    def interface(module: Any, query: Any, *args: Any, **kwargs: Any) -> tuple[Any, None]:
        return attend(query, kwargs.get("scaling")).transpose(1, 2).contiguous(), None

    is_falcon = model.config.model_type == "falcon"
    before = model.config._attn_implementation
    if is_falcon:
        model.config._attn_implementation = "sdpa"
        mask = _mask_that_computes(model, lambda query, key, value, scale: attend(query, scale))
        hook = model.base_model.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | {"attention_mask": mask}), with_kwargs=True
        )
    else:
        AttentionInterface.register(_ATTENDING_NAME, interface)
        AttentionMaskInterface.register(_ATTENDING_NAME, _no_mask)
        model.config._attn_implementation = _ATTENDING_NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before
        if is_falcon:
            hook.remove()


def chunk_attention(query: Any, key: Any, value: Any, scale: float | None = None, window: int | None = None) -> Any:
    """Attention of the last tokens of a context to all of it, or to a window, causally.

    Shapes: query [B, H, c, D], key [B, G, S, D], value [B, G, S, E] with G a divisor of H, E <= D and S >= c; the
    result is [B, H, c, E]. Queries are the last c of the S tokens. window: tokens that a query sees, itself included.
    """
    if isinstance(key, KeysInBlocks):
        return key.each(lambda q, k, v, _: chunk_attention(q, k, v, scale, window), query, value)
    if value.shape[-1] != key.shape[-1]:  # latent attention, expanded: kernels take one width
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        padded = functional.pad(value, (0, key.shape[-1] - value.shape[-1]))
        return chunk_attention(query, key, padded, scale, window)[..., : value.shape[-1]]
    if window is not None and window < key.shape[2]:
        return _in_window(query, key, value, scale, window)
    if query.is_cuda:
        return _on_cuda(query, key, value, scale)
    chunk_len, prefix_len = query.shape[2], key.shape[2] - query.shape[2]
    own_key, own_value = (repeated(part[:, :, prefix_len:], query.shape[1]) for part in (key, value))
    own, own_lse = flash_cpu(query, own_key, own_value, scale, causal=chunk_len > 1)
    if prefix_len == 0:
        return own
    seen, seen_lse = of_prefix(query, key[:, :, :prefix_len], value[:, :, :prefix_len], scale)
    share = torch.sigmoid(own_lse - seen_lse).unsqueeze(-1)
    # The sums are float32 whatever the model's dtype; the model wants its own back.
    return torch.lerp(seen.float(), own.float(), share).to(query.dtype)


def _in_window(query: Any, key: Any, value: Any, scale: float | None, window: int) -> Any:
    """Blocks of as many queries as the window has tokens, each against the keys that one of them sees, masked."""
    prefix_len, found = key.shape[2] - query.shape[2], []
    block_len = max(window, _LEAST_BLOCK)
    for start in range(0, query.shape[2], block_len):
        block = query[:, :, start : start + block_len]
        end = prefix_len + start + block.shape[2]
        first = max(0, prefix_len + start - window + 1)
        mask = torch.ones(block.shape[2], end - first, dtype=torch.bool, device=query.device)
        behind = prefix_len + start - first  # the diagonal: keys before the first query
        mask.tril_(behind).triu_(behind - window + 1)
        keys, values = (repeated(part[:, :, first:end], query.shape[1]) for part in (key, value))
        found.append(functional.scaled_dot_product_attention(block, keys, values, attn_mask=mask, scale=scale))
    return torch.cat(found, dim=2)


def of_prefix(query: Any, key: Any, value: Any, scale: float | None) -> tuple[Any, Any]:
    """Attention to the prefix alone, and the log of the sums of exponentials, shape [B, H, c].

    The query heads of a KV head are laid one after another as if they were tokens, which spares repeating K and V.
    """
    batch, heads, chunk_len, dim = query.shape
    groups = key.shape[1]
    folded = query.reshape(batch, groups, heads // groups * chunk_len, dim)
    out, lse = flash_cpu(folded, key, value, scale, causal=False)
    return out.reshape(batch, heads, chunk_len, dim), lse.reshape(batch, heads, chunk_len)


def flash_cpu(query: Any, key: Any, value: Any, scale: float | None, *, causal: bool) -> tuple[Any, Any]:
    """torch's flash kernel for the CPU: the result, and the log of the sums of exponentials, [B, H, c]."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(query, key, value, dropout_p=0.0, is_causal=causal, attn_mask=None, scale=scale)
    return out, lse


def _on_cuda(query: Any, key: Any, value: Any, scale: float | None) -> Any:
    """One of torch's kernels whose causal mask is aligned to the lower right corner.

    The kernels are called directly: torch.nn.attention.bias.CausalBias, which calls the same ones, allocates 2 c S
    floats of host memory in each call.
    """
    kernel = _cuda_kernel(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if kernel == "flash":
        return _flash_cuda(query, key, value, scale)[0]
    if kernel == "efficient":
        return _efficient_cuda(query, key, value, scale)[0]
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    mask = seen.tril_(key.shape[2] - query.shape[2])
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)


def _cuda_kernel(query: Any, key: Any, value: Any) -> Literal["flash", "efficient", "dense"]:
    """What the device, the dtype and the head's width allow; dense: with the mask written out, on the device."""
    from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

    if can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, True)):
        return "flash"
    key, value = (repeated(part[:, :, :1], query.shape[1]) for part in (key, value))
    if can_use_efficient_attention(SDPAParams(query, key, value, None, 0.0, False, False)):
        return "efficient"
    return "dense"


def cuda_block(query: Any, key: Any, value: Any, scale: float | None, *, causal: bool) -> tuple[Any, Any] | None:
    """Attention to a block, [B, H, c, E], and the log of the sums of exponentials, [B, H, c]; None: with no kernel."""
    kernel = _cuda_kernel(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if kernel == "flash":
        return _flash_cuda(query, key, value, scale, causal=causal)
    if kernel != "efficient":
        return None
    out, lse = _efficient_cuda(query, key, value, scale, causal=causal)
    return out, lse[:, :, : query.shape[2]]  # which the kernel pads


def _flash_cuda(query: Any, key: Any, value: Any, scale: float, *, causal: bool = True) -> tuple[Any, Any]:
    """FlashAttention, which takes K and V of fewer heads as they are; its causal mask is aligned to the lower right."""
    dim = query.shape[-1]
    if dim % _FLASH_WIDTH:
        padding = (0, -dim % _FLASH_WIDTH)
        query, key, value = (functional.pad(part, padding) for part in (query, key, value))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p=0.0, is_causal=causal, return_debug_mask=False, scale=scale
    )
    return out[..., :dim] if dim % _FLASH_WIDTH else out, lse


def _efficient_cuda(query: Any, key: Any, value: Any, scale: float, *, causal: bool = True) -> tuple[Any, Any]:
    """The memory-efficient kernel, for fp32: [B, S, H, D], as many heads of K and V as of queries."""
    heads = query.shape[1]
    parts = (part.transpose(1, 2) for part in (query, repeated(key, heads), repeated(value, heads)))
    out, lse, *_ = torch.ops.aten._efficient_attention_forward(
        *parts,
        bias=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        dropout_p=0.0,
        custom_mask_type=_CAUSAL_FROM_BOTTOM_RIGHT if causal else 0,
        compute_log_sumexp=True,
        scale=scale,
    )
    return out.transpose(1, 2), lse


def repeated(kv: Any, heads: int) -> Any:
    """K or V with each head repeated for the query heads that share it."""
    return kv if kv.shape[1] == heads else kv.repeat_interleave(heads // kv.shape[1], dim=1)


def _interface(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> tuple[Any, None]:
    """As transformers' AttentionInterface calls it; the result has shape [B, c, H, D]."""
    assert attention_mask is None
    found = chunk_attention(query, key, value, kwargs.get("scaling"), kwargs.get("sliding_window"))
    return found.transpose(1, 2).contiguous(), None


def _no_mask(*args: Any, attention_mask: Any = None, **kwargs: Any) -> None:
    """As transformers' AttentionMaskInterface calls it: `chunk_attention` needs no mask, and takes no padding."""
    _refuse_padding(attention_mask)


def _refuse_padding(attention_mask: Any) -> None:
    if attention_mask is not None and not bool(attention_mask.all()):
        raise InputError("attention_mask", "padding", "prompts of equal length, without padding, under flash attention")


class _FlashMask(torch.Tensor):  # type: ignore[misc]
    """A mask that computes: as the mask of scaled_dot_product_attention it runs `compute` instead.

    Falcon does not use the AttentionInterface, but it hands a mask of four dimensions on to
    scaled_dot_product_attention untouched. torch.nn.attention.bias.CausalBias works the same way.
    """

    compute: Callable[[Any, Any, Any, float | None], Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            query, key, value = args
            assert kwargs is not None
            return kwargs["attn_mask"].compute(query, key, value, kwargs.get("scale"))
        return super().__torch_function__(func, types, args, kwargs or {})


def _hand_in_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before Falcon's forward: put the mask that computes instead of none, or of one without padding."""
    _refuse_padding(kwargs.get("attention_mask"))
    return args, kwargs | {"attention_mask": _mask_that_computes(module, chunk_attention)}


def _mask_that_computes(module: Any, compute: Callable[[Any, Any, Any, float | None], Any]) -> _FlashMask:
    mask: _FlashMask = torch.ones(1, 1, 1, 1, device=next(module.parameters()).device).as_subclass(_FlashMask)
    mask.compute = compute
    return mask
