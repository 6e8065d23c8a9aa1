"""fit_profile: a CalibrationProfile from measurements, and a report of how well they agree.

FitChoices and Label: what a fit is told besides the rows, and what its profile says of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from calibrate.data.measurement import Measurement
from calibrate.data.provenance import Provenance
from calibrate.fit.attention import HeldOut, fit_blocked, fit_eager, fit_flash
from calibrate.fit.elementwise import fit_elementwise
from calibrate.fit.gemm import fit_gemm, head_bytes_per_s
from calibrate.fit.gemm_rows import Shape, builtin_shapes
from calibrate.fit.host import PrepareRates, fit_host, fit_pending_share, fit_prepare
from calibrate.fit.layers import compare_layers
from calibrate.fit.links import SendRates, fit_all_gather, fit_send_recv
from calibrate.fit.report import TITLES, FitReport
from calibrate.fit.screening import FilteredRows, check_error, notes_on
from calibrate.fit.solver import HALF, Errors, Fitted, column, has_waves, rounded
from kvrsim.cost.traffic import after_attention, before_attention
from kvrsim.hardware.gpu import GpuSpec
from kvrsim.hardware.links import LinkSpec
from kvrsim.model.spec import ModelSpec
from kvrsim.profile.profile import (
    CacheCopies,
    CalibrationProfile,
    HostRates,
    KernelRates,
    LinkRates,
    OperationFit,
    SendStyle,
    ValidRange,
)
from kvrsim.profile.rates.attention import AttentionRates
from kvrsim.profile.rates.elementwise import ElementwiseRates
from kvrsim.profile.rates.gemm import GemmRates

__all__ = ["DEFAULT_HOST", "FitChoices", "Label", "fit_profile"]

# A serving engine launches a layer in about a dozen kernels of 5 us; no table of kernel times says it.
DEFAULT_HOST = HostRates(layer_s=60e-6, gather_piece_s=0.0, resume_s=0.0)

_NO_COPIES = CacheCopies(keep=0.0, append=0.0, gather=0.0)  # appending is part of the flash kernels' times
_IN_PLACE = CacheCopies(keep=0.0, append=0.0, gather=0.0, own=1.0)  # as cache_append rows have been measured
_NO_HOST = HostRates(layer_s=0.0, gather_piece_s=0.0, resume_s=0.0)
_MOST_LINK_ERROR = 0.4  # mean, of transfers left out of the fit: GPUs that share a host's bus follow no ring
_DATASHEET_LOG_SD = 0.3  # what one does not measure may well take a third longer
_HAND_LOG_SD = 0.5
_QUARTILES = 1.349  # standard deviations between a normal distribution's quartiles
_MOST_SHAPES = 64  # that are kept as tables where the caller names none


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
    """A profile of one GPU and its link; gemm and attention are needed, the rest is the datasheet's without rows.

    `host` None: what host_layer and host_collective rows say, or else DEFAULT_HOST; a CPU is its own host.
    `origins`: what read_origin has found in the rows' files. Where one has a Hugging Face model, nothing is fused,
    attention's times hold all between the cache and the output projection, and whole layers are compared.

    Raises InputError naming `argument` for rows that are too few, unsteady, of several devices or kernels, or far
    from any fit.
    """
    chosen, origin = choices or FitChoices(), Provenance.of(origins, argument)
    filtered = FilteredRows.of(
        rows,
        head_dim=chosen.head_dim,
        kernel=chosen.attention_kernel,
        argument=argument,
        own=origin.is_hugging_face,
    )
    fit = _Fit(rows=filtered, gpu=gpu, link=link, choices=chosen, argument=argument, origin=origin)
    prepare = fit.prepare()
    kernels = KernelRates(
        gemm=fit.gemm(),
        attention=fit.attention(),
        elementwise=replace(fit.elementwise(), mask_element_s=prepare.mask_element_s),
        copies=fit.copies(),
        head_on_all_tokens=False,
        whole_attention=origin.is_hugging_face,
    )
    links = replace(fit.links(), pending_share=fit.pending_share(rows))
    host_rates = replace(fit.host(host, rows), request_s=prepare.request_s)
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
        operations={kind: fit.operations[kind] for kind in TITLES},
        residual=None,
        provenance=provenance_of(fit.used) | origin.provenance() | dict(label.provenance or {}),
        run_to_run_log_sd=_run_to_run_log_sd(rows),
        cluster=origin.cluster(label.name, gpu, link, fit.most_ranks()),
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
    """How much whole layers differ from time to time: what drifts does so for all of a prefill's layers alike."""
    spreads = [row.spread_s / row.median_s for row in rows if row.operation == "layer" and row.spread_s is not None]
    return rounded(float(np.median(spreads)) / _QUARTILES) if spreads else None


