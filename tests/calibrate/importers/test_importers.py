"""Importers read published measurements with their meaning, in SI units; errors name the mistake."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from calibrate.data import Measurement, write_measurements
from calibrate.importers import LAYOUTS, read_source
from kvrsim.errors import InputError

VIDUR_TIMED = (
    *("emb", "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj"),
    *("post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add"),
)
VIDUR_MLP: dict[str, Any] = {
    **{f"time_stats.{name}.{what}": value for name in VIDUR_TIMED for what, value in (("median", 0.5), ("std", 0.01))},
    **{"n_head": 64, "n_kv_head": 8, "n_embd": 8192, "n_expanded_embd": 28672, "vocab_size": 32768},
    **{"use_gated_mlp": True, "num_tokens": 100, "num_tensor_parallel_workers": 4},
}
VIDUR_ATTENTION: dict[str, Any] = {
    **{"time_stats.attn_decode.median": "", "time_stats.attn_prefill.median": 1.2, "time_stats.attn_prefill.std": 0.1},
    **{"n_embd": 8192, "n_q_head": 64, "n_kv_head": 8, "block_size": 16, "num_tensor_parallel_workers": 2},
    **{"max_model_len": 4096, "batch_size": 1, "prefill_chunk_size": 2624, "kv_cache_size": 352, "is_prefill": True},
    **{"attention_backend": "AttentionBackend.FLASH_ATTENTION", "profile_method": "ProfileMethod.KINETO"},
}
VIDUR_SEND_RECV: dict[str, Any] = {
    **{"": 0, "time_stats.send_recv.median": 0.024, "time_stats.send_recv.std": 0.002, "rank": 0, "num_workers": 2},
    **{"size": 2048, "collective": "send_recv", "devices_per_node": 1, "max_devices_per_node": 8},
}


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def refusal(source: str, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        read_source(source, "--from", **options)
    assert str(caught.value).startswith("--from")
    return str(caught.value)


def by_kernel(rows: list[Measurement]) -> dict[str, Measurement]:
    return {row.kernel: row for row in rows}


def test_a_layer_of_vidur(tmp_path: Path) -> None:
    path = write(tmp_path / "compute/h100/meta-llama/Llama-2-70b-hf/mlp.csv", VIDUR_MLP)
    rows = read_source(path)
    counted = Counter(row.operation for row in rows)
    assert counted == {"gemm": 4, "norm": 2, "rotary": 1, "activation": 1, "residual": 1, "embedding": 1}
    gemms = {row.kernel: (row.tokens, row.in_features, row.out_features) for row in rows if row.operation == "gemm"}
    assert gemms == {
        "attn_pre_proj": (100, 8192, (64 + 2 * 8) * 128 // 4),
        "attn_post_proj": (100, 64 * 128 // 4, 8192),
        "mlp_up_proj": (100, 8192, 2 * 28672 // 4),
        "mlp_down_proj": (100, 28672 // 4, 8192),
    }
    assert {row.kernel: row.bytes for row in rows if row.bytes} == {
        "emb": 100 * 8192 * 4,
        "input_layernorm": 100 * 8192 * 4,
        "attn_rope": 100 * (64 + 8) * 128 // 4 * 4,
        "post_attention_layernorm": 100 * 8192 * 4,
        "mlp_act": 100 * 28672 // 4 * 6,
        "add": 100 * 8192 * 6,
    }
    assert {(row.device, row.dtype, row.median_s, row.spread_s) for row in rows} == {("h100", "fp16", 5e-4, 1e-5)}
    assert {row.source for row in rows} == {"vidur compute/h100/meta-llama/Llama-2-70b-hf/mlp.csv"}


def test_a_layer_without_gate_and_second_norm(tmp_path: Path) -> None:
    phi = {name: value for name, value in VIDUR_MLP.items() if "post_attention_layernorm" not in name}
    rows = by_kernel(read_source(write(tmp_path / "mlp.csv", phi | {"use_gated_mlp": False})))
    assert "post_attention_layernorm" not in rows
    assert rows["mlp_up_proj"].out_features == 28672 // 4
    assert rows["mlp_act"].bytes == 100 * 28672 // 4 * 4
    assert rows["add"].bytes == 100 * 8192 * 12  # two additions: after attention and after the MLP


def test_attention_of_vidur_is_its_prefill_rows(tmp_path: Path) -> None:
    decode = {"is_prefill": False, "time_stats.attn_prefill.median": "", "prefill_chunk_size": 0}
    path = write(tmp_path / "compute/a100/m/attention.csv", VIDUR_ATTENTION, VIDUR_ATTENTION | decode)
    (row,) = read_source(path)
    assert (row.kernel, row.device, row.chunk, row.prefix, row.batch) == ("flash_attention", "a100", 2624, 352, 1)
    assert (row.num_attention_heads, row.num_key_value_heads, row.head_dim) == (32, 4, 128)
    assert (row.median_s, row.spread_s) == (1.2e-3, 1e-4)


def test_messages_of_vidur(tmp_path: Path) -> None:
    path = write(
        tmp_path / "network/a100_dgx/send_recv.csv", VIDUR_SEND_RECV, VIDUR_SEND_RECV | {"devices_per_node": 2}
    )
    across, inside = read_source(path)
    assert (across.nodes, inside.nodes) == (2, 1)
    assert (across.operation, across.device, across.bytes, across.ranks) == ("send_recv", "a100_dgx", 2048, 2)
    assert (across.median_s, across.spread_s) == (2.4e-5, 2e-6)


def test_filters_keep_what_contains_their_text(tmp_path: Path) -> None:
    about = dict(operation="gemm", dtype="fp16", tokens=1, in_features=2, out_features=3, median_s=1.0)
    named = (("A100-80GB", "paged", "somebody"), ("H100", "paged", "somebody"), ("A100-80GB", "fa3", "llama"))
    rows = [Measurement(**about, device=device, kernel=kernel, source=source) for device, kernel, source in named]  # type: ignore[arg-type]
    path = str(tmp_path / "t.csv")
    write_measurements(path, rows)
    assert len(read_source(path)) == 3
    assert [row.device for row in read_source(f"{path}?gpu=h100")] == ["H100"]
    assert [row.kernel for row in read_source(f"{path}?gpu=A100&kernel=FA")] == ["fa3"]
    assert [row.source for row in read_source(f"{path}?model=llama")] == ["llama"]
    assert "what there is: A100-80GB; H100" in refusal(f"{path}?gpu=B200")
    for query in ("?", "?gpu", "?gpu=", "?size=3", "?gpu=a&gpu=b", "?gpu=a&&kernel=b"):
        assert "gpu=TEXT, kernel=TEXT, model=TEXT" in refusal(path + query)


CSVS = {
    "mlp.csv": (VIDUR_MLP, "time_stats.add.median"),
    "attention.csv": (VIDUR_ATTENTION, "time_stats.attn_prefill.median"),
    "send_recv.csv": (VIDUR_SEND_RECV, "time_stats.send_recv.median"),
}


@pytest.mark.parametrize("kind", CSVS)
@pytest.mark.parametrize("value", ["-1", "nan"])
def test_a_bad_time_is_named_by_line_and_column(tmp_path: Path, kind: str, value: str) -> None:
    row, column = CSVS[kind]
    path = write(tmp_path / "t.csv", row, row | {column: value})
    assert refusal(path).startswith(
        f"--from {path}, line 3: {column}: got '{value}', accepted: a finite number above 0"
    )


@pytest.mark.parametrize("changed", [{"num_tensor_parallel_workers": 3}, {"n_embd": 8191}])
def test_shapes_that_cannot_be_split_are_refused(tmp_path: Path, changed: dict[str, int]) -> None:
    for kind, row in (("mlp", VIDUR_MLP), ("attention", VIDUR_ATTENTION)):
        assert "a divisor of" in refusal(write(tmp_path / f"{kind}.csv", row | changed))


def test_unknown_sources_list_what_is_known(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "t.csv", {"a": 1, "b": 2}))
    assert message.startswith(f"--from {tmp_path / 't.csv'}: header: got 'a, b'")
    assert all(layout.name in message for layout in LAYOUTS)
    message = refusal(write(tmp_path / "u.csv", {"operation": "gemm", "seconds": 2}))
    assert "nearest is kvrsim measurements, which has median_s too" in message
