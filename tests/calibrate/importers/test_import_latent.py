"""Tables of latent attention are read as calls of heads of the mean width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from calibrate.importers.aiconfigurator import read_latent
from kvrsim.errors import InputError

ROW: dict[str, Any] = {
    **{"device": "NVIDIA T1", "kernel_source": "default", "mla_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
    **{"batch_size": 1, "isl": 512, "step": 0, "num_heads": 16, "latency": 0.1},
}
SOURCE = "aiconfigurator:t1/trtllm/1.0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An unpacked package with one table."""
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    folder = tmp_path / "aiconfigurator_core/systems/data/t1/mla/trtllm/1.0"
    folder.mkdir(parents=True)
    rows = [ROW, ROW | {"latency": 0.3}, ROW | {"kv_cache_dtype": "fp8"}, ROW | {"isl": 1024, "latency": 0.4}]
    pandas.DataFrame(rows).to_parquet(folder / "context_mla_perf.parquet")
    return tmp_path / "aiconfigurator_core"


def test_expanded_heads_have_keys_of_their_own(root: Path) -> None:
    first, second = read_latent(SOURCE, "expanded", root=root)
    assert (first.chunk, first.num_attention_heads, first.num_key_value_heads) == (512, 16, 16)
    assert first.head_dim == (192 + 128) / 2
    assert first.median_s == pytest.approx(2e-4), "the median of both rows of that shape"
    assert (second.chunk, second.median_s) == (1024, pytest.approx(4e-4))


def test_absorbed_heads_share_the_latents(root: Path) -> None:
    rows = read_latent(SOURCE, "absorbed", root=root)
    assert {(row.num_attention_heads, row.num_key_value_heads, row.head_dim) for row in rows} == {(16, 1, 544)}


@pytest.mark.parametrize(
    "source", [SOURCE.replace("1.0", "2.0"), SOURCE.replace("trtllm", "vllm"), "aiconfigurator:t2"]
)
def test_a_table_that_is_not_there_is_named(root: Path, source: str) -> None:
    with pytest.raises(InputError, match=r"context_mla_perf\.parquet"):
        read_latent(source, "expanded", root=root)


def test_a_column_that_is_missing_is_named(root: Path) -> None:
    pandas = pytest.importorskip("pandas")
    path = root / "systems/data/t1/mla/trtllm/1.0/context_mla_perf.parquet"
    pandas.DataFrame([{key: value for key, value in ROW.items() if key != "num_heads"}]).to_parquet(path)
    with pytest.raises(InputError, match="num_heads"):
        read_latent(SOURCE, "expanded", root=root)
