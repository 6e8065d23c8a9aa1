"""Notes on missing rates (kinds of layers, routed experts, types of quantised products) and on the cached prefix."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvrsim.hardware import prefix_link
from kvrsim.kernels.gemm import GEMM_TYPES
from kvrsim.kernels.profile import CalibrationProfile, KernelRates
from kvrsim.kernels.sparse import sparse_call
from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers import RECURRENCE_TITLES, LatentAttention, Mixer, Recurrence
from kvrsim.model.spec import LayerSpec, ModelSpec
from kvrsim.notes import Note, note
from kvrsim.placement import PlacedScenario
from kvrsim.scenario import Scenario
from kvrsim.units import format_bandwidth


def missing_rate_notes(model: ModelSpec, profile: CalibrationProfile, element_bytes: int) -> Iterator[Note]:
    """Notes on the kinds of layers of the model for which the profile has no rates, a sentence per kind."""
    rates = profile.kernels
    name = profile.name
    mixers = [one.mixer for one in model.layer_kinds if one.mixer]
    latents = [mixer for mixer in mixers if isinstance(mixer, LatentAttention) and not mixer.is_sparse]
    if latents and rates.latent is None:
        yield note("no rates, latent", profile=name)
    if any(_is_counted(mixer, rates) for mixer in mixers):
        yield note("no rates, counted", profile=name, what="sparse attention")
    for kind in dict.fromkeys(mixer.kind for mixer in mixers if isinstance(mixer, Recurrence)):
        if rates.recurrence is None:
            yield note("no rates, counted", profile=name, what=RECURRENCE_TITLES[kind])
        elif kind not in rates.recurrence.kinds:
            yield note("no rates, recurrence", profile=name, what=RECURRENCE_TITLES[kind])
    types = {layer.mlp[0].compute for layer in model.layer_kinds if layer.num_experts}
    if any(rates.experts is None or not rates.experts.covers(compute, element_bytes) for compute in types):
        yield note("no rates, experts", profile=name)


def _is_counted(mixer: Mixer, rates: KernelRates) -> bool:
    """Whether a mixer attends to chosen keys for which the profile has no rates."""
    if isinstance(mixer, Recurrence) or not mixer.is_sparse:
        return False
    return rates.sparse is None or rates.sparse.of(sparse_call(mixer, np.ones(1), np.zeros(1))) is None


def expert_notes(scenario: Scenario) -> Iterator[Note]:
    """Notes on a mixture of experts: the rates of its experts, and how unevenly tokens are spread over GPUs."""
    sparse = [layer for layer in scenario.model.layer_kinds if layer.num_experts]
    profile = scenario.profile
    placement = PlacedScenario.of(scenario).expert_placement
    if sparse and profile is not None and (rates := profile.kernels.experts) is not None:
        types = dict.fromkeys(layer.mlp[0].compute for layer in sparse)
        covered = [kind for kind in types if rates.covers(kind, 2)]
        if covered:  # missing_rate_notes names experts without rates
            fit = profile.operations.get("experts")
            error = "" if fit is None else f"; mean error {fit.cross_validated_mape:.0%} on models left out of the fit"
            yield note("experts", error=error)
        for kind in filter(None, covered):
            if (priced := rates.rates_type(kind)) not in (None, kind):
                yield _price_note("experts", kind, GEMM_TYPES[priced].title, profile)
    if sparse and placement.num_gpus > 1:
        per_gpu = sorted({layer.num_experts // placement.num_gpus for layer in sparse})
        worst = max(placement.imbalance_of(layer.num_experts, layer.num_experts_per_tok) for layer in sparse)
        code = "expert parallelism" if placement.imbalance is None else "expert parallelism, given"
        yield note(code, held=" or ".join(map(str, per_gpu)), gpus=placement.num_gpus, worst=worst)


def precision_notes(scenario: Scenario) -> Iterator[Note]:
    """Notes on a quantised model: the type of each computation, and the rates used for types without their own."""
    model = scenario.model
    profile = scenario.profile
    dtype = scenario.request.dtype
    if (quantization := model.quantization) is None:
        return
    about = {
        "model": model.name,
        "weights": quantization.describe(),
        "half": "half precision" if dtype == "fp8" else dtype,
    }
    matrices = [gemm for kind in model.layer_kinds for gemm in _matrices(kind)]
    types = sorted({gemm.compute for gemm in matrices if gemm.compute})
    if not quantization.formats or not types:
        yield note("quantised, not modelled" if not quantization.formats else "quantised, no layer", **about)
        return
    computed = " and ".join(GEMM_TYPES[one].title for one in types)
    whole = all(gemm.compute for gemm in matrices if gemm.out_features > 1)
    which, others = ("products", "") if whole else ("some products", "other products, ")
    rest = (", head" if model.lm_head.compute is None else "") + ("" if quantization.kv_cache_bits else " and KV cache")
    yield note("quantised", which=which, computed=computed, others=others, rest=rest, **about)
    if profile is None:
        return
    products = (gemm.compute for kind in model.layer_kinds for gemm in _products(kind, profile))
    for one in sorted(set(filter(None, products))):
        if (priced := profile.kernels.rates_type(one)) != one:
            yield _price_note("products", one, _substitute(one, priced, about["half"], scenario), profile)


def _price_note(what: str, kind: str, substitute: str, profile: CalibrationProfile) -> Note:
    return note("no rates, type", profile=profile.name, what=what, type=GEMM_TYPES[kind].title, substitute=substitute)


def _matrices(layer: LayerSpec) -> tuple[Gemm, ...]:
    """All matrices except the router, which is never quantised."""
    mixer = () if layer.mixer is None else layer.mixer.matrices
    return (*mixer, *layer.mlp, *layer.shared_mlp)


def _products(layer: LayerSpec, profile: CalibrationProfile) -> tuple[Gemm, ...]:
    """Matrices, except routed experts that have rates of their own (see expert_notes)."""
    rates = profile.kernels.experts
    if layer.num_experts and rates is not None and rates.covers(layer.mlp[0].compute, 2):
        return tuple(gemm for gemm in _matrices(layer) if gemm not in layer.mlp)
    return _matrices(layer)


def _substitute(compute: str, priced: str | None, half: str, scenario: Scenario) -> str:
    """Describe the rates that are used for a type without rates."""
    if priced is not None:
        return GEMM_TYPES[priced].title
    if not GEMM_TYPES[compute].quantised:
        return f"{half}, without the time to dequantise: the predicted TTFT may be slightly too short"
    if compute == "nvfp4":
        return f"{half}, as engines do before Blackwell; on Blackwell TTFT is shorter"
    if compute == "int8" or "fp8" in scenario.cluster.gpu.peak_flops:
        return f"{half}, which is slower: the predicted TTFT of long prompts is too long"
    return f"{half}, as engines do on a GPU without such arithmetic"


def placement_notes(scenario: Scenario) -> Iterator[Note]:
    """Note on a cached prefix that is not on every rank."""
    placement = scenario.prefix_placement
    cluster = scenario.cluster
    if placement.place == "all" or not scenario.request.cached_prefix:
        return
    if (path := placement.path(cluster)) is None:
        yield note("cached prefix, moved")
        return
    rate = format_bandwidth(path.bandwidth_bytes_per_s)
    place = placement.place
    if placement.bytes_per_s is not None:
        yield note("cached prefix, given", rate=rate)
        return
    assumed = place == "remote" and cluster.network is None
    why = f" and assumed, as {cluster.name} has no network between nodes" if assumed else ""
    yield note("cached prefix, nominal", rate=rate, link=prefix_link(cluster, place).name, why=why, place=place)
