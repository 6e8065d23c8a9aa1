"""Element-wise kernels, which mainly move bytes: bytes per token of a layer, and their rates.

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

A ring attends to one block of keys after another. The result of each block is merged with that of the blocks before it,
weighted by their log-sum-exp, in fp32. The counts follow update_out_and_lse of ring-flash-attention
(ring_flash_attn/utils.py at 8996282), kernel by kernel (r = bytes read, w = bytes written):

per element of the output         to fp32 r2w4, difference r8w4, times its weight r4w4, subtraction r8w4      = 38
per log-sum-exp (token, head)    difference r8w4, sigmoid r4w4, difference r8w4, log-sigmoid r4w4, sum r8w4  = 52
a part of the rank's queries     the new values are copied back, r4w4                                        = 8 each
first and last                   the first block's output to fp32, r2w4; the merged one back to half, r4w2   = 6 each

TorchScript compiles that function and may fuse it; the times that the project publishes are those of separate kernels
(docs/results/studies.md). One fused kernel moves r6w4 = 10 per element, and r8w4 = 12 per log-sum-exp.

Where merging was measured on the machine itself (`kvrsim calibrate compute`), its rate counts the bytes that every
implementation moves: per element and per log-sum-exp, two results are read and one is written, in fp32.

Separate kernels are PyTorch's kernels under every engine. They reach the same share of the datasheet's memory bandwidth
as PyTorch on A100 in the profile a100-eager: 1.584 of 2.039 TB/s, fitted to published prefills.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from kvrsim.io.schema import NonNegative
from kvrsim.model.mixers import Attention, CompressedAttention, LatentAttention, Mixer, Recurrence
from kvrsim.model.spec import LayerSpec, ModelSpec

ElementwiseOp = Literal["norm", "rotary", "activation", "residual", "copy", "embedding"]
ELEMENTWISE_OPS: tuple[ElementwiseOp, ...] = get_args(ElementwiseOp)
_RATE = {"unit": "bytes_per_s"}  # unit of fields whose names contain no unit


class Traffic(NamedTuple):
    """Bytes that one step of a layer moves through device memory."""

    op: ElementwiseOp | Literal["merge"]
    nbytes: float  # bytes read and written, per token
    kernels: int  # number of kernels of the operation


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementwiseRates:
    """Bytes per second by operation; a kernel with more arithmetic per byte or less optimised code has a lower rate."""

    fused: bool = False  # whether norm, rotary embedding and activation are one kernel each, as in serving engines
    fused_merge: bool = False  # whether one kernel merges partial results of a ring's attention; else several
    start_s: NonNegative  # seconds to start a kernel, on the device
    norm: float = field(metadata=_RATE)
    rotary: float = field(metadata=_RATE)
    activation: float = field(metadata=_RATE)
    residual: float = field(metadata=_RATE)
    copy: float = field(metadata=_RATE)
    embedding: float = field(metadata=_RATE)
    merge_bytes_per_s: float | None = None  # measured rate of merging partial results; None: counted, see above
    mask_element_s: NonNegative = 0.0  # seconds per element of the attention mask, once per prefill

    @classmethod
    def uniform(
        cls, bytes_per_s: float, *, fused: bool, start_s: float = 0.0, fused_merge: bool = False
    ) -> ElementwiseRates:
        """Rates with one value for all operations."""
        rates: dict[str, Any] = dict.fromkeys(ELEMENTWISE_OPS, bytes_per_s)
        return cls(fused=fused, start_s=start_s, fused_merge=fused_merge, **rates)

    def bytes_per_s(self, op: ElementwiseOp | Literal["merge"]) -> float:
        """The rate of one operation."""
        if op == "merge":
            if self.merge_bytes_per_s is not None:
                return self.merge_bytes_per_s
            return self.residual
        return float(getattr(self, op))


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheCopies:
    """Number of copies of K and V on their way into the cache; each copy reads and writes them."""

    keep: NonNegative  # copies under every strategy, such as where K and V are stacked into one tensor
    append: NonNegative  # additional copies where a chunk is appended to a prefix (torch.cat)
    gather: NonNegative  # additional copies where gathered pieces are joined (a list of outputs, then torch.cat)
    own: NonNegative = 0.0  # copies of only the chunk's part, where it is written into a buffer with the other parts


NO_COPIES = CacheCopies(keep=0.0, append=0.0, gather=0.0)


class _Step(NamedTuple):
    nbytes: float  # bytes per element, for elements of two bytes
    kernels: int


_EAGER = {
    "RMSNorm": _Step(34, 6),
    "LayerNorm": _Step(4, 1),
    "rotary": _Step(20, 8),
    "reshape": _Step(4, 1),
    "residual": _Step(6, 1),
    "gated MLP": _Step(10, 2),
    "plain MLP": _Step(4, 1),
}
_FUSED = _EAGER | {"RMSNorm": _Step(4, 1), "rotary": _Step(4, 1), "reshape": _Step(0, 0), "gated MLP": _Step(6, 1)}
_ROTARY_REPEATS = _Step(8, 12)  # repetition of cos and sin for every head
_LLAMA_KERNELS = 7  # kernels of eager attention from rotary embedding to PV in Llama's code
_FALCON_KERNELS = 6  # the same kernels in Falcon's code
_FALCON_ALIBI_KERNELS = 8  # the same kernels in Falcon's code with ALiBi
# Bytes that eager attention moves per element of the score matrix in half precision, by Llama's code with its softmax
# in fp32: QK^T w2, /sqrt(d) r2w2, +mask r2w2, max(finfo.min) r2w2, softmax in fp32 r2w4, back to half r4w2, times V r2.
# This value holds for all models without a fitted value; ALiBi adds its biases, r2w2.
_SCORE_BYTES = 28.0
_ALIBI_BYTES = 4.0  # bytes per element of the score matrix to add ALiBi's biases
_SEPARATE_MERGE = (38.0, 52.0, 9)  # bytes per element, bytes per log-sum-exp, number of kernels
_FUSED_MERGE = (10.0, 12.0, 1)  # the same of one fused kernel
_BACK = 8.0  # bytes per element, and per log-sum-exp, to copy values of a part of the queries back
_BACK_KERNELS = 2  # kernels that copy values back: one for the output, one for the log-sum-exp
_CAST = 6.0  # bytes per element to convert between half precision and fp32
UPCAST_KERNELS = 1  # kernels of such a conversion
_MEASURED_MERGE = 6.0  # bytes per element, and per log-sum-exp, where elements have two bytes
PYTORCH_SHARE = 0.777  # share of the datasheet's memory bandwidth, see above


def eager_score_bytes(model: ModelSpec) -> float:
    """Bytes that eager attention moves per element of the score matrix, for elements of two bytes."""
    return _SCORE_BYTES + _ALIBI_BYTES * model.alibi


def eager_kernels(model: ModelSpec, mixer: Attention, *, repeats: bool) -> int:
    """Kernels of eager attention from rotary embedding to PV; `repeats` adds the repetition of K and of V."""
    shared = mixer.num_key_value_heads < mixer.num_attention_heads
    kernels = _LLAMA_KERNELS
    if model.model_type == "falcon":
        kernels = _FALCON_KERNELS
        if model.alibi:
            kernels = _FALCON_ALIBI_KERNELS
    if repeats and shared:
        kernels += 2
    return kernels


def before_mixer(
    model: ModelSpec, layer: LayerSpec, *, fused: bool, repeats_rotary: bool = False
) -> tuple[Traffic, ...]:
    """Traffic of the layer's norms, norms inside the mixer, and rotary embedding, per token.

    repeats_rotary: whether cos and sin are repeated for every head.
    """
    steps = [_norm(model, model.hidden_size, fused=fused)] * layer.norms_before_mixer
    if layer.mixer is not None:
        steps += [_norm(model, features, fused=fused) for features in _norm_widths(layer.mixer)]
        rotated = _rotary_widths(layer.mixer)
        step = _steps(fused)["rotary"]
        if rotated and model.rotary:
            steps.append(Traffic("rotary", step.nbytes * sum(rotated), step.kernels))
        if repeats_rotary:
            for features in rotated:
                if features > model.head_dim:
                    steps.append(Traffic("rotary", _ROTARY_REPEATS.nbytes * features, _ROTARY_REPEATS.kernels))
    return tuple(steps)


def _steps(fused: bool) -> dict[str, _Step]:
    """Bytes and kernels of the steps of a layer, in a serving engine or in eager code."""
    if fused:
        return _FUSED
    return _EAGER


def after_mixer(
    model: ModelSpec, layer: LayerSpec, *, fused: bool, intermediate: float, reshapes: bool = True
) -> tuple[Traffic, ...]:
    """Traffic of reshape, residuals, activation and the other norms, per token.

    intermediate: the MLP's width; routed experts count their own activations.
    reshapes: False where the rates of attention include the reshaping of the output.
    """
    table = _steps(fused)
    hidden = model.hidden_size
    mixer = layer.mixer
    blocks = layer.num_blocks
    steps = []
    if reshapes and mixer is not None:
        steps.append(Traffic("copy", table["reshape"].nbytes * hidden, table["reshape"].kernels))
    if isinstance(mixer, Attention | LatentAttention) and mixer.gate:
        steps.append(activation(mixer.num_attention_heads * mixer.v_head_dim, gated=True, fused=fused))
    residual = table["residual"]
    steps.append(Traffic("residual", blocks * residual.nbytes * hidden, blocks * residual.kernels))
    if intermediate:
        steps.append(activation(intermediate, gated=layer.gated_mlp, fused=fused))
    return (*steps, *[_norm(model, hidden, fused=fused)] * layer.norms_after_mixer)


def activation(intermediate: float, *, gated: bool, fused: bool) -> Traffic:
    """Traffic of one token's activation between the matrices of an MLP of width `intermediate`."""
    step = _steps(fused)["gated MLP" if gated else "plain MLP"]
    return Traffic("activation", step.nbytes * intermediate, step.kernels)


