"""CalibrationProfile: what a machine and its software were measured to do; versioned JSON in and out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvrsim.choices import DTYPES
from kvrsim.errors import InputError
from kvrsim.hardware.cluster import Cluster, cluster_to_dict, read_cluster
from kvrsim.io.files import write_atomically
from kvrsim.io.json_text import JsonObject
from kvrsim.profile.rates.attention import ATTENTION_KERNELS, AttentionRates, read_attention
from kvrsim.profile.rates.elementwise import ElementwiseRates
from kvrsim.profile.rates.gemm import GemmRates
from kvrsim.profile.rates.links import GatherRates

SCHEMA_VERSION = 2
_BUILTIN_FOLDER = Path(__file__).parents[1] / "data" / "profiles"

# Standard deviations on either side of the mean that hold four in five of a normal distribution.
DEVIATES_OF_80_PERCENT = 1.2816
OPERATION_KINDS = ("gemm", "attention", "elementwise", "send_recv", "all_gather", "host")
SendStyle = Literal["overlap", "rendezvous"]
_SEND_STYLES: tuple[SendStyle, ...] = ("overlap", "rendezvous")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheCopies:
    """How often K and V are copied, each time read and written, on their way into the cache."""

    keep: float  # by every strategy, as where K and V are stacked into one tensor
    append: float  # more where a chunk is appended to a prefix (torch.cat)
    gather: float  # more where gathered pieces are put together (a list of outputs, then torch.cat)
    own: float = 0.0  # of the chunk's alone, where it is written into a buffer that holds the rest


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRates:
    """What the device reaches; every rate at or below the datasheet's."""

    gemm: GemmRates  # projections, MLP and head
    attention: Mapping[str, AttentionRates]  # by kernel: "eager", "sdpa", "flash"
    elementwise: ElementwiseRates
    copies: CacheCopies
    head_on_all_tokens: bool  # whether logits are computed for every token of the last chunk
    whole_attention: bool = False  # whether its rates hold the repeating of KV heads and the transposed output, too

    def faster(self, factor: float) -> KernelRates:
        """Every rate `factor` times as high."""
        return replace(
            self,
            gemm=self.gemm.faster(factor),
            attention={kernel: rates.faster(factor) for kernel, rates in self.attention.items()},
            elementwise=self.elementwise.faster(factor),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRates:
    """The launching thread: a property of the software, not of the device."""

    layer_s: float  # seconds to issue one decoder layer
    gather_piece_s: float  # more, per rank that takes part, for the all-gathers of one layer
    resume_s: float = 0.0  # that the device idles after communication that held it, until what follows has been issued
    request_s: float = 0.0  # of the device, before the first layer, once a prefill
    prepare_s: float | None = None  # of the host, likewise; None: not measured, as long as the device
    message_s: float = 0.0  # to issue one send or one receive


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRates:
    """What a point-to-point message reaches."""

    link: str  # name of the LinkSpec that was measured
    bandwidth_bytes_per_s: float  # one way
    latency_s: float
    short_bytes_per_s: float | None  # at which short messages add time, see LinkSpec; None: as long ones
    gather: GatherRates | None  # of ring all-gathers; None: each step as a message
    sends: SendStyle  # "rendezvous": send and receive hold both compute streams; "overlap": neither
    sends_over_bus: SendStyle  # the same where transfers are staged through the host
    pending_share: float = 0.0  # of a rank's compute rate that is lost while a receive waits; 0: none, or not measured


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidRange:
    """What the calibration has seen; outside it a prediction is an extrapolation."""

    context_len: tuple[int, int]  # tokens, smallest and largest
    num_gpus: tuple[int, int]
    hidden_size: tuple[int, int]
    head_dim: tuple[int, int]
    dtypes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """How far the profile's TTFTs are from those it was fitted to, as fractions of TTFT.

    Cross-validated: each model's rows predicted by a fit without that model.
    """

    mape: float  # mean absolute error on the rows it was fitted to
    median_ape: float
    cross_validated_mape: float
    cross_validated_median_ape: float
    cross_validated_speedup_mape: float  # of KVR-S's speed-up over TSP
    other_family_mape: float  # each family's rows (Llama, Falcon) predicted by a fit to the other families
    p80_ape: float  # 80th percentile of the absolute error, models and families left out: half-width of the interval
    coverage: float  # share of a model's rows inside an interval made of the other models' errors
    longer_mape: float  # contexts above 4k predicted by a fit to those of at most 4k
    more_gpus_mape: float  # 8 GPUs predicted by a fit to at most 4
    num_rows: int


Gather = Literal["ring", "collective"]  # an all-gather: sends between neighbours, or the backend's own


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationFit:
    """How well one kind of operation is known."""

    source: str  # where its numbers come from, in a few words
    num_rows: int  # measurements; 0: counted or set by hand
    mape: float  # mean absolute error, as a fraction
    cross_validated_mape: float  # the same on rows left out of the fit
    log_sd: float  # spread of log(predicted / measured) on rows left out, four in five within 1.28: makes intervals
    interpolated_log_sd: float | None = None  # the same for shapes that the profile has times of; None: it has none
    seen: Mapping[str, tuple[float, float]]  # smallest and largest of each size that was measured, such as "chunk"
    gather: Gather | None = None  # how the all-gathers that were fitted worked; None: not known, or none are


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationProfile:
    """Coefficients, where they hold, how well, and where they come from."""

    name: str
    gpu: str  # name of the GpuSpec that it stands for
    description: str  # one sentence: software, kernels, machine
    not_covered: str  # one sentence: what it does not stand for
    kernels: KernelRates
    host: HostRates
    links: LinkRates
    valid: ValidRange
    operations: Mapping[str, OperationFit]  # by kind: gemm, attention, elementwise, send_recv, all_gather, host
    residual: Residual | None  # of whole TTFTs; None: none were compared
    provenance: Mapping[str, str]  # source, command, date, versions
    run_to_run_log_sd: float | None = None  # of log seconds of a layer, again and again; None: not measured
    cluster: Cluster | None = None  # the machine that was measured, its links as named; None: that of --cluster

    @property
    def attention_kernels(self) -> tuple[str, ...]:
        """Kernels that the profile has rates for; the first is the default."""
        return tuple(self.kernels.attention)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        cluster = None if self.cluster is None else cluster_to_dict(self.cluster)
        return {"schema_version": SCHEMA_VERSION} | asdict(replace(self, cluster=None)) | {"cluster": cluster}

    def write(self, path: str | Path) -> None:
        """Write the profile as JSON; the file appears whole or not at all."""
        write_atomically(path, (json.dumps(self.to_dict(), indent=2) + "\n").encode(), argument="output")


def builtin_profiles() -> tuple[str, ...]:
    """Names of the profiles that ship with kvrsim."""
    return tuple(sorted(path.stem for path in _BUILTIN_FOLDER.glob("*.json")))


def profiles_with(kernel: str, gpu: str) -> tuple[str, ...]:
    """Names of the built-in profiles of a GPU that have rates for an attention kernel."""
    known = ((name, load_profile(name)) for name in builtin_profiles())
    return tuple(name for name, profile in known if profile.gpu == gpu and kernel in profile.attention_kernels)


def load_profile(name_or_path: str | Path, argument: str = "profile") -> CalibrationProfile:
    """A built-in name or a file; InputError names `argument`, the file and the key."""
    name = str(name_or_path)
    if name in builtin_profiles():
        return read_profile(JsonObject.read(_BUILTIN_FOLDER / f"{name}.json", argument))
    if not _exists(name):
        known = ", ".join((*builtin_profiles(), "roofline"))
        raise InputError(argument, name, f"a built-in profile ({known}) or a file that exists")
    return read_profile(JsonObject.read(Path(name), argument))


def _exists(name: str) -> bool:
    """False too for what cannot be a path."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


_KEYS = (
    *("name", "gpu", "description", "not_covered", "kernels", "host", "links", "valid", "operations"),
    *("residual", "provenance", "run_to_run_log_sd", "cluster"),
)


def read_profile(data: JsonObject) -> CalibrationProfile:
    """Check every key of a profile; raises InputError naming the key path."""
    data.only(("schema_version", *_KEYS))
    if data.integer("schema_version") != SCHEMA_VERSION:
        raise data.error("schema_version", f"{SCHEMA_VERSION}, the version that this kvrsim reads")
    provenance = data.child("provenance")
    return CalibrationProfile(
        name=data.text("name"),
        gpu=data.text("gpu"),
        description=data.text("description"),
        not_covered=data.text("not_covered"),
        kernels=_read_kernels(data.child("kernels")),
        host=_read_host(data.child("host")),
        links=_read_links(data.child("links")),
        valid=_read_valid(data.child("valid")),
        operations=_read_operations(data.child("operations")),
        residual=_read_residual(data.child("residual")) if data.has("residual") else None,
        provenance={key: provenance.text(key) for key in provenance.fields},
        run_to_run_log_sd=(
            data.number("run_to_run_log_sd", allow_zero=True, maximum=10) if data.has("run_to_run_log_sd") else None
        ),
        cluster=read_cluster(data.child("cluster")) if data.has("cluster") else None,
    )


def _read_kernels(data: JsonObject) -> KernelRates:
    data.only(KernelRates.__slots__)
    attention = data.child("attention")
    attention.only(ATTENTION_KERNELS)
    rates = {kernel: read_attention(kernel, attention.child(kernel)) for kernel in attention.fields}
    if not rates:
        raise data.error("attention", f"rates for one or more of {', '.join(ATTENTION_KERNELS)}")
    return KernelRates(
        gemm=GemmRates.read(data.child("gemm")),
        attention=rates,
        elementwise=ElementwiseRates.read(data.child("elementwise")),
        copies=_read_copies(data.child("copies")),
        head_on_all_tokens=data.flag("head_on_all_tokens", False),
        whole_attention=data.flag("whole_attention", False),
    )


def _read_copies(data: JsonObject) -> CacheCopies:
    data.only(CacheCopies.__slots__)
    needed = {key: data.number(key, allow_zero=True) for key in ("keep", "append", "gather")}
    return CacheCopies(**needed, own=data.number("own", allow_zero=True) if data.has("own") else 0.0)


_MOST_PENDING = 0.9  # a rank that loses more computes next to nothing beside a receive
_HOST_OPTIONAL = ("resume_s", "request_s", "prepare_s", "message_s")


def _read_host(data: JsonObject) -> HostRates:
    data.only(HostRates.__slots__)
    return HostRates(
        layer_s=data.number("layer_s", allow_zero=True),
        gather_piece_s=data.number("gather_piece_s", allow_zero=True),
        **{key: data.number(key, allow_zero=True) for key in _HOST_OPTIONAL if data.has(key)},
    )


def _read_links(data: JsonObject) -> LinkRates:
    data.only(LinkRates.__slots__)
    return LinkRates(
        link=data.text("link"),
        bandwidth_bytes_per_s=data.number("bandwidth_bytes_per_s"),
        latency_s=data.number("latency_s", allow_zero=True),
        short_bytes_per_s=data.number("short_bytes_per_s") if data.has("short_bytes_per_s") else None,
        gather=GatherRates.read(data.child("gather")) if data.has("gather") else None,
        sends=_read_style(data, "sends"),
        sends_over_bus=_read_style(data, "sends_over_bus"),
        pending_share=(
            data.number("pending_share", allow_zero=True, maximum=_MOST_PENDING) if data.has("pending_share") else 0.0
        ),
    )


def _read_style(data: JsonObject, key: str) -> SendStyle:
    for style in _SEND_STYLES:
        if style == data.text(key):
            return style
    raise data.error(key, " or ".join(_SEND_STYLES))


def _read_valid(data: JsonObject) -> ValidRange:
    data.only(ValidRange.__slots__)
    ranges = {key: _read_range(data, key) for key in ("context_len", "num_gpus", "hidden_size", "head_dim")}
    dtypes = tuple(dtype for dtype in data.sequence("dtypes") if isinstance(dtype, str) and dtype in DTYPES)
    if not dtypes or len(dtypes) != len(data.sequence("dtypes")):
        raise data.error("dtypes", "some of " + ", ".join(DTYPES))
    return ValidRange(**ranges, dtypes=dtypes)


def _read_range(data: JsonObject, key: str) -> tuple[int, int]:
    match data.sequence(key):
        case [int(low), int(high)] if 0 < low <= high and not isinstance(low, bool):
            return low, high
    raise data.error(key, "[smallest, largest], whole numbers above 0")


def _read_operations(data: JsonObject) -> dict[str, OperationFit]:
    data.only(OPERATION_KINDS)
    return {kind: _read_operation(data.child(kind)) for kind in OPERATION_KINDS if data.has(kind)}


def _read_operation(data: JsonObject) -> OperationFit:
    data.only(OperationFit.__slots__)
    errors = ("mape", "cross_validated_mape", "log_sd")
    seen = data.child("seen")
    return OperationFit(
        source=data.text("source"),
        num_rows=data.integer("num_rows", minimum=0),
        **{key: data.number(key, allow_zero=True, maximum=10) for key in errors},
        interpolated_log_sd=(
            data.number("interpolated_log_sd", allow_zero=True, maximum=10) if data.has("interpolated_log_sd") else None
        ),
        seen={key: _read_span(seen, key) for key in seen.fields},
        gather=_read_gather(data),
    )


def _read_gather(data: JsonObject) -> Gather | None:
    if not data.has("gather"):
        return None
    match data.text("gather"):
        case ("ring" | "collective") as gather:
            return gather
    raise data.error("gather", '"ring" or "collective"')


def _read_span(data: JsonObject, key: str) -> tuple[float, float]:
    match data.numbers(key, allow_zero=True):
        case [low, high] if low <= high:
            return low, high
    raise data.error(key, "[smallest, largest], numbers of at least 0")


def _read_residual(data: JsonObject) -> Residual:
    data.only(Residual.__slots__)
    shares = [key for key in Residual.__slots__ if key != "num_rows"]
    return Residual(
        **{key: data.number(key, allow_zero=True, maximum=10) for key in shares},
        num_rows=data.integer("num_rows"),
    )
