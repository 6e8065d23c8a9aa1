"""The kernel tables of NVIDIA's PyPI packages aiconfigurator-core and its successor aisimulate (Apache-2.0).

A source is PACKAGE:[PLACE:]SYSTEM[/FRAMEWORK[/VERSION]], such as aiconfigurator:a100_sxm/vllm or
aisimulate:FILE.whl:b200_sxm. PLACE is a wheel or the folder of an unpacked wheel; without PLACE the installed package
is read. FRAMEWORK is vllm, sglang or trtllm (default vllm); VERSION is the framework's. Without VERSION, or if VERSION
lacks a table, the newest version with the table is read; for NCCL, the newest with all-gathers. `source` of a
measurement names the package, system, framework and version that were read. Times are in ms, on the GPU alone. Only
tables under systems/data are read.
These tables of the folder systems/data/SYSTEM are read:

    gemm/FRAMEWORK/VERSION/gemm_perf.parquet                    m tokens, n out_features, k in_features; bfloat16 and
                                                                kvrsim.kernels.gemm.GEMM_TYPES (sq is int8)
    attention/FRAMEWORK/VERSION/context_attention_perf.parquet  isl is the chunk, step the prefix; bfloat16 queries and
                                                                cache, no window, no beams
    .../generation_attention_perf.parquet                       one query behind step keys (decoding), same kernels
    comm/nccl/VERSION/nccl_perf.parquet                         all_gather and all_reduce of `half`; message_size counts
                                                                all elements gathered: 2**28 took 2.1 ms on four A100s,
                                                                a third of the time for 2**28 elements from each GPU
    comm/FRAMEWORK/VERSION/custom_allreduce_perf.parquet        the framework's all_reduce, in CUDA graphs if measured
    moe, mla, linear_attention, kda, sparse_attention, msa      see read_experts, read_latent, read_recurrence and
                                                                read_module

SGLang's and TensorRT-LLM's collectors (github.com/ai-dynamo/aiconfigurator) fill matrices with random data. vLLM's
collector leaves the weights of BF16 products uninitialised (torch.empty): such products take less time.

Rows of the same shape are merged into one row: their median, and their standard deviation as spread. If several
attention kernels were measured with a head_dim, one of them is read. The order of preference is fa3, other flash
kernels, TensorRT-LLM's, FlashInfer's, Triton's; kernels for decoding come last.
"""

from __future__ import annotations

import importlib.util
import io
import math
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt

from calibrate.data import Columns, Measurement, measurement_at
from kvrsim.errors import InputError
from kvrsim.kernels.experts import ExpertsCall
from kvrsim.kernels.gemm import GEMM_TYPES
from kvrsim.kernels.recurrence import RecurrenceCall
from kvrsim.program import Array

if TYPE_CHECKING:
    import pandas

# PyPI package by the first word of a source.
PACKAGES = MappingProxyType({"aiconfigurator": "aiconfigurator-core", "aisimulate": "aisimulate"})
DEFAULT_FRAMEWORK = "vllm"
_INSTALL = "a machine that has it (pip install {} pyarrow), or a wheel: {}:WHEEL:SYSTEM[/FRAMEWORK[/VERSION]]"
_DATA = "systems/data"
_PRE_RELEASES = {"dev": -4, "a": -3, "b": -2, "rc": -1, "post": 1}
_HALF_BYTES = 2

_GEMM_FILE = "gemm_perf.parquet"
_GEMM_COLUMNS = {"dtype": "gemm_dtype", "tokens": "m", "out_features": "n", "in_features": "k"}
_DTYPES = {"bfloat16": "bf16", "sq": "int8"} | {kind: kind for kind in GEMM_TYPES if kind != "int8"}
_ATTENTION_FILE = "context_attention_perf.parquet"
_DECODE_FILE = "generation_attention_perf.parquet"
_CALL_COLUMNS = {"batch": "batch_size", "chunk": "isl", "prefix": "step", "num_attention_heads": "num_heads"}
_ATTENTION_COLUMNS = _CALL_COLUMNS | {"num_key_value_heads": "num_key_value_heads", "head_dim": "head_dim"}
_NCCL_FILE = "nccl_perf.parquet"
_CUSTOM_FILE = "custom_allreduce_perf.parquet"
_COMM_COLUMNS = {"ranks": "num_gpus", "bytes": "message_size"}

