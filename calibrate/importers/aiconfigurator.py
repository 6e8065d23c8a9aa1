"""The kernel tables that NVIDIA's PyPI package aiconfigurator-core ships (Apache-2.0): times in ms, on the GPU alone.

aiconfigurator:SYSTEM[/FRAMEWORK[/VERSION]], such as aiconfigurator:a100_sxm/vllm. FRAMEWORK is vllm, sglang or trtllm
(default vllm), VERSION the framework's. A version that is not given, or that lacks a table, stands for the newest that
has it; NCCL's is always the newest. `source` of a measurement names the system, framework and version that were read.
Of the folder systems/data/SYSTEM are read

    gemm/FRAMEWORK/VERSION/gemm_perf.parquet                    m tokens, n out_features, k in_features; bfloat16 and
                                                                kvrsim.profile.rates.gemm.GEMM_TYPES (sq is int8)
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

import importlib.util
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from calibrate.data.measurement import Measurement
from calibrate.importers.collectors import with_loop
from kvrsim.errors import InputError
from kvrsim.profile.rates.gemm import GEMM_TYPES

PREFIX = "aiconfigurator:"
DEFAULT_FRAMEWORK = "vllm"
_PACKAGE = "aiconfigurator_core"
_INSTALL = "a machine that has it (pip install aiconfigurator-core pyarrow, which are the extra kvrsim[import])"

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
_PRE_RELEASES = {"dev": -4, "a": -3, "b": -2, "rc": -1, "post": 1}


def read_aiconfigurator(text: str, argument: str = "measurements", root: Path | None = None) -> list[Measurement]:
    """Measurements of one system and framework: gemm, attention and, where they were measured, collectives.

    `text` is the SOURCE with its prefix. `root` is the folder aiconfigurator_core of an unpacked wheel; None: of the
    installed package. Raises InputError where the package, the system, the framework or the version is missing.
    """
    folder = root if root is not None else _installed(text, argument)
    package = _package(folder)
    data = folder / "systems" / "data"
    system, framework, version = _parts(text, argument)
    _one_of(text, argument, "system", system, _names(data, "*/gemm"))
    _one_of(text, argument, "framework", framework, _names(data / system, "gemm/*", "attention/*"))
    if version is not None:
        found = _names(data / system, f"gemm/{framework}/*/{_GEMM_FILE}", f"attention/{framework}/*/{_ATTENTION_FILE}")
        _one_of(text, argument, "version", version, found)
    measured: list[Measurement] = []
    for table, file, read in (
        (f"gemm/{framework}", _GEMM_FILE, _read_gemm),
        (f"attention/{framework}", _ATTENTION_FILE, _read_attention),
        (f"attention/{framework}", _DECODE_FILE, _read_attention),
        ("comm/nccl", _NCCL_FILE, _read_nccl),
        (f"comm/{framework}", _CUSTOM_FILE, _read_custom),
    ):
        path = _newest(data / system / table, file, version if file != _NCCL_FILE else None)
        if path is not None:
            rows = read(path, f"{argument} {path}", f"{package} {system}/{table}/{path.parent.name}")
            if file == _DECODE_FILE:  # as the kernels of a prefill, if they do both
                kernels = {row.kernel for row in measured}
                rows = [row for row in rows if row.kernel in kernels]
            measured += [with_loop(row, framework, system) for row in rows]
    return measured


def _installed(text: str, argument: str) -> Path:
    """The folder of the installed package."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"{argument} {text}", "no package aiconfigurator-core", _INSTALL)
    return Path(next(iter(spec.submodule_search_locations)))


def _package(folder: Path) -> str:
    """The package and, where pip or an unpacked wheel left its name beside it, its version."""
    beside = sorted(folder.parent.glob(f"{_PACKAGE}-*.dist-info"))
    version = beside[-1].name.removesuffix(".dist-info").partition("-")[2] if beside else ""
    return f"aiconfigurator-core {version}".strip()


def _parts(text: str, argument: str) -> tuple[str, str, str | None]:
    """System, framework and version."""
    match text.removeprefix(PREFIX).split("/"):
        case [system]:
            return system, DEFAULT_FRAMEWORK, None
        case [system, framework]:
            return system, framework, None
        case [system, framework, version]:
            return system, framework, version
    raise InputError(argument, text, f"{PREFIX}SYSTEM[/FRAMEWORK[/VERSION]], such as {PREFIX}h100_sxm/vllm")


def _names(folder: Path, *patterns: str) -> list[str]:
    """What stands instead of the first * of patterns, wherever one matches."""
    found = set()
    for pattern in patterns:
        depth = pattern.split("/").index("*")
        found |= {path.relative_to(folder).parts[depth] for path in folder.glob(pattern)}
    return sorted(found)