def _model_of(origin: Provenance) -> str:
    if not origin.is_hugging_face:
        return ""
    return f", layers of {origin.data.text('model_name', 'a model')} by Hugging Face transformers"


def _beyond(origin: Provenance) -> str:
    return "Batches above 1, windows and mixtures of experts were not measured." if origin.is_hugging_face else ""


class _Fit:
    """The fits of all operations, one after another, and what they have used."""

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
        self.found: dict[str, Fitted[Any]] = {}  # by kind of operation
        self.others: dict[str, list[Errors]] = {}  # by kind of operation, of what `found` has no room for
        self.operations: dict[str, OperationFit] = {}
        self.missing: list[str] = []  # sentences about what was not measured
        self.used: list[Measurement] = []

    def gemm(self) -> GemmRates:
        """Of the shapes asked for, tables as well."""
        usable, keep = self.rows.gemm, self.choices.keep_shapes
        if keep is None:
            shapes = {(row.in_features or 0, row.out_features or 0) for row in usable}
            keep = shapes if len(shapes) <= _MOST_SHAPES else builtin_shapes()
        fitted = fit_gemm(usable, self.gpu, keep_shapes=keep, narrow=self.origin.is_hugging_face)
        rates: GemmRates = self._take("gemm", usable, fitted)
        self.used += self.rows.heads
        return replace(rates, head_bytes_per_s=head_bytes_per_s(self.rows.heads, self.gpu))

    def attention(self) -> dict[str, AttentionRates]:
        """By kernel, the one that skips what is masked first; the profile's errors are those of the first."""
        rates: dict[str, AttentionRates] = {}
        flash, sdpa, eager, head_dim = self.rows.flash, self.rows.sdpa, self.rows.eager, self.rows.head_dim
        if eager:
            slow = fit_eager(eager, self.gpu, head_dim=head_dim)
            rates = {"eager": self._take("attention", eager, slow)}
        if sdpa:
            masked = fit_blocked(sdpa, self.gpu, name="sdpa", skips_masked=False, head_dim=head_dim)
            rates = {"sdpa": self._take("attention", sdpa, masked)} | rates
        if flash:
            rates = {"flash": self._take("attention", flash, self._flash(flash, head_dim))} | rates
        return rates

    def _flash(self, rows: Sequence[Measurement], head_dim: int) -> Fitted[Any]:
        """Tiles over a GPU's multiprocessors; a CPU's blocks are small, and so are those of fp32 kernels."""
        if not has_waves(self.gpu) or self.rows.dtypes != HALF:
            return fit_blocked(rows, self.gpu, name="flash", skips_masked=True, head_dim=head_dim)
        kernel, held_out = self.choices.attention_kernel, self.choices.held_out
        return fit_flash(rows, self.gpu, kernel=kernel, head_dim=head_dim, held_out=held_out)

    def elementwise(self) -> ElementwiseRates:
        """As measured, or at the datasheet's rate of memory."""
        usable, fused = self.rows.elementwise, self.choices.fused and not self.origin.is_hugging_face
        if not usable:
            self._lack("elementwise")
            return ElementwiseRates.uniform(self.gpu.hbm_bytes_per_s, fused=fused)
        model = self.origin.model
        counts = None if model is None else _kernels_of(model)
        fitted = fit_elementwise(usable, self.gpu, fused=fused, kernels=counts)
        rates: ElementwiseRates = self._take("elementwise", usable, fitted)
        return rates

    def copies(self) -> CacheCopies:
        """Of the chunk alone, where that was measured."""
        measured = any(row.operation == "cache_append" for row in self.rows.elementwise)
        return _IN_PLACE if measured else _NO_COPIES

    def prepare(self) -> PrepareRates:
        """Nothing where it was not measured."""
        self.used += self.rows.prepare
        return fit_prepare(self.rows.prepare) if self.rows.prepare else PrepareRates(request_s=0.0, mask_element_s=0.0)

    def links(self) -> LinkRates:
        """As measured inside a node, or as the datasheet has it."""
        sends: SendRates | None = self._link("send_recv", self.rows.send_recv, fit_send_recv)
        gather = self._link("all_gather", self.rows.all_gather, fit_all_gather)
        return LinkRates(
            link=self.link.name,
            bandwidth_bytes_per_s=sends.bandwidth_bytes_per_s if sends else self.link.bandwidth_bytes_per_s,
            latency_s=sends.latency_s if sends else self.link.latency_s,
            short_bytes_per_s=sends.short_bytes_per_s if sends else None,
            gather=gather,
            sends=self.choices.sends,
            sends_over_bus=self.choices.sends,
        )

    def _link(
        self,
        kind: str,
        usable: Sequence[Measurement],
        fit: Callable[[Sequence[Measurement], LinkSpec], Fitted[Any]],
    ) -> Any:
        """The rates of a kind of transfer; None without rows, or where the form is far from them."""
        if not usable:
            return self._lack(kind)
        fitted = fit(usable, self.link)
        error = fitted.crossed.errors().mape
        if error <= _MOST_LINK_ERROR:
            return self._take(kind, usable, fitted)
        self.operations[kind] = _unmeasured("measured, but not as a link has it", _DATASHEET_LOG_SD)
        self.missing.append(f"{TITLES[kind].capitalize()}: the form is off by {error:.0%}: the datasheet's figures.")
        return None

    def host(self, given: HostRates | None, rows: Sequence[Measurement]) -> HostRates:
        """What was given, or measured, or else by hand; a CPU computes when it issues."""
        if given is None and not has_waves(self.gpu):
            self.operations["host"] = _unmeasured("none: the processor is its own host", 0.0)
            return _NO_HOST
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
        """Nothing on a CPU, whose messages take no multiprocessors."""
        if not has_waves(self.gpu):
            return 0.0
        self.used += [row for row in rows if row.operation in ("layer_alone", "layer_pending")]
        return fit_pending_share(rows)

    def most_ranks(self) -> int:
        """That took part in what was measured."""
        ranks = [row.ranks or 1 for row in self.used if row.operation in ("send_recv", "all_gather")]
        return max(ranks, default=1)

    def valid(self) -> ValidRange:
        """What the calls have covered; hidden sizes are those of square matrices."""
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
        """Others' half precision stands for both; own measurements for what they are of."""
        measured = {row.dtype for row in self.used if row.operation in ("gemm", "attention")}
        of_both = self.rows.dtypes == HALF and not self.origin.is_hugging_face
        return tuple(
            dtype for dtype in self.rows.dtypes if (of_both or dtype in measured) and dtype in dict(self.gpu.peak_flops)
        )

    def _take(self, kind: str, usable: Sequence[Measurement], fitted: Fitted[Any]) -> Any:
        """The rates of a fit that is near enough to its rows."""
        check_error(kind, fitted.own.errors().median_ape, self.argument)
        if kind in self.found:
            self.others.setdefault(kind, []).extend(self.found[kind].lines())
        self.found[kind], self.operations[kind] = fitted, fitted.operation
        self.used += usable
        return fitted.rates

    def _lack(self, kind: str) -> None:
        self.operations[kind] = _unmeasured("datasheet, not measured", _DATASHEET_LOG_SD)
        self.missing.append(f"{TITLES[kind].capitalize()} {_WERE[kind]} not measured: the datasheet's figures.")


