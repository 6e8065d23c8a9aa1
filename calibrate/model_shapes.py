"""Weight matrices of the built-in models, as serving engines multiply with them: Q, K, V in one, gate and up in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from calibrate.gemm_rows import Shape
from kvrsim.model import Gemm, builtin_models, load_model
from kvrsim.rates.gemm import Product, merged


def builtin_shapes() -> frozenset[Shape]:
    """(in_features, out_features) of every layer of every model that ships; experts of mixtures left away."""
    return frozenset(shape for name in builtin_models() for shape in model_shapes(name))


def model_shapes(name: str) -> Iterator[Shape]:
    """Those of one model, a built-in name or a path."""
    for layer in load_model(name).layer_kinds:
        dense: tuple[Sequence[Gemm], ...] = () if layer.num_experts else (layer.mlp,)
        for gemms in (layer.qkv, (layer.output,), *dense):
            for product in merged([Product(gemm.in_features, gemm.out_features) for gemm in gemms]):
                yield product.in_features, product.out_features
