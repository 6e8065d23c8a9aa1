"""Measurement: how long one operation took on one machine; read from and written to CSV.

The file has one header line and one row per measured operation; lines that begin with # are comments. Units are SI.
Columns have any order, and may be missing where no row needs them. Every row has

    operation    name of the measured operation, one of those below
    kernel       name of what ran, such as vllm_flash_attn or nccl
    device       name of the GPU, such as NVIDIA H100 80GB HBM3; for host_* rows name of the host's machine
    median_s     seconds, median of the repeats
    source       authors and tool of the measurement, and where to find it

and may have mean_s (seconds, mean of the repeats, outliers clipped; empty: not known), spread_s (standard deviation
or interquartile range of the repeats, seconds; empty: not known), batch (sequences at once; empty: 1) and
dtype (fp16, bf16, fp8 or fp32: of the operands; of gemm also fp8_block, nvfp4, int8, int4_wo or int8_wo, see
kvrsim.kernels.gemm; a time on the host has none). A prefill is a sum of many kernels, and means add up where medians
of skewed times do not: a fit takes mean_s where there is one.

The operations, what one row of each measures, and the columns that the row needs in addition:

    operation                                       time of                              also needs
    gemm                                            y = x W                              dtype, tokens (rows of x),
                                                                                         in_features, out_features
    head                                            logits of one token                  dtype, in_features,
                                                                                         out_features
    attention                                       chunk queries of each of batch       dtype, chunk, prefix,
                                                    sequences over prefix + chunk keys,  num_attention_heads,
                                                    causal                               num_key_value_heads, head_dim
    norm, rotary, activation, residual, embedding,  an element-wise kernel; merge joins  dtype, tokens, bytes
    merge                                           partial results of attention
    block                                           attention to prefix keys only        those of attention
    cache_append                                    K and V of a chunk written into      dtype, chunk, prefix, bytes
                                                    the cache
    prepare                                         what a prefill does once before its  dtype, chunk, prefix
                                                    first layer, except the embedding:
                                                    mask and rotary tables
    before_attention, after_attention, layer        a layer before attention, after it,  dtype, chunk, prefix
                                                    and whole; compared with
                                                    predictions, not fitted
    layer_alone, layer_pending                      a whole layer without a posted       dtype, chunk, prefix
                                                    receive, and with a receive that
                                                    waits for its sender
    all_gather, all_reduce                          the collective                       bytes, ranks, nodes
    send_recv                                       one message                          bytes, ranks, nodes
    host_layer                                      the host issuing one decoder layer   -
    host_collective                                 the host issuing one collective      ranks
    host_message                                    the host issuing one send or one     -
                                                    receive
    host_prepare                                    the host, from a prefill's start     -
                                                    until it issues the first layer

tokens, chunk and prefix are numbers of tokens; heads are those on the measured device. bytes is, for an element-wise
kernel and for cache_append, what the kernel must read and write, each value once (for measured layers of a model, what
its kernels move); for all_gather, the gathered tensor, all ranks' pieces together; for all_reduce, the tensor; for
send_recv, the message. nodes is 1 within one node, 2 between nodes. A column that an operation does not need may be
filled: it is checked and kept, but not used.

A send_recv row may say which ranks it went between (src and dst, counted from 0) and how many transfers of that size
were in flight at once (messages; empty: 1). A row of gemm or attention may say how often the operation ran without a
pause while it was timed (repeats) and just before (warmups): from these a fit knows how long the device was under
load.

A comment line before the header, `# origin {...}`, may hold a JSON object with what all rows have in common: the
machine, the model whose layers were timed, versions, command and date.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
import numpy.typing as npt

from kvrsim.choices import DTYPES, Topology
from kvrsim.errors import ABSENT, InputError
from kvrsim.hardware import Cluster, GpuSpec, LinkSpec, builtin_gpus, cluster_of, load_gpu, load_link
from kvrsim.io.files import read_text, write_atomically
from kvrsim.io.schema import Check, JsonObject, NonNegative, Range, parse_json, read
from kvrsim.kernels.gemm import GEMM_TYPES
from kvrsim.model.load import read_config
from kvrsim.model.spec import ModelSpec
from kvrsim.units import MAX_SECONDS

if TYPE_CHECKING:
    import pandas

MAX_CSV_BYTES = 2**28  # enough for millions of rows; a larger file is probably a mistake
MAX_WHOLE = 10**18

# ASCII only: float() and int() alone would accept "1_000", "inf" and digits of other alphabets.
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,3})?", re.ASCII)
_LFS_POINTER = "version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvTable:
    """A CSV file with one header line: comma-separated, UTF-8; lines that begin with # are comments.

    Every mistake raises InputError naming the argument, the file, the line and the column.
    """

    path: Path
    where: str  # the argument and the file, for messages
    columns: tuple[str, ...]  # names in the header; an unnamed column is ""
    rows: tuple[JsonObject, ...]  # lines after the header, as texts by column; empty cells are absent

    @classmethod
    def read(cls, path: str | Path, argument: str) -> CsvTable:
        """Read a whole file; raises InputError where it cannot be read or is not a CSV with a header."""
        where = f"{argument} {' '.join(str(path).split())}"
        text = io.StringIO(_content(path, argument), newline="")
        reader = csv.reader(map(_without_comment, text), strict=True)
        columns: tuple[str, ...] | None = None
        rows = []
        try:
            for line in reader:
                if line and columns is None:
                    columns = tuple(map(str.strip, line))
                    _check_header(columns, where)
                elif line and columns is not None:
                    rows.append(_row(line, columns, f"{where}, line {reader.line_num}"))
            if columns is None:
                columns = ()
                _check_header(columns, where)
        except csv.Error as error:
            raise InputError(f"{where}, line {reader.line_num}", error, "a line of comma-separated values") from None
        return cls(path=Path(path), where=where, columns=columns, rows=tuple(rows))

    @classmethod
    def of_frame(cls, frame: pandas.DataFrame, argument: str) -> CsvTable:
        """Rows of a data frame, as in its CSV file; a missing value becomes an empty text."""
        where = f"{argument} DataFrame"
        columns = tuple(map(str, frame.columns))
        _check_header(columns, where)
        records = frame.astype(object).where(frame.notna(), "").itertuples(index=False)
        rows = []
        for number, record in enumerate(records):
            rows.append(_row(list(map(_cell, record)), columns, f"{where}, row {number}"))
        return cls(path=Path("DataFrame"), where=where, columns=columns, rows=tuple(rows))

    def need(self, columns: Iterable[str]) -> None:
        """Raise InputError for a table that lacks one of these columns."""
        for name in columns:
            if name not in self.columns:
                raise InputError(f"{self.where}: header", ", ".join(self.columns), f"a column {name} among the others")

    def only(self, columns: Sequence[str]) -> None:
        """Raise InputError for a column that is not one of these."""
        for name in self.columns:
            if name not in columns:
                raise InputError(f"{self.where}: column", name or "a column without a name", ", ".join(columns))


def _cell(value: object) -> str:
    """A cell of a data frame as text; whole numbers lose the decimals that pandas adds in columns with gaps."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def _without_comment(line: str) -> str:
    """The line of a CSV file; a comment becomes an empty line, so that the numbers of lines are those of the file."""
    if line.startswith("#"):
        return "\n"
    return line


