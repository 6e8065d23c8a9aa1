"""CalibrationProfile: measured rates of a machine and its software, as versioned JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from kvrsim.choices import DTYPES
from kvrsim.engine import Engine, HostRates
from kvrsim.hardware import AllReduceRates, Cluster, GatherRates, GpuSpec
from kvrsim.io.schema import (
    Check,
    JsonObject,
    Keys,
    NonNegative,
    PositiveShare,
    Range,
    RelativeError,
    Whole,
    fields_to_json,
    named_object,
    read,
    shipped_files,
    write_json,
)
from kvrsim.kernels.attention import ATTENTION_KERNELS, AttentionRates, EagerRates, LatentRates
from kvrsim.kernels.cost import Call, KernelTraits
from kvrsim.kernels.elementwise import CacheCopies, ElementwiseRates
from kvrsim.kernels.experts import ExpertRates
from kvrsim.kernels.gemm import GEMM_TYPES, GemmRates, Product, Width, alike
from kvrsim.kernels.recurrence import RecurrenceRates
from kvrsim.kernels.sparse import SparseRates
from kvrsim.layout import LayoutKinds
from kvrsim.model.mixers import Attention, LatentAttention
from kvrsim.model.spec import ModelSpec
from kvrsim.program import Array
from kvrsim.units import map_fields

SCHEMA_VERSION = 2
_BUILTIN_FOLDER = Path(__file__).parents[1] / "data" / "profiles"

PendingShare = Annotated[float, Range(least=0.0, most=0.9)]  # with a larger share a rank would compute almost nothing
_LINK_OPERATIONS = ("send_recv", "all_gather", "all_reduce")
OPERATION_KINDS = (
    *("gemm", "attention", "latent", "sparse", "experts", "recurrence", "elementwise"),
    *_LINK_OPERATIONS,
    "host",
)
# What a message does to computation. rendezvous: send and receive occupy the compute streams of both ranks; sender: the
# sender computes nothing until the message has left; overlap: neither.
SendStyle = Literal["overlap", "sender", "rendezvous"]
_RISING = Check("[smallest, largest], two numbers", lambda span: span[0] <= span[1])
TokenSpan = Annotated[tuple[int, int], _RISING]
SizeSpan = Annotated[tuple[NonNegative, NonNegative], _RISING]
Dtypes = Annotated[
    tuple[str, ...], Check(f"some of {', '.join(DTYPES)}", lambda names: names and set(names) <= set(DTYPES))
]
AttentionByKernel = Annotated[
    Mapping[str, AttentionRates],
    Keys(ATTENTION_KERNELS),
    Check(f"rates for one or more of {', '.join(ATTENTION_KERNELS)}", bool),
]
GemmTypes = Annotated[Mapping[str, GemmRates], Keys(tuple(GEMM_TYPES))]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRates:
    """Rates of the device, at most the datasheet's."""

    gemm: GemmRates  # rates of projections, MLP and head
    attention: AttentionByKernel
    elementwise: ElementwiseRates
    copies: CacheCopies
    head_on_all_tokens: bool = False  # whether logits are computed for every token of the last chunk
    repeats_rotary: bool = False  # whether Falcon runs the code of transformers 4.34, see kvrsim.kernels.elementwise
    whole_attention: bool = False  # whether the rates include repeated KV heads and a transposed output
    clock: Clock | None = None  # fall of the clock below the burst clock of these rates; None: no fall
    gemm_types: GemmTypes = field(default_factory=dict)  # products of quantised weights, by type; absent: not measured
    experts: ExpertRates | None = None  # rates of grouped products of experts; None: priced as separate products
    latent: LatentRates | None = None  # None: priced as attention with heads of the same width
    sparse: SparseRates | None = None  # None: counted from the rates of other operations
    recurrence: RecurrenceRates | None = None  # None: counted from the rates of other operations

    def traits(self, kernel: str, batch: int, element_bytes: int) -> KernelTraits:
        """Return the traits that all kernels share; `kernel` computes attention, `element_bytes` is the dtype's."""
        rates = self.attention[kernel]
        return KernelTraits(
            kernel=kernel,
            batch=batch,
            element_bytes=element_bytes,
            fused=self.elementwise.fused,
            fused_merge=self.elementwise.fused_merge,
            measures_merge=self.elementwise.merge_bytes_per_s is not None,
            whole_attention=self.whole_attention,
            copies=self.copies,
            score_bytes=rates.score_bytes if isinstance(rates, EagerRates) else {},
            head_on_all_tokens=self.head_on_all_tokens,
            repeats_rotary=self.repeats_rotary,
        )

    @property
    def in_decode(self) -> KernelRates:
        """The rates in a decode step, whose kernels have few rows and mainly read weights."""
        types = dict(self.gemm_types)
        for name, rates in self.gemm_types.items():
            if GEMM_TYPES[name].quantised:
                types[name] = rates.in_decode(self.gemm)
        experts = self.experts
        if experts is not None:
            experts = experts.in_decode(self.gemm.bytes_per_s)
        return replace(self, gemm_types=types, experts=experts)

    def of(self, call: Call, kernel: str) -> Any:
        """Return the rates of the call's operation; None where the profile has none.

        kernel: the attention kernel. Latent attention without rates of its own uses those of attention.
        """
        kind = call.part.kind
        if kind == "attention" or (kind == "latent" and (self.latent is None or kernel != "flash")):
            return self.attention[kernel]
        measured = getattr(self, kind)
        return None if measured is None else measured.of(call)

    def rates_type(self, compute: str | None) -> str | None:
        """The type that provides the rates of a type of product: itself or the most similar; None: half precision."""
        for kind in alike(compute):
            if kind in self.gemm_types:
                return kind
        return None

    def gemm_of(self, compute: str | None, element_bytes: int) -> tuple[GemmRates, Width]:
        """Return the rates of a type of product and the bytes of its operands; `element_bytes` is the dtype's."""
        priced = self.rates_type(compute)
        if priced is None:
            return self.gemm, element_bytes
        return self.gemm_types[priced], GEMM_TYPES[priced]

    def head_dims(self, model: ModelSpec) -> tuple[int, ...]:
        """Widths of the heads that are priced by softmax rates; latents that have their own rates are left out."""
        widths = set()
        for layer in model.layer_kinds:
            mixer = layer.mixer
            is_softmax = isinstance(mixer, Attention) or (isinstance(mixer, LatentAttention) and self.latent is None)
            if mixer is not None and is_softmax and not mixer.is_sparse:
                widths.add(mixer.head_dim)
        return tuple(sorted(widths))

    def is_measured(self, product: Product) -> bool:
        """Whether the weight matrix was timed in the type that the product is priced in."""
        rates, _ = self.gemm_of(product.compute, 0)  # the bytes of an element do not matter here
        return rates.measured_shape(product) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRates:
    """Rates of a point-to-point message."""

    link: str  # name of the LinkSpec that was measured
    bandwidth_bytes_per_s: float  # bandwidth in one direction
    latency_s: NonNegative
    short_bytes_per_s: float | None  # rate for short messages, see LinkSpec; None: as for long ones
    gather: GatherRates | None  # rates of ring all-gathers; None: each step is priced as a message
    all_reduce: AllReduceRates | None = None  # rates inside one node; None: not measured, priced as two all-gathers
    sends: SendStyle  # what messages of KV-Runahead do to the computation of their ranks
    sends_over_bus: SendStyle  # value of `sends` where transfers are staged through the host
    pending_share: PendingShare = 0.0  # share of a rank's rate lost while a receive waits; 0 if not measured
    message_sms: Whole = 0  # multiprocessors that send and receive hold while messages are in flight
    # Copies of a message's K and V for whose time its sender computes nothing else, in a chain of KV-Runahead.
    message_copies: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidRange:
    """Range of the calibration; outside this range a prediction is an extrapolation."""

    context_len: TokenSpan  # tokens, smallest and largest
    num_gpus: TokenSpan
    hidden_size: TokenSpan
    head_dim: TokenSpan
    dtypes: Dtypes


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCoverage:
    """Share of TTFTs on a link that the profile was not fitted to which lie inside their prediction intervals."""

    bytes_per_s: NonNegative  # bandwidth of the link, as given
    coverage: RelativeError
    num_rows: Whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """Errors of the profile's predictions, as fractions of the measured TTFT.

    Cross-validated: each model's rows are predicted by a fit without that model.
    """

    mape: RelativeError  # mean absolute error on the rows that the profile was fitted to
    median_ape: RelativeError
    cross_validated_mape: RelativeError
    cross_validated_median_ape: RelativeError
    cross_validated_speedup_mape: RelativeError  # mean absolute error of KVR-S's speed-up over TSP
    other_family_mape: RelativeError  # error on each family (Llama, Falcon), by a fit to the other families
    p80_ape: RelativeError  # 80th percentile of the absolute error on held-out models, equally weighted
    coverage: RelativeError  # mean share of a model's rows inside an interval made from the other models' errors
    longer_mape: RelativeError  # error on contexts above 4k, predicted by a fit to contexts up to 4k
    more_gpus_mape: RelativeError  # error on 8 GPUs, predicted by a fit to at most 4 GPUs
    num_rows: int
    layouts: LayoutKinds | None = None  # ways in which the rows divide a prefill over GPUs; None: not recorded
    links: tuple[LinkCoverage, ...] = ()  # coverage on links other than the measured ones


