"""fit_profile: a CalibrationProfile from measurements, and a report of the profile's errors, also on whole layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from calibrate.data import ELEMENTWISE, Measurement, Provenance
from calibrate.fit import attention, elementwise, gemm
from calibrate.fit.fit import (
    HALF,
    FitComparison,
    FitErrors,
    FitResult,
    Rates,
    column,
    dtypes_of,
    has_waves,
    log_ratio,
    root_mean_square,
    span_of,
    to_digits,
)
from calibrate.fit.links import fit_all_gather, fit_all_reduce, fit_send_recv, usable_link_rows
from kvrsim.engine import NO_HOST, PRIOR_ENGINE, HostRates
from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec, LinkSpec
from kvrsim.interp import QUARTILE_RANGE_SD
from kvrsim.io.schema import NonNegative, PositiveShare, fields_to_json, to_json
from kvrsim.kernels.attention import AttentionRates
from kvrsim.kernels.cost import CalibratedCost
from kvrsim.kernels.elementwise import CacheCopies, ElementwiseRates, after_mixer, before_mixer
from kvrsim.kernels.gemm import GEMM_TYPES, GemmRates
from kvrsim.kernels.layer import LayerCosts
from kvrsim.kernels.mixer import LayerSetting
from kvrsim.kernels.profile import CalibrationProfile, Clock, KernelRates, LinkRates, OperationFit, ValidRange
from kvrsim.model.spec import ModelSpec
from kvrsim.program import Array
from kvrsim.scenario import dtype_bytes

# A serving engine launches a layer as about a dozen kernels of 5 us each; tables of kernel times lack this time.
DEFAULT_HOST = HostRates(layer_s=60e-6, gather_piece_s=0.0, resume_s=0.0)

MAX_SPREAD = 0.10  # largest accepted median of spread_s / median_s in published tables
MAX_MEDIAN_ERROR = 0.35  # largest accepted median error of a fit; a larger one means that the form does not fit
_FORMS = ("flash", "sdpa", "eager")  # forms of attention, the form that skips masked scores first
LAYERS = "layers, sum of parts"

TITLES = {
    "gemm": "matrix products",
    "attention": "attention",
    "latent": "latent attention",
    "sparse": "sparse attention",
    "experts": "experts",
    "recurrence": "recurrences",
    "elementwise": "element-wise kernels",
    "send_recv": "messages",
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "host": "host",
}
_COLLECTIVES = ("send_recv", "all_gather", "all_reduce")
LEAST_ROWS = {"gemm": 20, "attention": 12, "elementwise": 12, "send_recv": 6, "all_gather": 8, "all_reduce": 4}
LEAST_SIZES = {"gemm": 4, "attention": 4, "elementwise": 3, "send_recv": 4, "all_gather": 4, "all_reduce": 4}
_LEAST_TYPE_ROWS = 200
_SIZE = {"gemm": "tokens", "attention": "chunk", **dict.fromkeys((*_COLLECTIVES, "elementwise"), "bytes")}
_KINDS = {
    **dict.fromkeys((*ELEMENTWISE, "cache_append", "merge"), "elementwise"),
    **dict.fromkeys(("layer_alone", "layer_pending"), "send_recv"),
    **{"head": "gemm", "block": "attention"},
}

_NO_COPIES = CacheCopies(keep=0.0, append=0.0, gather=0.0)  # flash kernels' times include appending
_IN_PLACE = CacheCopies(keep=0.0, append=0.0, gather=0.0, own=1.0)  # only the chunk is copied, as in cache_append rows
_MOST_LINK_ERROR = 0.4  # largest accepted mean error on held-out transfers; transfers over a host's bus exceed it
_DATASHEET_LOG_SD = 0.3  # uncertainty of datasheet figures that replace measurements
_HAND_LOG_SD = 0.5  # uncertainty of DEFAULT_HOST
_MOST_SHAPES = 64  # maximum number of shapes with tables if the caller names none
_WERE = {"elementwise": "were", "send_recv": "were", "all_gather": "was"}

# -- comparison with other tables of the same GPU: fields that two rows must share (first the size), and the least size
_SHAPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gemm": ("tokens", "in_features", "out_features"),
        "attention": ("chunk", "prefix", "batch", "num_attention_heads", "num_key_value_heads", "head_dim"),
    }
)
_LEAST_SIZE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """Name and description of a profile."""

    name: str
    description: str | None = None  # None: the description names the measured devices
    not_covered: str = ""  # operations that the profile does not cover; unmeasured ones are added
    provenance: Mapping[str, str] | None = None  # entries in addition to those from the rows


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementwiseAssumption:
    """Element-wise kernels without measurements: all have the same share of the memory's bandwidth."""

    hbm_share: PositiveShare  # share of the datasheet's bytes per second
    start_s: NonNegative  # start time of each kernel
    source: str  # author of the assumption


