"""fit_profile: a CalibrationProfile from measurements, and a report of how well they agree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrate.fit_attention import HeldOut, fit_eager, fit_flash
from calibrate.fit_elementwise import fit_elementwise
from calibrate.fit_gemm import fit_gemm
from calibrate.fit_links import SendRates, fit_all_gather, fit_send_recv
from calibrate.fit_report import TITLES, FitReport
from calibrate.fitted import HALF, Fitted, column, rounded
from calibrate.gemm_rows import Shape
from calibrate.measurement import Measurement
from calibrate.model_shapes import builtin_shapes
from calibrate.screening import Screened, check_error, notes_on
from kvrsim.hardware import GpuSpec, LinkSpec
from kvrsim.profile import (
    CacheCopies,
    CalibrationProfile,
    HostRates,
    KernelRates,
    LinkRates,
    OperationFit,
    SendStyle,
    ValidRange,
)
from kvrsim.rates.attention import AttentionRates
from kvrsim.rates.elementwise import ElementwiseRates
from kvrsim.rates.gemm import GemmRates

# A serving engine launches a layer in about a dozen kernels of 5 us; no table of kernel times says it.
DEFAULT_HOST = HostRates(layer_s=60e-6, gather_piece_s=0.0, resume_s=0.0)

_NO_COPIES = CacheCopies(keep=0.0, append=0.0, gather=0.0)  # appending is part of the flash kernels' times
_MOST_LINK_ERROR = 0.4  # mean, of transfers left out of the fit: GPUs that share a host's bus follow no ring
_GATHERS = 2  # all-gathers of one layer: K and V
_DATASHEET_LOG_SD = 0.3  # what one does not measure may well take a third longer
_HAND_LOG_SD = 0.5
_MOST_SHAPES = 64  # that are kept as tables where the caller names none


@dataclass(frozen=True, kw_only=True, slots=True)
class FitChoices:
    """What a fit cannot see in the rows."""

    attention_kernel: str | None = None  # a preset of calibrate.flash_presets, or "eager"; None: by name, then nearest
    head_dim: int | None = None  # that attention is fitted to; None: 128 where it was measured, else the most frequent
    fused: bool = True  # whether norm, rotary embedding and activation are one kernel each
    sends: SendStyle = "overlap"  # whether messages hold the compute streams
    keep_shapes: Collection[Shape] | None = None  # that keep a table; None: all, or of many the models'
    held_out: HeldOut | None = None  # attention calls to compare with
    hidden_size: tuple[int, int] | None = None  # that the profile stands for; None: what was measured


def _origin(rows: Sequence[Measurement]) -> dict[str, str]:
    """What measured rows say of where they come from."""
    kernels = {row.kernel for row in rows if row.operation == "attention"}
    listed = {
        "source": {row.source for row in rows},
        "devices": {row.device for row in rows},
        "attention kernels": kernels,
        "dtypes": {row.dtype for row in rows if row.dtype is not None},
    }
    return {name: "; ".join(sorted(values)) for name, values in listed.items() if values}


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """What a profile says of itself."""

    name: str
    description: str | None = None  # None: the devices measured
    not_covered: str = ""  # what the rows lack is added
    provenance: Mapping[str, str] | None = None  # more than the rows say


def fit_profile(
    rows: Sequence[Measurement],
    label: Label,
    *,
    gpu: GpuSpec,
    link: LinkSpec,
    host: HostRates | None = None,
    choices: FitChoices | None = None,
    argument: str = "--compute",
) -> tuple[CalibrationProfile, FitReport]:
    """A profile of one GPU and its link; gemm and attention are needed, the rest is the datasheet's without rows.

    `host` None: what host_layer and host_collective rows say, or else DEFAULT_HOST. Raises InputError naming
    `argument` for rows that are too few, unsteady, of several devices or kernels, or far from any fit.
    """
    chosen = choices or FitChoices()
    screened = Screened.of(rows, head_dim=chosen.head_dim, kernel=chosen.attention_kernel, argument=argument)
    fit = _Fit(rows=screened, gpu=gpu, link=link, choices=chosen, argument=argument)
    kernels = KernelRates(
        gemm=fit.gemm(),
        attention=fit.attention(),
        elementwise=fit.elementwise(),
        copies=_NO_COPIES,
        head_on_all_tokens=False,
    )
    links = fit.links()
    host_rates = fit.host(host, rows)
    devices = ", ".join(sorted({row.device for row in fit.used if row.operation in ("gemm", "attention")}))
    profile = CalibrationProfile(
        name=label.name,
        gpu=gpu.name,
        description=label.description or f"fitted to measurements of {devices}.",
        not_covered=" ".join(part for part in (label.not_covered, *fit.missing) if part) or "what was not measured.",
        kernels=kernels,
        host=host_rates,
        links=links,
        valid=fit.valid(),
        operations={kind: fit.operations[kind] for kind in TITLES},
        residual=None,
        provenance=_origin(fit.used) | dict(label.provenance or {}),
    )
    report = FitReport(
        profile=profile,
        lines={kind: found.lines() for kind, found in fit.found.items()},
        fits={kind: found.own for kind, found in fit.found.items()},
        notes=(*notes_on(rows, fit.used), *fit.missing),
    )
    return profile, report


class _Fit:
    """The fits of all operations, one after another, and what they have used."""

    def __init__(self, *, rows: Screened, gpu: GpuSpec, link: LinkSpec, choices: FitChoices, argument: str) -> None:
        self.rows, self.gpu, self.link, self.choices, self.argument = rows, gpu, link, choices, argument
        self.found: dict[str, Fitted[Any]] = {}  # by kind of operation
        self.operations: dict[str, OperationFit] = {}
        self.missing: list[str] = []  # sentences about what was not measured
        self.used: list[Measurement] = []

    def gemm(self) -> GemmRates:
        """Of the shapes asked for, tables as well."""
        usable, keep = self.rows.gemm, self.choices.keep_shapes
        if keep is None:
            shapes = {(row.in_features or 0, row.out_features or 0) for row in usable}
            keep = shapes if len(shapes) <= _MOST_SHAPES else builtin_shapes()
        rates: GemmRates = self._take("gemm", usable, fit_gemm(usable, self.gpu, keep_shapes=keep))
        return rates

    def attention(self) -> dict[str, AttentionRates]:
        """By kernel; where there are both, the profile's errors are those of the flash kernel."""
        rates: dict[str, AttentionRates] = {}
        flash, eager, head_dim = self.rows.flash, self.rows.eager, self.rows.head_dim
        if eager:
            slow = fit_eager(eager, self.gpu, head_dim=head_dim)
            rates["eager"] = self._take("attention", eager, slow)
        if flash:
            kernel, held_out = self.choices.attention_kernel, self.choices.held_out
            fast = fit_flash(flash, self.gpu, kernel=kernel, head_dim=head_dim, held_out=held_out)
            rates = {"flash": self._take("attention", flash, fast)} | rates
        return rates

    def elementwise(self) -> ElementwiseRates:
        """As measured, or at the datasheet's rate of memory."""
        usable, fused = self.rows.elementwise, self.choices.fused
        if not usable:
            self._lack("elementwise")
            return ElementwiseRates.uniform(self.gpu.hbm_bytes_per_s, fused=fused)
        rates: ElementwiseRates = self._take("elementwise", usable, fit_elementwise(usable, self.gpu, fused=fused))
        return rates

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
        """What was given, or measured, or else by hand."""
        layers = [row for row in rows if row.operation == "host_layer"]
        if given is not None or not layers:
            self.operations["host"] = _unmeasured("set by hand, not measured", _HAND_LOG_SD)
            return given or DEFAULT_HOST
        gathers = [row for row in rows if row.operation == "host_collective"]
        self.used += [*layers, *gathers]
        seconds = column(layers, "median_s")
        log_sd = max(float(np.std(np.log(seconds))), 0.05)
        mape = float(np.mean(np.abs(seconds / np.median(seconds) - 1)))
        self.operations["host"] = OperationFit(
            source="; ".join(sorted({row.source for row in layers})),
            num_rows=len(layers) + len(gathers),
            mape=rounded(mape),
            cross_validated_mape=rounded(mape),
            log_sd=rounded(log_sd),
            seen={},
        )
        piece_s = float(np.median(column(gathers, "median_s") / column(gathers, "ranks"))) if gathers else 0.0
        layer_s = rounded(float(np.median(seconds)))
        return HostRates(layer_s=layer_s, gather_piece_s=rounded(_GATHERS * piece_s), resume_s=0.0)

    def valid(self) -> ValidRange:
        """What the calls have covered; hidden sizes are those of square matrices."""
        attention = [row for row in self.used if row.operation == "attention"]
        keys = column(attention, "chunk") + column(attention, "prefix")
        ranks = [row.ranks or 1 for row in self.used if row.operation in ("send_recv", "all_gather")]
        gemms = [row for row in self.used if row.operation == "gemm"]
        square = [row.in_features or 1 for row in gemms if row.in_features == row.out_features]
        sizes = square or [row.in_features or 1 for row in gemms]
        head_dims = [row.head_dim or 1 for row in attention]
        return ValidRange(
            context_len=(int(keys.min()), int(keys.max())),
            num_gpus=(1, max(ranks, default=1)),
            hidden_size=self.choices.hidden_size or (min(sizes), max(sizes)),
            head_dim=(min(head_dims), max(head_dims)),
            dtypes=tuple(dtype for dtype in HALF if dtype in dict(self.gpu.peak_flops)),
        )

    def _take(self, kind: str, usable: Sequence[Measurement], fitted: Fitted[Any]) -> Any:
        """The rates of a fit that is near enough to its rows."""
        check_error(kind, fitted.own.errors().median_ape, self.argument)
        self.found[kind], self.operations[kind] = fitted, fitted.operation
        self.used += usable
        return fitted.rates

    def _lack(self, kind: str) -> None:
        self.operations[kind] = _unmeasured("datasheet, not measured", _DATASHEET_LOG_SD)
        self.missing.append(f"{TITLES[kind].capitalize()} {_WERE[kind]} not measured: the datasheet's figures.")


_WERE = {"elementwise": "were", "send_recv": "were", "all_gather": "was"}


def _unmeasured(source: str, log_sd: float) -> OperationFit:
    return OperationFit(source=source, num_rows=0, mape=0.0, cross_validated_mape=0.0, log_sd=log_sd, seen={})