def _content(path: str | Path, argument: str) -> str:
    text = read_text(path, argument, what="a CSV file", most_bytes=MAX_CSV_BYTES)
    if text.startswith(_LFS_POINTER):
        raise InputError(argument, path, "the CSV itself; this is its Git LFS pointer (git lfs pull fetches the file)")
    return text


def _check_header(columns: tuple[str, ...], where: str) -> None:
    if not any(columns):
        raise InputError(where, "an empty file", "a CSV file with a header line")
    for name in columns:
        if name and columns.count(name) > 1:
            raise InputError(f"{where}: header", name, "each column once")


def _row(values: list[str], columns: tuple[str, ...], where: str) -> JsonObject:
    if len(values) != len(columns):
        raise InputError(where, f"{len(values)} values", f"{len(columns)} values, one per column of the header")
    cells = zip(columns, map(str.strip, values), strict=True)
    return JsonObject(fields={name: text for name, text in cells if text}, where=where)


def parse_cells(row: JsonObject, texts: Collection[str] = ()) -> JsonObject:
    """The row with numbers and truth values instead of their texts, except in the columns `texts`."""
    fields: dict[str, Any] = {}
    for name, text in row.fields.items():
        if name in texts:
            fields[name] = text
        else:
            fields[name] = _value(text)
    return replace(row, fields=fields)


