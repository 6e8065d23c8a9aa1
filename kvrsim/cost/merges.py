"""Bytes that merging partial results of attention moves through memory, and kernels that do it.

A ring attends to one block of keys after another. The result of each block is merged with that of the blocks before it,
weighted by their log-sum-exp, in fp32. The counts follow update_out_and_lse of ring-flash-attention
(ring_flash_attn/utils.py at 8996282), kernel by kernel (r = bytes read, w = bytes written):

of an element of the output      to fp32 r2w4, difference r8w4, times its weight r4w4, subtraction r8w4      = 38
of a log-sum-exp (token, head)   difference r8w4, sigmoid r4w4, difference r8w4, log-sigmoid r4w4, sum r8w4  = 52
of a part of a rank's queries    the new values are copied back, r4w4                                        = 8 each
first and last                   the first block's output to fp32, r2w4; the merged one back to half, r4w2   = 6 each

TorchScript compiles that function and may fuse it; the times that the project publishes are those of separate kernels
(docs/results/rings.md). One fused kernel moves r6w4 = 10 an element, and r8w4 = 12 a log-sum-exp.

Where merging was measured on the machine itself (`kvrsim calibrate compute`), its rate is for the bytes that any code
moves: of an element both results are read and one is written, in fp32, and so of a log-sum-exp.

Separate kernels are PyTorch's, whatever kernels an engine has: they reach the share of the datasheet's memory bandwidth
that the profile a100-eager has for PyTorch on A100, 1.584 of 2.039 TB/s, fitted to published prefills.
"""

from __future__ import annotations

from kvrsim.model.mixers import Attention, LatentAttention
from kvrsim.profile.rates.elementwise import Traffic

_SEPARATE, _SEPARATE_LSE, _SEPARATE_KERNELS = 38.0, 52.0, 9
_FUSED, _FUSED_LSE, _FUSED_KERNELS = 10.0, 12.0, 1
_BACK, _BACK_KERNELS = 8.0, 2
_CAST = 6.0
_MEASURED = 6.0  # bytes of an element, and of a log-sum-exp, where elements have two bytes
PYTORCH_SHARE = 0.777  # of the datasheet's memory bandwidth, as above


def merge(mixer: Attention | LatentAttention, *, fused: bool, part: bool) -> Traffic:
    """One token's result of a block into that of the blocks before.

    fused: one kernel does it. part: the block has results for a part of the rank's queries.
    """
    nbytes, lse, kernels = (
        (_FUSED, _FUSED_LSE, _FUSED_KERNELS) if fused else (_SEPARATE, _SEPARATE_LSE, _SEPARATE_KERNELS)
    )
    if part and not fused:
        nbytes, lse, kernels = nbytes + _BACK, lse + _BACK, kernels + _BACK_KERNELS
    heads = mixer.num_attention_heads
    return Traffic("residual", heads * (mixer.v_head_dim * nbytes + lse), kernels)


def measured_merge(mixer: Attention | LatentAttention) -> Traffic:
    """The same where it was measured; its kernels' starts are in the rate."""
    return Traffic("merge", _MEASURED * mixer.num_attention_heads * (mixer.v_head_dim + 1), 0)


def cast(mixer: Attention | LatentAttention) -> Traffic:
    """One token's output to fp32, or back."""
    return Traffic("residual", _CAST * mixer.num_attention_heads * mixer.v_head_dim, 1)
