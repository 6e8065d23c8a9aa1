"""fit_recurrence: rates of the scans and convolutions of linear attention, by kind."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import permutations
from typing import TypeVar

from calibrate.fit.fit import (
    Fit,
    FitComparison,
    FitResult,
    Parameter,
    log_ratio,
    peak_flops,
    root_mean_square,
    span_of,
    to_digits,
)
from calibrate.importers.aiconfigurator import TABLES, RecurrenceRows, read_recurrence
from kvrsim.hardware import GpuSpec, load_gpu
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.profile import CalibrationProfile
from kvrsim.kernels.recurrence import SCAN_CHUNK, ConvolutionRates, KindRates, RecurrenceRates, ScanRates

_LONG_TOKENS = 1024  # minimum number of tokens of the scans that are compared
# Assumed spread of log(predicted / measured) for a kind that takes the rates of the only measured kind.
_UNKNOWN_ALIKE_LOG_SD = 0.5
_STARTS = 8
_NOISE = 0.1  # kernels are tuned better to some head counts than to others
_COMPARED = "compare"
_SEEN = ("tokens", "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
Rates = TypeVar("Rates", ScanRates, ConvolutionRates)


def fit_recurrence_section(part: JsonObject, profile: CalibrationProfile) -> FitResult[RecurrenceRates]:
    """Fit a recipe's source of each kind and compare other tables. Raises InputError for unknown names."""
    part.only((*TABLES, _COMPARED))
    compared = JsonObject(fields={}, where=part.where)
    if part.has(_COMPARED):
        compared = part.child(_COMPARED)
        compared.only(tuple(TABLES))
    rows: dict[str, RecurrenceRows] = {}
    others: list[RecurrenceRows] = []
    for kind in TABLES:
        if not part.has(kind):
            continue
        rows[kind] = read_recurrence(part.text(kind), kind, "recipes")
        if compared.has(kind):
            others += [read_recurrence(str(source), kind, "recipes") for source in compared.sequence(kind)]
    return fit_recurrence(rows, load_gpu(profile.gpu), others)


def fit_recurrence(
    rows: Mapping[str, RecurrenceRows], gpu: GpuSpec, others: Sequence[RecurrenceRows] = ()
) -> FitResult[RecurrenceRates]:
    """Fit rates of each kind to calls of one sequence of at least a chunk; stated errors are those of scans.

    `cross_validated` holds out head counts. `others`: other tables of the same GPU, which are not fitted.
    """
    scans = {kind: _scans(of_kind) for kind, of_kind in rows.items()}
    fits = {kind: _fit(of_kind, ScanRates, _scan_parameters(gpu)) for kind, of_kind in scans.items()}
    swapped = [_long(scans[kind], fits[other].rates) for kind, other in permutations(fits, 2)]
    alike_log_sd = _UNKNOWN_ALIKE_LOG_SD
    if swapped:
        alike_log_sd = FitComparison.join("", swapped).errors().log_sd
    held_out = []
    rates = {}
    for kind, fit in fits.items():
        heads = zip(scans[kind].num_key_heads, scans[kind].num_value_heads, strict=True)
        held_out.append(fit.left_out("head counts", [f"{keys:.0f} {values:.0f}" for keys, values in heads]))
        convolutions = _scans(rows[kind], convolutions=True)
        convolution = _fit(convolutions, ConvolutionRates, _convolution_parameters(gpu))
        rates[kind] = KindRates(scan=fit.rates, convolution=convolution.rates)
    medians: list[float] = []
    for table in others:
        medians += log_ratio(_by_shape(scans[table.kind]), _by_shape(_scans(table)), least=1)
    systematic = root_mean_square(medians)
    return FitResult(
        rates=RecurrenceRates(kinds=rates, alike_log_sd=alike_log_sd),
        source="; ".join(of_kind.source for of_kind in rows.values()),
        own=FitComparison.join("scans, fitted", [fit.own for fit in fits.values()]),
        cross_validated=FitComparison.join("scans, head counts left out", held_out),
        systematic_log_sd=None if systematic is None else to_digits(systematic),
        seen={name: span_of([getattr(of_kind, name) for of_kind in scans.values()]) for name in _SEEN},
    )


def _fit(rows: RecurrenceRows, make: type[Rates], parameters: Sequence[Parameter]) -> Fit[Rates]:
    return Fit(
        label="",
        measured_s=rows.seconds,
        parameters=parameters,
        make=lambda values: make(**values),
        seconds=lambda rates, indices: rates.seconds(*rows.take(indices).arguments),
        starts=_STARTS,
        noise=_NOISE,
    )


def _scans(rows: RecurrenceRows, *, convolutions: bool = False) -> RecurrenceRows:
    """Scans, or convolutions, of one sequence of at least a chunk."""
    return rows.take((rows.tokens >= SCAN_CHUNK[rows.kind]) & (rows.batch == 1) & (rows.is_scan != convolutions))


def _long(rows: RecurrenceRows, rates: ScanRates) -> FitComparison:
    """Compare scans of at least _LONG_TOKENS tokens with rates."""
    long = rows.take(rows.tokens >= _LONG_TOKENS)
    return FitComparison(label="", measured_s=long.seconds, predicted_s=rates.seconds(*long.arguments))


def _by_shape(rows: RecurrenceRows) -> dict[Hashable, float]:
    long = rows.take(rows.tokens >= _LONG_TOKENS)
    shapes = zip(long.tokens, long.num_key_heads, long.num_value_heads, strict=True)
    return dict(zip(shapes, long.seconds.tolist(), strict=True))


def _scan_parameters(gpu: GpuSpec) -> list[Parameter]:
    peak = peak_flops(gpu)
    hbm = gpu.hbm_bytes_per_s
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