def _value(text: str) -> Any:
    if _NUMBER.fullmatch(text):
        if text.lstrip("+-").isdigit():
            return int(text)
        return float(text)
    return {"true": True, "false": False}.get(text.lower(), text)


MEASURED_DTYPES = (*DTYPES, *(kind for kind in GEMM_TYPES if kind not in DTYPES))
ELEMENTWISE = ("norm", "rotary", "activation", "residual", "embedding")
RING = "_p2p_ring"  # suffix of `kernel`: an all-gather made of messages between neighbours
SEGMENTS = ("before_attention", "after_attention", "layer")  # operations that are sums of others

# Columns that an operation needs in addition to those of every row.
NEEDED: dict[str, tuple[str, ...]] = {
    "gemm": ("dtype", "tokens", "in_features", "out_features"),
    **dict.fromkeys(
        ("attention", "block"), ("dtype", "chunk", "prefix", "num_attention_heads", "num_key_value_heads", "head_dim")
    ),
    "head": ("dtype", "in_features", "out_features"),
    **dict.fromkeys((*ELEMENTWISE, "merge"), ("dtype", "tokens", "bytes")),
    "cache_append": ("dtype", "chunk", "prefix", "bytes"),
    **dict.fromkeys(("prepare", *SEGMENTS, "layer_alone", "layer_pending"), ("dtype", "chunk", "prefix")),
    **dict.fromkeys(("all_gather", "all_reduce", "send_recv"), ("bytes", "ranks", "nodes")),
    "host_collective": ("ranks",),
    **dict.fromkeys(("host_layer", "host_message", "host_prepare"), ()),
}
OPERATIONS = tuple(NEEDED)

