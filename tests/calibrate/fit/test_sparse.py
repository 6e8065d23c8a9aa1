"""Fits of sparse attention find the rates that made the rows: of kernels alone, and of whole modules."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.fit import sparse
from calibrate.fit.sparse import fit_blocks, fit_keys, read_modules
from calibrate.importers.aiconfigurator import SparseRows, read_kernel
from kvrsim.hardware import load_gpu
from kvrsim.kernels.profile import load_profile
from kvrsim.kernels.sparse import AttendRates, ScoreRates, SelectRates, SparseKernels
from kvrsim.program import Array
from tests.building.tables import perf_table

GPU = load_gpu("h200")
PROFILE = load_profile("h200-flash")
SOURCE = "aiconfigurator:t1/sglang/1.0"
SCORE = ScoreRates(start_s=4e-6, flops_per_s=9e14, full_heads=14000.0, entries_share=0.8)
SELECT = SelectRates(start_s=3e-6, query_s=2e-9, key_s=2e-12, full_queries=150.0)
ATTEND = AttendRates(start_s=1e-5, flops_per_s=6e14, query_keys=200.0, full_queries=130.0, least_heads=64)
CHUNKS, PREFIXES = (1, 128, 512, 2048, 8192), (0, 4096, 16384, 65536, 131072)
SHAPES = list(product(CHUNKS, PREFIXES))


def write(folder: Path, name: str, rows: list[dict[str, Any]], table: str = "sparse_attention") -> Path:
    about = {"device": "d", "kernel_source": "k", "batch_size": 1}
    return perf_table(folder, f"t1/{table}/sglang/1.0/{name}", (about | row for row in rows))


def rows_of(**columns: Any) -> Iterator[dict[str, Any]]:
    for chunk, prefix in SHAPES:
        yield {"isl": chunk, "step": prefix, "num_heads": 64, "latency": 1.0} | columns


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tables whose times are those of the rates above."""
    root = tmp_path / "aiconfigurator_core"
    times: dict[str, Callable[[SparseRows], Array]] = {
        "glm5_mqa_logits_module": lambda one: SCORE.seconds(one.chunk, one.keys, one.heads, one.width),
        "dsv4_paged_mqa_logits_module": lambda one: SCORE.seconds(
            one.chunk, one.keys, one.heads, one.width, entries=True
        ),
        "glm5_topk_module": lambda one: SELECT.seconds(one.chunk, one.keys),
        "glm5_dsa_attn_module": lambda one: ATTEND.seconds(one.chunk, one.keys, one.heads, one.width),
        "dsv4_hca_attn_module": lambda one: ATTEND.seconds(one.chunk, one.keys, one.heads, one.width),
    }
    for name, seconds in times.items():
        more = {"score_mode": "top_last"} if "topk" in name else {}
        write(tmp_path, name, list(rows_of(**more)))
        read = read_kernel(SOURCE, name, root=root)
        timed = zip(read.chunk, read.prefix, seconds(read), strict=True)
        found = {(int(chunk), int(prefix)): 1000 * float(one) for chunk, prefix, one in timed}
        write(tmp_path, name, [row | {"latency": found.get((row["isl"], row["step"]), 0.0)} for row in rows_of(**more)])
    monkeypatch.setattr(sparse, "read_kernel", lambda text, name, argument: read_kernel(text, name, argument, root))
    return root


def test_kernels_are_found_again(root: Path) -> None:
    fitted = fit_keys(SOURCE, SOURCE, GPU, least_heads=64)
    assert fitted.own.errors().mape < 0.005
    assert fitted.cross_validated.errors().mape < 0.005
    found = fitted.rates
    assert found.score.flops_per_s == pytest.approx(SCORE.flops_per_s, rel=0.01)
    assert found.score.full_heads == pytest.approx(SCORE.full_heads, rel=0.02)
    assert found.score.entries_share == pytest.approx(SCORE.entries_share, rel=0.01)
    assert found.select is not None
    assert found.select.key_s == pytest.approx(SELECT.key_s, rel=0.01)
    assert found.attend.flops_per_s == pytest.approx(ATTEND.flops_per_s, rel=0.01)
    assert found.attend.query_keys == pytest.approx(ATTEND.query_keys, rel=0.02)
    assert fitted.seen["chunk"] == (128, 8192), "single queries are not fitted"
    assert {"scores, fitted", "selection, fitted", "attention, fitted"} < {line.label for line in fitted.lines()}


