"""fit_recurrence: scans and convolutions of linear attention, by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from calibrate.fit.fit import Comparison, Fitted, Parameter, Some, cross_validated_s, peak_flops, rounded, solve
from calibrate.importers.aiconfigurator import TABLES, RecurrenceRows, read_recurrence
from kvrsim.hardware import GpuSpec, load_gpu
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.profile import CalibrationProfile
from kvrsim.kernels.recurrence import SCAN_CHUNK, ConvolutionRates, KindRates, RecurrenceRates, ScanRates
from kvrsim.program import Array

_SHORT_TOKENS = 8192  # longer scans are predicted by a fit to these
_LONG_TOKENS = 1024  # from here on, a prefill's chunks
_NO_OTHER_LOG_SD = 0.5  # of one kind by another's rates, where one alone was measured
_STARTS = 8
_NOISE = 0.1  # kernels are tuned to some head counts better than to others
_COMPARED = "compare"
Rates = TypeVar("Rates", ScanRates, ConvolutionRates)


def fit_recurrence_section(part: JsonObject, profile: CalibrationProfile) -> Fitted[RecurrenceRates]:
    """From a recipe that names the source of each kind, and other tables of these; InputError for what is unknown."""
    part.only((*TABLES, _COMPARED))
    others = part.child(_COMPARED) if part.has(_COMPARED) else JsonObject(fields={}, where=part.where)
    others.only(tuple(TABLES))
    rows = {kind: read_recurrence(part.text(kind), kind, "recipes") for kind in TABLES if part.has(kind)}
    listed = [(kind, text) for kind in rows if others.has(kind) for text in others.sequence(kind)]
    compared = [read_recurrence(str(text), kind, "recipes") for kind, text in listed]
    return fit_recurrence(rows, load_gpu(profile.gpu), compared)


def fit_recurrence(
    rows: Mapping[str, RecurrenceRows], gpu: GpuSpec, compared: Sequence[RecurrenceRows] = ()
) -> Fitted[RecurrenceRates]:
    """Rates of each kind, from calls of one sequence of at least a chunk; stated errors are those of scans.

    `cross_validated` holds head counts out. `compared`: other tables of the same GPU, which are not fitted.
    """
    kinds = {kind: _Kind.of(found, gpu) for kind, found in rows.items()}
    rates = {kind: one.rates() for kind, one in kinds.items()}
    swapped = [
        one.long(f"{kind}, scans by the rates of {other}", one.scan_s(found.scan))
        for kind, one in kinds.items()
        for other, found in rates.items()
        if other != kind
    ]
    alike_log_sd = _joined("", swapped).errors().log_sd if swapped else _NO_OTHER_LOG_SD
    others = [one for found in compared for one in kinds[found.kind].against(found)]
    seen = {
        name: np.concatenate([getattr(one.scans, name) for one in kinds.values()])
        for name in ("tokens", "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    }
    return Fitted(
        rates=RecurrenceRates(kinds=rates, alike_log_sd=alike_log_sd),
        source="; ".join(found.source for found in rows.values()),
        own=_joined(
            "scans, fitted",
            [one.compare("", one.scan_s(rates[kind].scan)) for kind, one in kinds.items()],
        ),
        cross_validated=_joined("scans, head counts left out", [one.heads_left_out() for one in kinds.values()]),
        systematic_log_sd=_systematic_log_sd(others),
        checks=(*(check for kind, one in kinds.items() for check in one.checks(rates[kind])), *swapped, *others),
        seen={name: (float(sizes.min()), float(sizes.max())) for name, sizes in seen.items()},
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Kind:
    """The rows of one kind."""

    name: str
    scans: RecurrenceRows  # of one sequence
    convolutions: RecurrenceRows  # of one sequence
    batched: RecurrenceRows  # scans of several sequences
    gpu: GpuSpec

    @classmethod
    def of(cls, rows: RecurrenceRows, gpu: GpuSpec) -> _Kind:
        usable = rows.take(rows.tokens >= SCAN_CHUNK[rows.kind])
        alone, is_scan = usable.batch == 1, usable.is_scan
        return cls(
            name=rows.kind,
            scans=usable.take(alone & is_scan),
            convolutions=usable.take(alone & ~is_scan),
            batched=usable.take(~alone & is_scan),
            gpu=gpu,
        )

    def rates(self) -> KindRates:
        """Fitted to all rows."""
        convolution = _solve(ConvolutionRates, _convolution_parameters(self.gpu), self.convolutions)
        return KindRates(scan=self.scan_rates(self.scans), convolution=convolution)

    def scan_rates(self, scans: RecurrenceRows) -> ScanRates:
        """Fitted to some scans."""
        return _solve(ScanRates, _scan_parameters(self.gpu), scans)

    def scan_s(self, rates: ScanRates) -> Array:
        """All scans by these rates."""
        return rates.seconds(*self.scans.arguments)

    def compare(self, label: str, predicted_s: Array) -> Comparison:
        """All scans."""
        return Comparison(label=label, measured_s=self.scans.seconds, predicted_s=predicted_s)

    def long(self, label: str, predicted_s: Array) -> Comparison:
        """Scans as long as a prefill's chunks."""
        return self.compare(label, predicted_s).where(self.scans.tokens >= _LONG_TOKENS, label)

    def heads_left_out(self) -> Comparison:
        """Each scan by a fit without those of its head counts."""
        heads = [f"{keys:.0f} {values:.0f}" for keys, values in zip(*self._heads, strict=True)]

        def predict(train: Some, test: Some) -> Array:
            return self.scan_rates(self.scans.take(train)).seconds(*self.scans.take(test).arguments)

        return self.compare("", cross_validated_s(heads, predict))

    @property
    def _heads(self) -> tuple[Array, Array]:
        return self.scans.num_key_heads, self.scans.num_value_heads

    def checks(self, rates: KindRates) -> list[Comparison]:
        """More lines of the report."""
        long = self.long(f"{self.name}, scans of {_LONG_TOKENS} tokens and more, fitted", self.scan_s(rates.scan))
        of_short = self.scan_rates(self.scans.take(self.scans.tokens <= _SHORT_TOKENS))
        label = f"{self.name}, scans above {_SHORT_TOKENS} tokens by a fit to shorter ones"
        longer = self.compare("", self.scan_s(of_short)).where(self.scans.tokens > _SHORT_TOKENS, label)
        batched = Comparison(
            label=f"{self.name}, scans of several sequences, not fitted",
            measured_s=self.batched.seconds,
            predicted_s=rates.scan.seconds(*self.batched.arguments),
        )
        convolutions = Comparison(
            label=f"{self.name}, convolutions, fitted",
            measured_s=self.convolutions.seconds,
            predicted_s=rates.convolution.seconds(*self.convolutions.arguments),
        )
        return [one for one in (long, longer, batched, convolutions) if len(one.measured_s)]

    def against(self, other: RecurrenceRows) -> list[Comparison]:
        """The same long scans in another table: measured there, and in place of predicted measured here."""
        theirs = _by_shape(_Kind.of(other, self.gpu).scans)
        both = [(seconds, theirs[shape]) for shape, seconds in _by_shape(self.scans).items() if shape in theirs]
        if not both:
            return []
        ours_s, theirs_s = np.array(both).T
        kernel = ", ".join(sorted({str(name) for name in other.kernel[other.is_scan]}))
        label = f"{self.name}, the fitted table against {other.source} ({kernel})"
        return [Comparison(label=label, measured_s=theirs_s, predicted_s=ours_s)]


