"""fit_modules: attention to chosen keys, entries or blocks, fitted to whole modules of an engine, for a profile.

A module is the part of a layer between its input and its residual: products with weights, the indexer's scores and
choice, attention. The products' seconds are taken from the profile; the remaining seconds are fitted. Whole modules
were measured as engines run them, with the kernels and the type of cache that an engine chooses on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from calibrate.data import Some
from calibrate.fit.fit import Constants, Fit, FitComparison, FitResult, Parameter, peak_flops, span_of, to_digits
from calibrate.importers.aiconfigurator import SparseRows, read_module
from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec, load_gpu
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.attention import absorbing
from kvrsim.kernels.cost import CalibratedCost
from kvrsim.kernels.gemm import products_of
from kvrsim.kernels.profile import CalibrationProfile
from kvrsim.kernels.sparse import (
    AttendRates,
    ScoreRates,
    SparseCall,
    SparseKernels,
    SparseMixer,
    SparseRates,
    sparse_call,
)
from kvrsim.model.load import load_model
from kvrsim.model.mixers import CompressedAttention, LatentAttention
from kvrsim.program import Array

LEAST_CHUNK = 128  # fewer queries take negligible time
# Calls shorter than this multiple of a table's shortest call are left out: launches take most of their time.
_BUSY = 2.0
_MOST_START_S = 2e-4  # upper bound of start_s: a longer start is that of a slow host (Grace), which launch_s contains
_NOISE = 0.1  # each share of the heads has its own autotuned kernel
_MOST_ROWS = 2000
_STARTS = 4
_CONFIGS = Path(__file__).with_name("models")


@dataclass(frozen=True, kw_only=True, slots=True)
class _SparseKind:
    """Tables and models in which one field of SparseRates was measured."""

    tables: tuple[str, ...]
    models: Mapping[str, str]  # model (built-in name or config.json) by a part of its name in a table


_KINDS: Mapping[str, _SparseKind] = MappingProxyType(
    {
        "keys": _SparseKind(
            tables=("dsa_context_module",), models={"GLM-5": "glm-5", "DeepSeek-V3.2": "deepseek-v3.2"}
        ),
        "entries": _SparseKind(
            tables=("dsv4_csa_context_module", "dsv4_hca_context_module"),
            models={f"V4-{size}": str(_CONFIGS / f"deepseek-v4-{size.lower()}.json") for size in ("Flash", "Pro")},
        ),
        "blocks": _SparseKind(tables=("msa_context_module",), models={"MiniMax-M3": str(_CONFIGS / "minimax-m3.json")}),
    }
)


def fit_sparse_section(part: JsonObject, profile: CalibrationProfile) -> FitResult[SparseRates]:
    """Fit each kind to its source in a recipe. Raises InputError for an invalid recipe or source."""
    part.only(tuple(_KINDS))
    fits = {kind: fit_modules(kind, part.text(kind), profile) for kind in _KINDS if part.has(kind)}
    results = list(fits.values())
    return FitResult(
        rates=SparseRates(**{kind: fit.rates for kind, fit in fits.items()}),
        source="; ".join(sorted({fit.source for fit in results})),
        own=FitComparison.join("all, fitted", [fit.own for fit in results]),
        cross_validated=FitComparison.join("all, contexts left out", [fit.cross_validated for fit in results]),
        seen={
            "chunk": span_of([np.array(fit.seen["chunk"]) for fit in results]),
            "context": span_of([np.array(fit.seen["context"]) for fit in results]),
        },
    )


def fit_modules(kind: str, source: str, profile: CalibrationProfile) -> FitResult[SparseKernels]:
    """Fit the time of one kind of module without its products; stated errors are those of whole modules.

    Raises InputError as read_modules does.
    """
    gpu = load_gpu(profile.gpu)
    modules = read_modules(kind, source)
    rows = [module.rows for module in modules]
    products_s = [module.products_s(profile) for module in modules]
    contexts = np.concatenate([rows_of_module.context for rows_of_module in rows])

    def seconds(kernels: SparseKernels, indices: Some) -> Array:
        attention_s = [kernels.seconds(module.call, 1) for module in modules]
        return np.concatenate(list(map(np.add, products_s, attention_s)))[indices]

    fit = Fit(
        label=f"{kind}, whole modules, ",
        measured_s=np.concatenate([rows_of_module.seconds for rows_of_module in rows]),
        parameters=_parameters(gpu),
        make=_kernels,
        seconds=seconds,
        starts=_STARTS,
        noise=_NOISE,
        warm=True,
    )
    return FitResult(
        rates=fit.rates,
        source="; ".join(sorted({rows_of_module.source for rows_of_module in rows})),
        own=fit.own,
        cross_validated=fit.left_out("contexts", contexts.tolist()),
        seen={"chunk": span_of([rows_of_module.chunk for rows_of_module in rows]), "context": span_of([contexts])},
    )


def _parameters(gpu: GpuSpec) -> tuple[Parameter, ...]:
    peak = peak_flops(gpu)
    fp8 = max(gpu.peak_flops.values())
    return (
        Parameter(name="start_s", start=5e-5, low=1e-6, high=_MOST_START_S),
        Parameter(name="score", start=0.15 * fp8, low=1e-3 * fp8, high=fp8),
        Parameter(name="full_heads", start=100.0 * gpu.num_sms, low=1.0, high=1000.0 * gpu.num_sms),
        Parameter(name="attend", start=0.2 * peak, low=1e-3 * peak, high=fp8),
        Parameter(name="query_keys", start=100.0, low=1.0, high=4096.0),
        Parameter(name="full_queries", start=float(gpu.num_sms), low=1.0, high=40.0 * gpu.num_sms),
        Parameter(name="least_heads", start=32.0, low=1.0, high=128.0),
    )


def _kernels(values: Constants) -> SparseKernels:
    attend = AttendRates(
        start_s=values["start_s"],
        flops_per_s=values["attend"],
        query_keys=values["query_keys"],
        full_queries=values["full_queries"],
        least_heads=to_digits(values["least_heads"]),
    )
    score = ScoreRates(start_s=0.0, flops_per_s=values["score"], full_heads=values["full_heads"])
    return SparseKernels(score=score, attend=attend)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModuleRows:
    """Calls of a model's module on one of several GPUs, with one type of products."""

    name: str
    gemm_type: str
    mixer: SparseMixer  # share of the module on one GPU
    rows: SparseRows

    @property
    def call(self) -> SparseCall:
        """The attention call of the module, without its matrix products."""
        return sparse_call(self.mixer, self.rows.chunk, self.rows.prefix)

    def products_s(self, profile: CalibrationProfile) -> Array:
        """Seconds of the products with weights by a profile's rates; some weights are half precision in all types."""
        cost = CalibratedCost(rates=profile.kernels, traits=profile.kernels.traits("flash", 1, 2))
        matrices = list(self.mixer.projections)
        if self.mixer.indexer is not None:
            matrices += self.mixer.indexer.projections
        matrices += self.mixer.output
        products = []
        for product in products_of(matrices, fused=True):
            is_half = isinstance(self.mixer, CompressedAttention) and product.compute is None
            if is_half or self.gemm_type == "bfloat16":
                products.append(product._replace(compute=None))
            else:
                products.append(product._replace(compute=self.gemm_type))
        if isinstance(self.mixer, LatentAttention):
            products += absorbing(self.mixer)
        return np.asarray(cost.row_cost(tuple(products), ())(self.rows.chunk))


