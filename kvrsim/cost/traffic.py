"""Bytes that element-wise kernels move for one token of one layer.

Eager PyTorch runs each step of a norm, a rotary embedding or an activation as a kernel of its own, each
reading and writing device memory. The counts below follow the 2023 Hugging Face Llama and Falcon code in
half precision, operation by operation (r = bytes read, w = bytes written, per element):

RMSNorm      to fp32 r2w4, pow r4w4, mean r4, times rsqrt r2w4, to half r4w2, times weight r2w2    = 34
LayerNorm    one fused kernel r2w2                                                                 = 4
rotary       x*cos r2w2, rotate_half r3w3, *sin r2w2, add r4w2, on Q and on K                      = 20 each
attention    transpose and reshape of the output r2w2                                              = 4
residual     r4w2                                                                                  = 6
gated MLP    silu r2w2, times up r4w2                                                              = 10
plain MLP    gelu r2w2                                                                             = 4

Serving engines fuse: norm with residual r4w4, rotary in place r2w2, silu with product r4w2.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrsim.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bytes:
    """Bytes per element, one row of the table above, for elements of two bytes."""

    rms_norm: float
    layer_norm: float
    rotary: float
    reshape: float
    residual: float
    gated_mlp: float
    plain_mlp: float


_EAGER = _Bytes(rms_norm=34, layer_norm=4, rotary=20, reshape=4, residual=6, gated_mlp=10, plain_mlp=4)
_FUSED = _Bytes(rms_norm=8, layer_norm=8, rotary=4, reshape=0, residual=0, gated_mlp=6, plain_mlp=4)

# Bytes that eager attention moves per element of the score matrix, half precision with an fp32 softmax:
# QK^T w2, /sqrt(d) r2w2, +mask r2w2, max(finfo.min) r2w2, softmax in fp32 r2w4, back to half r4w2, times V r2.
EAGER_SCORE_BYTES = 28.0


def _norm_bytes(model: ModelSpec, table: _Bytes) -> float:
    """RMSNorm has weights only, LayerNorm weights and biases."""
    return table.rms_norm if model.final_norm_parameters == model.hidden_size else table.layer_norm


def before_attention_bytes(model: ModelSpec, *, fused: bool) -> float:
    """Input norm and rotary embedding of one token."""
    table = _FUSED if fused else _EAGER
    norm = _norm_bytes(model, table)
    heads = model.num_attention_heads + model.num_key_value_heads
    rotary = 0.0 if model.alibi else table.rotary * heads * model.head_dim
    return norm * model.hidden_size + rotary


def after_attention_bytes(model: ModelSpec, *, fused: bool, intermediate: float) -> float:
    """Reshape, residuals, second norm and activation of one token; `intermediate` is the active MLP width."""
    table = _FUSED if fused else _EAGER
    norm = 0.0 if model.parallel_attn else _norm_bytes(model, table)
    activation = table.gated_mlp if model.gated_mlp else table.plain_mlp
    hidden = table.reshape + 2 * table.residual + norm
    return hidden * model.hidden_size + activation * intermediate
