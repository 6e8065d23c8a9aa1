"""fit_profile: a CalibrationProfile from measurements, and a report of how well they agree, also on whole layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from calibrate.data import ELEMENTWISE, Measurement, Provenance
from calibrate.fit.attention import (
    HEAD_DIM,
    NARROW_HEAD_DIM,
    PROMISED_CHUNK,
    HeldOut,
    fit_blocked,
    fit_eager,
    fit_flash,
    is_decoding,
    usable_attention,
    with_blocks,
)
from calibrate.fit.elementwise import (
    PrepareRates,
    fit_elementwise,
    fit_host,
    fit_pending_share,
    fit_prepare,
    usable_elementwise,
    with_merges,
)
from calibrate.fit.fit import HALF, Errors, Fitted, column, dtypes_of, has_waves, rounded
from calibrate.fit.gemm import (
    STEP,
    Shape,
    at_burst,
    builtin_shapes,
    check_full_waves,
    computes_in,
    fit_clock,
    fit_gemm,
    fit_gemm_type,
    head_bytes_per_s,
    usable_gemm,
)
from calibrate.fit.links import SendRates, fit_all_gather, fit_all_reduce, fit_send_recv, usable_link_rows
from calibrate.fit.report import TITLES, FitReport, compare_layers
from kvrsim.engine import NO_HOST, PRIOR_ENGINE, HostRates
from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec, LinkSpec
from kvrsim.interp import QUARTILE_RANGE_SD
from kvrsim.io.schema import NonNegative, PositiveShare
from kvrsim.kernels.attention import AttentionRates, FlashRates
from kvrsim.kernels.elementwise import CacheCopies, ElementwiseRates, after_mixer, before_mixer
from kvrsim.kernels.gemm import GEMM_TYPES, GemmRates
from kvrsim.kernels.links import AllReduceRates
from kvrsim.kernels.profile import (
    CalibrationProfile,
    Clock,
    KernelRates,
    LinkRates,
    OperationFit,
    SendStyle,
    ValidRange,
)
from kvrsim.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """Name and description of a profile."""

    name: str
    description: str | None = None  # None: the devices measured
    not_covered: str = ""  # what was not measured is added
    provenance: Mapping[str, str] | None = None  # more than the rows say


def fit_profile(
    rows: Sequence[Measurement],
    label: Label,
    *,
    gpu: GpuSpec,
    link: LinkSpec,
    host: HostRates | None = None,
    choices: FitChoices | None = None,
    argument: str = "compute",
    origins: Sequence[Mapping[str, Any]] = (),
) -> tuple[CalibrationProfile, FitReport]:
    """A profile of one GPU and its link; gemm and attention are required, the rest defaults to the datasheet.

    `host` None: from host_layer and host_collective rows, or else DEFAULT_HOST, which predictions replace by a serving
    engine's; a CPU is its own host. `origins`: what
    read_origin found in the files of the rows. With a Hugging Face model among them, nothing is fused, attention's
    times contain everything between the cache and the output projection, and whole layers are compared.

    Raises InputError naming `argument` for rows that are too few, vary too much, are of several devices or kernels, or
    that no fit reproduces.
    """
    chosen, origin = choices or FitChoices(), Provenance.of(origins, argument)
    filtered = FilteredRows.of(
        rows,
        head_dim=chosen.head_dim,
        kernel=chosen.attention_kernel,
        argument=argument,
        own=origin.is_hugging_face,
    )
    fit = OperationFits(rows=filtered, gpu=gpu, link=link, choices=chosen, argument=argument, origin=origin)
    prepare = fit.prepare()
    kernels = KernelRates(
        gemm=fit.gemm(),
        attention=fit.attention(),
        elementwise=replace(fit.elementwise(), mask_element_s=prepare.mask_element_s),
        copies=fit.copies(),
        clock=fit.clock,
        gemm_types=fit.gemm_types(),
        head_on_all_tokens=False,
        whole_attention=origin.is_hugging_face,
    )
    links = replace(fit.links(), pending_share=fit.pending_share(rows))
    host_rates = replace(fit.host(host, rows), step_s=prepare.step_s)
    devices = ", ".join(sorted({row.device for row in fit.used if row.operation in ("gemm", "attention")}))
    profile = CalibrationProfile(
        name=label.name,
        gpu=gpu.name,
        description=label.description or f"fitted to measurements of {devices}{_model_of(origin)}.",
        not_covered=" ".join(part for part in (label.not_covered, _beyond(origin), *fit.missing) if part)
        or "what was not measured.",
        kernels=kernels,
        host=host_rates,
        links=links,
        valid=fit.valid(),
        operations={kind: fit.operations[kind] for kind in TITLES if kind in fit.operations},
        residual=None,
        provenance=provenance_of(fit.used) | origin.provenance() | _clock(fit) | dict(label.provenance or {}),
        run_to_run_log_sd=_run_to_run_log_sd(rows),
        cluster=origin.cluster(label.name, gpu, link, fit.most_ranks()),
        engine=PRIOR_ENGINE if host_rates == DEFAULT_HOST else None,
    )
    layers = None if origin.model is None else compare_layers(profile, origin.model, rows)
    report = FitReport(
        profile=profile,
        lines={kind: [*found.lines(), *fit.others.get(kind, ())] for kind, found in fit.found.items()},
        fits={kind: found.own for kind, found in fit.found.items()},
        notes=(*notes_on(rows, fit.used, filtered.dtypes), *fit.missing),
        layers=layers,
    )
    return profile, report


def _run_to_run_log_sd(rows: Sequence[Measurement]) -> float | None:
    """Run-to-run variation of whole layers: drift affects all layers of a prefill alike."""
    spreads = [row.spread_s / row.median_s for row in rows if row.operation == "layer" and row.spread_s is not None]
    return rounded(float(np.median(spreads)) / QUARTILE_RANGE_SD) if spreads else None


def _clock(fit: OperationFits) -> dict[str, str]:
    return {} if fit.fitted_clock is None else {"clock": fit.fitted_clock.describe()}


def _model_of(origin: Provenance) -> str:
    if not origin.is_hugging_face:
        return ""
    return f", layers of {origin.data.text('model_name', 'a model')} by Hugging Face transformers"


def _beyond(origin: Provenance) -> str:
    return "Batches above 1, windows and mixtures of experts were not measured." if origin.is_hugging_face else ""


def provenance_of(rows: Sequence[Measurement]) -> dict[str, str]:
    """Provenance of measured rows."""
    kernels = {row.kernel for row in rows if row.operation == "attention"}
    listed = {
        "source": {row.source for row in rows},
        "devices": {row.device for row in rows},
        "attention kernels": kernels,
        "dtypes": {row.dtype for row in rows if row.dtype is not None},
    }
    return {name: "; ".join(sorted(values)) for name, values in listed.items() if values}


# -- The inputs of a fit: FitChoices, and FilteredRows (enough of them, steady, of one device, or else an InputError).

MAX_SPREAD = 0.10  # median of spread_s / median_s, of published tables
# Of own campaigns, which repeat until medians are precise: with ten repeats of this interquartile range the standard
# error of the median is 7 %.
MAX_OWN_SPREAD = 0.25
# Of own links and element-wise kernels, which are short: their spread is part of the fit's error and interval.
MAX_OWN_SHORT_SPREAD = 0.5
_SHORT = ("send_recv", "all_gather", "all_reduce", "elementwise")
LEAST_ROWS = {"gemm": 20, "attention": 12, "elementwise": 12, "send_recv": 6, "all_gather": 8, "all_reduce": 4}
LEAST_SIZES = {"gemm": 4, "attention": 4, "elementwise": 3, "send_recv": 4, "all_gather": 4, "all_reduce": 4}
_LEAST_TYPE_ROWS = 200
_SIZE = {
    **{"gemm": "tokens", "attention": "chunk", "elementwise": "bytes"},
    **dict.fromkeys(("send_recv", "all_gather", "all_reduce"), "bytes"),
}
_KINDS = {
    **dict.fromkeys((*ELEMENTWISE, "cache_append", "merge"), "elementwise"),
    **dict.fromkeys(("host_layer", "host_collective", "host_message", "host_prepare", "prepare"), "host"),
    **dict.fromkeys(("layer_alone", "layer_pending"), "send_recv"),
    **{"head": "gemm", "block": "attention"},
}
MAX_MEDIAN_ERROR = 0.35  # of a fit; beyond, its form is not that of what was measured


def kind_of(row: Measurement) -> str:
    """The kind of operation in a profile."""
    return _KINDS.get(row.operation, row.operation)


def check_rows(
    kind: str, usable: Sequence[Measurement], argument: str, what: str, max_spread: float = MAX_SPREAD
) -> None:
    """InputError where the rows of a kind are too few, vary too much or mix devices; `what`: rows needed."""
    sizes = {getattr(row, _SIZE[kind]) for row in usable}
    least = LEAST_ROWS[kind]
    if len(usable) < least or len(sizes) < LEAST_SIZES[kind]:
        got = f"{len(usable)} {kind} rows of {len(sizes)} sizes that can be used"
        raise InputError(argument, got, f"at least {least} of at least {LEAST_SIZES[kind]} sizes: {what}")
    _check_spread(kind, usable, argument, max_spread)
    if kind in ("gemm", "attention"):
        _check_one(kind, "device", usable, argument)
    if kind == "attention":
        _check_one(kind, "kernel", usable, argument)


def check_error(kind: str, median_ape: float, argument: str) -> None:
    """InputError where the fit is far from its own rows."""
    if median_ape > MAX_MEDIAN_ERROR:
        got = f"{kind} rows on which the best fit has an error of {median_ape:.0%} (median)"
        raise InputError(argument, got, f"measurements that a fit reproduces within {MAX_MEDIAN_ERROR:.0%}")


def _check_spread(kind: str, rows: Iterable[Measurement], argument: str, most: float) -> None:
    spreads = [row.spread_s / row.median_s for row in rows if row.spread_s is not None]
    if spreads and float(np.median(spreads)) > most:
        got = f"{kind} rows with a median spread of {float(np.median(spreads)):.0%}"
        raise InputError(argument, got, f"repeatable measurements: at most {most:.0%} of their medians")


def _check_one(kind: str, field: str, rows: Iterable[Measurement], argument: str) -> None:
    found = sorted({getattr(row, field) for row in rows})
    if len(found) > 1:
        key = "gpu" if field == "device" else "kernel"
        accepted = f"{kind} rows of one {field}; a source may end in a filter, ?{key}=TEXT"
        raise InputError(argument, "; ".join(found), accepted)


@dataclass(frozen=True, kw_only=True, slots=True)
class AssumedElementwise:
    """Element-wise kernels that no table has: a share of the memory's bandwidth, the same for all."""

    hbm_share: PositiveShare  # of the datasheet's bytes per second
    start_s: NonNegative  # of each kernel
    source: str  # whose assumption it is


