"""Tables of aiconfigurator-core: their values, the choice of the newest version, and errors that name the mistake."""

from __future__ import annotations

import importlib.util
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calibrate.data import Measurement
from calibrate.importers import read_source
from calibrate.importers.aiconfigurator import read_latent, read_recurrence, version_key, with_loop
from kvrsim.errors import InputError
from tests.building.measurements import row
from tests.building.tables import at, perf_table


def refusal(source: str, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        read_source(source, "--from", **options)
    assert str(caught.value).startswith("--from")
    return str(caught.value)


GEMM: dict[str, Any] = {
    **{"framework": "VLLM", "version": "1.0", "device": "NVIDIA T1", "op_name": "gemm", "kernel_source": "linear"},
    **{"gemm_dtype": "bfloat16", "m": 64, "n": 4096, "k": 1024, "latency": 0.02},
}
CONTEXT: dict[str, Any] = {
    **{"device": "NVIDIA T1", "kernel_source": "fa3", "batch_size": 2, "isl": 512, "num_heads": 32},
    **{"num_key_value_heads": 8, "head_dim": 128, "window_size": 0, "beam_width": 1, "attn_dtype": "bfloat16"},
    **{"kv_cache_dtype": "bfloat16", "step": 0, "latency": 0.1},
}
NCCL: dict[str, Any] = {
    **{"nccl_dtype": "half", "num_gpus": 4, "message_size": 256, "kernel_source": "NCCL", "op_name": "all_gather"},
    **{"latency": 0.01},
}
SOURCE = "aiconfigurator:t1_sxm"


class Package:
    """An unpacked aiconfigurator-core that a test has made."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "aiconfigurator_core"
        (folder / "aiconfigurator_core-9.8.7.dist-info").mkdir()

    def write(self, place: str, *rows: dict[str, Any]) -> Path:
        """Write a parquet table of the test's system; place: such as gemm/vllm/1.0."""
        name = {"gemm": "gemm", "attention": "context_attention", "comm": "nccl"}[place.split("/")[0]]
        root = perf_table(self.root.parent, f"t1_sxm/{place}/{name}", rows)
        return root / f"systems/data/t1_sxm/{place}/{name}_perf.parquet"

    def at(self, source: str) -> str:
        """The source as a path into this package."""
        return at(source, self.root)

    def read(self, source: str = SOURCE) -> list[Measurement]:
        return read_source(self.at(source))

    def refusal(self, source: str = SOURCE) -> str:
        return refusal(self.at(source))


@pytest.fixture
def package(tmp_path: Path) -> Package:
    """A package with one table of each kind for vllm."""
    made = Package(tmp_path)
    made.write("gemm/vllm/1.0", GEMM, GEMM | {"gemm_dtype": "fp8"}, GEMM | {"gemm_dtype": "fp8_block"})
    made.write("attention/vllm/1.0", CONTEXT)
    made.write("comm/nccl/2.27.3", NCCL, NCCL | {"op_name": "all_reduce"}, NCCL | {"nccl_dtype": "int8"})
    return made


def test_one_system_of_aiconfigurator(package: Package) -> None:
    half, eighth, block, attention, gather, reduce = package.read()
    about: dict[str, Any] = {"device": "NVIDIA T1", "dtype": "bf16"}
    source = "aiconfigurator-core 9.8.7 t1_sxm"
    product: dict[str, Any] = {"tokens": 64, "in_features": 1024, "out_features": 4096, "warmups": 18, "repeats": 36}
    assert half == row("gemm", 2e-5, kernel="linear", source=f"{source}/gemm/vllm/1.0", **about, **product)
    assert eighth.dtype == "fp8"
    assert (block.dtype, block.warmups, block.repeats) == ("fp8_block", 3, 6)
    call: dict[str, Any] = {"chunk": 512, "prefix": 0, "batch": 2, "warmups": 3, "repeats": 6}
    call |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    assert attention == row("attention", 1e-4, kernel="fa3", source=f"{source}/attention/vllm/1.0", **about, **call)
    assert (gather.operation, gather.bytes, gather.ranks, gather.nodes) == ("all_gather", 512, 4, 1)
    assert replace(reduce, operation="all_gather") == gather
    assert (gather.device, gather.source) == ("t1_sxm", "aiconfigurator-core 9.8.7 t1_sxm/comm/nccl/2.27.3")


def test_the_newest_version_that_has_a_table(package: Package) -> None:
    package.write("gemm/vllm/1.2.0rc10", GEMM)
    package.write("gemm/vllm/1.2.0rc9", GEMM)
    package.write("gemm/sglang/0.5", GEMM)

    def version(source: str, operation: str) -> str:
        return next(row.source for row in package.read(source) if row.operation == operation).rpartition("t1_sxm/")[2]

    assert version(SOURCE, "gemm") == "gemm/vllm/1.2.0rc10"
    assert version(f"{SOURCE}/vllm", "attention") == "attention/vllm/1.0"
    assert version(f"{SOURCE}/vllm/1.0", "gemm") == "gemm/vllm/1.0"
    assert version(f"{SOURCE}/vllm/1.2.0rc9", "attention") == "attention/vllm/1.0"  # 1.2.0rc9 has no attention table
    assert {row.operation for row in package.read(f"{SOURCE}/sglang")} == {"gemm", "all_gather", "all_reduce"}


def test_nccl_is_the_newest_version_with_all_gathers(package: Package) -> None:
    package.write("comm/nccl/2.30.7", NCCL | {"op_name": "all_reduce", "message_size": 1})
    package.write("comm/nccl/2.29.2", NCCL, NCCL | {"op_name": "all_reduce"})
    sources = {row.source for row in package.read() if row.operation in ("all_gather", "all_reduce")}
    assert sources == {"aiconfigurator-core 9.8.7 t1_sxm/comm/nccl/2.29.2"}


def test_versions_are_ordered_as_they_came_out() -> None:
    early = ["0.1.dev19262", "0.1", "0.5.6", "0.5.6.post2", "0.5.14"]
    versions = [*early, "1.3.0rc9", "1.3.0rc20", "1.3.0", "2.23", "2.27.3"]
    keys = [version_key(version) for version in versions]
    assert keys == sorted(set(keys))


def test_repeats_of_a_shape_become_their_median(package: Package) -> None:
    package.write("gemm/vllm/1.0", *(GEMM | {"latency": ms} for ms in (1.0, 2.0, 6.0)), GEMM | {"m": 8, "latency": 4.0})
    three, one = (row for row in package.read() if row.operation == "gemm")
    assert (three.median_s, one.median_s, one.spread_s) == (2e-3, 4e-3, None)
    assert three.spread_s == pytest.approx(7**0.5 * 1e-3)


@pytest.mark.parametrize(
    "changed", [{"kv_cache_dtype": "fp8"}, {"window_size": 128}], ids=lambda changed: next(iter(changed))
)
def test_attention_is_plain_attention(package: Package, changed: dict[str, Any]) -> None:
    package.write("attention/vllm/1.0", CONTEXT | {"isl": 64, "step": 32}, CONTEXT | changed)
    (row,) = (row for row in package.read() if row.operation == "attention")
    assert (row.chunk, row.prefix) == (64, 32)


@pytest.mark.parametrize(
    "kernels",
    [("vllm_flash_attn_fa3", "vllm_flash_attn_fa4"), ("trtllm_mha", "flashinfer", "triton")],
    ids=lambda kernels: kernels[0],
)
def test_each_head_dim_takes_one_kernel(package: Package, kernels: tuple[str, ...]) -> None:
    rows = [CONTEXT | {"kernel_source": kernel} for kernel in reversed(kernels)]
    package.write("attention/vllm/1.0", *rows, CONTEXT | {"kernel_source": kernels[-1], "head_dim": 512})
    chosen = {row.head_dim: row.kernel for row in package.read() if row.operation == "attention"}
    assert chosen == {128: kernels[0], 512: kernels[-1]}


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("aiconfigurator:../t1_sxm", "a system among t1_sxm"),
        (f"{SOURCE}/onnx", "a framework among vllm"),
        (f"{SOURCE}/vllm/1.0/more", "aiconfigurator:[WHEEL:]SYSTEM[/FRAMEWORK[/VERSION]]"),
    ],
)
def test_what_aiconfigurator_does_not_have_is_refused(package: Package, source: str, complaint: str) -> None:
    assert complaint in package.refusal(source)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"latency": float("nan")}, "latency, row 1: got 'nan'"),
        ({"m": 1.5}, "m, row 1: got '1.5', accepted: a whole number"),
        ({"kernel_source": None}, "kernel_source, row 1:"),
    ],
)
def test_a_bad_value_in_a_parquet_table_is_named(package: Package, changed: dict[str, Any], complaint: str) -> None:
    path = package.write("gemm/vllm/1.0", GEMM, GEMM | changed)
    message = package.refusal()
    assert message.startswith(f"--from {path}: ")
    assert complaint in message


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install aiconfigurator-core" in refusal(SOURCE)