def _norm(model: ModelSpec, features: int, *, fused: bool) -> Traffic:
    """Traffic of one norm over `features` features; LayerNorm has weights and biases."""
    has_bias = model.final_norm_parameters == 2 * model.hidden_size
    step = _steps(fused)["LayerNorm" if has_bias else "RMSNorm"]
    return Traffic("norm", step.nbytes * features, step.kernels)


def _norm_widths(mixer: Mixer) -> tuple[int, ...]:
    """Number of features of each norm inside a mixer: of queries and keys, or of latents."""
    if isinstance(mixer, Attention):
        if not mixer.qk_norm:
            return ()
        return (mixer.num_attention_heads * mixer.head_dim, mixer.num_key_value_heads * mixer.head_dim)
    if isinstance(mixer, LatentAttention):
        key_width = mixer.kv_lora_rank + mixer.qk_rope_head_dim  # the latent with its rotated key
        query_latents = []
        for gemm in mixer.projections:
            if gemm.split == "whole" and gemm.out_features != key_width:
                query_latents.append(gemm.out_features)
        return (*query_latents, mixer.kv_lora_rank)
    if isinstance(mixer, CompressedAttention):
        return (mixer.num_attention_heads * mixer.head_dim, mixer.head_dim)
    return (mixer.num_value_heads * mixer.value_head_dim,)