@dataclass(frozen=True, kw_only=True, slots=True)
class FitChoices:
    """Settings of a fit that the rows do not contain."""

    attention_kernel: str | None = (
        None  # a preset of calibrate.fit.attention, or "eager"; None: by name, then the best fit
    )
    head_dim: int | None = None  # of attention; None: 128 where it was measured, else the most frequent
    fused: bool = True  # whether norm, rotary embedding and activation are one kernel each; never in measured layers
    sends: SendStyle = "overlap"  # whether messages hold the compute streams
    keep_shapes: Collection[Shape] | None = (
        None  # that get a table; None: all, or where they are many those of built-in models
    )
    held_out: HeldOut | None = None  # attention calls to compare with
    others: Sequence[Measurement] = ()  # other tables of the same GPU: for the clock and for the systematic error
    hidden_size: tuple[int, int] | None = None  # valid range of the profile; None: as measured
    elementwise: AssumedElementwise | None = None  # instead of measured element-wise kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class FilteredRows:
    """The rows that a fit uses, by kind of operation; a kind that was not measured is empty."""

    gemm: list[Measurement]
    heads: list[Measurement]  # logits of one token
    flash: list[Measurement]  # attention of a fused kernel that skips what is masked
    sdpa: list[Measurement]  # attention of a fused kernel with a mask
    eager: list[Measurement]  # attention of separate kernels
    head_dim: int  # of attention
    narrow: list[Measurement]  # calls of the flash kernel with narrower heads, beside those of the usual width
    elementwise: list[Measurement]  # with copies into the cache
    prepare: list[Measurement]
    blocks: list[Measurement]  # of a ring
    merges: list[Measurement]  # of their results
    send_recv: list[Measurement]
    all_gather: list[Measurement]
    all_reduce: list[Measurement]
    gemm_types: Mapping[str, list[Measurement]]  # products of quantised types with enough rows
    dtypes: tuple[str, ...]  # of the rows in the fit

    @classmethod
    def of(
        cls,
        rows: Sequence[Measurement],
        *,
        head_dim: int | None,
        kernel: str | None,
        argument: str,
        own: bool = False,
    ) -> FilteredRows:
        """All of them checked; InputError naming `argument`, also where gemm or attention is missing.

        `head_dim` None: 128 where it was measured often enough, else the most frequent. `kernel` "eager": all attention
        rows are eager; None: rows with eager in their kernel; otherwise rows of exactly the kernel eager. Rows of the
        kernel sdpa are sdpa, except with `kernel` "eager". Half precision if there is any, else fp32. `own`: rows of a
        model's layers on this machine: narrow products are used too, and larger spreads are accepted.
        """
        dtypes = dtypes_of(row for row in rows if row.operation in ("gemm", "attention"))
        of_dtype = [row for row in rows if row.dtype in dtypes]
        wanted = _head_dim(rows, dtypes) if head_dim is None else head_dim
        calls = usable_attention(rows, wanted, dtypes)
        eager = [row for row in calls if _is_eager(row, kernel)]
        sdpa = [row for row in calls if kernel != "eager" and row.kernel == "sdpa"]
        taken = set(map(id, (*eager, *sdpa)))
        reduces = usable_link_rows(rows, "all_reduce")
        filtered = cls(
            gemm=usable_gemm(rows, dtypes, narrow=own),
            heads=[row for row in of_dtype if row.operation == "head"],
            flash=[row for row in calls if id(row) not in taken],
            sdpa=sdpa,
            eager=eager,
            head_dim=wanted,
            narrow=_narrow(rows, dtypes, kernel) if wanted == HEAD_DIM else [],
            elementwise=usable_elementwise(rows, dtypes),
            prepare=[row for row in of_dtype if row.operation == "prepare"],
            blocks=[row for row in of_dtype if row.operation == "block"],
            merges=[row for row in of_dtype if row.operation == "merge"],
            send_recv=usable_link_rows(rows, "send_recv"),
            all_gather=usable_link_rows(rows, "all_gather"),
            all_reduce=[] if own and len(reduces) < LEAST_ROWS["all_reduce"] else reduces,
            gemm_types={kind: found for kind in GEMM_TYPES if _enough(found := usable_gemm(rows, (kind,)))},
            dtypes=dtypes,
        )
        filtered._check(argument, own=own)
        return filtered

    def _check(self, argument: str, *, own: bool) -> None:
        max_spread = MAX_OWN_SPREAD if own else MAX_SPREAD
        types = " or ".join(self.dtypes)
        check_rows("gemm", self.gemm, argument, f"products in {types} of at least {STEP} tokens", max_spread)
        calls = f"calls of one sequence in {types}, head_dim {self.head_dim}"
        check_rows("attention", self.flash or self.sdpa or self.eager, argument, calls, max_spread)
        for kind, rows, what in (
            ("attention", self.sdpa, calls),
            ("attention", self.eager, calls),
            ("elementwise", self.elementwise, f"kernels in {types}"),
            ("send_recv", self.send_recv, "inside one node"),
            ("all_gather", self.all_gather, "inside one node"),
            ("all_reduce", self.all_reduce, "inside one node"),
        ):
            if rows:
                check_rows(kind, rows, argument, what, MAX_OWN_SHORT_SPREAD if own and kind in _SHORT else max_spread)


