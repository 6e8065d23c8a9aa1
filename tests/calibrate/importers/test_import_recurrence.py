"""Tables of linear attention read as scans and convolutions of a prefill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from calibrate.importers.aiconfigurator import read_recurrence
from kvrsim.errors import InputError

ROW: dict[str, Any] = {
    **{"device": "NVIDIA T1", "phase": "context", "kernel_source": "chunk_gated_delta_rule", "batch_size": 2},
    **{"seq_len": 512, "num_k_heads": 4, "head_k_dim": 128, "num_v_heads": 8, "head_v_dim": 64, "d_conv": 4},
    **{"latency": 0.5},
}


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    root = folder / "aiconfigurator_core"
    path = root / "systems/data/t1_sxm/linear_attention/sglang/1.0/gdn_perf.parquet"
    path.parent.mkdir(parents=True)
    pandas.DataFrame(list(rows)).to_parquet(path)
    return root


def test_scans_and_convolutions_of_a_prefill(tmp_path: Path) -> None:
    convolution = ROW | {"kernel_source": "causal_conv1d_fn", "latency": 0.1}
    decoding = ROW | {"phase": "generation", "kernel_source": "fused_recurrent_gated_delta_rule"}
    root = write(tmp_path, ROW, ROW | {"latency": 0.7}, convolution, decoding)
    rows = read_recurrence("aiconfigurator:t1_sxm/sglang", "gated_delta", root=root)
    assert rows.is_scan.tolist() == [True, False]
    assert rows.seconds == pytest.approx([6e-4, 1e-4])  # the median of two rows of one shape
    call, batch, element_bytes = rows.arguments
    assert (batch.tolist(), element_bytes) == ([2, 2], 2)
    assert call.tokens.tolist() == [512, 512]
    assert call.conv_channels == pytest.approx(2 * 4 * 128 + 8 * 64)
    assert rows.source == "aiconfigurator-core t1_sxm/linear_attention/sglang/1.0"
    assert len(rows.take(rows.is_scan).seconds) == 1


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    root = write(tmp_path, {name: value for name, value in ROW.items() if name != "num_v_heads"})
    with pytest.raises(InputError, match="num_v_heads"):
        read_recurrence("aiconfigurator:t1_sxm/sglang", "gated_delta", root=root)
    with pytest.raises(InputError, match="kda"):
        read_recurrence("aiconfigurator:t1_sxm/sglang", "kda", root=root)