def read_modules(kind: str, text: str, argument: str = "measurements") -> list[ModuleRows]:
    """Calls of a kind's modules in prefills that keep the GPU busy; one entry per model, type and share.

    Calls of dense attention are left out. If any call has an FP8 cache, calls with another cache are left out.
    """
    modules: list[ModuleRows] = []
    for table in _KINDS[kind].tables:
        rows = read_module(text, table, argument)
        caches = rows.texts["kv_cache_dtype"]
        fp8_caches = [cache for cache in sorted(set(caches)) if cache.startswith("fp8")]
        usable = np.array(["dense" not in kernel for kernel in rows.texts["kernel_source"]])
        usable &= (rows.texts["op_name"] == table) & (rows.chunk >= LEAST_CHUNK)
        if fp8_caches:
            usable &= caches == fp8_caches[0]
        usable &= rows.seconds > _BUSY * rows.seconds[usable].min()
        for name, config in _KINDS[kind].models.items():
            of_model = rows.take(usable & np.array([name in model for model in rows.texts["model"]]))
            if len(of_model.seconds):
                modules += _shares(of_model, name, _mixer(config, table))
    if not modules:
        raise InputError(argument, text, f"a source with modules of {', '.join(_KINDS[kind].models)}")
    step = max(1, sum(len(module.rows.seconds) for module in modules) // _MOST_ROWS)
    thinned = []
    for module in modules:
        rows = module.rows.take(np.arange(len(module.rows.seconds)) % step == 0)
        if len(rows.seconds):
            thinned.append(replace(module, rows=rows))
    return thinned


@cache
def _mixer(config: str, table: str) -> Any:
    """The model's mixer that a table measures; a model that transformers reads takes seconds, so it is read once."""
    for layer in load_model(config).layers:
        mixer = layer.mixer
        has_indexer = getattr(mixer, "indexer", None) is not None
        if "hca" not in table:
            is_measured = has_indexer
        else:
            is_measured = getattr(mixer, "compress_ratio", 0) > 0 and not has_indexer
        if is_measured:
            return mixer
    raise AssertionError(f"{config} has no layer that {table} measures")


def _shares(rows: SparseRows, name: str, mixer: Any) -> Sequence[ModuleRows]:
    modules = []
    for gemm_type in sorted(set(rows.texts["gemm_type"])):
        for heads in np.unique(rows.heads):
            of_share = rows.take((rows.texts["gemm_type"] == gemm_type) & (rows.heads == heads))
            size = mixer.num_attention_heads // int(heads)
            if len(of_share.seconds) and size:
                modules.append(ModuleRows(name=name, gemm_type=gemm_type, mixer=_share(mixer, size), rows=of_share))
    return modules


def _share(mixer: SparseMixer, size: int) -> SparseMixer:
    """The share of one GPU; where blocks are chosen per KV head, SGLang keeps index heads with their KV heads."""
    shared = mixer.share(size)
    indexer = shared.indexer
    if indexer is None or indexer.block == 1:
        return shared
    return replace(shared, indexer=replace(indexer, num_heads=max(1, indexer.num_heads // size)))
