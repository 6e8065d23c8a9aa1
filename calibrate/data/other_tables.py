"""systematic_log_sd: how far other tables of the same GPU are from the one that a profile is fitted to."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from calibrate.data.measurement import Measurement

# What makes two rows the same operation, and the size from which on rows are compared: those that make a prefill.
_SHAPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gemm": ("tokens", "in_features", "out_features"),
        "attention": ("chunk", "prefix", "batch", "num_attention_heads", "num_key_value_heads", "head_dim"),
    }
)
_LEAST_SIZE = 1024
_HALF = ("fp16", "bf16")
_ENOUGH = 20  # common shapes


def systematic_log_sd(kind: str, rows: Sequence[Measurement], others: Sequence[Measurement]) -> float | None:
    """Root mean square over the other sources of the median of log(their seconds / seconds of `rows`).

    Of half-precision rows of at least 1024 tokens; None without a source that has enough of the same shapes.
    """
    if kind not in _SHAPES:
        return None
    own = _by_shape(kind, rows)
    medians = []
    for source in sorted({row.source for row in others if row.operation == kind}):
        other = _by_shape(kind, [row for row in others if row.source == source])
        common = own.keys() & other.keys()
        if len(common) >= _ENOUGH:
            medians.append(float(np.median([np.log(other[shape] / own[shape]) for shape in common])))
    return float(np.sqrt(np.mean(np.square(medians)))) if medians else None


def _by_shape(kind: str, rows: Sequence[Measurement]) -> dict[Hashable, float]:
    size, *_ = _SHAPES[kind]
    return {
        tuple(getattr(row, name) for name in _SHAPES[kind]): row.expected_s
        for row in rows
        if row.operation == kind and row.dtype in _HALF and (getattr(row, size) or 0) >= _LEAST_SIZE
    }
