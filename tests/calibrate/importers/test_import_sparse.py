"""Tables of sparse attention are read as what their kernels were given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from calibrate.importers.aiconfigurator import read_kernel, read_module
from kvrsim.errors import InputError

ROW: dict[str, Any] = {
    **{"device": "NVIDIA T1", "kernel_source": "k", "batch_size": 1, "isl": 4096, "step": 8192, "num_heads": 64},
    **{"latency": 2.0},
}
SOURCE = "aiconfigurator:t1/sglang/1.0"


def write(folder: Path, name: str, *rows: dict[str, Any], table: str = "sparse_attention") -> Path:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    path = folder / f"aiconfigurator_core/systems/data/t1/{table}/sglang/1.0/{name}_perf.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(list(rows)).to_parquet(path)
    return folder / "aiconfigurator_core"


def test_scores_are_of_the_keys_that_queries_see(tmp_path: Path) -> None:
    root = write(tmp_path, "glm5_mqa_logits_module", ROW, ROW | {"batch_size": 2}, ROW | {"latency": 4.0})
    rows = read_kernel(SOURCE, "glm5_mqa_logits_module", root=root)
    assert rows.keys.tolist() == [8192 + 2048]
    assert (rows.heads.tolist(), rows.width, rows.compress_ratio) == ([32], 128, 1)
    assert rows.seconds == pytest.approx([3e-3]), "the median of both calls of one sequence"
    assert "t1/sparse_attention/sglang/1.0" in rows.source
    write(tmp_path, "dsv4_paged_mqa_logits_module", ROW)
    entries = read_kernel(SOURCE, "dsv4_paged_mqa_logits_module", root=root)
    assert (entries.keys.tolist(), entries.heads.tolist(), entries.compress_ratio) == ([2560], [64], 4)


def test_the_choice_has_clear_winners_and_more_keys_than_it_takes(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        "glm5_topk_module",
        *(ROW | {"score_mode": mode, "latency": 1.0} for mode in ("flat", "top_last")),
        ROW | {"isl": 1024, "step": 0, "score_mode": "top_last", "latency": 0.0},
    )
    rows = read_kernel(SOURCE, "glm5_topk_module", root=root)
    assert (rows.keys.tolist(), set(rows.texts["score_mode"])) == ([12288], {"top_last"})


def test_attention_takes_as_many_keys_for_each_query(tmp_path: Path) -> None:
    root = write(tmp_path, "glm5_dsa_attn_module", ROW, ROW | {"isl": 512, "step": 0})
    rows = read_kernel(SOURCE, "glm5_dsa_attn_module", root=root)
    assert (rows.chunk.tolist(), rows.keys.tolist(), rows.width) == ([4096], [2048], 1088)
    write(tmp_path, "dsv4_hca_attn_module", ROW)
    entries = read_kernel(SOURCE, "dsv4_hca_attn_module", root=root)
    assert (entries.keys.tolist(), entries.width) == ([128 + 96], 1024)


def test_modules_keep_what_tells_them_apart(tmp_path: Path) -> None:
    about = {"op_name": "msa_context_module", "model": "m", "kv_cache_dtype": "fp8", "gemm_type": "bfloat16"}
    root = write(tmp_path, "msa_context_module", ROW | about, ROW | about | {"model": "n"}, table="msa")
    rows = read_module(SOURCE, "msa_context_module", root=root)
    assert rows.texts["model"].tolist() == ["m", "n"]
    assert rows.take(rows.text("model") == "n").seconds == pytest.approx([2e-3])


def test_a_faulty_table_is_named(tmp_path: Path) -> None:
    root = write(tmp_path, "glm5_dsa_attn_module", ROW | {"latency": -1.0})
    with pytest.raises(InputError, match=r"latency.*ms of at least 0"):
        read_kernel(SOURCE, "glm5_dsa_attn_module", root=root)
    with pytest.raises(InputError, match=r"dsv4_hca_attn_module_perf\.parquet"):
        read_kernel(SOURCE, "dsv4_hca_attn_module", root=root)