def test_decoding_is_read_where_the_kernels_of_a_prefill_do_it(package: Package) -> None:
    calls = [
        CONTEXT | {"isl": 1, "step": 4095, "batch_size": size, "kernel_source": name}
        for size, name in ((1, "fa3"), (8, "fa3"), (1, "decode"))
    ]
    path = package.write("attention/vllm/1.0", CONTEXT)
    written = package.write("attention/vllm/0.9", *calls)
    written.rename(path.parent / "generation_attention_perf.parquet")
    written.parent.rmdir()
    _, decoding = (row for row in package.read() if row.operation == "attention")
    assert (decoding.chunk, decoding.prefix, decoding.batch, decoding.kernel) == (1, 4095, 1, "fa3")


def test_how_often_tensorrt_llm_repeats_a_product_depends_on_the_cache() -> None:
    """50 MiB of L2: 8 MiB of weights repeat five times, 32 MiB twice, 128 MiB once; FP8 has half the bytes."""

    def repeats(features: int, dtype: str = "bf16", system: str = "h100_sxm") -> int | None:
        about = dict(operation="gemm", kernel="k", device="d", tokens=64, source="s", median_s=1.0, out_features=4096)
        return with_loop(Measurement(in_features=features, dtype=dtype, **about), "trtllm", system).repeats  # type: ignore[arg-type]

    assert [repeats(features) for features in (1024, 4096, 16384)] == [30, 12, 6]
    assert repeats(16384, "fp8") == 6
    assert repeats(8192, "nvfp4") == 24
    assert repeats(1024, system="unknown") is None