def _kernels_of(model: ModelSpec) -> dict[str, int]:
    """Kernels of each element-wise step of a layer of eager code, by operation."""
    steps = (*before_attention(model, fused=False), *after_attention(model, fused=False, intermediate=1.0))
    return {step.op: step.kernels for step in reversed(steps) if step.op != "copy"}  # the first norm is the input's


_WERE = {"elementwise": "were", "send_recv": "were", "all_gather": "was"}


def _unmeasured(source: str, log_sd: float) -> OperationFit:
    return OperationFit(source=source, num_rows=0, mape=0.0, cross_validated_mape=0.0, log_sd=log_sd, seen={})


@dataclass(frozen=True, kw_only=True, slots=True)
class FitChoices:
    """What a fit cannot see in the rows."""

    attention_kernel: str | None = (
        None  # a preset of calibrate.fit.flash_presets, or "eager"; None: by name, then nearest
    )
    head_dim: int | None = None  # that attention is fitted to; None: 128 where it was measured, else the most frequent
    fused: bool = True  # whether norm, rotary embedding and activation are one kernel each; never in measured layers
    sends: SendStyle = "overlap"  # whether messages hold the compute streams
    keep_shapes: Collection[Shape] | None = None  # that keep a table; None: all, or of many the models'
    held_out: HeldOut | None = None  # attention calls to compare with
    hidden_size: tuple[int, int] | None = None  # that the profile stands for; None: what was measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """What a profile says of itself."""

    name: str
    description: str | None = None  # None: the devices measured
    not_covered: str = ""  # what the rows lack is added
    provenance: Mapping[str, str] | None = None  # more than the rows say


def provenance_of(rows: Sequence[Measurement]) -> dict[str, str]:
    """What measured rows say of where they come from."""
    kernels = {row.kernel for row in rows if row.operation == "attention"}
    listed = {
        "source": {row.source for row in rows},
        "devices": {row.device for row in rows},
        "attention kernels": kernels,
        "dtypes": {row.dtype for row in rows if row.dtype is not None},
    }
    return {name: "; ".join(sorted(values)) for name, values in listed.items() if values}