_ALWAYS = ("operation", "kernel", "device", "median_s", "source")
_ORIGIN = "# origin "
Line = Annotated[str, Check("a text of one line", str.isprintable)]
Count = Annotated[int, Range(least=1, most=MAX_WHOLE)]
Position = Annotated[int, Range(least=0, most=MAX_WHOLE)]  # number of tokens or of runs, or number of a rank
Seconds = Annotated[float, Range(above=0.0, most=MAX_SECONDS)]
_TEXTS = ("operation", "kernel", "device", "source", "dtype")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One measured operation. InputError names a field that the operation needs, or that does not agree with others."""

    operation: str  # one of OPERATIONS
    kernel: Line  # name of the measured kernel
    device: Line  # name of the GPU; in host_* rows name of the machine
    dtype: str | None = None  # dtype of the operands, one of MEASURED_DTYPES; None: does not apply or is not known
    chunk: Count | None = None  # tokens of each sequence; attention: queries
    prefix: Position | None = None  # tokens before the chunk; attention: keys
    num_attention_heads: Count | None = None  # attention: query heads on the measured device
    num_key_value_heads: Count | None = None  # attention: KV heads on the measured device
    head_dim: Count | None = None  # attention: elements of one head
    batch: Count = 1  # sequences at once
    tokens: Count | None = None  # rows of a gemm or of an element-wise kernel
    in_features: Count | None = None  # gemm, head: length of the sums of products
    out_features: Count | None = None  # gemm, head: columns of the result
    bytes: Count | None = None  # bytes of a kernel: read and written; of all_gather: all pieces; of others: the tensor
    ranks: Count | None = None  # number of GPUs in the collective
    nodes: Annotated[int, Range(least=1, most=2)] | None = None  # 1: all in one node; 2: across nodes
    src: Position | None = None  # send_recv: the rank that sends
    dst: Position | None = None  # send_recv: the rank that receives
    messages: Count = 1  # send_recv: number of transfers of this size in flight at once
    warmups: Position | None = None  # runs just before the timed ones; None: unknown
    repeats: Count | None = None  # timed runs without a pause; None: unknown
    median_s: Seconds  # seconds, median of the repeats
    mean_s: Seconds | None = None  # seconds, mean of the repeats, outliers clipped; None: not known
    spread_s: NonNegative | None = None  # seconds, standard deviation or interquartile range; None: not known
    source: Line  # authors and tool of the measurement

    @property
    def expected_s(self) -> float:
        """Mean seconds if known, else the median. Only means of single operations add up to the mean of their sum."""
        if self.mean_s is not None:
            return self.mean_s
        return self.median_s

    @property
    def has_loop(self) -> bool:
        """Whether the numbers of warm-up and timed runs are known."""
        return self.warmups is not None and self.repeats is not None

    def times(self, factor: float) -> Measurement:
        """The measurement with its times multiplied by a factor."""
        mean_s = self.mean_s
        if mean_s is not None:
            mean_s *= factor
        return replace(self, median_s=self.median_s * factor, mean_s=mean_s)

    def __post_init__(self) -> None:
        needed = NEEDED.get(self.operation)
        if needed is None:
            raise InputError("operation", self.operation, ", ".join(OPERATIONS))
        for name in needed:
            if getattr(self, name) is None:
                raise InputError(name, ABSENT, f"a value ({self.operation} needs {', '.join(needed)})")
        dtypes: Sequence[str] = DTYPES
        if self.operation == "gemm":
            dtypes = MEASURED_DTYPES
        if self.dtype is not None and self.dtype not in dtypes:
            raise InputError("dtype", self.dtype, ", ".join(dtypes))
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads
        if heads is not None and kv_heads is not None and heads % kv_heads:
            raise InputError("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")


COLUMNS = Measurement.__slots__
Some = npt.NDArray[Any]  # indices of rows, or a mask of them


def measurement_at(where: str, **values: Any) -> Measurement:
    """Check the values and make a measurement; InputError names the file, the line and the wrong value."""
    return read(Measurement, JsonObject(fields=values, where=where))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Columns:
    """Measured rows as arrays of one length, or as mappings of such arrays; formulas of rates take them."""

    def take(self, rows: Some) -> Self:
        """Some of the rows, by index or mask."""
        columns: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                columns[field.name] = value[rows]
            elif isinstance(value, dict):
                columns[field.name] = {name: array[rows] for name, array in value.items()}
        return replace(self, **columns)


def read_measurements(path: str | Path, argument: str = "measurements") -> list[Measurement]:
    """The rows of a measurement CSV, in its order; InputError names file, line, column, value and accepted values."""
    return _read_table(CsvTable.read(path, argument))


def _read_table(table: CsvTable) -> list[Measurement]:
    table.only(COLUMNS)
    table.need(_ALWAYS)
    return [read(Measurement, parse_cells(row, _TEXTS)) for row in table.rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvFormat:
    """A kind of CSV file with measurements, and its reader."""

    name: str  # name in messages
    signature: tuple[str, ...]  # columns that only this kind has; a file must have all of them
    read: Callable[[CsvTable], list[Measurement]]  # reader of the table; InputError names file, line and column


LAYOUT = CsvFormat(name="kvrsim measurements", signature=("operation", "median_s"), read=_read_table)


def write_measurements(
    path: str | Path, rows: Iterable[Measurement], argument: str = "output", *, origin: Mapping[str, Any] | None = None
) -> None:
    """Write a measurement CSV that reads back as the same rows; the file is written completely or not at all.

    `origin`: plain JSON values that hold for all rows, which read_origin returns.
    """
    text = io.StringIO(newline="")
    if origin is not None:
        text.write(f"{_ORIGIN}{json.dumps(origin, allow_nan=False)}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(map(attrgetter(*COLUMNS), rows))
    write_atomically(path, text.getvalue().encode(), argument=argument)


def read_origin(path: str | Path, argument: str = "measurements") -> dict[str, Any] | None:
    """The origin line of a measurement CSV; None without one. Raises InputError where it is not JSON."""
    for number, line in enumerate(io.StringIO(_content(path, argument)), start=1):
        if line.strip() and not line.startswith("#"):
            return None
        if line.startswith(_ORIGIN):
            where = f"{argument} {' '.join(str(path).split())}, line {number}: origin"
            return _parse_origin(line.removeprefix(_ORIGIN).strip(), where)
    return None


def _parse_origin(text: str, where: str) -> dict[str, Any]:
    try:
        origin = parse_json(text)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise InputError(where, text[:80], f"valid JSON ({reason})") from None
    if not isinstance(origin, dict):
        raise InputError(where, text[:80], "a JSON object ({...})")
    return origin


_TABLES = ("aiconfigurator:", "aisimulate:")  # prefixes of sources that are not files
_MAX_TEXT = 300  # maximum number of characters in a line of provenance
_REPEATED = ("command", "date", "threads", "kvrsim", "model_name", "device_state")  # keys copied to a profile


def read_origins(sources: Iterable[str], argument: str) -> list[dict[str, Any]]:
    """Origins of those SOURCEs (see calibrate.importers) that are files with an origin line."""
    origins = []
    for source in sources:
        if source.startswith(_TABLES):
            continue
        file, _, _ = source.partition("?")
        origin = read_origin(file, argument)
        if origin is not None:
            origins.append(origin)
    return origins


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """The machine, model and software of measurement files: for each key the value of the first file that has it."""

    data: JsonObject

    @classmethod
    def of(cls, origins: Sequence[Mapping[str, Any]], argument: str = "compute") -> Provenance:
        """Merge results of read_origin; the result may be empty."""
        merged: dict[str, Any] = {}
        for origin in reversed(origins):
            merged |= origin
        return cls(data=JsonObject(fields=merged, where=f"{argument} origin"))

    @property
    def gpu(self) -> GpuSpec | None:
        """The measured GPU, in the format of gpus.json; None: not recorded. Raises InputError for invalid data."""
        if not self.data.has("gpu"):
            return None
        return GpuSpec.read(self.data.child("gpu"))

    @property
    def link(self) -> LinkSpec | None:
        """The measured link, in the format of links.json; None: not recorded."""
        if not self.data.has("link"):
            return None
        return LinkSpec.read(self.data.child("link"))

    @property
    def is_hugging_face(self) -> bool:
        """Whether layers of a Hugging Face model were timed."""
        return self.data.has("model")

    @property
    def model(self) -> ModelSpec | None:
        """The model whose layers were timed."""
        if not self.data.has("model"):
            return None
        name = self.data.text("model_name", "measured model")
        return read_config(JsonObject(fields=self.data.child("model").fields, where=f"{self.data.where}: model"), name)

    def cluster(self, name: str, gpu: GpuSpec, link: LinkSpec, ranks: int) -> Cluster | None:
        """Return the measured machine, with at least that number of ranks; None where the files do not describe it."""
        if self.gpu is None or self.gpu.name != gpu.name:
            return None
        topology = self.data.get("topology", Topology, "switch")
        return Cluster(
            name=name, gpu=gpu, num_gpus=max(ranks, self.data.integer("num_gpus", 1)), link=link, topology=topology
        )

    def provenance(self) -> dict[str, str]:
        """Versions, threads, command and date, as text."""
        versions = self.data.fields.get("versions")
        values: dict[str, object] = {}
        if isinstance(versions, Mapping) and versions:
            values["versions"] = ", ".join(f"{name} {value}" for name, value in versions.items())
        values |= {f"measured: {key}": self.data.fields[key] for key in _REPEATED if self.data.has(key)}
        return {key: _text(value) for key, value in values.items()}


def _text(value: object) -> str:
    text = value
    if not isinstance(text, str):
        text = json.dumps(value)
    return " ".join(text.split())[:_MAX_TEXT] or "nothing"


# -- the measured GPU and its link

# Words in the names of PCIe cards and of slices of a GPU. Their clock and power differ from those of the SXM boards
# that kvrsim describes.
_OTHER_FORMS = {"pcie", "nvl", "mig"}
_MEMORY_TOLERANCE = 0.1  # relative tolerance: drivers reserve some memory and count in other units


def gpu_of(rows: Sequence[Measurement], name: str | None, origins: Sequence[Mapping[str, Any]] = ()) -> GpuSpec:
    """Return the GPU `name`, or else the one in the files, or else the built-in GPU that the rows' device names.

    For example, "NVIDIA A100-SXM4-80GB" is a100-80gb. Raises InputError if no GPU or several GPUs match.
    """
    if name is not None:
        return load_gpu(name)
    measured = Provenance.of(origins).gpu
    if measured is not None:
        return measured
    devices = sorted({row.device for row in rows if row.operation in ("gemm", "attention")})
    gpus = {gpu.name: gpu for gpu in map(gpu_named, devices) if gpu is not None}
    if len(gpus) != 1:
        text = ", ".join(devices) or "no gemm or attention rows"
        names = ", ".join(builtin_gpus())
        raise InputError("gpu", f"nothing for {text}", f"one of {names}, or a JSON file that describes the GPU")
    return next(iter(gpus.values()))


def gpu_named(device: str, *, num_sms: int | None = None, memory_bytes: int | None = None) -> GpuSpec | None:
    """The built-in GPU whose name is part of a device's name; None if there is none, or several.

    `num_sms`, `memory_bytes`: properties that the device reports, if known. A PCIe card, such as the
    H100 PCIe with 114 SMs, or a slice of a GPU is not a built-in GPU.
    """
    candidates = [load_gpu(gpu) for gpu in builtin_gpus() if _is_named(gpu, device)]
    gpus = [gpu for gpu in candidates if _agrees(gpu, num_sms, memory_bytes)]
    if len(gpus) != 1:
        return None
    return gpus[0]


def _agrees(gpu: GpuSpec, num_sms: int | None, memory_bytes: int | None) -> bool:
    """Whether the known properties agree; SMs must be equal, because they determine the number of waves of a kernel."""
    if num_sms is not None and num_sms != gpu.num_sms:
        return False
    return memory_bytes is None or abs(memory_bytes / gpu.memory_bytes - 1) <= _MEMORY_TOLERANCE


def _is_named(gpu: str, device: str) -> bool:
    return name_parts(gpu) <= name_parts(device) and not (_OTHER_FORMS & name_parts(device)) - name_parts(gpu)


def name_parts(name: str) -> set[str]:
    """Words and numbers of a GPU's name, in lower case."""
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def link_of(gpu: GpuSpec, name: str | None, origins: Sequence[Mapping[str, Any]] = ()) -> LinkSpec:
    """The link `name`, or else the one in the files, or else the link of a built-in cluster of the GPU.

    Raises InputError if there is no link.
    """
    if name is not None:
        return load_link(name)
    measured = Provenance.of(origins, "links").link
    if measured is not None:
        return measured
    cluster = cluster_of(gpu.name)
    if cluster is None:
        accepted = "a built-in link or a JSON file that describes it; or measured ones: `links`"
        raise InputError("link", f"nothing for {gpu.name}", accepted)
    return cluster.link