# Parts of kernels' names in the order of preference; the first part that a name contains counts. "decode" comes last.
_KERNEL_ORDER = ("decode", "fa3", "flash_att", "fa4", "trtllm", "flashinfer", "triton")

# How often collectors run an operation without a pause (collector/helper.py, benchmark_with_power): warm-up runs of a
# CUDA graph, then timed runs of the graph. A graph of collect_gemm.py contains the product several times, each with its
# own matrices: up to 6 times for SGLang and for vLLM (once for vLLM's fp8_block and nvfp4), and for TensorRT-LLM as
# often as the weights fit into the L2 cache, at most 5 times. A graph of collect_attn.py contains one call.
_GEMM_RUNS = (3, 6)  # runs before and during timing
_ATTENTION_RUNS = {"sglang": (3, 20), "trtllm": (10, 6), "vllm": (3, 6)}
_MOST_COPIES = 5  # maximum number of copies of TensorRT-LLM's weights in a graph
_COPIES = 6  # number of copies of SGLang's and vLLM's weights in a graph
# Size of the L2 cache in MiB, from NVIDIA's architecture whitepapers and datasheets.
_L2_MIB = {
    **{"a100_sxm": 40, "h100_sxm": 50, "h200_sxm": 50, "l40s": 96, "rtx_pro_6000_server": 128},
    **{"b200_sxm": 126, "gb200": 126, "b300_sxm": 126, "gb300": 126},
}


def read_aiconfigurator(text: str, argument: str = "measurements") -> list[Measurement]:
    """Measurements of one system and framework: gemm, attention and, where they were measured, collectives.

    `text` is the SOURCE with its prefix. Raises InputError where the package, the system, the framework or the version
    is missing.
    """
    source = PackageSource.parse(text, argument)
    framework = source.framework
    measured: list[Measurement] = []
    for table, file, reader in (
        (f"gemm/{framework}", _GEMM_FILE, _read_gemm),
        (f"attention/{framework}", _ATTENTION_FILE, _read_attention),
        (f"attention/{framework}", _DECODE_FILE, _read_attention),
        ("comm/nccl", _NCCL_FILE, _read_nccl),
        (f"comm/{framework}", _CUSTOM_FILE, _read_custom),
    ):
        table_file = source.nccl() if file == _NCCL_FILE else source.table(table, file)
        if table_file is not None:
            rows = reader(table_file)
            if file == _DECODE_FILE:  # keep only kernels that also compute prefills
                kernels = {row.kernel for row in measured}
                rows = [row for row in rows if row.kernel in kernels]
            measured += [with_loop(row, framework, source.system) for row in rows]
    return measured


def _rows(
    frame: pandas.DataFrame, columns: Mapping[str, str], where: str, *, operation: str, source: str, **common: Any
) -> list[Measurement]:
    """One measurement per device, kernel and shape. `columns`: the table's column by field of Measurement."""
    measurements = []
    for (device, kernel, *shape), times in _merge(frame, list(columns.values())):
        fields = dict(zip(columns, shape, strict=True)) | common | times
        measurement = measurement_at(where, operation=operation, device=device, kernel=kernel, source=source, **fields)
        measurements.append(measurement)
    return measurements


def _read_gemm(table: PackageTable) -> list[Measurement]:
    frame = table.read(["m", "n", "k"], ["device", "kernel_source", "gemm_dtype"])
    frame = frame[frame["gemm_dtype"].isin(_DTYPES)]
    frame = frame.assign(gemm_dtype=frame["gemm_dtype"].map(_DTYPES))
    return _rows(frame, _GEMM_COLUMNS, table.where, operation="gemm", source=table.source)


def _read_attention(table: PackageTable) -> list[Measurement]:
    texts = ["device", "kernel_source", "attn_dtype", "kv_cache_dtype"]
    frame = table.read([*_ATTENTION_COLUMNS.values(), "beam_width"], texts)
    plain = (frame["attn_dtype"] == "bfloat16") & (frame["kv_cache_dtype"] == "bfloat16") & (frame["beam_width"] == 1)
    if table.path.name == _DECODE_FILE:  # a prefill has no batch of single queries
        plain &= frame["batch_size"] == 1
    if "window_size" in frame:
        plain &= frame["window_size"].isna() | (frame["window_size"] == 0)
    frame = frame[plain]
    kernels_of = frame.groupby("head_dim")["kernel_source"].agg(lambda kernels: min(kernels.unique(), key=_preference))
    frame = frame[frame["kernel_source"] == frame["head_dim"].map(kernels_of)]
    about = {"operation": "attention", "dtype": "bf16", "source": table.source}
    return _rows(frame, _ATTENTION_COLUMNS, table.where, **about)


