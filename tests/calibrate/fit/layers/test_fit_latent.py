"""The fit of latent attention finds the rates that made the rows, in both forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.fit import attention as latent
from calibrate.fit.attention import PRESETS, fit_latent
from calibrate.importers.aiconfigurator import WIDTHS, LatentForm
from kvrsim.hardware import load_gpu
from kvrsim.kernels.attention import AttentionCall

GPU = load_gpu("h200")
SHARED: dict[LatentForm, int] = {"expanded": 0, "absorbed": 1}


def truth(form: LatentForm) -> Any:
    preset = PRESETS["fa3" if form == "absorbed" else "fa2"]
    return preset.rates(GPU, {"launch_s": 8e-6, "tile_s": 2e-6})


def write(folder: Path, form: LatentForm, framework: str) -> None:
    """A table whose times are those of the truth; with single queries that take ten times as long."""
    import pandas

    rows = []
    for heads in (1, 4, 16, 64, 128):
        for chunk in (1, 64, 256, 1024, 2048, 4096, 8192, 16384):
            tokens = np.array([float(chunk)])
            keys, values = WIDTHS[form]
            call = AttentionCall(
                chunk=tokens,
                prefix=0 * tokens,
                causal=tokens * tokens / 2,
                num_attention_heads=heads,
                num_key_value_heads=SHARED[form] or heads,
                head_dim=keys,
                v_head_dim=values,
                score_bytes=28.0,
            )
            seconds = truth(form).seconds(call, 1, 2).item() * (10 if chunk == 1 else 1)
            about = {"device": "d", "kernel_source": "k", "mla_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
            rows.append(
                about | {"batch_size": 1, "isl": chunk, "step": 0, "num_heads": heads, "latency": seconds * 1e3}
            )
    path = folder / f"aiconfigurator_core/systems/data/t1/mla/{framework}/1.0/context_mla_perf.parquet"
    path.parent.mkdir(parents=True)
    pandas.DataFrame(rows).to_parquet(path)


def test_rates_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    sources: dict[LatentForm, str] = {
        "expanded": "aiconfigurator:t1/trtllm/1.0",
        "absorbed": "aiconfigurator:t1/sglang/1.0",
    }
    write(tmp_path, "expanded", "trtllm")
    write(tmp_path, "absorbed", "sglang")
    read = latent.read_latent
    monkeypatch.setattr(
        latent, "read_latent", lambda text, form, argument: read(text, form, argument, tmp_path / "aiconfigurator_core")
    )
    fitted = fit_latent(sources, GPU)
    assert fitted.own.errors().mape < 0.01
    assert fitted.cross_validated.errors().mape < 0.01
    assert fitted.seen["chunk"][0] > 1, "single queries are not fitted"
    assert fitted.rates.expanded.block_s == pytest.approx(truth("expanded").block_s, rel=0.02)
    assert fitted.rates.absorbed is not None
    assert fitted.rates.absorbed.block_s == pytest.approx(truth("absorbed").block_s, rel=0.02)
    labels = [line.label for line in fitted.lines()]
    assert any(label.startswith("absorbed") for label in labels)
    assert fitted.source.count("t1/mla") == 2