MODEL = "MiniMaxAI/MiniMax-M3"
CONFIG = {
    **{"architectures": ["MiniMaxM3ForCausalLM"], "model_type": "minimax_m3", "hidden_size": 6144, "vocab_size": 1000},
    **{"num_hidden_layers": 2, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128},
    **{"intermediate_size": 3072, "dense_intermediate_size": 12288, "shared_intermediate_size": 3072},
    **{"num_local_experts": 8, "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_layer_freq": [0, 1]},
    **{"rotary_dim": 64, "use_qk_norm": True, "qk_norm_type": "per_head", "max_position_embeddings": 1048576},
    "sparse_attention_config": {
        **{"sparse_attention_freq": [0, 1], "sparse_block_size": 128, "sparse_index_dim": 128},
        **{"sparse_num_index_heads": 4, "sparse_topk_blocks": 16, "use_sparse_attention": True},
        **{"sparse_disable_index_value": [0, 1], "sparse_init_block": 0, "sparse_local_block": 1},
    },
}
BLOCKS = SparseKernels(
    score=ScoreRates(start_s=0.0, flops_per_s=1.5e14, full_heads=12000.0),
    attend=AttendRates(start_s=1e-4, flops_per_s=1e14, query_keys=0.0, full_queries=0.0, least_heads=16),
)


def test_modules_are_products_and_what_is_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "aiconfigurator_core"
    (root / "model_configs").mkdir(parents=True)
    (root / "model_configs" / "MiniMaxAI--MiniMax-M3_config.json").write_text(json.dumps(CONFIG))
    about = {"op_name": "msa_context_module", "model": MODEL, "kv_cache_dtype": "bfloat16", "gemm_type": "bfloat16"}
    rows = [row | about | {"num_heads": heads} for row in rows_of() for heads in (8, 16, 64)]
    write(tmp_path, "msa_context_module", [row | {"latency": 1e3 * (1 + row["isl"])} for row in rows], table="msa")
    timed: dict[tuple[int, int, int], float] = {}
    for one in read_modules(SOURCE, root=root):
        heads = one.mixer.num_attention_heads
        assert one.call.index_heads == max(1, 4 * heads // 64), "SGLang gives a KV head its own index heads"
        seconds = one.products_s(PROFILE) + BLOCKS.seconds(one.call, 1)
        assert (one.products_s(PROFILE) > 0).all()
        for chunk, prefix, value in zip(one.rows.chunk, one.rows.prefix, seconds, strict=True):
            timed[heads, int(chunk), int(prefix)] = 1000 * float(value)
    assert {chunk for _, chunk, _ in timed} == {2048, 8192}
    shortest = min(timed.values()) / 2
    keys = [(row["num_heads"], row["isl"], row["step"]) for row in rows]
    known = [row | {"latency": timed.get(key, shortest)} for key, row in zip(keys, rows, strict=True)]
    write(tmp_path, "msa_context_module", known, table="msa")
    monkeypatch.setattr(sparse, "read_modules", lambda text, argument: read_modules(text, argument, root))
    fitted = fit_blocks(SOURCE, PROFILE, GPU)
    assert fitted.own.errors().mape < 0.01
    assert fitted.cross_validated.errors().mape < 0.01
    assert fitted.rates.attend.flops_per_s == pytest.approx(1e14, rel=0.02)
    assert fitted.rates.score.flops_per_s == pytest.approx(1.5e14, rel=0.02)
    slower = replace(PROFILE, kernels=replace(PROFILE.kernels, gemm=replace(PROFILE.kernels.gemm, launch_s=1e-3)))
    with_start = fit_blocks(SOURCE, slower, GPU).rates.attend
    assert with_start.start_s < fitted.rates.attend.start_s, "what products take is not counted twice"
    assert np.isfinite(with_start.flops_per_s)