def _preference(kernel: str) -> tuple[int, str]:
    """Sort key of kernels: the preferred kernel has the smallest key; kernels of equal rank are sorted by name."""
    name = kernel.lower()
    rank = len(_KERNEL_ORDER) - 2
    for place, part in enumerate(_KERNEL_ORDER):
        if part in name:
            rank = place
            break
    if rank == 0:
        rank = len(_KERNEL_ORDER)
    return rank, name


def _read_nccl(table: PackageTable) -> list[Measurement]:
    frame = table.read(_COMM_COLUMNS.values(), ["kernel_source", "op_name", "nccl_dtype"])
    if "device" not in frame:  # the oldest tables do not name the device
        frame = frame.assign(device=table.path.parts[0])
    frame = frame[frame["nccl_dtype"] == "half"]
    gathers = _collectives(frame[frame["op_name"] == "all_gather"], "all_gather", table)
    reduces = _collectives(frame[frame["op_name"] == "all_reduce"], "all_reduce", table)
    return gathers + reduces


def _read_custom(table: PackageTable) -> list[Measurement]:
    frame = table.read(_COMM_COLUMNS.values(), ["device", "kernel_source", "op_name"])
    in_graph = frame["kernel_source"].str.endswith("_graph")
    if in_graph.any():  # as engines run it
        frame = frame[in_graph]
    frame = frame[frame["op_name"] == "all_reduce"]
    return _collectives(frame, "all_reduce", table)


def _collectives(frame: pandas.DataFrame, operation: str, table: PackageTable) -> list[Measurement]:
    frame = frame[frame["num_gpus"] > 1]
    nbytes = frame["message_size"] * _HALF_BYTES
    kernels = frame["kernel_source"].str.lower()
    about: dict[str, Any] = {"operation": operation, "dtype": "fp16", "source": table.source}
    about |= {"nodes": 1}  # all ranks are inside one NVLink domain, or on one host
    return _rows(frame.assign(message_size=nbytes, kernel_source=kernels), _COMM_COLUMNS, table.where, **about)


def with_loop(row: Measurement, framework: str, system: str) -> Measurement:
    """The row with its numbers of warm-up and timed runs, if they are known."""
    if row.operation == "attention" and framework in _ATTENTION_RUNS:
        warmups, repeats = _ATTENTION_RUNS[framework]
        return replace(row, warmups=warmups, repeats=repeats)
    if row.operation != "gemm":
        return row
    copies = _copies(row, framework, system)
    if copies is None:
        return row
    return replace(row, warmups=_GEMM_RUNS[0] * copies, repeats=_GEMM_RUNS[1] * copies)


def _copies(row: Measurement, framework: str, system: str) -> int | None:
    """Copies of the product in one graph; None if the number is not known."""
    if framework == "vllm" and row.dtype in ("fp8_block", "nvfp4"):
        return 1
    if framework in ("sglang", "vllm"):
        return _COPIES
    if framework != "trtllm" or system not in _L2_MIB:
        return None
    width = GEMM_TYPES.get(row.dtype or "")
    element_bytes: float = _HALF_BYTES
    if width is not None:
        element_bytes = math.floor(2 * width.weight) / 2  # without scales
    nbytes = (row.in_features or 1) * (row.out_features or 1) * element_bytes
    return min(_MOST_COPIES, math.ceil(_L2_MIB[system] * 2**20 / nbytes))


# -- experts

