"""OperationFits: the fits of all kinds of operations of one profile, one after another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from calibrate.data.measurement import Measurement
from calibrate.data.other_tables import systematic_log_sd
from calibrate.data.provenance import Provenance
from calibrate.fit.attention import fit_blocked, fit_eager, fit_flash, is_decoding
from calibrate.fit.attention_rows import with_blocks
from calibrate.fit.clock import at_burst, fit_clock
from calibrate.fit.elementwise import fit_elementwise, with_merges
from calibrate.fit.gemm import check_full_waves, computes_in, fit_gemm, fit_gemm_type, head_bytes_per_s
from calibrate.fit.gemm_rows import Shape, builtin_shapes
from calibrate.fit.host import PrepareRates, fit_host, fit_pending_share, fit_prepare
from calibrate.fit.inputs import FilteredRows, FitChoices, check_error
from calibrate.fit.links import SendRates, fit_all_gather, fit_all_reduce, fit_send_recv
from calibrate.fit.report import TITLES
from calibrate.fit.solver import HALF, Errors, Fitted, column, has_waves, rounded
from kvrsim.engine import NO_HOST, HostRates
from kvrsim.hardware import GpuSpec, LinkSpec
from kvrsim.kernels.attention import AttentionRates, FlashRates
from kvrsim.kernels.elementwise import CacheCopies, ElementwiseRates, after_mixer, before_mixer
from kvrsim.kernels.gemm import GemmRates
from kvrsim.kernels.links import AllReduceRates
from kvrsim.kernels.profile import (
    Clock,
    LinkRates,
    OperationFit,
    ValidRange,
)
from kvrsim.model.spec import ModelSpec

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