def _one_of(text: str, argument: str, what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise InputError(argument, text, f"a {what} among {', '.join(known) or 'none (no tables here)'}")


def _newest(folder: Path, file: str, version: str | None) -> Path | None:
    """The table of this version, else of the newest version that has it; None where there is none."""
    tables = {path.parent.name: path for path in folder.glob(f"*/{file}")}
    if not tables:
        return None
    return tables[version if version in tables else max(tables, key=_version_key)]


def _version_key(version: str) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Orders 1.2 < 1.3.0rc10 < 1.3.0rc20 < 1.3.0 < 1.3.0.post2."""
    release = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    numbers = tuple(int(part) for part in release[0].split(".")) if release else ()
    tag = re.match(r"\.?([a-z]+)\.?([0-9]*)", version[len(release[0]) if release else 0 :])
    return numbers, (_PRE_RELEASES.get(tag[1], 0), int(tag[2] or 0)) if tag else (0, 0)


def _read_gemm(path: Path, where: str, source: str) -> list[Measurement]:
    frame = _frame(path, where, [*_GEMM_SHAPE[1:], "latency"], ["device", "kernel_source", "gemm_dtype"])
    merged = _merged(frame[frame["gemm_dtype"].isin(_DTYPES)], _GEMM_SHAPE)
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
    frame = _frame(path, where, [*_ATTENTION_SHAPE, "beam_width", "latency"], texts)
    plain = (frame["attn_dtype"] == "bfloat16") & (frame["kv_cache_dtype"] == "bfloat16") & (frame["beam_width"] == 1)
    if path.name == _DECODE_FILE:  # of several sequences no prefill is made
        plain &= frame["batch_size"] == 1
    if "window_size" in frame:
        plain &= frame["window_size"].isna() | (frame["window_size"] == 0)
    frame = frame[plain]
    chosen = frame.groupby("head_dim")["kernel_source"].agg(lambda kernels: min(kernels.unique(), key=_preference))
    merged = _merged(frame[frame["kernel_source"] == frame["head_dim"].map(chosen)], _ATTENTION_SHAPE)
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
    frame = _frame(path, where, [*_COMM_SHAPE, "latency"], ["kernel_source", "op_name", "nccl_dtype"])
    if "device" not in frame:  # the oldest tables do not say
        frame = frame.assign(device=path.parents[3].name)
    frame = frame[frame["nccl_dtype"] == "half"]
    return [
        row
        for operation in _COMM_OPERATIONS
        for row in _collectives(frame[frame["op_name"] == operation], operation, where, source)
    ]


def _read_custom(path: Path, where: str, source: str) -> list[Measurement]:
    frame = _frame(path, where, [*_COMM_SHAPE, "latency"], ["kernel_source", "op_name", "device"])
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
        for (device, kernel, ranks, elements), times in _merged(frame[frame["num_gpus"] > 1], _COMM_SHAPE)
    ]


def _preference(kernel: str) -> tuple[int, str]:
    """Smallest for the kernel to prefer; the name settles ties."""
    name = kernel.lower()
    place = next((place for place, part in enumerate(_KERNEL_ORDER) if part in name), len(_KERNEL_ORDER) - 2)
    return (len(_KERNEL_ORDER) if place == 0 else place), name


def _frame(path: Path, where: str, numbers: list[str], texts: list[str]) -> Any:
    """A DataFrame of a parquet table, its columns checked; InputError names the file and the column."""
    import pandas

    try:
        frame = pandas.read_parquet(path, engine="pyarrow")
    except ImportError:
        raise InputError(where, "no pyarrow", _INSTALL) from None
    except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
        raise InputError(where, error, "a parquet file") from None
    for name in (*numbers, *texts):
        if name not in frame:
            raise InputError(f"{where}: columns", ", ".join(map(str, frame.columns)), f"{name} among them")
    for name in numbers:
        frame[name] = _numbers(frame[name], f"{where}: {name}")
    for name in {*texts, "device"} & set(frame.columns):
        _refuse(~frame[name].map(lambda value: isinstance(value, str)), frame[name], f"{where}: {name}", "a text")
    return frame


def _numbers(written: Any, where: str) -> Any:
    """A column as it is computed with: latency in ms, all else in whole numbers."""
    import pandas

    values = pandas.to_numeric(written, errors="coerce")
    if written.name == "latency":
        _refuse(~((values > 0) & (values < math.inf)), written, where, "ms above 0")
        return values
    _refuse(~((values >= 0) & (values < 2**62) & (values % 1 == 0)), written, where, "a whole number")
    return values.astype("int64")


def _refuse(faulty: Any, written: Any, where: str, accepted: str) -> None:
    """InputError for the first row that is faulty, if there is one."""
    if faulty.any():
        row = faulty.to_numpy().argmax()
        raise InputError(f"{where}, row {row}", written.iloc[row], accepted)


def _merged(frame: Any, shape: list[str]) -> Iterable[tuple[tuple[Any, ...], dict[str, float | None]]]:
    """For each device, kernel and shape: these, and the median and spread of its rows in seconds."""
    keys = ["device", "kernel_source", *shape]
    times = frame.groupby(keys, sort=False)["latency"].agg(["median", "std"]).reset_index()
    columns = [times[name].tolist() for name in (*keys, "median", "std")]
    for *key, median, deviation in zip(*columns, strict=True):
        spread = deviation / 1000 if deviation == deviation else None  # one row has no deviation: nan
        yield tuple(key), {"median_s": median / 1000, "spread_s": spread}


def _made(where: str, **fields: Any) -> Measurement:
    try:
        return Measurement(**fields)
    except InputError as error:
        raise InputError(f"{where}: {error.parameter}", error.value, error.accepted) from None