def _rotary_widths(mixer: Mixer) -> tuple[int, ...]:
    """Number of rotated features of queries and of keys."""
    if isinstance(mixer, Recurrence):
        return ()
    if isinstance(mixer, CompressedAttention):
        return (mixer.num_attention_heads * mixer.rotary_dim, mixer.rotary_dim)
    if not mixer.rotary:
        return ()
    if isinstance(mixer, LatentAttention):
        return (mixer.num_attention_heads * mixer.qk_rope_head_dim, mixer.qk_rope_head_dim)
    return (mixer.num_attention_heads * mixer.head_dim, mixer.num_key_value_heads * mixer.head_dim)


def merge(mixer: Attention | LatentAttention, *, fused: bool, part: bool) -> Traffic:
    """Traffic to merge one token's result of a block into the result of earlier blocks.

    fused: one kernel merges. part: the block has results for a part of the rank's queries.
    """
    nbytes, lse, kernels = _FUSED_MERGE if fused else _SEPARATE_MERGE
    if part and not fused:
        nbytes = nbytes + _BACK
        lse = lse + _BACK
        kernels = kernels + _BACK_KERNELS
    heads = mixer.num_attention_heads
    return Traffic("residual", heads * (mixer.v_head_dim * nbytes + lse), kernels)


def measured_merge(mixer: Attention | LatentAttention) -> Traffic:
    """Traffic of a merge, for profiles that measured its rate; the rate includes the starts of the kernels."""
    return Traffic("merge", _MEASURED_MERGE * mixer.num_attention_heads * (mixer.v_head_dim + 1), 0)


def upcast(mixer: Attention | LatentAttention) -> Traffic:
    """Traffic to convert one token's output to fp32 or back."""
    return Traffic("residual", _CAST * mixer.num_attention_heads * mixer.v_head_dim, UPCAST_KERNELS)
