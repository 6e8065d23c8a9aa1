"""fit_keys: kernels of attention to chosen keys, each from calls of its own; and the section of a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.fit.fit import Comparison, Fitted, Parameter, Some, cross_validated_s, peak_flops, solve
from calibrate.importers.aiconfigurator import SparseRows, find_package, read_kernel, read_module
from kvrsim.hardware import GpuSpec, load_gpu
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.attention import AttentionCall
from kvrsim.kernels.calibrated import CalibratedCost
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
from kvrsim.model.gemm import Gemm
from kvrsim.model.load import load_model
from kvrsim.model.mixers import LatentAttention
from kvrsim.program import Array

LEAST_CHUNK = 128  # fewer queries take next to nothing beside the rest of a layer
_CLASSES = (LEAST_CHUNK, 1024, 4096, 16384, 65536)
_MOST_QUERIES = 4096.0  # that fill the device
_SCORE, _SELECT, _ATTEND = "scores", "selection", "attention"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Stage:
    """One kernel: its constants, its rates from them, and their seconds for rows."""

    name: str
    rows: Sequence[SparseRows]  # tables that are fitted together
    parameters: tuple[Parameter, ...]
    make: Callable[[Mapping[str, float]], Any]
    seconds: Callable[[Any, SparseRows], Array]

    def fit(self, some: Sequence[SparseRows]) -> Any:
        """Robust least squares of the logarithms."""
        measured = np.concatenate([rows.seconds for rows in some])

        def predict(found: Mapping[str, float], kept: Some) -> Array:
            rates = self.make(found)
            return np.concatenate([self.seconds(rates, rows) for rows in some])[kept]

        return self.make(solve(self.parameters, predict, measured, starts=4))

    def fitted(self, label: str) -> tuple[Any, Comparison, Comparison]:
        """Rates, on their own rows, and on contexts left out of the fit."""
        rates = self.fit(self.rows)
        measured = np.concatenate([rows.seconds for rows in self.rows])
        own = np.concatenate([self.seconds(rates, rows) for rows in self.rows])
        contexts = np.concatenate([rows.prefix + rows.chunk for rows in self.rows])
        ends = np.cumsum([0, *(len(rows.seconds) for rows in self.rows)])

        def left_out(train: Some, test: Some) -> Array:
            spans = zip(self.rows, ends[:-1], ends[1:], strict=True)
            parts = [(rows, train[(train >= low) & (train < high)] - low) for rows, low, high in spans]
            found = self.fit([rows.where(kept) for rows, kept in parts if len(kept)])
            return np.concatenate([self.seconds(found, rows) for rows in self.rows])[test]

        predicted = cross_validated_s(contexts.tolist(), left_out)
        return (
            rates,
            Comparison(label=f"{label}, fitted", measured_s=measured, predicted_s=own),
            Comparison(label=f"{label}, contexts left out", measured_s=measured, predicted_s=predicted),
        )


def fit_sparse_section(part: JsonObject, profile: CalibrationProfile) -> Fitted[SparseRates]:
    """From a recipe: sources of kernels, and how many heads an attention kernel takes; InputError for what is wrong."""
    part.only(("keys", "entries", "least_heads", "blocks"))
    gpu = load_gpu(profile.gpu)
    keys = fit_keys(part.text("keys"), part.text("entries"), gpu, least_heads=part.integer("least_heads"))
    blocks = fit_blocks(part.text("blocks"), profile, gpu)
    return Fitted(
        rates=SparseRates(keys=keys.rates, blocks=blocks.rates),
        source=f"{keys.source}; {blocks.source}",
        own=_joined("all, fitted", [keys.own, blocks.own]),
        cross_validated=_joined("all, contexts left out", [keys.cross_validated, blocks.cross_validated]),
        checks=(*keys.checks, blocks.own, blocks.cross_validated, *blocks.checks),
        seen={
            name: (min(low, blocks.seen[name][0]), max(high, blocks.seen[name][1]))
            for name, (low, high) in keys.seen.items()
        },
    )


def fit_keys(keys: str, entries: str, gpu: GpuSpec, *, least_heads: int) -> Fitted[SparseKernels]:
    """Kernels that choose single keys.

    `keys`: a source with GLM-5's kernels; `entries`: one with DeepSeek V4's attention to all entries, whose number of
    keys varies; least_heads: that the attention kernel computes, whatever their number.
    """
    rows = {
        _SCORE: [
            _prefill(read_kernel(keys, "glm5_mqa_logits_module", "recipes")),
            _prefill(read_kernel(keys, "dsv4_paged_mqa_logits_module", "recipes")),
        ],
        _SELECT: [_prefill(read_kernel(keys, "glm5_topk_module", "recipes"))],
        _ATTEND: [
            _prefill(read_kernel(keys, "glm5_dsa_attn_module", "recipes")),
            _prefill(read_kernel(entries, "dsv4_hca_attn_module", "recipes")),
        ],
    }
    stages = _stages(rows, gpu, least_heads)
    found = {name: stage.fitted(name) for name, stage in stages.items()}
    checks = [one for _, own, held_out in found.values() for one in (own, held_out)]
    for name, (_, _, held_out) in found.items():
        contexts = np.concatenate([one.prefix + one.chunk for one in rows[name]])
        checks += held_out.by(contexts, _CLASSES, "context")
    every = [one for some in rows.values() for one in some]
    chunk, context = (np.concatenate([get(one) for one in every]) for get in (_chunk, _context))
    return Fitted(
        rates=SparseKernels(score=found[_SCORE][0], select=found[_SELECT][0], attend=found[_ATTEND][0]),
        source="; ".join(sorted({one.source for one in every})),
        own=_joined("all kernels, fitted", [own for _, own, _ in found.values()]),
        cross_validated=_joined("all kernels, contexts left out", [held_out for _, _, held_out in found.values()]),
        checks=tuple(checks),
        seen={"chunk": _span(chunk), "context": _span(context)},
    )


def _stages(rows: Mapping[str, Sequence[SparseRows]], gpu: GpuSpec, least_heads: int) -> dict[str, _Stage]:
    fp8, half = peak_flops(gpu, ("fp8",)), peak_flops(gpu)
    start = Parameter(name="start_s", start=5e-6, low=1e-7, high=1e-4)

    def full(name: str, value: float) -> Parameter:
        return Parameter(name=name, start=value, low=1.0, high=value / 100 * _MOST_QUERIES)

    return {
        _SCORE: _Stage(
            name=_SCORE,
            rows=rows[_SCORE],
            parameters=(
                start,
                Parameter(name="flops_per_s", start=0.4 * fp8, low=1e-3 * fp8, high=fp8),
                full("full_heads", 128.0 * gpu.num_sms),
                Parameter(name="entries_share", start=0.8, low=0.1, high=1.0),
            ),
            make=lambda found: ScoreRates(**found),
            seconds=lambda rates, one: rates.seconds(
                one.chunk, one.keys, one.heads, one.width, entries=one.compress_ratio > 1
            ),
        ),
        _SELECT: _Stage(
            name=_SELECT,
            rows=rows[_SELECT],
            parameters=(
                start,
                Parameter(name="query_s", start=3e-9, low=1e-12, high=1e-6),
                Parameter(name="key_s", start=1.5e-12, low=1e-14, high=1e-9),
                full("full_queries", float(gpu.num_sms)),
            ),
            make=lambda found: SelectRates(**found),
            seconds=lambda rates, one: rates.seconds(one.chunk, one.keys),
        ),
        _ATTEND: _Stage(
            name=_ATTEND,
            rows=rows[_ATTEND],
            parameters=(
                start,
                Parameter(name="flops_per_s", start=0.5 * half, low=1e-3 * half, high=half),
                Parameter(name="query_keys", start=200.0, low=1.0, high=2048.0),
                full("full_queries", float(gpu.num_sms)),
            ),
            make=lambda found: AttendRates(**found, least_heads=least_heads),
            seconds=lambda rates, one: rates.seconds(one.chunk, one.keys, one.heads, one.width),
        ),
    }


def _prefill(rows: SparseRows) -> SparseRows:
    return rows.where(rows.chunk >= LEAST_CHUNK)


def _chunk(rows: SparseRows) -> Array:
    return rows.chunk


def _context(rows: SparseRows) -> Array:
    return rows.prefix + rows.chunk


def _span(values: Array) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def _joined(label: str, parts: Sequence[Comparison]) -> Comparison:
    """Rows of several comparisons."""
    return Comparison(
        label=label,
        measured_s=np.concatenate([one.measured_s for one in parts]),
        predicted_s=np.concatenate([one.predicted_s for one in parts]),
    )


# -- fit_blocks: attention to chosen blocks of tokens, from whole modules and the rates of their products.

MODEL = "MiniMaxAI/MiniMax-M3"
_LEAST_HEADS = 16  # rows of the smallest matrix product; a KV head's queries are filled up to as many
_NOISE = 0.1  # each share of the heads has an autotuned kernel of its own
_CLASSES_blocks = (1024, 4096, 16384, 65536)


def fit_blocks(source: str, profile: CalibrationProfile, gpu: GpuSpec) -> Fitted[SparseKernels]:
    """Scores of all keys and attention to the best blocks of MiniMax M3; what is left of its modules is the start.

    Seconds that are compared are those of whole modules, products included. InputError as read_modules.
    """
    modules = read_modules(source, "msa_context_module", [MODEL], "recipes")
    products = [one.products_s(profile) for one in modules]
    measured = np.concatenate([one.rows.seconds for one in modules])
    contexts = np.concatenate([one.rows.chunk + one.rows.prefix for one in modules])
    heads = np.concatenate([one.rows.heads for one in modules])

    def predicted(kernels: SparseKernels) -> Array:
        pairs = zip(modules, products, strict=True)
        return np.concatenate([start + kernels.seconds(one.call, 1) for one, start in pairs])

    def fit(some: Some) -> SparseKernels:
        found = solve(
            _parameters(gpu), lambda values, rows: predicted(_made(values))[some][rows], measured[some], noise=_NOISE
        )
        return _made(found)

    kernels = fit(np.arange(len(measured)))
    own = Comparison(label="blocks, whole modules, fitted", measured_s=measured, predicted_s=predicted(kernels))
    left_out = {
        what: Comparison(
            label=f"blocks, whole modules, {what} left out",
            measured_s=measured,
            predicted_s=cross_validated_s(labels.tolist(), lambda train, test: predicted(fit(train))[test]),
        )
        for what, labels in (("contexts", contexts), ("counts of heads", heads))
    }
    return Fitted(
        rates=kernels,
        source=modules[0].rows.source,
        own=own,
        cross_validated=left_out["contexts"],
        checks=(*left_out["contexts"].by(contexts, _CLASSES_blocks, "context"), left_out["counts of heads"]),
        seen=_seen(modules),
    )


def _parameters(gpu: GpuSpec) -> tuple[Parameter, ...]:
    peak = peak_flops(gpu)
    return (
        Parameter(name="start_s", start=1e-4, low=1e-6, high=1e-3),
        Parameter(name="score", start=0.15 * peak, low=0.01 * peak, high=peak),
        Parameter(name="attend", start=0.1 * peak, low=0.01 * peak, high=peak),
        Parameter(name="full_heads", start=100.0 * gpu.num_sms, low=1.0, high=1000.0 * gpu.num_sms),
    )


def _made(found: Mapping[str, float]) -> SparseKernels:
    attend = AttendRates(
        start_s=found["start_s"],
        flops_per_s=found["attend"],
        query_keys=0.0,
        full_queries=0.0,
        least_heads=_LEAST_HEADS,
    )
    score = ScoreRates(start_s=0.0, flops_per_s=found["score"], full_heads=found["full_heads"])
    return SparseKernels(score=score, attend=attend)


def _seen(modules: Sequence[ModuleRows]) -> dict[str, tuple[float, float]]:
    chunk, context = (
        np.concatenate([one.rows.chunk + behind * one.rows.prefix for one in modules]) for behind in (0, 1)
    )
    return {"chunk": (float(chunk.min()), float(chunk.max())), "context": (float(context.min()), float(context.max()))}


# -- Whole modules of latent and sparse attention: their products by a profile's rates, and the calls between them.

_BUSY = 2.0  # times the shortest call of a table: below, the host's launches are what was timed
_SHARED = "_skip_indexer"
LEAST_CHUNK_modules = 1024


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModuleRows:
    """Calls of the module of one model on one of so many GPUs, in one type of products."""

    model: str
    gemm_type: str
    mixer: SparseMixer  # the share of one GPU
    rows: SparseRows

    @property
    def call(self) -> SparseCall:
        """What is between the products."""
        return sparse_call(self.mixer, self.rows.chunk, self.rows.prefix)

    def between_s(self, profile: CalibrationProfile) -> Array:
        """Of what is between its products: sparse attention, or expanded latent attention to all keys."""
        cost, mixer = _cost(profile), self.mixer
        if not isinstance(mixer, LatentAttention) or mixer.indexer is not None:
            return cost.sparse_s(self.call)
        chunk, prefix = self.rows.chunk, self.rows.prefix
        return cost.attention_s(
            AttentionCall(
                chunk=chunk,
                prefix=prefix,
                causal=chunk * (prefix + 0.5 * chunk),
                num_attention_heads=mixer.num_attention_heads,
                num_key_value_heads=mixer.num_attention_heads,
                head_dim=mixer.head_dim,
                v_head_dim=mixer.v_head_dim,
                score_bytes=0.0,
                latent=True,
            )
        )

    def products_s(self, profile: CalibrationProfile) -> Array:
        """Of the module's weight matrices."""
        cost = _cost(profile)
        compute = None if self.gemm_type == "bfloat16" else self.gemm_type
        products = [_product(gemm, compute) for gemm in _matrices(self.mixer)]
        if isinstance(self.mixer, LatentAttention) and self.mixer.indexer is not None:
            nope, rank, v = self.mixer.qk_nope_head_dim, self.mixer.kv_lora_rank, self.mixer.v_head_dim
            heads = self.mixer.num_attention_heads
            products += [Product(nope, rank, heads), Product(rank, v, heads)]
        return sum((cost.row_cost((one,), ())(self.rows.chunk) for one in products), np.zeros_like(self.rows.chunk))


