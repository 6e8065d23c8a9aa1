"""Shapes of weight matrices: kvrsim's, and those of the model that transformers builds without memory for them."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from calibrate.reference import parameter_shapes
from kvrsim.model.spec import ModelSpec

# Weights of two dimensions that no token is multiplied with: convolutions, positions inside of an entry.
_NO_MATRIX = re.compile(r"conv1d|position_bias|A_log|embed|hc")
_FUSED = "gate_up_proj"  # of a gate and a projection of the same shape
Shapes = Counter[tuple[int, int]]  # outputs, inputs


def shapes(model: ModelSpec) -> Shapes:
    """Of all matrices of the layers, each expert's counted."""
    found: Shapes = Counter()
    for layer in model.layers:
        for gemm in layer.matrices:
            found[gemm.out_features, gemm.in_features // gemm.groups] += 1
        for gemm in layer.mlp:
            found[gemm.out_features, gemm.in_features] += max(1, layer.num_experts)
    return found


def transformers_shapes(config: dict[str, Any]) -> Shapes:
    """The same of the model that transformers makes of a configuration; it has the matrices of experts stacked."""
    found: Shapes = Counter()
    for name, shape in (parameter_shapes(config) or {}).items():
        if ".layers." not in name or _NO_MATRIX.search(name) or len(shape) < 2:
            continue
        *stack, outputs, inputs = shape
        parts = 2 if _FUSED in name else 1
        found[outputs // parts, inputs] += (stack[0] if stack else 1) * parts
    return found