def _enough(rows: Sequence[Measurement]) -> bool:
    return len(rows) >= _LEAST_TYPE_ROWS and len({row.tokens for row in rows}) >= LEAST_SIZES["gemm"]


def _is_eager(row: Measurement, kernel: str | None) -> bool:
    if kernel is None:
        return "eager" in row.kernel
    return kernel == "eager" or row.kernel == "eager"


def _narrow(rows: Sequence[Measurement], dtypes: Sequence[str], kernel: str | None) -> list[Measurement]:
    """Of a prefill's chunks, where enough were measured."""
    calls = usable_attention(rows, NARROW_HEAD_DIM, dtypes)
    flash = [row for row in calls if not _is_eager(row, kernel) and row.kernel != "sdpa"]
    found = [row for row in flash if row.chunk is not None and row.chunk >= PROMISED_CHUNK]
    return found if len(found) >= LEAST_ROWS["attention"] else []


def _head_dim(rows: Sequence[Measurement], dtypes: Sequence[str]) -> int:
    """128 if there are enough, else what was measured most."""
    if len(usable_attention(rows, HEAD_DIM, dtypes)) >= LEAST_ROWS["attention"]:
        return HEAD_DIM
    found = [row.head_dim for row in rows if row.operation == "attention" and row.head_dim is not None]
    return max(sorted(set(found)), key=found.count, default=HEAD_DIM)


