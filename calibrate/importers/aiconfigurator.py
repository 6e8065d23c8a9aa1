"""The kernel tables that NVIDIA's PyPI package aiconfigurator-core ships (Apache-2.0): times in ms, on the GPU alone.

aiconfigurator:SYSTEM[/FRAMEWORK[/VERSION]], such as aiconfigurator:a100_sxm/vllm. FRAMEWORK is vllm, sglang or trtllm
(default vllm), VERSION the framework's. A version that is not given, or that lacks a table, stands for the newest that
has it; NCCL's is always the newest. `source` of a measurement names the system, framework and version that were read.
Of the folder systems/data/SYSTEM are read

    gemm/FRAMEWORK/VERSION/gemm_perf.parquet                    m tokens, n out_features, k in_features; bfloat16 and
                                                                kvrsim.kernels.gemm.GEMM_TYPES (sq is int8)
    attention/FRAMEWORK/VERSION/context_attention_perf.parquet  isl is the chunk, step the prefix; bfloat16 queries and
                                                                cache, no window, no beams
    .../generation_attention_perf.parquet                       one query behind step keys (decoding), same kernels
    comm/nccl/VERSION/nccl_perf.parquet                         all_gather and all_reduce of `half`; message_size counts
                                                                all elements gathered: 2**28 took 2.1 ms on four A100s,
                                                                a third of what each sending as many would take
    comm/FRAMEWORK/VERSION/custom_allreduce_perf.parquet        the framework's all_reduce, in a CUDA graph if it was

For how often an operation ran in a row see calibrate.importers.collectors. SGLang's and TensorRT-LLM's collectors fill
matrices with random data; vLLM's leaves weights of BF16 products as torch.empty made them, which takes less time.

Rows of the same shape become one: their median, and their standard deviation as spread. Where several attention
kernels were measured, each head_dim takes one of those that it was measured with: fa3 before other flash kernels,
those before TensorRT-LLM's, then FlashInfer's, Triton's last; kernels for decoding only where there is nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from calibrate.data.measurement import Measurement
from calibrate.importers.collectors import with_loop
from calibrate.importers.tables import (
    check_one_of,
    find_package,
    folder_names,
    merge_rows,
    newest_table,
    package_name,
    parse_source,
    read_frame,
)
from kvrsim.errors import InputError
from kvrsim.kernels.gemm import GEMM_TYPES

_GEMM_FILE = "gemm_perf.parquet"
_GEMM_SHAPE = ["gemm_dtype", "m", "n", "k"]
_DTYPES = {"bfloat16": "bf16", "sq": "int8"} | {kind: kind for kind in GEMM_TYPES if kind != "int8"}
_ATTENTION_FILE = "context_attention_perf.parquet"
_DECODE_FILE = "generation_attention_perf.parquet"
_ATTENTION_SHAPE = ["batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim"]
_NCCL_FILE = "nccl_perf.parquet"
_CUSTOM_FILE = "custom_allreduce_perf.parquet"
_COMM_SHAPE = ["num_gpus", "message_size"]
_COMM_OPERATIONS = ("all_gather", "all_reduce")
_HALF_BYTES = 2

# The first that a kernel's name contains is its place in the order of preference.
_KERNEL_ORDER = ("decode", "fa3", "flash_att", "fa4", "trtllm", "flashinfer", "triton")


def read_aiconfigurator(text: str, argument: str = "measurements", root: Path | None = None) -> list[Measurement]:
    """Measurements of one system and framework: gemm, attention and, where they were measured, collectives.

    `text` is the SOURCE with its prefix. `root` is the folder aiconfigurator_core of an unpacked wheel; None: of the
    installed package. Raises InputError where the package, the system, the framework or the version is missing.
    """
    folder = root if root is not None else find_package(text, argument)
    package = package_name(folder)
    data = folder / "systems" / "data"
    system, framework, version = parse_source(text, argument)
    check_one_of(text, argument, "system", system, folder_names(data, "*/gemm"))
    check_one_of(text, argument, "framework", framework, folder_names(data / system, "gemm/*", "attention/*"))
    if version is not None:
        found = folder_names(
            data / system, f"gemm/{framework}/*/{_GEMM_FILE}", f"attention/{framework}/*/{_ATTENTION_FILE}"
        )
        check_one_of(text, argument, "version", version, found)
    measured: list[Measurement] = []
    for table, file, read in (
        (f"gemm/{framework}", _GEMM_FILE, _read_gemm),
        (f"attention/{framework}", _ATTENTION_FILE, _read_attention),
        (f"attention/{framework}", _DECODE_FILE, _read_attention),
        ("comm/nccl", _NCCL_FILE, _read_nccl),
        (f"comm/{framework}", _CUSTOM_FILE, _read_custom),
    ):
        path = newest_table(data / system / table, file, version if file != _NCCL_FILE else None)
        if path is not None:
            rows = read(path, f"{argument} {path}", f"{package} {system}/{table}/{path.parent.name}")
            if file == _DECODE_FILE:  # as the kernels of a prefill, if they do both
                kernels = {row.kernel for row in measured}
                rows = [row for row in rows if row.kernel in kernels]
            measured += [with_loop(row, framework, system) for row in rows]
    return measured


def _read_gemm(path: Path, where: str, source: str) -> list[Measurement]:
    frame = read_frame(path, where, [*_GEMM_SHAPE[1:], "latency"], ["device", "kernel_source", "gemm_dtype"])
    merged = merge_rows(frame[frame["gemm_dtype"].isin(_DTYPES)], _GEMM_SHAPE)
    return [
        _made(
            where,
            operation="gemm",
            kernel=kernel,
            device=device,
            dtype=_DTYPES[dtype],
            tokens=m,
            in_features=k,
            out_features=n,
            source=source,
            **times,
        )
        for (device, kernel, dtype, m, n, k), times in merged
    ]


def _read_attention(path: Path, where: str, source: str) -> list[Measurement]:
    texts = ["device", "kernel_source", "attn_dtype", "kv_cache_dtype"]
    frame = read_frame(path, where, [*_ATTENTION_SHAPE, "beam_width", "latency"], texts)
    plain = (frame["attn_dtype"] == "bfloat16") & (frame["kv_cache_dtype"] == "bfloat16") & (frame["beam_width"] == 1)
    if path.name == _DECODE_FILE:  # of several sequences no prefill is made
        plain &= frame["batch_size"] == 1
    if "window_size" in frame:
        plain &= frame["window_size"].isna() | (frame["window_size"] == 0)
    frame = frame[plain]
    chosen = frame.groupby("head_dim")["kernel_source"].agg(lambda kernels: min(kernels.unique(), key=_preference))
    merged = merge_rows(frame[frame["kernel_source"] == frame["head_dim"].map(chosen)], _ATTENTION_SHAPE)
    return [
        _made(
            where,
            operation="attention",
            kernel=kernel,
            device=device,
            dtype="bf16",
            chunk=chunk,
            prefix=prefix,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            batch=batch,
            source=source,
            **times,
        )
        for (device, kernel, batch, chunk, prefix, heads, kv_heads, head_dim), times in merged
    ]


def _read_nccl(path: Path, where: str, source: str) -> list[Measurement]:
    frame = read_frame(path, where, [*_COMM_SHAPE, "latency"], ["kernel_source", "op_name", "nccl_dtype"])
    if "device" not in frame:  # the oldest tables do not say
        frame = frame.assign(device=path.parents[3].name)
    frame = frame[frame["nccl_dtype"] == "half"]
    return [
        row
        for operation in _COMM_OPERATIONS
        for row in _collectives(frame[frame["op_name"] == operation], operation, where, source)
    ]


def _read_custom(path: Path, where: str, source: str) -> list[Measurement]:
    frame = read_frame(path, where, [*_COMM_SHAPE, "latency"], ["kernel_source", "op_name", "device"])
    in_graph = frame["kernel_source"].str.endswith("_graph")
    frame = frame[(frame["op_name"] == "all_reduce") & (in_graph if in_graph.any() else ~in_graph)]
    return _collectives(frame, "all_reduce", where, source)


def _collectives(frame: Any, operation: str, where: str, source: str) -> list[Measurement]:
    return [
        _made(
            where,
            operation=operation,
            kernel=kernel.lower(),
            device=device,
            dtype="fp16",
            bytes=elements * _HALF_BYTES,
            ranks=ranks,
            nodes=1,  # inside one NVLink domain, or on one host
            source=source,
            **times,
        )
        for (device, kernel, ranks, elements), times in merge_rows(frame[frame["num_gpus"] > 1], _COMM_SHAPE)
    ]


def _preference(kernel: str) -> tuple[int, str]:
    """Smallest for the kernel to prefer; the name settles ties."""
    name = kernel.lower()
    place = next((place for place, part in enumerate(_KERNEL_ORDER) if part in name), len(_KERNEL_ORDER) - 2)
    return (len(_KERNEL_ORDER) if place == 0 else place), name


def _made(where: str, **fields: Any) -> Measurement:
    try:
        return Measurement(**fields)
    except InputError as error:
        raise InputError(f"{where}: {error.parameter}", error.value, error.accepted) from None
