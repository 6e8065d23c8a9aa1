"""fit_keys and fit_blocks: kernels of attention to chosen keys and to chosen blocks; and the section of a profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.data import Some
from calibrate.fit.fit import Comparison, Constants, Fit, Fitted, Parameter, Rates, Span, peak_flops, span_of
from calibrate.importers.aiconfigurator import SparseRows, find_package, read_kernel, read_module
from kvrsim.hardware import GpuSpec, load_gpu
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.cost import CalibratedCost
from kvrsim.kernels.gemm import Product
from kvrsim.kernels.profile import CalibrationProfile
from kvrsim.kernels.sparse import (
    AttendRates,
    ScoreRates,
    SelectRates,
    SparseCall,
    SparseKernels,
    SparseMixer,
    SparseRates,
    sparse_call,
)
from kvrsim.model.load import load_model
from kvrsim.program import Array

LEAST_CHUNK = 128  # fewer queries take next to nothing compared with the rest of a layer
_CLASSES = (LEAST_CHUNK, 1024, 4096, 16384, 65536)
_MOST_QUERIES = 4096.0  # that fill the device

# -- blocks, from whole modules
MODEL = "MiniMaxAI/MiniMax-M3"
_MODULE = "msa_context_module"
_LEAST_MODULE_CHUNK = 1024
_BUSY = 2.0  # times the shortest call of a table: below, the host's launches are what was timed
_LEAST_HEADS = 16  # rows of the smallest matrix product; a KV head's queries are filled up to as many
_BLOCKS_NOISE = 0.1  # each share of the heads has an autotuned kernel of its own
_MODULE_CLASSES = (1024, 4096, 16384, 65536)


def fit_sparse_section(part: JsonObject, profile: CalibrationProfile) -> Fitted[SparseRates]:
    """From a recipe: sources of kernels, and how many heads an attention kernel takes; InputError for what is wrong."""
    part.only(("keys", "entries", "least_heads", "blocks"))
    gpu = load_gpu(profile.gpu)
    keys = fit_keys(part.text("keys"), part.text("entries"), gpu, least_heads=part.integer("least_heads"))
    blocks = fit_blocks(part.text("blocks"), profile, gpu)
    return Fitted(
        rates=SparseRates(keys=keys.rates, blocks=blocks.rates),
        source=f"{keys.source}; {blocks.source}",
        own=Comparison.joined("all, fitted", [keys.own, blocks.own]),
        cross_validated=Comparison.joined("all, contexts left out", [keys.cross_validated, blocks.cross_validated]),
        checks=(*keys.checks, blocks.own, blocks.cross_validated, *blocks.checks),
        seen={name: span_of([np.array([*span, *blocks.seen[name]])]) for name, span in keys.seen.items()},
    )


def fit_keys(keys: str, entries: str, gpu: GpuSpec, *, least_heads: int) -> Fitted[SparseKernels]:
    """Kernels that choose single keys.

    `keys`: a source with GLM-5's kernels; `entries`: one with DeepSeek V4's attention to all entries, whose number of
    keys varies; least_heads: that the attention kernel computes, whatever their number.
    """
    fp8, half = peak_flops(gpu, ("fp8",)), peak_flops(gpu)
    start = Parameter(name="start_s", start=5e-6, low=1e-7, high=1e-4)

    def full(name: str, value: float) -> Parameter:
        return Parameter(name=name, start=value, low=1.0, high=value / 100 * _MOST_QUERIES)

    score = _Kernel.read("scores", [(keys, "glm5_mqa_logits_module"), (keys, "dsv4_paged_mqa_logits_module")])
    select = _Kernel.read("selection", [(keys, "glm5_topk_module")])
    attend = _Kernel.read("attention", [(keys, "glm5_dsa_attn_module"), (entries, "dsv4_hca_attn_module")])
    scores = score.fit(
        (
            start,
            Parameter(name="flops_per_s", start=0.4 * fp8, low=1e-3 * fp8, high=fp8),
            full("full_heads", 128.0 * gpu.num_sms),
            Parameter(name="entries_share", start=0.8, low=0.1, high=1.0),
        ),
        lambda values: ScoreRates(**values),
        lambda rates, one: rates.seconds(one.chunk, one.keys, one.heads, one.width, entries=one.compress_ratio > 1),
    )
    selection = select.fit(
        (
            start,
            Parameter(name="query_s", start=3e-9, low=1e-12, high=1e-6),
            Parameter(name="key_s", start=1.5e-12, low=1e-14, high=1e-9),
            full("full_queries", float(gpu.num_sms)),
        ),
        lambda values: SelectRates(**values),
        lambda rates, one: rates.seconds(one.chunk, one.keys),
    )
    attention = attend.fit(
        (
            start,
            Parameter(name="flops_per_s", start=0.5 * half, low=1e-3 * half, high=half),
            Parameter(name="query_keys", start=200.0, low=1.0, high=2048.0),
            full("full_queries", float(gpu.num_sms)),
        ),
        lambda values: AttendRates(**values, least_heads=least_heads),
        lambda rates, one: rates.seconds(one.chunk, one.keys, one.heads, one.width),
    )
    kernels = (score, select, attend)
    fits: tuple[Fit[Any], ...] = (scores, selection, attention)
    owns = [fit.own for fit in fits]
    held_out = [fit.left_out("contexts", kernel.contexts.tolist()) for fit, kernel in zip(fits, kernels, strict=True)]
    by_context = [
        check
        for one, kernel in zip(held_out, kernels, strict=True)
        for check in one.by(kernel.contexts, _CLASSES, "context")
    ]
    tables = [table for kernel in kernels for table in kernel.tables]
    return Fitted(
        rates=SparseKernels(score=scores.rates, select=selection.rates, attend=attention.rates),
        source="; ".join(sorted({table.source for table in tables})),
        own=Comparison.joined("all kernels, fitted", owns),
        cross_validated=Comparison.joined("all kernels, contexts left out", held_out),
        checks=(*(one for pair in zip(owns, held_out, strict=True) for one in pair), *by_context),
        seen=_seen(tables),
    )


def _seen(tables: Sequence[SparseRows]) -> dict[str, Span]:
    return {"chunk": span_of([one.chunk for one in tables]), "context": span_of([one.context for one in tables])}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Kernel:
    """Tables that one kernel is fitted to, one after another."""

    name: str
    tables: Sequence[SparseRows]

    @classmethod
    def read(cls, name: str, sources: Sequence[tuple[str, str]]) -> _Kernel:
        read = [read_kernel(source, kernel, "recipes") for source, kernel in sources]
        return cls(name=name, tables=[table.take(table.chunk >= LEAST_CHUNK) for table in read])

    @property
    def contexts(self) -> Array:
        return np.concatenate([table.context for table in self.tables])

    def fit(
        self,
        parameters: Sequence[Parameter],
        make: Callable[[Constants], Rates],
        seconds: Callable[[Any, SparseRows], Array],
    ) -> Fit[Rates]:
        return Fit(
            label=f"{self.name}, ",
            measured_s=np.concatenate([table.seconds for table in self.tables]),
            parameters=parameters,
            make=make,
            seconds=lambda rates, some: np.concatenate([seconds(rates, table) for table in self.tables])[some],
            starts=4,
        )


def fit_blocks(source: str, profile: CalibrationProfile, gpu: GpuSpec) -> Fitted[SparseKernels]:
    """Scores of all keys and attention to the best blocks of MiniMax M3; what is left of its modules is the start.

    Seconds that are compared are those of whole modules, products included. InputError as read_modules.
    """
    modules = read_modules(source, "recipes")
    rows = [one.rows for one in modules]
    products = [one.products_s(profile) for one in modules]
    contexts = np.concatenate([one.context for one in rows])
    heads = np.concatenate([one.heads for one in rows])
    peak = peak_flops(gpu)

    def seconds(kernels: SparseKernels, some: Some) -> Array:
        pairs = zip(modules, products, strict=True)
        return np.concatenate([start + kernels.seconds(one.call, 1) for one, start in pairs])[some]

    fit = Fit(
        label="blocks, whole modules, ",
        measured_s=np.concatenate([one.seconds for one in rows]),
        parameters=(
            Parameter(name="start_s", start=1e-4, low=1e-6, high=1e-3),
            Parameter(name="score", start=0.15 * peak, low=0.01 * peak, high=peak),
            Parameter(name="attend", start=0.1 * peak, low=0.01 * peak, high=peak),
            Parameter(name="full_heads", start=100.0 * gpu.num_sms, low=1.0, high=1000.0 * gpu.num_sms),
        ),
        make=_block_kernels,
        seconds=seconds,
        noise=_BLOCKS_NOISE,
    )
    by_context, by_heads = fit.left_out("contexts", contexts.tolist()), fit.left_out("counts of heads", heads.tolist())
    return Fitted(
        rates=fit.rates,
        source=rows[0].source,
        own=fit.own,
        cross_validated=by_context,
        checks=(*by_context.by(contexts, _MODULE_CLASSES, "context"), by_heads),
        seen=_seen(rows),
    )


def _block_kernels(values: Constants) -> SparseKernels:
    attend = AttendRates(
        start_s=values["start_s"],
        flops_per_s=values["attend"],
        query_keys=0.0,
        full_queries=0.0,
        least_heads=_LEAST_HEADS,
    )
    score = ScoreRates(start_s=0.0, flops_per_s=values["score"], full_heads=values["full_heads"])
    return SparseKernels(score=score, attend=attend)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModuleRows:
    """Calls of the model's module on one of so many GPUs, in one type of products."""

    gemm_type: str
    mixer: SparseMixer  # the share of one GPU
    rows: SparseRows

    @property
    def call(self) -> SparseCall:
        """What is between the products."""
        return sparse_call(self.mixer, self.rows.chunk, self.rows.prefix)

    def products_s(self, profile: CalibrationProfile) -> Array:
        """Of the module's weight matrices, by a profile's rates."""
        cost = CalibratedCost(rates=profile.kernels, traits=profile.kernels.traits("flash", 1, 2))
        compute = None if self.gemm_type == "bfloat16" else self.gemm_type
        products = [
            Product(gemm.in_features // gemm.groups, gemm.out_features // gemm.groups, gemm.groups, 1.0, compute)
            for gemm in self.mixer.matrices
        ]
        return sum((cost.row_cost((one,), ())(self.rows.chunk) for one in products), np.zeros_like(self.rows.chunk))


def read_modules(text: str, argument: str = "measurements", root: Path | None = None) -> list[ModuleRows]:
    """The calls of MODEL's module that keep the GPU busy, in prefills; one entry per type of products and share.

    The model has a configuration in the package. Calls of dense attention, and with a cache that is not BF16 where
    there is one in BF16 too, are left out.
    """
    rows = read_module(text, _MODULE, argument, root)
    caches = set(rows.text("kv_cache_dtype"))
    usable = np.array(["dense" not in kernel for kernel in rows.text("kernel_source")])
    usable &= rows.text("op_name") == _MODULE
    usable &= rows.text("kv_cache_dtype") == ("bfloat16" if "bfloat16" in caches else min(caches))
    usable &= rows.seconds > _BUSY * rows.seconds[usable].min()
    rows = rows.take(usable & (rows.chunk >= _LEAST_MODULE_CHUNK) & (rows.text("model") == MODEL))
    folder = (root if root is not None else find_package(text, argument)) / "model_configs"
    layers = load_model(str(folder / f"{MODEL.replace('/', '--')}_config.json")).layers
    mixer: Any = next(layer.mixer for layer in layers if getattr(layer.mixer, "indexer", None) is not None)
    found = []
    for gemm_type in sorted(set(rows.text("gemm_type"))):
        for heads in np.unique(rows.heads):
            some = rows.take((rows.text("gemm_type") == gemm_type) & (rows.heads == heads))
            size = mixer.num_attention_heads // int(heads)
            if len(some.seconds) and size:
                found.append(ModuleRows(gemm_type=gemm_type, mixer=_share(mixer, size), rows=some))
    return found


def _share(mixer: SparseMixer, size: int) -> SparseMixer:
    """Of one GPU; SGLang gives each the index heads of its own KV heads, where blocks are chosen per KV head."""
    shared = mixer.share(size)
    indexer = shared.indexer
    if indexer is None or indexer.block == 1:
        return shared
    return replace(shared, indexer=replace(indexer, num_heads=max(1, indexer.num_heads // size)))