def notes_on(rows: Sequence[Measurement], used: Iterable[Measurement], dtypes: Sequence[str]) -> tuple[str, ...]:
    """How many rows of each kind were not used, and possible reasons."""
    taken = set(map(id, used))
    left: dict[str, int] = {}
    for row in rows:
        if id(row) not in taken:
            left[kind_of(row)] = left.get(kind_of(row), 0) + 1
    types = " or ".join(dtypes)
    reasons = {
        "gemm": f"not {types}, fewer than {STEP} tokens, or of a narrow matrix",
        "attention": f"not {types}, another head_dim, more than one sequence, or decoding",
        "elementwise": f"not {types}",
        "send_recv": "between nodes, or far from the form",
        "all_gather": "between nodes, or far from the form",
        "all_reduce": "between nodes, or slower than another kernel at that size",
    }
    return tuple(
        f"{count} {kind} rows were not fitted: {reasons[kind]}"
        for kind, count in sorted(left.items())
        if kind in reasons
    )


# -- systematic_log_sd: how far other tables of the same GPU are from the one that a profile is fitted to.

# What makes two rows the same operation, and the size from which on rows are compared: those that make a prefill.
_SHAPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gemm": ("tokens", "in_features", "out_features"),
        "attention": ("chunk", "prefix", "batch", "num_attention_heads", "num_key_value_heads", "head_dim"),
    }
)
_LEAST_SIZE = 1024
_HALF = ("fp16", "bf16")
_ENOUGH = 20  # common shapes