@dataclass(frozen=True, kw_only=True, slots=True)
class FitChoices:
    """Options of fit_profile; the defaults suit rows that a user measured."""

    # One of calibrate.fit.attention.KERNELS; None: chosen by the rows' kernels, then by the best fit. With "eager",
    # norm, rotary embedding and activation are several kernels each.
    attention_kernel: str | None = None
    # Shapes of products with tables; None: all measured shapes, or those of built-in models if there are many.
    keep_shapes: Collection[gemm.Shape] | None = None
    others: Sequence[Measurement] = ()  # other tables of the same GPU: for the clock and for the systematic error
    hidden_size: tuple[int, int] | None = None  # hidden sizes for which the profile is valid; None: as measured
    elementwise: ElementwiseAssumption | None = None  # assumption that replaces measured element-wise kernels


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FitReport:
    """The profile, and the errors of each operation that was measured."""

    profile: CalibrationProfile
    lines: Mapping[str, Sequence[FitErrors]]  # errors by operation
    notes: tuple[str, ...]  # notes on omitted rows, and on values from other sources
    layers: FitComparison | None = None  # whole layers, predicted as the sum of their parts; None: none were measured

    @property
    def layers_note(self) -> tuple[str, ...]:
        """Note on the error of whole layers, which no fit used."""
        if self.layers is None:
            return ()
        errors = self.layers.errors()
        return (
            f"{errors.num_rows} whole layers, which were not fitted, by the sum of their parts: mean error"
            f" {errors.mape:.1%}, median {errors.median_ape:.1%}, bias {errors.bias:+.1%}",
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values, without the rates: the profile has them."""
        profile = self.profile
        operations = {}
        for kind, fit in profile.operations.items():
            operations[kind] = to_json(fit) | {"errors": to_json(self.lines.get(kind, ()))}
        return {
            "profile": profile.name,
            **fields_to_json(profile, "gpu", "description", "not_covered"),
            "operations": operations,
            "layers": to_json(self.layers.errors()) if self.layers is not None else None,
            "notes": [*self.layers_note, *self.notes],
            "provenance": dict(profile.provenance),
        }


def fit_profile(
    rows: Sequence[Measurement],
    label: Label,
    *,
    gpu: GpuSpec,
    link: LinkSpec,
    choices: FitChoices | None = None,
    argument: str = "compute",
    origins: Sequence[Mapping[str, Any]] = (),
) -> tuple[CalibrationProfile, FitReport]:
    """Fit a profile of one GPU and its link; gemm and attention are required, the rest defaults to the datasheet.

    Host costs are those of host rows, or else DEFAULT_HOST, which predictions replace by an engine's costs; a CPU has
    no separate host. `origins`: results of read_origin for the files of the rows. If one of them names a Hugging Face
    model, nothing is fused, times of attention contain everything between the cache and the output projection, and
    whole layers are compared with predictions.

    Raises InputError naming `argument` for rows that are too few, vary too much, are of several devices or kernels, or
    that no fit reproduces.
    """
    choice = choices or FitChoices()
    origin = Provenance.of(origins, argument)
    fit = _OperationFits(rows=rows, gpu=gpu, link=link, choices=choice, argument=argument, origin=origin)
    step_s, mask_element_s = elementwise.fit_prepare(fit.use("prepare"))
    copies = _NO_COPIES
    if any(row.operation == "cache_append" for row in fit.usable["elementwise"]):
        copies = _IN_PLACE
    kernels = KernelRates(
        gemm=fit.gemm_rates(),
        attention=fit.attention_rates(),
        elementwise=replace(fit.elementwise_rates(), mask_element_s=mask_element_s),
        copies=copies,
        clock=fit.clock,
        gemm_types=fit.gemm_type_rates(),
        head_on_all_tokens=False,
        whole_attention=origin.is_hugging_face,
    )
    links = fit.links()
    host_rates = replace(fit.host(), step_s=step_s)
    most_ranks = max((row.ranks or 1 for row in fit.used if row.operation in _COLLECTIVES), default=1)
    provenance = provenance_of(fit.used) | origin.provenance()
    if fit.fitted_clock is not None:
        provenance["clock"] = fit.fitted_clock.describe()
    provenance |= label.provenance or {}
    profile = CalibrationProfile(
        name=label.name,
        gpu=gpu.name,
        description=label.description or fit.description(),
        not_covered=fit.not_covered(label),
        kernels=kernels,
        host=host_rates,
        links=links,
        valid=fit.valid(most_ranks),
        operations={kind: fit.operations[kind] for kind in TITLES if kind in fit.operations},
        residual=None,
        provenance=provenance,
        run_to_run_log_sd=_run_to_run_log_sd(rows),
        cluster=origin.cluster(label.name, gpu, link, most_ranks),
        engine=PRIOR_ENGINE if host_rates == DEFAULT_HOST else None,
    )
    layers = None
    if origin.model is not None:
        layers = compare_layers(profile, origin.model, rows)
    notes = (*_notes_on_unused(rows, fit.used, fit.dtypes), *fit.missing)
    return profile, FitReport(profile=profile, lines=fit.lines, notes=notes, layers=layers)


def _run_to_run_log_sd(rows: Sequence[Measurement]) -> float | None:
    """Run-to-run variation of whole layers, not averaged over layers: drift affects all layers of a prefill alike."""
    spreads = [row.spread_s / row.median_s for row in rows if row.operation == "layer" and row.spread_s is not None]
    if not spreads:
        return None
    return to_digits(float(np.median(spreads)) / QUARTILE_RANGE_SD)


def provenance_of(rows: Sequence[Measurement]) -> dict[str, str]:
    """Provenance of measured rows."""
    entries = {
        "source": {row.source for row in rows},
        "devices": {row.device for row in rows},
        "attention kernels": {row.kernel for row in rows if row.operation == "attention"},
        "dtypes": {row.dtype for row in rows if row.dtype is not None},
    }
    return {name: "; ".join(sorted(values)) for name, values in entries.items() if values}


def check_rows(
    kind: str, usable: Sequence[Measurement], argument: str, what: str, max_spread: float = MAX_SPREAD
) -> None:
    """Raise InputError where the rows of a kind are too few, vary too much or mix devices; `what`: the rows needed."""
    sizes = {getattr(row, _SIZE[kind]) for row in usable}
    if len(usable) < LEAST_ROWS[kind] or len(sizes) < LEAST_SIZES[kind]:
        got = f"{len(usable)} {kind} rows of {len(sizes)} sizes that can be used"
        raise InputError(argument, got, f"at least {LEAST_ROWS[kind]} of at least {LEAST_SIZES[kind]} sizes: {what}")
    spreads = [row.spread_s / row.median_s for row in usable if row.spread_s is not None]
    if spreads and np.median(spreads) > max_spread:
        got = f"{kind} rows with a median spread of {np.median(spreads):.0%}"
        raise InputError(argument, got, f"repeatable measurements: at most {max_spread:.0%} of their medians")
    unique = {"gemm": {"device": "gpu"}, "attention": {"device": "gpu", "kernel": "kernel"}}
    for name, key in unique.get(kind, {}).items():
        values = sorted({getattr(row, name) for row in usable})
        if len(values) > 1:
            accepted = f"{kind} rows of one {name}; a source may end in a filter, ?{key}=TEXT"
            raise InputError(argument, "; ".join(values), accepted)


def _notes_on_unused(
    rows: Sequence[Measurement], inputs: Iterable[Measurement], dtypes: Sequence[str]
) -> tuple[str, ...]:
    """Number of rows of each kind that were not used, and possible reasons, as text."""
    in_fits = set(map(id, inputs))
    unused = Counter(_KINDS.get(row.operation, row.operation) for row in rows if id(row) not in in_fits)
    types = " or ".join(dtypes)
    reasons = {
        "attention": f"not {types}, another head_dim, more than one sequence, or decoding",
        "elementwise": f"not {types}",
        "gemm": f"not {types}, fewer than {gemm.STEP} tokens, or of a narrow matrix",
    } | dict.fromkeys(_COLLECTIVES, "between nodes, slower than another kernel, or far from the form")
    return tuple(f"{unused[kind]} {kind} rows were not fitted: {why}" for kind, why in reasons.items() if unused[kind])


# -- the fits of all kinds of operations, one after another


@dataclass(kw_only=True)
class _OperationFits:
    """The fits of one profile, and the rows that they used."""

    rows: Sequence[Measurement]
    gpu: GpuSpec
    link: LinkSpec
    choices: FitChoices
    argument: str
    origin: Provenance
    lines: dict[str, list[FitErrors]] = field(default_factory=dict)  # errors of all fits by kind of operation
    operations: dict[str, OperationFit] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)  # notes on operations without measurements
    used: list[Measurement] = field(default_factory=list)

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes of the fitted rows: half precision where it was measured, else fp32."""
        return dtypes_of(row for row in self.rows if row.operation in ("gemm", "attention"))

    @cached_property
    def head_dim(self) -> int:
        """Width of the fitted attention heads: 128 if enough rows have it, else the most frequent one."""
        if len(attention.usable_attention(self.rows, attention.HEAD_DIM, self.dtypes)) >= LEAST_ROWS["attention"]:
            return attention.HEAD_DIM
        head_dims = [row.head_dim for row in self.rows if row.operation == "attention" and row.head_dim is not None]
        return max(sorted(set(head_dims)), key=head_dims.count, default=attention.HEAD_DIM)

    @cached_property
    def usable(self) -> dict[str, list[Measurement]]:
        """The rows of each fit; flash, sdpa and eager are forms of attention.

        Rows of layers that were measured on this machine may be of narrow products, and may have any spread, because a
        spread only widens the profile's intervals. Raises InputError naming `argument` for bad rows, or if gemm or
        attention is missing.
        """
        is_own = self.origin.is_hugging_face
        types = " or ".join(self.dtypes)
        calls = attention.usable_attention(self.rows, self.head_dim, self.dtypes)
        by_form = {
            "gemm": gemm.usable_gemm(self.rows, self.dtypes, narrow=is_own),
            **{form: [row for row in calls if self.form_of(row) == form] for form in _FORMS},
            "elementwise": elementwise.usable_elementwise(self.rows, self.dtypes),
            **{operation: usable_link_rows(self.rows, operation) for operation in _COLLECTIVES},
        }
        if is_own and len(by_form["all_reduce"]) < LEAST_ROWS["all_reduce"]:
            by_form["all_reduce"] = []
        needed = {
            "gemm": f"products in {types} of at least {gemm.STEP} tokens",
            "attention": f"calls of one sequence in {types}, head_dim {self.head_dim}",
            "elementwise": f"kernels in {types}",
        }
        max_spread = MAX_SPREAD
        if is_own:
            max_spread = float("inf")
        measured_forms = [form for form in _FORMS if by_form[form]]
        required = ("gemm", *(measured_forms or _FORMS)[:1])
        for name, rows in by_form.items():
            kind = name
            if name in _FORMS:
                kind = "attention"
            if rows or name in required:
                check_rows(kind, rows, self.argument, needed.get(kind, "inside one node"), max_spread)
        return by_form

    @cached_property
    def fitted_clock(self) -> gemm.ClockFit | None:
        """The GPU's clock under load; None if the rows do not determine it."""
        return gemm.fit_clock([*self.usable["gemm"], *self.choices.others], self.gpu) if has_waves(self.gpu) else None

    @property
    def clock(self) -> Clock | None:
        """Clock of products and attention."""
        if self.fitted_clock is None:
            return None
        return self.fitted_clock.clock

    def form_of(self, row: Measurement) -> str:
        """Form of an attention row: eager, sdpa or flash.

        If "eager" is the chosen kernel, all rows are eager. If no kernel is chosen, a row is eager if the name of its
        kernel contains "eager"; otherwise the name must be "eager". Rows of the kernel sdpa are sdpa. All others are
        flash.
        """
        kernel = self.choices.attention_kernel
        if kernel == "eager" or row.kernel == "eager" or (kernel is None and "eager" in row.kernel):
            return "eager"
        if row.kernel == "sdpa":
            return "sdpa"
        return "flash"

    def use(self, *operations: str, kernel: str | None = None) -> list[Measurement]:
        """Mark rows of these operations as used, and return them; their dtype is a fitted one or unknown."""
        rows = []
        for row in self.rows:
            is_usable = row.operation in operations and row.dtype in (None, *self.dtypes)
            if is_usable and kernel in (None, row.kernel):
                rows.append(row)
        self.used += rows
        return rows

    def description(self) -> str:
        """Which devices, and which model's layers, were measured."""
        devices = sorted({row.device for row in self.used if row.operation in ("gemm", "attention")})
        text = f"fitted to measurements of {', '.join(devices)}"
        if self.origin.model is not None:
            text += f", layers of {self.origin.model.name} by Hugging Face transformers"
        return f"{text}."

    def not_covered(self, label: Label) -> str:
        """What the profile does not cover, in sentences."""
        sentences = []
        if label.not_covered:
            sentences.append(label.not_covered)
        if self.origin.is_hugging_face:
            sentences.append("Batches above 1, windows and mixtures of experts were not measured.")
        return " ".join([*sentences, *self.missing]) or "what was not measured."

    def record(self, kind: str, usable: Sequence[Measurement], fitted: FitResult[Rates]) -> Rates:
        """Record a fit and return its rates. A poor fit gives a note for rows of this machine, else an InputError."""
        self._check_error(kind, fitted)
        self.lines[kind] = [*fitted.lines(), *self.lines.get(kind, ())]
        systematic = systematic_log_sd(kind, usable, self.choices.others)
        if systematic is not None:
            systematic = to_digits(systematic)
        self.operations[kind] = replace(fitted.operation, systematic_log_sd=systematic)
        self.used += usable
        return fitted.rates

    def _check_error(self, kind: str, fitted: FitResult[Any]) -> None:
        median_ape = fitted.own.errors().median_ape
        if median_ape <= MAX_MEDIAN_ERROR:
            return
        if self.origin.is_hugging_face:
            what = TITLES[kind].capitalize()
            self.missing.append(f"{what}: the fit is off by {median_ape:.0%} (median), and intervals are as wide.")
        else:
            got = f"{kind} rows on which the best fit has an error of {median_ape:.0%} (median)"
            raise InputError(self.argument, got, f"measurements that a fit reproduces within {MAX_MEDIAN_ERROR:.0%}")

    def mark_missing(self, kind: str) -> None:
        self.operations[kind] = _assumption("datasheet, not measured", _DATASHEET_LOG_SD)
        self.missing.append(f"{TITLES[kind].capitalize()} {_WERE[kind]} not measured: the datasheet's figures.")

    def gemm_rates(self) -> GemmRates:
        """Rates of products, with tables of the requested shapes."""
        usable = self.usable["gemm"]
        fitted = gemm.fit_gemm(gemm.at_burst(usable, self.clock), self.gpu, keep_shapes=self._keep_shapes())
        rates: GemmRates = self.record("gemm", usable, fitted)
        gemm.check_full_waves(rates, self.gpu, self.argument)
        return replace(rates, head_bytes_per_s=gemm.head_bytes_per_s(self.use("head"), self.gpu))

    def gemm_type_rates(self) -> dict[str, GemmRates]:
        """Rates of the measured quantised types that the GPU can compute, at the clock of the other products."""
        rates: dict[str, GemmRates] = {}
        for kind in GEMM_TYPES:
            usable = gemm.usable_gemm(self.rows, (kind,))
            sizes = {row.tokens for row in usable}
            is_enough = len(usable) >= _LEAST_TYPE_ROWS and len(sizes) >= LEAST_SIZES["gemm"]
            if not is_enough or not gemm.computes_in(self.gpu, kind):
                continue
            self.used += usable
            burst = gemm.at_burst(usable, self.clock)
            fitted = gemm.fit_gemm_type(burst, self.gpu, kind, keep_shapes=self._keep_shapes())
            self._check_error("gemm", fitted)
            self.lines["gemm"] += fitted.lines()
            rates[kind] = fitted.rates
        return rates

    def _keep_shapes(self) -> Collection[gemm.Shape]:
        """The requested shapes; by default all shapes, or those of built-in models if there are many."""
        if self.choices.keep_shapes is not None:
            return self.choices.keep_shapes
        shapes = {(row.in_features or 0, row.out_features or 0) for row in self.usable["gemm"]}
        if len(shapes) > _MOST_SHAPES:
            return gemm.builtin_shapes()
        return shapes

    def attention_rates(self) -> dict[str, AttentionRates]:
        """Rates by kernel; first the kernel that skips masked scores: the profile states its errors."""
        by_form: dict[str, AttentionRates] = {}
        # The lines of a report and the stated errors are those of the form that is fitted last.
        for form in reversed(_FORMS):
            rows = self.usable[form]
            if not rows:
                continue
            if form == "eager":
                by_form[form] = self.record("attention", rows, attention.fit_eager(rows, self.gpu))
            elif form == "flash" and has_waves(self.gpu) and self.dtypes == HALF:
                by_form[form] = self._flash_rates(rows)
            else:  # on a CPU and in fp32, flash has small blocks instead of tiles on multiprocessors
                blocked = attention.fit_blocked(rows, self.gpu, name=form, skips_masked=form == "flash")
                rates = self.record("attention", rows, blocked)
                by_form[form] = attention.with_blocks(rates, self.use("block", kernel=form))
        return {form: by_form[form] for form in _FORMS if form in by_form}

    def _flash_rates(self, rows: Sequence[Measurement]) -> AttentionRates:
        """Rates of tiles on a GPU's multiprocessors."""
        narrow = self._narrow()
        fused = attention.fit_flash(
            gemm.at_burst(rows, self.clock),
            self.gpu,
            kernel=self.choices.attention_kernel,
            narrow=gemm.at_burst(narrow, self.clock),
        )
        prefills = [row for row in rows if not attention.is_decoding(row)]
        return self.record("attention", [*narrow, *prefills], fused)

    def _narrow(self) -> list[Measurement]:
        """Flash calls with narrow heads and at least PROMISED_CHUNK queries; empty if there are too few."""
        if self.head_dim != attention.HEAD_DIM:
            return []
        calls = attention.usable_attention(self.rows, attention.NARROW_HEAD_DIM, self.dtypes)
        long = [row for row in calls if self.form_of(row) == "flash" and (row.chunk or 0) >= attention.PROMISED_CHUNK]
        if len(long) < LEAST_ROWS["attention"]:
            return []
        return long

    def elementwise_rates(self) -> ElementwiseRates:
        """Rates as measured, as assumed, or at the datasheet's memory bandwidth."""
        usable = self.usable["elementwise"]
        fused = self.choices.attention_kernel != "eager" and not self.origin.is_hugging_face
        assumed = self.choices.elementwise
        hbm_bytes_per_s = self.gpu.hbm_bytes_per_s
        if assumed is not None:
            self.operations["elementwise"] = _assumption(assumed.source, _DATASHEET_LOG_SD)
            return ElementwiseRates.uniform(assumed.hbm_share * hbm_bytes_per_s, fused=fused, start_s=assumed.start_s)
        if not usable:
            self.mark_missing("elementwise")
            return ElementwiseRates.uniform(hbm_bytes_per_s, fused=fused)
        counts = None
        if self.origin.model is not None:
            counts = _kernels_of(self.origin.model)
        fitted = elementwise.fit_elementwise(usable, self.gpu, fused=fused, kernels=counts)
        return elementwise.with_merges(self.record("elementwise", usable, fitted), self.use("merge"))

    def links(self) -> LinkRates:
        """Rates measured inside a node, or the datasheet's; on a CPU messages occupy no multiprocessors."""
        sends = self._link("send_recv", fit_send_recv)
        gather = self._link("all_gather", fit_all_gather)
        all_reduce = None  # without measurements an all-reduce is two all-gathers
        reduces = self.usable["all_reduce"]
        if reduces:
            all_reduce = self.record("all_reduce", reduces, fit_all_reduce(reduces))
        pending_share = 0.0
        pending = self.use("layer_alone", "layer_pending")
        if has_waves(self.gpu):
            pending_share = elementwise.fit_pending_share(pending)
        datasheet = LinkRates(
            link=self.link.name,
            bandwidth_bytes_per_s=self.link.bandwidth_bytes_per_s,
            latency_s=self.link.latency_s,
            short_bytes_per_s=None,
            gather=gather,
            all_reduce=all_reduce,
            sends="overlap",
            sends_over_bus="overlap",
            pending_share=pending_share,
        )
        if sends is None:
            return datasheet
        return replace(
            datasheet,
            bandwidth_bytes_per_s=sends.bandwidth_bytes_per_s,
            latency_s=sends.latency_s,
            short_bytes_per_s=sends.short_bytes_per_s,
        )

    def _link(self, kind: str, fit: Callable[[Sequence[Measurement], LinkSpec], FitResult[Rates]]) -> Rates | None:
        """The rates of a kind of transfer; None without rows or with a poor fit."""
        usable = self.usable[kind]
        if not usable:
            self.mark_missing(kind)
            return None
        fitted = fit(usable, self.link)
        error = fitted.cross_validated.errors().mape
        if error <= _MOST_LINK_ERROR:
            return self.record(kind, usable, fitted)
        self.operations[kind] = _assumption("measured, but a link's form does not fit", _DATASHEET_LOG_SD)
        self.missing.append(
            f"{TITLES[kind].capitalize()}: the form has an error of {error:.0%}; the datasheet's figures are used."
        )
        return None

    def host(self) -> HostRates:
        """Host costs as measured, or DEFAULT_HOST; a CPU has no launch overhead."""
        if not has_waves(self.gpu):
            self.operations["host"] = _assumption("none: the CPU is its own host", 0.0)
            return NO_HOST
        layers = self.use("host_layer")
        gathers = self.use("host_collective")
        messages = self.use("host_message")
        before = self.use("host_prepare")
        if not layers:
            self.operations["host"] = _assumption("set by hand, not measured", _HAND_LOG_SD)
            return DEFAULT_HOST
        rates, self.operations["host"] = elementwise.fit_host(layers, gathers, messages)
        if before:
            rates = replace(rates, prepare_s=to_digits(float(np.median(column(before, "expected_s")))))
        return rates

    def valid(self, most_ranks: int) -> ValidRange:
        """The measured ranges; hidden sizes are those of square matrices.

        Published half-precision rows count for fp16 and bf16; own measurements only for their dtype.
        """
        attention = [row for row in self.used if row.operation == "attention"]
        gemms = [row for row in self.used if row.operation == "gemm"]
        square = [row for row in gemms if row.in_features == row.out_features]
        measured = {row.dtype for row in (*attention, *gemms)}
        if self.dtypes == HALF and not self.origin.is_hugging_face:
            measured |= set(HALF)
        computed = self.gpu.peak_flops
        return ValidRange(
            context_len=_whole_span(column(attention, "chunk") + column(attention, "prefix")),
            num_gpus=(1, most_ranks),
            hidden_size=self.choices.hidden_size or _whole_span(column(square or gemms, "in_features")),
            head_dim=_whole_span(column(attention, "head_dim")),
            dtypes=tuple(dtype for dtype in self.dtypes if dtype in measured and dtype in computed),
        )


def _whole_span(values: Array) -> tuple[int, int]:
    low, high = span_of([values])
    return int(low), int(high)


def _kernels_of(model: ModelSpec) -> dict[str, int]:
    """How many kernels eager code runs for each element-wise step of a layer, by operation."""
    layer = model.layers[0]
    steps = (*before_mixer(model, layer, fused=False), *after_mixer(model, layer, fused=False, intermediate=1.0))
    return {step.op: step.kernels for step in reversed(steps) if step.op != "copy"}  # the first norm replaces others


def _assumption(source: str, log_sd: float) -> OperationFit:
    return OperationFit(source=source, num_rows=0, mape=0.0, cross_validated_mape=0.0, log_sd=log_sd, seen={})


def systematic_log_sd(kind: str, rows: Sequence[Measurement], others: Sequence[Measurement]) -> float | None:
    """Root mean square, over the other sources, of the median of log(their seconds / seconds of `rows`).

    Only half-precision rows of at least 1024 tokens count; None if no source has enough of the same shapes.
    """
    if kind not in _SHAPES:
        return None
    fitted = _by_shape(kind, rows)
    medians: list[float] = []
    for source in sorted({row.source for row in others if row.operation == kind}):
        table = _by_shape(kind, [row for row in others if row.source == source])
        medians += log_ratio(fitted, table)
    return root_mean_square(medians)


def _by_shape(kind: str, rows: Sequence[Measurement]) -> dict[Hashable, float]:
    size, *_ = _SHAPES[kind]
    shape_of = attrgetter(*_SHAPES[kind])
    seconds: dict[Hashable, float] = {}
    for row in rows:
        if row.operation == kind and row.dtype in HALF and (getattr(row, size) or 0) >= _LEAST_SIZE:
            seconds[shape_of(row)] = row.expected_s
    return seconds


# -- whole layers, predicted as the sum of their parts


def layer_costs(profile: CalibrationProfile, model: ModelSpec, kernel: str, dtype: str) -> LayerCosts:
    """Costs of the model's first kind of layer by a profile, for one sequence on one device."""
    rates = profile.kernels
    cost = CalibratedCost(rates=rates, traits=rates.traits(kernel, 1, dtype_bytes(dtype)))
    return LayerCosts(LayerSetting(model=model, cost=cost, host=profile.host), model.layer_kinds[0])


def compare_layers(profile: CalibrationProfile, model: ModelSpec, rows: Sequence[Measurement]) -> FitComparison | None:
    """Compare `layer` rows of one sequence in a dtype and kernel of the profile; None if there are no such rows.

    A row with an unknown kernel belongs to the profile's attention kernel, if the profile has only one.
    """
    layers = []
    predicted_s = []
    for row in rows:
        kernel = _kernel(profile, row)
        if kernel is not None:
            layers.append(row)
            predicted_s.append(_layer_s(profile, model, row, kernel))
    if not layers:
        return None
    return FitComparison(label=LAYERS, measured_s=column(layers, "expected_s"), predicted_s=np.array(predicted_s))


def _kernel(profile: CalibrationProfile, row: Measurement) -> str | None:
    if row.operation != "layer" or row.batch != 1 or row.dtype not in profile.valid.dtypes:
        return None
    kernels = profile.attention_kernels
    if row.kernel in kernels:
        return row.kernel
    if len(kernels) == 1:
        return kernels[0]
    return None


def _layer_s(profile: CalibrationProfile, model: ModelSpec, row: Measurement, kernel: str) -> float:
    costs = layer_costs(profile, model, kernel, row.dtype or "")
    chunk = np.array([float(row.chunk or 0)])
    prefix = np.array([float(row.prefix or 0)])
    mixer_s = costs.mixer.append_s(chunk, prefix) + costs.mixer.attention_s(chunk, prefix)
    return float((costs.qkv_s(chunk) + mixer_s + costs.output_mlp_s(chunk))[0])
