"""Sparse attention in NVIDIA's tables: systems/data/SYSTEM/{sparse_attention,msa,mla}/FRAMEWORK/VERSION.

Kernels alone, of GLM-5 and DeepSeek V4 (github.com/ai-dynamo/aiconfigurator, collector/sglang/*_sparse_modules.py):

    glm5_mqa_logits_module    index scores, 32 heads of 128, FP8, causal
    dsv4_paged_mqa_logits_module   the same with 64 heads, of entries that stand for 4 tokens
    glm5_topk_module          the best 2048 of step + isl scores for each query; score_mode top_last has clear winners
    glm5_dsa_attn_module      all 64 heads attend to 2048 latents (576 and 512 wide), BF16
    dsv4_hca_attn_module      all 64 heads attend to a window of 128 tokens and to an entry for each 128 tokens (512)

Whole modules, with their projections: isl tokens behind step tokens, num_heads heads on the GPU.

    dsa_context_module        DeepSeek V3.2 and GLM-5; kernel_source tells dense attention, which short contexts get
    dsv4_csa_context_module   DeepSeek V4, entries of 4 tokens
    dsv4_hca_context_module   DeepSeek V4, entries of 128 tokens
    msa_context_module        MiniMax M3
    mla_context_module        DeepSeek V3, whose queries attend to all keys
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from calibrate.importers.tables import read_table
from kvrsim.program import Array

_SHAPE = ["batch_size", "isl", "step", "num_heads"]
_KERNELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "glm5_mqa_logits_module": {"heads": 32, "width": 128, "seen": True},
        "dsv4_paged_mqa_logits_module": {"heads": 64, "width": 128, "seen": True, "compress_ratio": 4},
        "glm5_topk_module": {"top_k": 2048},
        "glm5_dsa_attn_module": {"width": 576 + 512, "top_k": 2048, "filled": True},
        "dsv4_hca_attn_module": {"width": 512 + 512, "compress_ratio": 128, "window": 128},
    }
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SparseRows:
    """Calls of one kernel or module; all arrays of one length."""

    chunk: Array  # queries of a sequence
    prefix: Array  # tokens before them
    heads: Array  # on the GPU; of index scores the indexer's
    keys: Array  # that a query sees or attends to, in the mean
    seconds: Array  # median of the rows of a shape
    width: int  # elements of a key, and of its value where there is one; 0: does not apply
    compress_ratio: int = 1  # tokens for which one key stands
    source: str
    texts: Mapping[str, Array]  # further columns

    def where(self, mask: Any) -> SparseRows:
        """Some of them, by index or mask."""
        arrays = {name: getattr(self, name)[mask] for name in ("chunk", "prefix", "heads", "keys", "seconds")}
        return replace(self, **arrays, texts={name: values[mask] for name, values in self.texts.items()})


def read_kernel(text: str, kernel: str, argument: str = "measurements", root: Path | None = None) -> SparseRows:
    """One of the tables of kernels alone, one sequence a call.

    `text`: aiconfigurator:SYSTEM/FRAMEWORK[/VERSION]; `root` as of read_aiconfigurator. Raises InputError as
    read_table does.
    """
    about = _KERNELS[kernel]
    rows = _read(
        text, "sparse_attention", kernel, ("score_mode",) if kernel == "glm5_topk_module" else (), argument, root
    )
    ratio, window, top_k = about.get("compress_ratio", 1), about.get("window", 0), about.get("top_k")
    all_keys = (rows.prefix + rows.chunk) / ratio
    keys = (rows.prefix + 0.5 * rows.chunk) / ratio if about.get("seen") else all_keys
    if about.get("filled"):
        keys = np.full_like(keys, float(top_k or 0))
    rows = replace(
        rows,
        keys=window + keys,
        heads=np.full_like(keys, float(about["heads"])) if "heads" in about else rows.heads,
        width=about.get("width", 0),
        compress_ratio=ratio,
    )
    kept = np.ones_like(keys, dtype=bool)
    if top_k is not None:
        kept &= all_keys > top_k if kernel == "glm5_topk_module" else all_keys >= top_k
    if kernel == "glm5_topk_module":
        kept &= rows.texts["score_mode"] == "top_last"
    return rows.where(kept)


def read_module(text: str, module: str, argument: str = "measurements", root: Path | None = None) -> SparseRows:
    """One of the tables of whole modules, one sequence a call; `keys` are tokens that a query sees, in the mean."""
    table = next((name for name in ("msa", "mla") if module.startswith(name)), "sparse_attention")
    return _read(text, table, module, ("op_name", "model", "kv_cache_dtype", "gemm_type"), argument, root)


def _read(text: str, table: str, name: str, more: tuple[str, ...], argument: str, root: Path | None) -> SparseRows:
    """Rows of one sequence, those of the same shape and texts as one."""
    texts = ["kernel_source", *more]
    # What selects nothing took no time.
    frame, source = read_table(
        text, table, f"{name}_perf.parquet", _SHAPE, texts, allow_zero=True, argument=argument, root=root
    )
    frame = frame[(frame["batch_size"] == 1) & (frame["latency"] > 0)]
    merged = frame.groupby([*_SHAPE, *texts], sort=True)["latency"].median().reset_index()
    columns = {column: merged[column].to_numpy(dtype=float) for column in _SHAPE}
    chunk, prefix = columns["isl"], columns["step"]
    return SparseRows(
        chunk=chunk,
        prefix=prefix,
        heads=columns["num_heads"],
        keys=prefix + 0.5 * chunk,
        seconds=merged["latency"].to_numpy(dtype=float) / 1000,
        width=0,
        source=source,
        texts={column: merged[column].to_numpy(dtype=object) for column in texts},
    )