def read_modules(
    text: str, module: str, models: Sequence[str], argument: str = "measurements", root: Path | None = None
) -> list[ModuleRows]:
    """The calls of these models that keep the GPU busy, in prefills; one entry a model, type of products and share.

    `module`: as its file is named, or with _skip_indexer behind it the calls that take an earlier layer's choice.
    `models`: as the table names them; each has a configuration in the package. Calls of dense attention, and with a
    cache that is not BF16 where there is one in BF16 too, are left out.
    """
    operation, module = module, module.removesuffix(_SHARED)
    rows = read_module(text, module, argument, root)
    caches = set(rows.texts["kv_cache_dtype"])
    cache = "bfloat16" if "bfloat16" in caches else min(caches)
    dense = np.array(["dense" in kernel for kernel in rows.texts["kernel_source"]])
    kept = ~dense & (rows.texts["op_name"] == operation) & (rows.texts["kv_cache_dtype"] == cache)
    kept &= rows.seconds > _BUSY * rows.seconds[kept].min()
    rows = rows.where(kept & (rows.chunk >= LEAST_CHUNK_modules))
    folder = (root if root is not None else find_package(text, argument)) / "model_configs"
    found = []
    for model in models:
        mixer = _mixer(folder, model, module)
        if operation != module and mixer.indexer is not None:
            mixer = replace(mixer, indexer=replace(mixer.indexer, shared=True, projections=()))
        of_model = rows.where(rows.texts["model"] == model)
        for gemm_type in sorted(set(of_model.texts["gemm_type"])):
            for heads in np.unique(of_model.heads):
                some = of_model.where((of_model.texts["gemm_type"] == gemm_type) & (of_model.heads == heads))
                size = mixer.num_attention_heads // int(heads)
                if len(some.seconds) and size:
                    found.append(ModuleRows(model=model, gemm_type=gemm_type, mixer=_share(mixer, size), rows=some))
    return found