Gather = Literal["ring", "collective"]  # kind of all-gather: sends between neighbours, or the backend's own


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationFit:
    """Source and errors of one kind of operation."""

    source: str  # origin of the numbers, in a few words
    num_rows: Whole  # measurements; 0: counted or set by hand
    mape: RelativeError  # mean absolute error, as a fraction
    cross_validated_mape: RelativeError  # mean absolute error on rows left out of the fit
    log_sd: RelativeError  # spread of log(predicted / measured) on held-out rows; the prediction intervals come from it
    # log_sd for shapes with measured times in the profile; None: no measured times.
    interpolated_log_sd: RelativeError | None = None
    # Spread of log(seconds in other tables of the GPU / seconds in this one), common to all sizes; None: no other
    # table.
    systematic_log_sd: RelativeError | None = None
    seen: Mapping[str, SizeSpan]  # smallest and largest measured value of each size, such as "chunk"
    gather: Gather | None = None  # kind of the fitted all-gathers; None if unknown or not fitted


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CalibrationProfile:
    """Rates of a GPU and its software, with their valid range, errors and sources."""

    name: str
    gpu: str  # name of the measured GpuSpec
    description: str  # one sentence: software, kernels, machine
    not_covered: str  # one sentence: cases that it does not cover
    kernels: KernelRates
    host: HostRates
    links: LinkRates
    valid: ValidRange
    operations: Annotated[Mapping[str, OperationFit], Keys(OPERATION_KINDS)]
    residual: Residual | None  # errors of whole TTFTs; None: no TTFTs were compared
    provenance: Mapping[str, str]  # source, command, date, versions
    run_to_run_log_sd: RelativeError | None = None  # spread of log seconds of a layer between runs; None: not measured
    cluster: Cluster | None = None  # measured machine, with its links; None: the cluster of --cluster
    engine: Engine | str | None = None  # default engine of a prediction; None: `host` has been measured

    def __repr__(self) -> str:
        return f"<CalibrationProfile: {self.name}>"

    @property
    def attention_kernels(self) -> tuple[str, ...]:
        """Kernels that the profile has rates for; the first is the default."""
        return tuple(self.kernels.attention)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Types that a request may have: the measured ones, and fp8 if there are rates of FP8 products."""
        measured = self.kernels.rates_type("fp8") in ("fp8", "fp8_block")
        if measured and "fp8" not in self.valid.dtypes:
            return (*self.valid.dtypes, "fp8")
        return self.valid.dtypes

    def has_times(self, kind: str) -> bool:
        """Whether times of these operations were measured; profiles without a record of messages measured them."""
        fit = self.operations.get(kind)
        if fit is None:
            return kind == "send_recv"
        return fit.num_rows > 0

    def has_measured(self, link: str) -> bool:
        """Whether rates of the link's messages or collectives were measured."""
        return self.links.link == link and any(self.has_times(kind) for kind in _LINK_OPERATIONS)

    @classmethod
    def read(cls, data: JsonObject) -> CalibrationProfile:
        """Check every key of a profile; raises InputError naming the key path."""
        if data.integer("schema_version") != SCHEMA_VERSION:
            raise data.error("schema_version", f"{SCHEMA_VERSION}, the version that this kvrsim reads")
        return read(cls, data.without("schema_version"))

    def to_dict(self) -> dict[str, Any]:
        """The profile as plain JSON values."""
        return {"schema_version": SCHEMA_VERSION} | fields_to_json(self)

    def write(self, path: str | Path) -> None:
        """Write the profile as JSON in one atomic step."""
        write_json(path, self)


