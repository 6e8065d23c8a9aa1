"""Whole modules of latent and sparse attention: their products by a profile's rates, and the calls between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.importers.sparse import SparseRows, read_module
from calibrate.importers.tables import find_package
from kvrsim.kernels.attention import AttentionCall
from kvrsim.kernels.calibrated import CalibratedCost
from kvrsim.kernels.gemm import Product
from kvrsim.kernels.profile import CalibrationProfile
from kvrsim.kernels.sparse import SparseCall, SparseMixer, sparse_call
from kvrsim.model.gemm import Gemm
from kvrsim.model.load import load_model
from kvrsim.model.mixers import LatentAttention
from kvrsim.program import Array

_BUSY = 2.0  # times the shortest call of a table: below, the host's launches are what was timed
_SHARED = "_skip_indexer"
LEAST_CHUNK = 1024


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
    rows = rows.where(kept & (rows.chunk >= LEAST_CHUNK))
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