HALF = "half"
# kvrsim's name of a type by the name in the tables; HALF is half precision.
TYPES = MappingProxyType(
    {"bfloat16": HALF, "w4a16_mxfp4": "mxfp4_wo", "w4a8_mxfp4_mxfp8": "mxfp4_fp8"}
    | {kind: kind for kind in GEMM_TYPES if not kind.startswith("mxfp4")}
)
# Column by field of ExpertRows.
_MOE_COLUMNS = {
    **{"tokens": "num_tokens", "hidden_size": "hidden_size", "intermediate_size": "inter_size"},
    **{"num_experts_per_tok": "topk", "num_experts": "num_experts"},
    **{"tp_size": "moe_tp_size", "ep_size": "moe_ep_size"},
}
_MOE_SHAPE = [column for column in _MOE_COLUMNS.values() if column != "num_tokens"]
_MOE_TEXTS = ["moe_dtype", "kernel_source", "distribution"]
LEAST_TOKENS = 64
_SLOW = 1.5
_NOT_READ = ("min_latency", "as_silu")  # parts of the names of kernels for decoding or with another activation
# Models with experts without a gate, such as Nemotron-H: inter_size, topk, num_experts. The tables have no such column.
_PLAIN = ((1856, 6, 128), (2688, 22, 512), (5120, 22, 512))
# Numbers of warm-up and timed runs of collectors: first for balanced routing, then for power laws.
_LOOPS = {"sglang": ((25, 50), (25, 50)), "trtllm": ((3, 6), (5, 5)), "vllm": ((3, 6), (5, 5))}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertRows(Columns):
    """Calls of routed experts of one type."""

    kind: str  # a key of GEMM_TYPES, or HALF
    source: str
    tokens: Array
    hidden_size: Array
    intermediate_size: Array  # width of a whole expert
    num_experts: Array  # number of experts of the model
    num_experts_per_tok: Array
    tp_size: Array
    ep_size: Array
    gated: Array
    exponent: Array  # exponent of the power law; 0: balanced
    seconds: Array
    warmups: Array
    repeats: Array

    def call(self) -> ExpertsCall:
        """All rows as one call with arrays of sizes."""
        compute = None
        if self.kind != HALF:
            compute = self.kind
        rows: Any = self  # ExpertsCall declares numbers, but the rates' formula accepts arrays
        return ExpertsCall(
            tokens=self.tokens,
            hidden_size=rows.hidden_size,
            intermediate_size=rows.intermediate_size / rows.tp_size,
            gated=rows.gated > 0,
            num_experts=rows.num_experts / rows.ep_size,
            num_experts_per_tok=rows.num_experts_per_tok / rows.ep_size,
            compute=compute,
        )

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shape of each row's model: hidden_size, intermediate_size, num_experts_per_tok, num_experts."""
        columns = (self.hidden_size, self.intermediate_size, self.num_experts_per_tok, self.num_experts)
        return [tuple(map(int, shape)) for shape in zip(*columns, strict=True)]


def read_experts(text: str, kinds: Sequence[str] | None = None, argument: str = "experts") -> list[ExpertRows]:
    """The rows of moe/FRAMEWORK/VERSION/moe_perf.parquet, one ExpertRows per type; `kinds` None: all types.

    A row is one call of a framework's experts on one of moe_tp_size x moe_ep_size GPUs. The GPU holds num_experts /
    moe_ep_size experts, each inter_size / moe_tp_size wide, and computes its experts for num_tokens tokens. Times
    include routing, top-k, permutation and summation. `distribution` states how tokens were distributed over experts:
    evenly (balanced), or by a power law with its exponent (collector/helper.py); in a power law over several GPUs, the
    busiest GPU was timed. SGLang's rows of several GPUs cannot be used: its collector assigns the tokens of other GPUs
    to expert 0 (collector/sglang/collect_moe.py).

    For each type the kernel with most rows is read; other kernels were measured only where this kernel does not run. A
    row is dropped if it takes over 1.5 times as long as a row of the same shape with more tokens: its kernel was chosen
    badly. `text` and errors: see read_table; also InputError for a type without rows.
    """
    frame, source = read_table(text, "moe", "moe_perf.parquet", _MOE_COLUMNS.values(), _MOE_TEXTS, argument=argument)
    framework = source.split("/")[-2]
    kind = frame["moe_dtype"].map(TYPES.get)
    measured = [name for name in (HALF, *GEMM_TYPES) if (kind == name).any()]
    kinds = kinds or measured
    for name in kinds:
        if name not in measured:
            raise InputError(argument, name, f"a type of {text}: {', '.join(measured)}")
    usable = (frame["num_tokens"] >= LEAST_TOKENS) & frame["distribution"].str.match(r"balanced$|power_law_[0-9.]+$")
    for part in _NOT_READ:
        usable &= ~frame["kernel_source"].str.contains(part)
    return [_expert_rows(frame[usable & (kind == name)], name, source, framework) for name in kinds]


