"""Notes about a model and a profile: layers that have no rates of their own, routed experts, quantised weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvrsim.hardware import GpuSpec
from kvrsim.kernels.experts import ExpertPlacement
from kvrsim.kernels.gemm import GEMM_TYPES
from kvrsim.kernels.profile import CalibrationProfile, KernelRates
from kvrsim.kernels.sparse import sparse_call
from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers import RECURRENCE_TITLES, Attention, LatentAttention, Mixer, Recurrence
from kvrsim.model.spec import LayerSpec, ModelSpec

_COUNTED = "counted from FLOPs and bytes at the rates of other operations"


def head_dims(model: ModelSpec, rates: KernelRates) -> tuple[int, ...]:
    """Widths of the heads that are priced by softmax rates; latents that have their own rates are left out."""
    widths = {
        layer.mixer.head_dim
        for layer in model.layer_kinds
        if isinstance(layer.mixer, Attention | LatentAttention)
        and not layer.mixer.is_sparse
        and (rates.latent is None or not isinstance(layer.mixer, LatentAttention))
    }
    return tuple(sorted(widths))


def coverage_notes(model: ModelSpec, profile: CalibrationProfile, element_bytes: int) -> Iterator[str]:
    """Notes on the kinds of layers of the model for which the profile has no rates, a sentence per kind."""
    rates, mixers = profile.kernels, [layer.mixer for layer in model.layer_kinds if layer.mixer is not None]
    missing = f"profile {profile.name} has no rates of"
    latents = [mixer for mixer in mixers if isinstance(mixer, LatentAttention) and not mixer.is_sparse]
    if latents and rates.latent is None:
        yield f"{missing} latent attention; priced as attention with heads of the mean width of its keys and values"
    if any(_is_counted(mixer, rates) for mixer in mixers):
        yield f"{missing} sparse attention; {_COUNTED}"
    kinds = dict.fromkeys(mixer.kind for mixer in mixers if isinstance(mixer, Recurrence))
    for kind in kinds:
        if rates.recurrence is None:
            yield f"{missing} {RECURRENCE_TITLES[kind]}; {_COUNTED}"
        elif kind not in rates.recurrence.kinds:
            yield f"{missing} {RECURRENCE_TITLES[kind]}; priced as the most similar recurrence that it has"
    types = {layer.mlp[0].compute for layer in model.layer_kinds if layer.num_experts}
    if any(rates.experts is None or not rates.experts.covers(compute, element_bytes) for compute in types):
        yield f"{missing} grouped products of such experts; each expert is priced as a product of its own"


def _is_counted(mixer: Mixer, rates: KernelRates) -> bool:
    """Whether a mixer attends to chosen keys for which the profile has no rates."""
    if isinstance(mixer, Recurrence) or not mixer.is_sparse:
        return False
    return rates.sparse is None or rates.sparse.of(sparse_call(mixer, np.ones(1), np.zeros(1))) is None


def expert_notes(model: ModelSpec, profile: CalibrationProfile | None, placement: ExpertPlacement) -> Iterator[str]:
    """Notes on a mixture of experts: the rates of its experts, and how unevenly tokens are spread over GPUs.

    profile: None means the roofline of the datasheet.
    """
    sparse = [layer for layer in model.layer_kinds if layer.num_experts]
    if not sparse:
        return
    rates = None if profile is None else profile.kernels.experts
    types = dict.fromkeys(layer.mlp[0].compute for layer in sparse)
    covered = [kind for kind in types if rates is not None and rates.covers(kind, 2)]
    if profile is not None and covered:  # coverage_notes names experts without rates
        fit = profile.operations.get("experts")
        error = "" if fit is None else f"; mean error {fit.cross_validated_mape:.0%} on models left out of the fit"
        yield (
            "mixture of experts: the rates of grouped products are means over even and uneven loads of the experts"
            f"{error}"
        )
    for kind in filter(None, covered):
        if profile is not None and rates is not None and (priced := rates.priced_as(kind)) not in (None, kind):
            yield f"profile {profile.name} has no rates of experts in {EXPLAINED[kind]}; priced as {EXPLAINED[priced]}"
    if placement.num_gpus > 1:
        held = sorted({layer.num_experts // placement.num_gpus for layer in sparse})
        each = " or ".join(map(str, held))
        source = "as given"
        if placement.imbalance is None:
            source = "experts' loads vary by a power law of exponent 1.01, as aiconfigurator takes it for DeepSeek"
        worst = max(placement.imbalance_of(layer.num_experts, layer.num_experts_per_tok) for layer in sparse)
        yield (
            f"expert parallelism: {each} of each layer's experts on each of {placement.num_gpus} GPUs; the busiest has"
            f" {worst:.2f} times the mean rows ({source}; --expert-imbalance)"
        )


EXPLAINED = {
    "fp8": "FP8",
    "fp8_block": "FP8 with a scale per block",
    "nvfp4": "NVFP4",
    "int8": "INT8",
    "int4_wo": "half precision from 4-bit weights",
    "int8_wo": "half precision from 8-bit weights",
    "mxfp4_wo": "half precision from MXFP4 weights",
    "mxfp4_fp8": "FP8 from MXFP4 weights",
}


def precision_notes(model: ModelSpec, dtype: str, profile: CalibrationProfile | None, gpu: GpuSpec) -> Iterator[str]:
    """Notes on a quantised model: the type of each computation, and the rates used for types without their own.

    profile: None means the roofline of the datasheet.
    """
    if model.quantization is None:
        return
    half = "half precision" if dtype == "fp8" else dtype
    begin = f"{model.name} has quantised weights ({model.quantization.describe()})"
    if not model.quantization.formats:
        yield (
            f"{begin} by a method that is not modelled: weights and computation are priced in {half}; the"
            " checkpoint needs less memory, and its TTFT may be longer or shorter"
        )
        return
    types = sorted({gemm.compute for kind in model.layer_kinds for gemm in _matrices(kind) if gemm.compute})
    if not types:
        yield f"{begin}, but not in its layers: all products are in {half}"
        return
    computed = " and ".join(EXPLAINED[one] for one in types)
    whole = all(gemm.compute for kind in model.layer_kinds for gemm in _matrices(kind) if gemm.out_features > 1)
    which, others = ("products", "") if whole else ("some products", "other products, ")
    cache = "" if model.quantization.kv_cache_bits else " and KV cache"
    head = ", head" if model.lm_head.compute is None else ""
    yield f"{begin}: {which} of the layers in {computed}; {others}attention, norms, embedding{head}{cache} in {half}"
    for one in sorted(
        {gemm.compute for kind in model.layer_kinds for gemm in _products(kind, profile) if gemm.compute}
    ):
        yield from _priced_precision(one, half, profile, gpu)


def _matrices(layer: LayerSpec) -> tuple[Gemm, ...]:
    """All matrices except the router, which is never quantised."""
    mixer = () if layer.mixer is None else layer.mixer.matrices
    return (*mixer, *layer.mlp, *layer.shared_mlp)


def _products(layer: LayerSpec, profile: CalibrationProfile | None) -> tuple[Gemm, ...]:
    """Matrices, except routed experts that have rates of their own (see expert_notes)."""
    rates = None if profile is None else profile.kernels.experts
    if layer.num_experts and rates is not None and rates.covers(layer.mlp[0].compute, 2):
        return tuple(gemm for gemm in _matrices(layer) if gemm not in layer.mlp)
    return _matrices(layer)


def _priced_precision(compute: str, half: str, profile: CalibrationProfile | None, gpu: GpuSpec) -> Iterator[str]:
    """Notes on the rates used for a type that the profile lacks."""
    if profile is None or (priced := profile.kernels.priced_as(compute)) == compute:
        return
    if priced is not None:
        substitute = EXPLAINED[priced]
    elif not GEMM_TYPES[compute].quantised:
        substitute = f"{half}, without the time to dequantise: the predicted TTFT may be slightly too short"
    elif compute == "nvfp4":
        substitute = f"{half}, as engines do before Blackwell; on Blackwell TTFT is shorter"
    elif compute == "int8" or "fp8" in gpu.peak_flops:
        substitute = f"{half}, which is slower: the predicted TTFT of long prompts is too long"
    else:
        substitute = f"{half}, as engines do on a GPU without such arithmetic"
    yield f"profile {profile.name} has no rates of products in {EXPLAINED[compute]}; priced as {substitute}"