def systematic_log_sd(kind: str, rows: Sequence[Measurement], others: Sequence[Measurement]) -> float | None:
    """Root mean square over the other sources of the median of log(their seconds / seconds of `rows`).

    Of half-precision rows of at least 1024 tokens; None without a source that has enough of the same shapes.
    """
    if kind not in _SHAPES:
        return None
    own = _by_shape(kind, rows)
    medians = []
    for source in sorted({row.source for row in others if row.operation == kind}):
        other = _by_shape(kind, [row for row in others if row.source == source])
        common = own.keys() & other.keys()
        if len(common) >= _ENOUGH:
            medians.append(float(np.median([np.log(other[shape] / own[shape]) for shape in common])))
    return float(np.sqrt(np.mean(np.square(medians)))) if medians else None


def _by_shape(kind: str, rows: Sequence[Measurement]) -> dict[Hashable, float]:
    size, *_ = _SHAPES[kind]
    return {
        tuple(getattr(row, name) for name in _SHAPES[kind]): row.expected_s
        for row in rows
        if row.operation == kind and row.dtype in _HALF and (getattr(row, size) or 0) >= _LEAST_SIZE
    }


# -- OperationFits: the fits of all kinds of operations of one profile, one after another.

# A serving engine launches a layer in about a dozen kernels of 5 us; tables of kernel times do not contain it.
DEFAULT_HOST = HostRates(layer_s=60e-6, gather_piece_s=0.0, resume_s=0.0)

_NO_COPIES = CacheCopies(keep=0.0, append=0.0, gather=0.0)  # appending is part of the flash kernels' times
_IN_PLACE = CacheCopies(keep=0.0, append=0.0, gather=0.0, own=1.0)  # as cache_append rows have been measured
_MOST_LINK_ERROR = 0.4  # mean, on held-out transfers: GPUs that share a host's bus do not behave like a ring
_DATASHEET_LOG_SD = 0.3  # uncertainty of what was not measured
_HAND_LOG_SD = 0.5
_MOST_SHAPES = 64  # that are kept as tables where the caller names none
_WERE = {"elementwise": "were", "send_recv": "were", "all_gather": "was"}