def _expert_rows(frame: pandas.DataFrame, kind: str, source: str, framework: str) -> ExpertRows:
    name = frame["kernel_source"].str.removesuffix("_nongated")
    frame = frame[name == name.mode()[0]]
    frame = frame.groupby([*_MOE_SHAPE, "distribution", "num_tokens"], as_index=False)["latency"].median()
    frame = frame.sort_values("num_tokens", ascending=False, kind="stable")
    least = frame.groupby([*_MOE_SHAPE, "distribution"])["latency"].cummin()
    rows = frame[frame["latency"] <= _SLOW * least].sort_values([*_MOE_SHAPE, "distribution", "num_tokens"])
    exponent = rows["distribution"].str.extract(r"([0-9.]+)$")[0].astype(float).fillna(0.0).to_numpy()
    plain = [shape in _PLAIN for shape in zip(rows["inter_size"], rows["topk"], rows["num_experts"], strict=True)]
    even, skewed = _LOOPS.get(framework, ((0, 1), (0, 1)))
    loops = np.where(exponent[:, None] > 0, skewed, even).astype(float)
    return ExpertRows(
        kind=kind,
        source=source,
        **{field: rows[column].to_numpy(dtype=float) for field, column in _MOE_COLUMNS.items()},
        gated=1.0 - np.array(plain, dtype=float),
        exponent=exponent,
        seconds=rows["latency"].to_numpy(dtype=float) / 1000,
        warmups=loops[:, 0],
        repeats=loops[:, 1],
    )


# -- latent attention

LatentForm = Literal["expanded", "absorbed"]
# Widths of keys and of values of DeepSeek-V3, by form.
WIDTHS: dict[LatentForm, tuple[int, int]] = {"expanded": (192, 128), "absorbed": (576, 512)}


def mean_head_dim(form: LatentForm) -> int:
    """Mean width of keys and values, as in AttentionCall."""
    return sum(WIDTHS[form]) // 2


def read_latent(text: str, form: LatentForm, argument: str = "measurements") -> list[Measurement]:
    """Calls of mla/FRAMEWORK/VERSION/context_mla_perf.parquet with a BF16 cache, as attention with heads of the mean
    width.

    One row is one call of a prefill without a prefix, without the products: isl tokens of each of batch_size sequences,
    num_heads heads on the GPU, BF16. `form`: what the collector ran (collector/*/collect_mla.py): expanded heads for
    TensorRT-LLM, and for SGLang on Blackwell; latents, to which all heads attend, for SGLang on other GPUs. Raises
    InputError as read_table does.
    """
    texts = ["kernel_source", "mla_dtype", "kv_cache_dtype"]
    calls = _CALL_COLUMNS.values()
    frame, source = read_table(text, "mla", "context_mla_perf.parquet", calls, texts, argument=argument)
    frame = frame[(frame["mla_dtype"] == "bfloat16") & (frame["kv_cache_dtype"] == "bfloat16")]
    frame = frame.assign(kernel_source=f"{form} " + frame["kernel_source"], kv_heads=1)
    if form == "expanded":
        frame = frame.assign(kv_heads=frame["num_heads"])
    columns = _CALL_COLUMNS | {"num_key_value_heads": "kv_heads"}
    about: dict[str, Any] = {
        "operation": "attention",
        "dtype": "bf16",
        "head_dim": mean_head_dim(form),
        "source": source,
    }
    return _rows(frame, columns, argument, **about)


# -- recurrences

# Folder and file of the table, by kind.
TABLES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"gated_delta": ("linear_attention", "gdn_perf.parquet"), "kda": ("kda", "kda_perf.parquet")}
)
_SCAN_COLUMNS = {
    **{"batch": "batch_size", "tokens": "seq_len", "num_key_heads": "num_k_heads", "key_head_dim": "head_k_dim"},
    **{"num_value_heads": "num_v_heads", "value_head_dim": "head_v_dim", "conv_kernel": "d_conv"},
}
_CONVOLUTION = "causal_conv1d"  # prefix of the names of convolutions; the other kernels of a prefill are scans


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecurrenceRows(Columns):
    """Measured kernels of one kind of recurrence."""

    kind: str
    source: str
    kernel: npt.NDArray[Any]  # name of the measured kernel
    batch: Array
    tokens: Array  # tokens of each sequence
    num_key_heads: Array
    key_head_dim: Array
    num_value_heads: Array
    value_head_dim: Array
    conv_kernel: Array
    seconds: Array

    @property
    def is_scan(self) -> npt.NDArray[np.bool_]:
        """Whether each row is a scan; the others are convolutions."""
        return np.array([not str(name).startswith(_CONVOLUTION) for name in self.kernel], dtype=bool)

    @property
    def arguments(self) -> tuple[RecurrenceCall, Array, int]:
        """Arguments of the rates' formulas: one call with arrays, number of sequences, bytes of an element."""
        queries_keys = 2 * self.num_key_heads * self.key_head_dim
        call = RecurrenceCall(
            tokens=self.tokens,
            kind=self.kind,
            num_key_heads=cast(Any, self.num_key_heads),
            num_value_heads=cast(Any, self.num_value_heads),
            key_head_dim=cast(Any, self.key_head_dim),
            value_head_dim=cast(Any, self.value_head_dim),
            conv_channels=cast(Any, queries_keys + self.num_value_heads * self.value_head_dim),
            conv_kernel=cast(Any, self.conv_kernel),
        )
        return call, self.batch, _HALF_BYTES