def builtin_profiles() -> tuple[str, ...]:
    """Names of the profiles that ship with kvrsim."""
    return tuple(shipped_files(_BUILTIN_FOLDER))


def profiles_with(kernel: str, gpu: str) -> tuple[str, ...]:
    """Names of the built-in profiles of a GPU that have rates for an attention kernel."""
    profiles = ((name, load_profile(name)) for name in builtin_profiles())
    return tuple(name for name, profile in profiles if profile.gpu == gpu and kernel in profile.attention_kernels)


def load_profile(name_or_path: str | Path, argument: str = "profile") -> CalibrationProfile:
    """Load a built-in profile by name, or a file; InputError names `argument`, the file and the key."""
    return CalibrationProfile.read(named_object(name_or_path, argument, shipped_files(_BUILTIN_FOLDER), "roofline"))


_NEWTON_STEPS = 60  # largest number of steps of Newton's method, which needs about five
_NEWTON_TOLERANCE = 1e-12  # relative change below which the iteration ends


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """Clock under load: after t seconds the rate is s + (1 - s) exp(-t / tau) times the rate at the burst clock.

    A device starts at its highest clock; within tens of milliseconds the power limit lowers it. The rates of a profile
    that has a clock are those at the burst clock.
    """

    sustained_share: PositiveShare  # s: rate under long load divided by the rate of short bursts
    time_constant_s: float  # tau

    def loaded_s(self, busy_s: Array) -> Array:
        """Seconds, from the beginning of the load, of work that takes `busy_s` seconds at the burst clock.

        The result T solves busy_s = s T + (1 - s) tau (1 - exp(-T / tau)). Any shape, values of at least 0. More work
        never takes less time, and T is at least busy_s. Newton's method starts from below: the work done is concave in
        T, so no step is too large.
        """
        share = self.sustained_share
        tau = self.time_constant_s
        busy = np.asarray(busy_s, dtype=float)
        elapsed = np.maximum(busy, (busy - (1 - share) * tau) / share)
        for _ in range(_NEWTON_STEPS):
            decay = np.exp(-elapsed / tau)
            done = share * elapsed - (1 - share) * tau * np.expm1(-elapsed / tau)
            step = (busy - done) / (share + (1 - share) * decay)
            elapsed = elapsed + np.maximum(step, 0.0)
            if np.all(step <= _NEWTON_TOLERANCE * elapsed):
                break
        return np.asarray(elapsed)