def _mixer(folder: Path, model: str, module: str) -> SparseMixer:
    """The first of the model's that the module is about."""
    spec = load_model(str(folder / f"{model.replace('/', '--')}_config.json"))
    wanted = {"dsv4_csa": 4, "dsv4_hca": 128}.get(module.partition("_context")[0])
    for layer in spec.layers:
        mixer: Any = layer.mixer
        if wanted is None and (module.startswith("mla") or getattr(mixer, "indexer", None) is not None):
            return mixer  # type: ignore[no-any-return]
        if wanted is not None and getattr(mixer, "compress_ratio", None) == wanted:
            return mixer  # type: ignore[no-any-return]
    raise AssertionError(f"{model} has no layer of {module}")


def _share(mixer: SparseMixer, size: int) -> SparseMixer:
    """Of one GPU; SGLang gives each the index heads of its own KV heads, where blocks are chosen a KV head."""
    shared = mixer.share(size)
    indexer = shared.indexer
    if indexer is None or indexer.block == 1:
        return shared
    return replace(shared, indexer=replace(indexer, num_heads=max(1, indexer.num_heads // size)))


def _matrices(mixer: SparseMixer) -> list[Gemm]:
    """All, but for the expansion of latents where it is absorbed."""
    expand = mixer.expand if isinstance(mixer, LatentAttention) and mixer.indexer is not None else None
    return [gemm for gemm in mixer.matrices if gemm is not expand]


def _cost(profile: CalibrationProfile) -> CalibratedCost:
    return CalibratedCost(rates=profile.kernels, kernel="flash", batch=1, element_bytes=2)


def _product(gemm: Gemm, compute: str | None) -> Product:
    return Product(gemm.in_features // gemm.groups, gemm.out_features // gemm.groups, gemm.groups, 1.0, compute)
