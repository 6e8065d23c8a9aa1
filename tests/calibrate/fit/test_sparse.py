"""Fits of sparse attention recover the rates that made the rows of whole modules."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from calibrate.fit.sparse import fit_modules, read_modules
from kvrsim.kernels.profile import load_profile
from kvrsim.kernels.sparse import AttendRates, ScoreRates, SparseKernels
from tests.building.tables import at, perf_table

PROFILE = load_profile("h200-flash")
SOURCE = "aiconfigurator:t1/sglang/1.0"
MODULES = {
    "keys": ("sparse_attention", "dsa_context_module", "zai-org/GLM-5-FP8"),
    "blocks": ("msa", "msa_context_module", "MiniMaxAI/MiniMax-M3"),
}
KERNELS = SparseKernels(
    score=ScoreRates(start_s=0.0, flops_per_s=1.5e14, full_heads=12000.0),
    attend=AttendRates(start_s=1e-4, flops_per_s=1e14, query_keys=50.0, full_queries=300.0, least_heads=16),
)


def write(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    table, module, model = MODULES[kind]
    about = {"device": "d", "kernel_source": "k", "batch_size": 1, "op_name": module, "model": model}
    return perf_table(folder, f"t1/{table}/sglang/1.0/{module}", (about | row for row in rows))


@pytest.mark.parametrize("kind", ["keys", pytest.param("blocks", marks=pytest.mark.slow)])
def test_modules_are_products_and_what_is_between(kind: str, tmp_path: Path) -> None:
    shapes = list(product((1, 512, 2048, 8192), (0, 4096, 65536), (8, 64)))
    rows: list[dict[str, Any]] = [
        {"isl": chunk, "step": prefix, "num_heads": heads, "gemm_type": "bfloat16", "kv_cache_dtype": cache}
        for chunk, prefix, heads in shapes
        for cache in ("fp8", "bfloat16")
    ]
    root = write(tmp_path, kind, [row | {"latency": 1e3 * (1 + row["isl"])} for row in rows])
    timed: dict[tuple[int, ...], float] = {}
    for one in read_modules(kind, at(SOURCE, root)):
        assert (one.products_s(PROFILE) > 0).all()
        seconds = one.products_s(PROFILE) + KERNELS.seconds(one.call, 1)
        for chunk, prefix, value in zip(one.rows.chunk, one.rows.prefix, seconds, strict=True):
            timed[int(chunk), int(prefix), one.mixer.num_attention_heads] = 1000 * float(value)
    assert {chunk for chunk, *_ in timed} == {2048, 8192}, (
        "calls that hardly take longer than the shortest are not fitted"
    )
    known = [
        row | {"latency": 1e6 if row["kv_cache_dtype"] == "bfloat16" else timed.get(key, min(timed.values()) / 3)}
        for row in rows
        for key in [(row["isl"], row["step"], row["num_heads"])]
    ]
    write(tmp_path, kind, known)
    fitted = fit_modules(kind, at(SOURCE, root), PROFILE)
    assert fitted.own.errors().mape < 0.02, "rows with a cache of another type are not fitted"
    assert fitted.cross_validated.errors().mape < 0.02
    assert fitted.rates.score.flops_per_s == pytest.approx(KERNELS.score.flops_per_s, rel=0.1)