_STEPS = ("block_s", "softmax_s", "tile_s", "chunk_s")  # fields in seconds of one multiprocessor's arithmetic
_SLOTS = ("concurrent_tiles", "num_sms")


def profile_of_sibling(profile: CalibrationProfile, measured: GpuSpec, gpu: GpuSpec) -> CalibrationProfile:
    """Estimate the profile of an unmeasured GPU from a measured GPU of the same architecture.

    Rates of arithmetic scale with the peak of the tensor cores, and rates of bytes with the memory's bandwidth; tiles
    run on all multiprocessors of `gpu`. Times of launches do not change. Times of single products are dropped.
    """
    return _scaled(
        profile,
        compute=gpu.peak_flops["fp16"] / measured.peak_flops["fp16"],
        memory=gpu.hbm_bytes_per_s / measured.hbm_bytes_per_s,
        slots=gpu.num_sms / measured.num_sms,
    )


def profile_under_power_limit(profile: CalibrationProfile, arithmetic_share: float) -> CalibrationProfile:
    """Estimate the profile of the same GPU with a lower power limit, see Cluster.arithmetic_share.

    Only rates of arithmetic fall. Times of single products are dropped.
    """
    return _scaled(profile, compute=arithmetic_share, memory=1.0, slots=1.0)


def _scaled(profile: CalibrationProfile, *, compute: float, memory: float, slots: float) -> CalibrationProfile:
    """The profile with its rates times these ratios: of arithmetic, of bytes, of the number of multiprocessors."""

    def change(unit: str, old: Any) -> Any:
        if unit == "measured":
            return () if isinstance(old, tuple) else None
        if unit.endswith("flops_per_s"):
            return old * compute
        if unit.endswith("bytes_per_s"):
            return old * memory
        if unit in _STEPS:
            return old * slots / compute
        if unit in _SLOTS:
            return max(1, round(old * slots))
        return old

    return replace(profile, kernels=map_fields(profile.kernels, change))