def _by_shape(rows: RecurrenceRows) -> dict[tuple[float, ...], float]:
    long = rows.take(rows.tokens >= _LONG_TOKENS)
    shapes = zip(long.tokens, long.num_key_heads, long.num_value_heads, strict=True)
    return dict(zip(shapes, long.seconds.tolist(), strict=True))


def _scan_parameters(gpu: GpuSpec) -> list[Parameter]:
    peak, hbm = peak_flops(gpu), gpu.hbm_bytes_per_s
    return [
        Parameter(name="start_s", start=4e-5, low=1e-6, high=1e-3),
        Parameter(name="chunk_s", start=1.5e-6, low=1e-8, high=1e-4),
        Parameter(name="flops_per_s", start=0.3 * peak, low=1e-3 * peak, high=peak),
        Parameter(name="cached_bytes", start=5e7, low=1e6, high=1e9),
        Parameter(name="bytes_per_s", start=0.5 * hbm, low=1e-2 * hbm, high=hbm),
    ]


def _convolution_parameters(gpu: GpuSpec) -> list[Parameter]:
    hbm = gpu.hbm_bytes_per_s
    return [
        Parameter(name="start_s", start=4e-6, low=1e-7, high=1e-3),
        Parameter(name="cached_bytes_per_s", start=2 * hbm, low=0.1 * hbm, high=20 * hbm),
        Parameter(name="cached_bytes", start=3e7, low=1e6, high=1e9),
        Parameter(name="bytes_per_s", start=0.7 * hbm, low=1e-2 * hbm, high=hbm),
    ]


def _solve(make: Callable[..., Rates], parameters: list[Parameter], rows: RecurrenceRows) -> Rates:
    def predict(values: Mapping[str, float], some: Some) -> Array:
        return make(**values).seconds(*rows.take(some).arguments)

    return make(**solve(parameters, predict, rows.seconds, starts=_STARTS, noise=_NOISE))


def _systematic_log_sd(others: Sequence[Comparison]) -> float | None:
    """Root mean square over other tables of the median of log(seconds there / seconds here), as of products."""
    medians = [float(np.median(np.log(one.measured_s / one.predicted_s))) for one in others]
    return rounded(float(np.sqrt(np.mean(np.square(medians))))) if medians else None


def _joined(label: str, parts: Sequence[Comparison]) -> Comparison:
    return Comparison(
        label=label,
        measured_s=np.concatenate([one.measured_s for one in parts]),
        predicted_s=np.concatenate([one.predicted_s for one in parts]),
    )