class OperationFits:
    """Fits the operations one after another, and keeps the rows that were used."""

    def __init__(
        self,
        *,
        rows: FilteredRows,
        gpu: GpuSpec,
        link: LinkSpec,
        choices: FitChoices,
        argument: str,
        origin: Provenance,
    ) -> None:
        self.rows, self.gpu, self.link, self.choices, self.argument = rows, gpu, link, choices, argument
        self.origin = origin
        self.fitted_clock = fit_clock([*rows.gemm, *choices.others], gpu) if has_waves(gpu) else None
        self.found: dict[str, Fitted[Any]] = {}  # by kind of operation
        self.others: dict[str, list[Errors]] = {}  # by kind of operation, of what `found` has no room for
        self.operations: dict[str, OperationFit] = {}
        self.missing: list[str] = []  # notes on what was not measured
        self.used: list[Measurement] = []

    @property
    def clock(self) -> Clock | None:
        """Of products and attention; None: no fall under load was seen."""
        return None if self.fitted_clock is None else self.fitted_clock.clock

    def gemm(self) -> GemmRates:
        """Rates, with tables of the requested shapes."""
        usable, keep = self.rows.gemm, self._keep_shapes()
        fitted = fit_gemm(at_burst(usable, self.clock), self.gpu, keep_shapes=keep, narrow=self.origin.is_hugging_face)
        rates: GemmRates = self._take("gemm", usable, fitted)
        check_full_waves(rates, self.gpu, self.argument)
        self.used += self.rows.heads
        return replace(rates, head_bytes_per_s=head_bytes_per_s(self.rows.heads, self.gpu))

    def gemm_types(self) -> dict[str, GemmRates]:
        """Rates of the quantised types that the GPU computes in and that were measured, their clock as the others'."""
        rates: dict[str, GemmRates] = {}
        for kind, usable in self.rows.gemm_types.items():
            if not computes_in(self.gpu, kind):
                continue
            fitted = fit_gemm_type(at_burst(usable, self.clock), self.gpu, kind, keep_shapes=self._keep_shapes())
            check_error("gemm", fitted.own.errors().median_ape, self.argument)
            self.others.setdefault("gemm", []).extend(fitted.lines())
            self.used += usable
            rates[kind] = fitted.rates
        return rates

    def _keep_shapes(self) -> Collection[Shape]:
        """Those requested, else all or the built-in models'."""
        usable, keep = self.rows.gemm, self.choices.keep_shapes
        if keep is None:
            shapes = {(row.in_features or 0, row.out_features or 0) for row in usable}
            keep = shapes if len(shapes) <= _MOST_SHAPES else builtin_shapes()
        return keep

    def attention(self) -> dict[str, AttentionRates]:
        """By kernel, the one that skips masked scores first; the errors of the profile are those of the first."""
        rates: dict[str, AttentionRates] = {}
        flash, sdpa, eager, head_dim = self.rows.flash, self.rows.sdpa, self.rows.eager, self.rows.head_dim
        if eager:
            slow = fit_eager(eager, self.gpu, head_dim=head_dim)
            rates = {"eager": self._take("attention", eager, slow)}
        if sdpa:
            masked = fit_blocked(sdpa, self.gpu, name="sdpa", skips_masked=False, head_dim=head_dim)
            rates = {"sdpa": with_blocks(self._take("attention", sdpa, masked), self._blocks("sdpa"))} | rates
        if flash:
            fused = self._flash(flash, head_dim)
            tiled = isinstance(fused.rates, FlashRates)
            taken = [*self.rows.narrow, *(row for row in flash if not is_decoding(row))] if tiled else flash
            found = self._take("attention", taken, fused)
            rates = {"flash": found if tiled else with_blocks(found, self._blocks("flash"))} | rates
        return rates

    def _blocks(self, kernel: str) -> list[Measurement]:
        """Blocks of a ring that a kernel has attended to."""
        rows = [row for row in self.rows.blocks if row.kernel == kernel]
        self.used += rows
        return rows

    def _flash(self, rows: Sequence[Measurement], head_dim: int) -> Fitted[Any]:
        """Tiles over a GPU's multiprocessors; a CPU's blocks are small, and so are those of fp32 kernels."""
        if not has_waves(self.gpu) or self.rows.dtypes != HALF:
            return fit_blocked(rows, self.gpu, name="flash", skips_masked=True, head_dim=head_dim)
        kernel, held_out = self.choices.attention_kernel, self.choices.held_out
        narrow = at_burst(self.rows.narrow, self.clock)
        burst = at_burst(rows, self.clock)
        return fit_flash(burst, self.gpu, kernel=kernel, head_dim=head_dim, held_out=held_out, narrow=narrow)

    def elementwise(self) -> ElementwiseRates:
        """As measured, as assumed, or at the datasheet's memory bandwidth."""
        usable, fused = self.rows.elementwise, self.choices.fused and not self.origin.is_hugging_face
        assumed = self.choices.elementwise
        if assumed is not None:
            self.operations["elementwise"] = _unmeasured(assumed.source, _DATASHEET_LOG_SD)
            bytes_per_s = assumed.hbm_share * self.gpu.hbm_bytes_per_s
            return ElementwiseRates.uniform(bytes_per_s, fused=fused, start_s=assumed.start_s)
        if not usable:
            self._lack("elementwise")
            return ElementwiseRates.uniform(self.gpu.hbm_bytes_per_s, fused=fused)
        model = self.origin.model
        counts = None if model is None else _kernels_of(model)
        fitted = fit_elementwise(usable, self.gpu, fused=fused, kernels=counts)
        rates: ElementwiseRates = self._take("elementwise", usable, fitted)
        self.used += self.rows.merges
        return with_merges(rates, self.rows.merges)

    def copies(self) -> CacheCopies:
        """Only the chunk is copied where cache_append was measured."""
        measured = any(row.operation == "cache_append" for row in self.rows.elementwise)
        return _IN_PLACE if measured else _NO_COPIES

    def prepare(self) -> PrepareRates:
        """Nothing where it was not measured."""
        self.used += self.rows.prepare
        return fit_prepare(self.rows.prepare) if self.rows.prepare else PrepareRates(step_s=0.0, mask_element_s=0.0)

    def links(self) -> LinkRates:
        """As measured inside a node, or from the datasheet."""
        sends: SendRates | None = self._link("send_recv", self.rows.send_recv, fit_send_recv)
        gather = self._link("all_gather", self.rows.all_gather, fit_all_gather)
        return LinkRates(
            link=self.link.name,
            bandwidth_bytes_per_s=sends.bandwidth_bytes_per_s if sends else self.link.bandwidth_bytes_per_s,
            latency_s=sends.latency_s if sends else self.link.latency_s,
            short_bytes_per_s=sends.short_bytes_per_s if sends else None,
            gather=gather,
            all_reduce=self._all_reduce(),
            sends=self.choices.sends,
            sends_over_bus=self.choices.sends,
        )

    def _all_reduce(self) -> AllReduceRates | None:
        """None where none was measured: it is two all-gathers then."""
        if not self.rows.all_reduce:
            return None
        rates: AllReduceRates = self._take("all_reduce", self.rows.all_reduce, fit_all_reduce(self.rows.all_reduce))
        return rates

    def _link(
        self,
        kind: str,
        usable: Sequence[Measurement],
        fit: Callable[[Sequence[Measurement], LinkSpec], Fitted[Any]],
    ) -> Any:
        """The rates of a kind of transfer; None without rows, or where the form fits poorly."""
        if not usable:
            return self._lack(kind)
        fitted = fit(usable, self.link)
        error = fitted.cross_validated.errors().mape
        if error <= _MOST_LINK_ERROR:
            return self._take(kind, usable, fitted)
        self.operations[kind] = _unmeasured("measured, but a link's form does not fit", _DATASHEET_LOG_SD)
        self.missing.append(
            f"{TITLES[kind].capitalize()}: the form has an error of {error:.0%}; the datasheet's figures are used."
        )
        return None

    def host(self, given: HostRates | None, rows: Sequence[Measurement]) -> HostRates:
        """As given, as measured, or DEFAULT_HOST; a CPU has no launch overhead of its own."""
        if given is None and not has_waves(self.gpu):
            self.operations["host"] = _unmeasured("none: the CPU is its own host", 0.0)
            return NO_HOST
        layers = [row for row in rows if row.operation == "host_layer"]
        if given is not None or not layers:
            self.operations["host"] = _unmeasured("set by hand, not measured", _HAND_LOG_SD)
            return given or DEFAULT_HOST
        gathers = [row for row in rows if row.operation == "host_collective"]
        messages = [row for row in rows if row.operation == "host_message"]
        self.used += [*layers, *gathers, *messages]
        rates, self.operations["host"] = fit_host(layers, gathers, messages)
        before = [row for row in rows if row.operation == "host_prepare"]
        self.used += before
        return replace(rates, prepare_s=rounded(float(np.median(column(before, "expected_s"))))) if before else rates

    def pending_share(self, rows: Sequence[Measurement]) -> float:
        """0 on a CPU, where messages occupy no multiprocessors."""
        if not has_waves(self.gpu):
            return 0.0
        self.used += [row for row in rows if row.operation in ("layer_alone", "layer_pending")]
        return fit_pending_share(rows)

    def most_ranks(self) -> int:
        """Largest number of ranks in the measurements."""
        ranks = [row.ranks or 1 for row in self.used if row.operation in ("send_recv", "all_gather", "all_reduce")]
        return max(ranks, default=1)

    def valid(self) -> ValidRange:
        """The measured ranges; hidden sizes are those of square matrices."""
        attention = [row for row in self.used if row.operation == "attention"]
        keys = column(attention, "chunk") + column(attention, "prefix")
        gemms = [row for row in self.used if row.operation == "gemm"]
        square = [row.in_features or 1 for row in gemms if row.in_features == row.out_features]
        sizes = square or [row.in_features or 1 for row in gemms]
        head_dims = [row.head_dim or 1 for row in attention]
        return ValidRange(
            context_len=(int(keys.min()), int(keys.max())),
            num_gpus=(1, self.most_ranks()),
            hidden_size=self.choices.hidden_size or (min(sizes), max(sizes)),
            head_dim=(min(head_dims), max(head_dims)),
            dtypes=self._dtypes(),
        )

    def _dtypes(self) -> tuple[str, ...]:
        """Published half-precision rows stand for fp16 and bf16; own measurements only for their dtype."""
        measured = {row.dtype for row in self.used if row.operation in ("gemm", "attention")}
        of_both = self.rows.dtypes == HALF and not self.origin.is_hugging_face
        return tuple(
            dtype for dtype in self.rows.dtypes if (of_both or dtype in measured) and dtype in dict(self.gpu.peak_flops)
        )

    def _take(self, kind: str, usable: Sequence[Measurement], fitted: Fitted[Any]) -> Any:
        """The rates of a fit; InputError where its error is too large."""
        check_error(kind, fitted.own.errors().median_ape, self.argument)
        if kind in self.found:
            self.others.setdefault(kind, []).extend(self.found[kind].lines())
        self.found[kind] = fitted
        systematic = systematic_log_sd(kind, usable, self.choices.others)
        self.operations[kind] = replace(
            fitted.operation, systematic_log_sd=None if systematic is None else rounded(systematic)
        )
        self.used += usable
        return fitted.rates

    def _lack(self, kind: str) -> None:
        self.operations[kind] = _unmeasured("datasheet, not measured", _DATASHEET_LOG_SD)
        self.missing.append(f"{TITLES[kind].capitalize()} {_WERE[kind]} not measured: the datasheet's figures.")


def _kernels_of(model: ModelSpec) -> dict[str, int]:
    """Kernels of each element-wise step of a layer of eager code, by operation."""
    layer = model.layers[0]
    steps = (*before_mixer(model, layer, fused=False), *after_mixer(model, layer, fused=False, intermediate=1.0))
    return {step.op: step.kernels for step in reversed(steps) if step.op != "copy"}  # the first norm is the input's


def _unmeasured(source: str, log_sd: float) -> OperationFit:
    return OperationFit(source=source, num_rows=0, mape=0.0, cross_validated_mape=0.0, log_sd=log_sd, seen={})
