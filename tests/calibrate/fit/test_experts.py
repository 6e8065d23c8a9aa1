"""Tables of routed experts: types, shares, routings and slow rows; fits recover the rates that made the rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.fit.experts import fit_experts
from calibrate.importers.aiconfigurator import HALF, ExpertRows, read_experts
from kvrsim.errors import InputError
from kvrsim.hardware import load_gpu
from kvrsim.kernels.experts import GroupedRates
from kvrsim.kernels.gemm import GEMM_TYPES
from kvrsim.kernels.profile import load_profile
from tests.building.tables import at, perf_table

ROW: dict[str, Any] = {
    **{"device": "NVIDIA T1", "kernel_source": "moe_torch_flow", "moe_dtype": "bfloat16", "num_tokens": 1024},
    **{"hidden_size": 2048, "inter_size": 768, "topk": 8, "num_experts": 128, "moe_tp_size": 1, "moe_ep_size": 1},
    **{"distribution": "balanced", "latency": 1.0},
}
SOURCE = "aiconfigurator:t1_sxm/trtllm/1.0"


def table(folder: Path, *rows: dict[str, Any]) -> Path:
    return perf_table(folder, "t1_sxm/moe/trtllm/1.0/moe", (ROW | row for row in rows))


def test_rows_are_read_by_type(tmp_path: Path) -> None:
    root = table(
        tmp_path,
        {"moe_tp_size": 2, "moe_ep_size": 4},
        {"num_tokens": 2048, "latency": 1.5, "distribution": "power_law_1.2"},
        {"moe_dtype": "w4a16_mxfp4", "inter_size": 1856, "topk": 6, "latency": 0.5},
        {"moe_dtype": "something_new"},
        {"num_tokens": 8, "latency": 0.1},
        {"kernel_source": "moe_torch_flow_min_latency", "latency": 0.1},
    )
    half, four_bits = read_experts(at(SOURCE, root))
    assert (half.kind, four_bits.kind) == (HALF, "mxfp4_wo")
    assert sorted(half.seconds.tolist()) == pytest.approx([0.001, 0.0015])
    assert half.source.endswith("t1_sxm/moe/trtllm/1.0")
    assert set(half.exponent.tolist()) == {0.0, 1.2}
    shared = half.take(half.ep_size == 4).call()
    assert (shared.intermediate_size[0], shared.num_experts[0], shared.num_experts_per_tok[0]) == (384, 32, 2)  # type: ignore[index]
    assert (half.gated.tolist(), four_bits.gated.tolist()) == ([1.0, 1.0], [0.0])
    (only,) = read_experts(at(SOURCE, root), ["mxfp4_wo"])
    assert only.seconds.tolist() == [0.0005]
    with pytest.raises(InputError, match=r"a type of .*: half, mxfp4_wo"):
        read_experts(at(SOURCE, root), ["nvfp4"])


def test_rows_slower_than_longer_ones_are_dropped(tmp_path: Path) -> None:
    """Rows slower than longer ones are dropped, and so are rows of the less frequent of two kernels."""
    times = {256: 2.0, 512: 0.9, 1024: 1.0, 2048: 1.9}
    rows = [{"num_tokens": tokens, "latency": one} for tokens, one in times.items()]
    (half,) = read_experts(at(SOURCE, table(tmp_path, *rows, {"kernel_source": "other", "latency": 9.0})))
    assert half.tokens.tolist() == [512, 1024, 2048]


TRUE = GroupedRates(
    flops_per_s=6e14,
    weight_bytes_per_s=2e12,
    row_bytes_per_s=1.5e12,
    tile_rows=100.0,
    tile_features=300.0,
    start_s=4e-5,
)


def made_rows(kind: str, rates: GroupedRates) -> ExpertRows:
    """Rows of five models at powers of two of tokens, with the times of these rates."""
    models = [(2048, 768, 128, 8), (4096, 14336, 8, 2), (7168, 2048, 256, 8), (4096, 1536, 128, 8), (2880, 2880, 32, 4)]
    sizes = [(*model, 2**power, tp) for model in models for power in range(6, 15) for tp in (1, 2, 4)]
    hidden, inner, experts, per_tok, tokens, tp_size = np.array(sizes, dtype=float).T
    one = np.ones(len(sizes))
    rows = ExpertRows(
        **{"kind": kind, "source": "made", "tokens": tokens, "hidden_size": hidden},
        **{"intermediate_size": inner, "num_experts": experts, "num_experts_per_tok": per_tok, "tp_size": tp_size},
        **{"ep_size": one, "gated": one, "exponent": 0 * one, "seconds": one, "warmups": 0 * one, "repeats": one},
    )
    return replace(rows, seconds=rates.seconds(rows.call(), 1, GEMM_TYPES.get(kind, 2)))


def test_a_fit_finds_the_constants() -> None:
    """Rates of each type are recovered; rows of another engine, 25 % slower, give the systematic error."""
    profile = load_profile("h100-flash")
    profile = replace(profile, kernels=replace(profile.kernels, clock=None))
    fast = replace(TRUE, flops_per_s=1.2e15)
    rows = [made_rows(HALF, TRUE), made_rows("fp8_block", fast)]
    slower = replace(rows[0], source="other", seconds=1.25 * rows[0].seconds)
    fitted = fit_experts(rows, profile, [slower])
    for result, true in ((fitted.rates.half, TRUE), (fitted.rates.types["fp8_block"], fast)):
        assert result.flops_per_s == pytest.approx(true.flops_per_s, rel=0.05)
        assert result.weight_bytes_per_s == pytest.approx(true.weight_bytes_per_s, rel=0.05)
        assert result.start_s == pytest.approx(true.start_s, rel=0.05)
        assert result.flops_per_s <= dict(load_gpu("h100").peak_flops)["fp8"]
    assert fitted.operation.cross_validated_mape < 0.02
    assert fitted.systematic_log_sd == pytest.approx(np.log(1.25), rel=1e-3)
    with pytest.raises(InputError, match="half among them"):
        fit_experts(rows[1:], profile)
