"""What the products of a quantised model are computed in and priced as, in words."""

from __future__ import annotations

from collections.abc import Iterator

from kvrsim.hardware.gpu import GpuSpec
from kvrsim.model.gemm import Gemm
from kvrsim.model.spec import LayerSpec, ModelSpec
from kvrsim.profile.profile import CalibrationProfile
from kvrsim.profile.rates.gemm import GEMM_TYPES

EXPLAINED = {
    "fp8": "FP8",
    "fp8_block": "FP8 with scales by block",
    "nvfp4": "NVFP4",
    "int8": "INT8",
    "int4_wo": "half precision from 4-bit weights",
    "int8_wo": "half precision from 8-bit weights",
    "mxfp4_wo": "half precision from MXFP4 weights",
    "mxfp4_fp8": "FP8 from MXFP4 weights",
}


def precision_notes(model: ModelSpec, dtype: str, profile: CalibrationProfile | None, gpu: GpuSpec) -> Iterator[str]:
    """Of a quantised model: what is computed in which type, and which rates stand for a type without its own.

    profile: None is the datasheet's roofline.
    """
    if model.quantization is None:
        return
    half = "half precision" if dtype == "fp8" else dtype
    begin = f"{model.name} has quantised weights ({model.quantization.describe()})"
    if not model.quantization.formats:
        yield (
            f"{begin} by a method that is not modelled: weights and computation are taken in {half}; the checkpoint"
            " needs less memory, and may need more or less time"
        )
        return
    types = sorted({gemm.compute for kind in model.layer_kinds for gemm in _matrices(kind) if gemm.compute})
    if not types:
        yield f"{begin}, of none of its layers: all is taken in {half}"
        return
    computed = " and ".join(EXPLAINED[one] for one in types)
    whole = all(gemm.compute for kind in model.layer_kinds for gemm in _matrices(kind) if gemm.out_features > 1)
    which = "the layers' products" if whole else "some of the layers' products (the rest is not quantised)"
    cache = "" if model.quantization.kv_cache_bits else " and KV cache"
    head = ", head" if model.lm_head.compute is None else ""
    yield f"{begin}: {which} in {computed}; attention, norms, embedding{head}{cache} in {half}"
    for one in sorted(
        {gemm.compute for kind in model.layer_kinds for gemm in _products(kind, profile) if gemm.compute}
    ):
        yield from _priced(one, half, profile, gpu)


def _matrices(layer: LayerSpec) -> tuple[Gemm, ...]:
    """All but the router, which is never quantised."""
    mixer = () if layer.mixer is None else layer.mixer.matrices
    return (*mixer, *layer.mlp, *layer.shared_mlp)


def _products(layer: LayerSpec, profile: CalibrationProfile | None) -> tuple[Gemm, ...]:
    """Without routed experts that have rates of their own (see expert_notes)."""
    rates = None if profile is None else profile.kernels.experts
    if layer.num_experts and rates is not None and rates.covers(layer.mlp[0].compute, 2):
        return tuple(gemm for gemm in _matrices(layer) if gemm not in layer.mlp)
    return _matrices(layer)


def _priced(compute: str, half: str, profile: CalibrationProfile | None, gpu: GpuSpec) -> Iterator[str]:
    """Nothing where the profile has the type's own rates."""
    if profile is None:
        return
    priced = profile.kernels.priced_as(compute)
    if priced == compute:
        return
    missing = f"profile {profile.name} has no rates of products in {EXPLAINED[compute]}"
    if priced is not None:
        yield f"{missing}; priced as {EXPLAINED[priced]}"
    elif not GEMM_TYPES[compute].quantised:
        yield f"{missing}; priced as {half}, which leaves out the dequantising: TTFT may be a little short"
    elif compute == "nvfp4":
        yield f"{missing}; priced as {half}, as engines compute them before Blackwell, where TTFT is shorter"
    elif compute == "int8" or "fp8" in dict(gpu.peak_flops):
        yield f"{missing}; priced as {half}, which takes longer: TTFT of a long prompt is too long"
    else:
        yield f"{missing}; priced as {half}, as engines compute them on a GPU without such arithmetic"
