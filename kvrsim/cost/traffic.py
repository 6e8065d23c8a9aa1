"""Bytes that element-wise kernels move for one token of one layer, and kernels that do it.

Eager PyTorch runs each step of a norm, a rotary embedding or an activation as a kernel of its own, each
reading and writing device memory. The counts below follow the 2023 Hugging Face Llama and Falcon code in
half precision, operation by operation (r = bytes read, w = bytes written, per element):

RMSNorm      to fp32 r2w4, pow r4w4, mean r4, times rsqrt r2w4, to half r4w2, times weight r2w2    = 34
LayerNorm    one fused kernel r2w2                                                                 = 4
             of queries and keys (Qwen3, Gemma 3): as a norm, over the heads' features instead of the hidden size
rotary       x*cos r2w2, rotate_half r3w3, *sin r2w2, add r4w2, on Q and on K                      = 20 each
attention    transpose and reshape of the output r2w2                                              = 4
residual     r4w2                                                                                  = 6
gated MLP    silu r2w2, times up r4w2                                                              = 10
plain MLP    gelu r2w2                                                                             = 4

Falcon's code of late 2023 (transformers 4.34) first repeats cos and sin for every head, by torch.repeat_interleave:
6 kernels each (fill, copy, sum, its value read back, indices, selection), and cos and sin are written and read at the
size of the queries, r2w2 each. Reading a value back makes the host wait for the device.

Attention is 7 kernels in Llama's code (QK^T, scaling, mask, max, softmax, to half, PV), 6 in Falcon's (both inputs
scaled, QK^T, mask, softmax, PV), 8 in Falcon's with ALiBi (QK^T, to fp32, biases, scaling, mask, to half, softmax, PV).

Serving engines fuse: norm r2w2, residual r4w2, rotary in place r2w2, silu with product r4w2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvrsim.model.spec import ModelSpec
from kvrsim.profile.profile import CacheCopies
from kvrsim.profile.rates.elementwise import Traffic


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """Bytes per element and kernels of one step, for elements of two bytes."""

    nbytes: float
    kernels: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Steps:
    """One way to write a layer's element-wise steps: a column of the table above."""

    rms_norm: _Step
    layer_norm: _Step
    rotary: _Step
    reshape: _Step
    residual: _Step
    gated_mlp: _Step
    plain_mlp: _Step


_EAGER = _Steps(
    rms_norm=_Step(nbytes=34, kernels=6),
    layer_norm=_Step(nbytes=4, kernels=1),
    rotary=_Step(nbytes=20, kernels=8),
    reshape=_Step(nbytes=4, kernels=1),
    residual=_Step(nbytes=6, kernels=1),
    gated_mlp=_Step(nbytes=10, kernels=2),
    plain_mlp=_Step(nbytes=4, kernels=1),
)
_FUSED = _Steps(
    rms_norm=_Step(nbytes=4, kernels=1),
    layer_norm=_Step(nbytes=4, kernels=1),
    rotary=_Step(nbytes=4, kernels=1),
    reshape=_Step(nbytes=0, kernels=0),
    residual=_Step(nbytes=6, kernels=1),
    gated_mlp=_Step(nbytes=6, kernels=1),
    plain_mlp=_Step(nbytes=4, kernels=1),
)

# Bytes that eager attention moves per element of the score matrix in half precision, by Llama's code with its
# softmax in fp32: QK^T w2, /sqrt(d) r2w2, +mask r2w2, max(finfo.min) r2w2, softmax in fp32 r2w4, back to half r4w2,
# times V r2. It stands for all models whose bytes no profile has fitted; ALiBi adds its biases, r2w2.
_SCORE_BYTES = 28.0
_ALIBI_BYTES = 4.0
_LLAMA_KERNELS, _FALCON_KERNELS, _FALCON_ALIBI_KERNELS = 7, 6, 8
_ROTARY_REPEATS = _Step(nbytes=8, kernels=12)


def eager_score_bytes(model: ModelSpec) -> float:
    """Bytes that eager attention moves per element of the score matrix, for elements of two bytes."""
    return _SCORE_BYTES + _ALIBI_BYTES * model.alibi


class LayerKernels(NamedTuple):
    """Kernels that one layer launches."""

    before: int  # norms, projections to Q, K, V, rotary embedding
    attention: int  # with the copies of K and V into the cache
    after: int  # output projection, norms, MLP, residuals


def attention_kernels(model: ModelSpec, kernel: str, *, repeats: bool, copies: CacheCopies) -> int:
    """Kernels from rotary embedding to PV; `repeats`: shared KV heads are repeated for their queries, K and V each."""
    cached = (copies.keep > 0) + (copies.own > 0)
    if kernel != "eager":
        return 1 + cached
    shared = model.num_key_value_heads < model.num_attention_heads
    falcon = _FALCON_ALIBI_KERNELS if model.alibi else _FALCON_KERNELS
    return (falcon if model.model_type == "falcon" else _LLAMA_KERNELS) + 2 * (repeats and shared) + cached


def _norm(model: ModelSpec, table: _Steps, features: int) -> Traffic:
    """One norm over so many features; RMSNorm has weights only, LayerNorm weights and biases."""
    step = table.rms_norm if model.final_norm_parameters == model.hidden_size else table.layer_norm
    return Traffic("norm", step.nbytes * features, step.kernels)


def before_attention(model: ModelSpec, *, fused: bool, repeats_rotary: bool = False) -> tuple[Traffic, ...]:
    """Norms of the layer's input, norms of queries and keys, and rotary embedding of one token.

    repeats_rotary: cos and sin are repeated for every head.
    """
    table = _FUSED if fused else _EAGER
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    steps = [_norm(model, table, model.hidden_size)] * model.norms_before_attention
    if model.qk_norm:
        steps += [_norm(model, table, queries), _norm(model, table, keys)]
    if model.rotary:
        steps.append(Traffic("rotary", table.rotary.nbytes * (queries + keys), table.rotary.kernels))
    if repeats_rotary:
        repeated = [features for features in (queries, keys) if features > model.head_dim]
        steps += [Traffic("rotary", _ROTARY_REPEATS.nbytes * each, _ROTARY_REPEATS.kernels) for each in repeated]
    return tuple(steps)


def after_attention(
    model: ModelSpec, *, fused: bool, intermediate: float, reshapes: bool = True
) -> tuple[Traffic, ...]:
    """Reshape, residuals, activation and the other norms of one token; `intermediate` is the active MLP width.

    reshapes: False where the output's reshaping is part of attention.
    """
    table, hidden = _FUSED if fused else _EAGER, model.hidden_size
    mlp = table.gated_mlp if model.gated_mlp else table.plain_mlp
    steps = [
        *([Traffic("copy", table.reshape.nbytes * hidden, table.reshape.kernels)] if reshapes else []),
        Traffic("residual", 2 * table.residual.nbytes * hidden, 2 * table.residual.kernels),
        Traffic("activation", mlp.nbytes * intermediate, mlp.kernels),
    ]
    return (*steps, *[_norm(model, table, hidden)] * model.norms_after_attention)