def read_recurrence(text: str, kind: str, argument: str = "measurements") -> RecurrenceRows:
    """The prefill rows of one kind (a key of TABLES); rows of the same shape are merged into their median.

    gdn_perf has the gated delta rule of Qwen3.5 (convolution and chunked scan), kda_perf Kimi delta attention (three
    convolutions, of Q, K and V, and chunked scan). Rows of phase `context` belong to prefills: seq_len tokens of each
    of batch_size sequences, BF16, without an earlier state; heads are those on the GPU. mamba2_perf.parquet has
    convolutions but no scans, and is not read. Raises InputError as read_table does.
    """
    table, file = TABLES[kind]
    shape = list(_SCAN_COLUMNS.values())
    frame, source = read_table(text, table, file, shape, ["kernel_source", "phase"], argument=argument)
    kernels = []
    sizes = []
    seconds = []
    for (_, kernel, *sizes_of_row), times in _merge(frame[frame["phase"] == "context"], shape):
        kernels.append(kernel)
        sizes.append(sizes_of_row)
        seconds.append(times["median_s"])
    columns = np.array(sizes, dtype=float).reshape(-1, len(shape)).T
    return RecurrenceRows(
        kind=kind,
        source=source,
        kernel=np.array(kernels, dtype=object),
        seconds=np.array(seconds, dtype=float),
        **dict(zip(_SCAN_COLUMNS, columns, strict=True)),
    )


# -- sparse attention


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SparseRows(Columns):
    """Calls of one module of sparse attention."""

    chunk: Array  # queries of a sequence
    prefix: Array  # tokens before the queries
    heads: Array  # heads on the GPU
    seconds: Array  # median of the rows of a shape
    source: str
    texts: dict[str, Array]  # columns of texts, by name

    @property
    def context(self) -> Array:
        return self.prefix + self.chunk


def read_module(text: str, module: str, argument: str = "measurements") -> SparseRows:
    """Read whole modules with their projections, one sequence per call: isl tokens behind step tokens.

    dsa_context_module is the module of DeepSeek V3.2 and GLM-5, dsv4_csa and dsv4_hca those of DeepSeek V4, msa that of
    MiniMax M3. Rows of the same shape and texts are merged into their median. Raises InputError as read_table does.
    """
    table = "sparse_attention"
    if module.startswith("msa"):
        table = "msa"
    texts = ["kernel_source", "op_name", "model", "kv_cache_dtype", "gemm_type"]
    calls = [*_CALL_COLUMNS.values()]
    frame, source = read_table(text, table, f"{module}_perf.parquet", calls, texts, argument=argument)
    merged = frame[frame["batch_size"] == 1].groupby([*calls, *texts], sort=True)["latency"].median().reset_index()
    return SparseRows(
        chunk=merged["isl"].to_numpy(dtype=float),
        prefix=merged["step"].to_numpy(dtype=float),
        heads=merged["num_heads"].to_numpy(dtype=float),
        seconds=merged["latency"].to_numpy(dtype=float) / 1000,
        source=source,
        texts={column: merged[column].to_numpy(dtype=object) for column in texts},
    )


# -- tables of the package, found and checked