# -- Tables of latent attention become calls whose head_dim is the mean of the widths of keys and values.

ROW: dict[str, Any] = {
    **{"device": "NVIDIA T1", "kernel_source": "default", "mla_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
    **{"batch_size": 1, "isl": 512, "step": 0, "num_heads": 16, "latency": 0.1},
}
SOURCE_LATENT = "aiconfigurator:t1/trtllm/1.0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An unpacked package with one table."""
    rows = [ROW, ROW | {"latency": 0.3}, ROW | {"kv_cache_dtype": "fp8"}, ROW | {"isl": 1024, "latency": 0.4}]
    return perf_table(tmp_path, "t1/mla/trtllm/1.0/context_mla", rows)


def test_expanded_heads_have_keys_of_their_own(root: Path) -> None:
    first, second = read_latent(at(SOURCE_LATENT, root), "expanded")
    assert (first.chunk, first.num_attention_heads, first.num_key_value_heads) == (512, 16, 16)
    assert first.head_dim == (192 + 128) / 2
    assert first.median_s == pytest.approx(2e-4), "the median of both rows of that shape"
    assert (second.chunk, second.median_s) == (1024, pytest.approx(4e-4))
    absorbed = read_latent(at(SOURCE_LATENT, root), "absorbed")  # all heads share the latents
    assert {(row.num_attention_heads, row.num_key_value_heads, row.head_dim) for row in absorbed} == {(16, 1, 544)}


# -- Tables of linear attention become scans and convolutions of a prefill.

ROW_RECURRENCE: dict[str, Any] = {
    **{"device": "NVIDIA T1", "phase": "context", "kernel_source": "chunk_gated_delta_rule", "batch_size": 2},
    **{"seq_len": 512, "num_k_heads": 4, "head_k_dim": 128, "num_v_heads": 8, "head_v_dim": 64, "d_conv": 4},
    **{"latency": 0.5},
}


def test_scans_and_convolutions_of_a_prefill(tmp_path: Path) -> None:
    convolution = ROW_RECURRENCE | {"kernel_source": "causal_conv1d_fn", "latency": 0.1}
    decoding = ROW_RECURRENCE | {"phase": "generation", "kernel_source": "fused_recurrent_gated_delta_rule"}
    rows_written = [ROW_RECURRENCE, ROW_RECURRENCE | {"latency": 0.7}, convolution, decoding]
    root = perf_table(tmp_path, "t1_sxm/linear_attention/sglang/1.0/gdn", rows_written)
    rows = read_recurrence(at("aiconfigurator:t1_sxm/sglang", root), "gated_delta")
    assert rows.is_scan.tolist() == [True, False]
    assert rows.seconds == pytest.approx([6e-4, 1e-4])  # the median of two rows of one shape
    call, batch, element_bytes = rows.arguments
    assert (batch.tolist(), element_bytes) == ([2, 2], 2)
    assert call.tokens.tolist() == [512, 512]
    assert call.conv_channels == pytest.approx(2 * 4 * 128 + 8 * 64)
    assert rows.source == "aiconfigurator-core t1_sxm/linear_attention/sglang/1.0"
    assert len(rows.take(rows.is_scan).seconds) == 1


def test_a_wheel_is_read_as_its_folder(tmp_path: Path) -> None:
    package = Package(tmp_path)
    package.write("gemm/vllm/1.0", GEMM)
    file = tmp_path / "aiconfigurator_core-9.8.7-cp311-none.whl"
    with zipfile.ZipFile(file, "w") as wheel:
        for path in package.root.rglob("*.parquet"):
            wheel.write(path, path.relative_to(tmp_path))
        wheel.writestr("aiconfigurator_core/systems/data/t1_sxm/silicon.csv", "not read")
    [row] = package.read()
    assert read_source(f"aiconfigurator:{file}:t1_sxm") == [row]
    assert "a system among t1_sxm" in refusal(f"aiconfigurator:{file}")