def read_table(
    text: str,
    table: str,
    file: str,
    numbers: Iterable[str],
    texts: Sequence[str] = (),
    *,
    argument: str = "measurements",
) -> tuple[pandas.DataFrame, str]:
    """A DataFrame of systems/data/SYSTEM/TABLE/FRAMEWORK/VERSION/FILE, and the name of its source.

    `text`: a SOURCE; without a version, the newest version with the file is read. `numbers`: columns of whole numbers,
    in addition to latency in ms; `texts`: columns of texts. Raises InputError where the package, the table or a column
    is missing, or a value is not of its kind.
    """
    source = PackageSource.parse(text, argument)
    table_file = source.table(f"{table}/{source.framework}", file)
    if table_file is None or source.version not in (None, table_file.version):
        raise InputError(argument, text, f"a system, framework and version with {table}/.../{file}")
    return table_file.read(numbers, ["device", *texts]), table_file.source


@dataclass(frozen=True, kw_only=True)
class Package:
    """One of PACKAGES: a wheel, a folder that it was unpacked into, or the installed package."""

    title: str  # name, and the version if it is known
    root: Path | zipfile.Path  # folder of the tables
    tables: tuple[PurePosixPath, ...]  # paths of the tables, relative to the root

    @classmethod
    def find(cls, word: str, place: Path | None, argument: str) -> Package:
        """Find a package by its name: at a place, or else the installed one. Raises InputError if it is missing."""
        name = PACKAGES[word]
        module = f"{word}_core"
        if place is None:
            spec = importlib.util.find_spec(module)
            if spec is None or not spec.submodule_search_locations:
                raise InputError(argument, f"no package {name}", _INSTALL.format(name, word))
            place = Path(next(iter(spec.submodule_search_locations)))
        root: Path | zipfile.Path
        if place.is_file() and zipfile.is_zipfile(place):
            distribution = place.name
            folder = f"{module}/{_DATA}/"
            root = zipfile.Path(place, folder)
            files = [file.removeprefix(folder) for file in root.root.namelist() if file.startswith(folder)]
        else:
            folder_of_package = place / module
            if (place / _DATA).is_dir():
                folder_of_package = place
            root = folder_of_package / _DATA
            files = [file.relative_to(root).as_posix() for file in root.glob("*/*/*/*/*")]
            installed = folder_of_package.parent.glob(f"{name.replace('-', '_')}-*.dist-info")
            distribution = max((path.name.removesuffix(".dist-info") for path in installed), default="")
        tables = tuple(PurePosixPath(file) for file in files if file.endswith(".parquet"))
        if not tables:
            raise InputError(argument, place, f"a wheel of {name}, or the folder of an unpacked one")
        return cls(title=" ".join([name, *distribution.split("-")[1:2]]), root=root, tables=tables)


@dataclass(frozen=True, kw_only=True)
class PackageTable:
    """One table of a package."""

    package: Package
    path: PurePosixPath  # SYSTEM/TABLE/FRAMEWORK/VERSION/FILE
    argument: str

    @property
    def version(self) -> str:
        return self.path.parent.name

    @property
    def source(self) -> str:
        """Package, system, table, framework and version."""
        return f"{self.package.title} {self.path.parent}"

    @property
    def where(self) -> str:
        return f"{self.argument} {self.package.root / str(self.path)}"

    def read(self, numbers: Iterable[str], texts: Iterable[str]) -> pandas.DataFrame:
        """Read a DataFrame and check columns of whole numbers and of texts, and the latency in ms.

        InputError names the file and the column.
        """
        import pandas

        where = self.where
        numbers = [*numbers, "latency"]
        try:
            frame = pandas.read_parquet(io.BytesIO((self.package.root / str(self.path)).read_bytes()), engine="pyarrow")
        except ImportError:
            raise InputError(where, "no pyarrow", "a machine that has it (pip install pyarrow)") from None
        except (OSError, ValueError) as error:  # pyarrow raises errors of these classes
            raise InputError(where, error, "a parquet file") from None
        for name in (*numbers, *texts):
            if name not in frame:
                raise InputError(f"{where}: columns", ", ".join(map(str, frame.columns)), f"{name} among them")
        for name in numbers:
            frame[name] = _numbers(frame[name], f"{where}: {name}")
        for name in {*texts, "device"} & set(frame.columns):
            _refuse(~frame[name].map(lambda value: isinstance(value, str)), frame[name], f"{where}: {name}", "a text")
        return frame


@dataclass(frozen=True, kw_only=True)
class PackageSource:
    """The parts of a SOURCE."""

    text: str
    argument: str
    package: Package
    system: str
    framework: str
    version: str | None

    @classmethod
    def parse(cls, text: str, argument: str) -> PackageSource:
        """Parse a SOURCE. Raises InputError for another form, or if its system, framework or version has no table."""
        word, _, rest = text.partition(":")
        place, _, part = rest.rpartition(":")
        if not place and Path(part).exists():
            place = part
            part = ""
        path = None
        if place:
            path = Path(place)
        package = Package.find(word, path, f"{argument} {text}")
        names = part.split("/")
        if len(names) > 3:
            accepted = f"{word}:[WHEEL:]SYSTEM[/FRAMEWORK[/VERSION]], such as {word}:h100_sxm/vllm"
            raise InputError(argument, text, accepted)
        system = names[0]
        framework = DEFAULT_FRAMEWORK
        version = None
        if len(names) > 1:
            framework = names[1]
        if len(names) > 2:
            version = names[2]
        tables = [path.parts for path in package.tables if path.parts[2] != "nccl"]
        for what, place_of, name in (("system", 0, system), ("framework", 2, framework), ("version", 3, version)):
            names = sorted({parts[place_of] for parts in tables})
            if name is not None and name not in names:
                raise InputError(argument, text, f"a {what} among {', '.join(names)}")
            tables = [parts for parts in tables if parts[place_of] == name]
        return cls(text=text, argument=argument, package=package, system=system, framework=framework, version=version)

    def table(self, folder: str, file: str) -> PackageTable | None:
        """The table of the source's version, or else of the newest version that has it; None if there is none."""
        tables = self._tables(folder, file)
        for table in tables:
            if table.version == self.version:
                return table
        return next(iter(tables), None)

    def nccl(self) -> PackageTable | None:
        """The newest NCCL table with all-gathers, or else the newest: some have only all-reduces of a few GPUs."""
        tables = self._tables("comm/nccl", _NCCL_FILE)
        for table in tables:
            if (table.read([], ["op_name"])["op_name"] == "all_gather").any():
                return table
        return next(iter(tables), None)

    def _tables(self, folder: str, file: str) -> list[PackageTable]:
        """The table in all versions, newest first."""
        paths = [path for path in self.package.tables if path.match(f"{self.system}/{folder}/*/{file}")]
        tables = [PackageTable(package=self.package, path=path, argument=self.argument) for path in paths]
        return sorted(tables, key=lambda table: version_key(table.version), reverse=True)


def version_key(version: str) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Sort key of versions: 1.2 < 1.3.0rc10 < 1.3.0rc20 < 1.3.0 < 1.3.0.post2."""
    numbers: tuple[int, ...] = ()
    rest = version
    release = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    if release:
        numbers = tuple(map(int, release[0].split(".")))
        rest = version.removeprefix(release[0])
    tag = re.match(r"\.?([a-z]+)\.?([0-9]*)", rest)
    if not tag:
        return numbers, (0, 0)
    return numbers, (_PRE_RELEASES.get(tag[1], 0), int(tag[2] or 0))


def _numbers(written: pandas.Series, where: str) -> pandas.Series:
    """Convert a column to numbers: latency in ms, others to whole numbers."""
    import pandas

    values = pandas.to_numeric(written, errors="coerce")
    if written.name == "latency":
        _refuse(~((values > 0) & (values < math.inf)), written, where, "ms above 0")
        return values
    _refuse(~((values >= 0) & (values < 2**62) & (values % 1 == 0)), written, where, "a whole number")
    return values.astype("int64")


def _refuse(faulty: pandas.Series, written: pandas.Series, where: str, accepted: str) -> None:
    """Raise InputError for the first faulty row, if any."""
    if faulty.any():
        row = faulty.to_numpy().argmax()
        raise InputError(f"{where}, row {row}", written.iloc[row], accepted)


def _merge(frame: pandas.DataFrame, shape: list[str]) -> Iterable[tuple[tuple[Any, ...], dict[str, float | None]]]:
    """Merge rows by device, kernel and shape: yield the median and the spread of their seconds."""
    keys = ["device", "kernel_source", *shape]
    times = frame.groupby(keys, sort=False)["latency"].agg(["median", "std"]).reset_index()
    columns = [times[name].tolist() for name in (*keys, "median", "std")]
    for *key, median, deviation in zip(*columns, strict=True):
        seconds = {"median_s": median / 1000, "spread_s": None}
        if not math.isnan(deviation):  # a single row has no deviation
            seconds["spread_s"] = deviation / 1000
        yield tuple(key), seconds
