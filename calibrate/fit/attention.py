"""fit_flash, fit_eager, fit_blocked and fit_latent: rates of attention from measured calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from calibrate.data import Columns, Measurement, Some
from calibrate.fit.fit import (
    Constants,
    Fit,
    FitResult,
    Parameter,
    choose_knots,
    column,
    dtypes_of,
    element_bytes_of,
    mean_rate,
    peak_flops,
    ranges_of,
    sources_of,
    to_digits,
)
from calibrate.importers.aiconfigurator import LatentForm, read_latent
from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec, load_gpu
from kvrsim.io.schema import JsonObject, NonNegative
from kvrsim.kernels.attention import (
    AttentionCall,
    AttentionRates,
    BlockedRates,
    EagerRates,
    FlashRates,
    LatentRates,
    MeasuredSizes,
)
from kvrsim.kernels.profile import CalibrationProfile
from kvrsim.program import Array

HEAD_DIM = 128
NARROW_HEAD_DIM = 64
PROMISED_CHUNK = 128  # minimum number of tokens of a chunk for which the profile states its error
LLAMA_SCORE_BYTES = 28.0  # bytes that Llama's code moves per score, see kvrsim/kernels/elementwise.py
FORMS: tuple[LatentForm, ...] = ("expanded", "absorbed")

_ALL_KEYS = 2**30  # longer than any prompt: one key block, so that masked scores are computed too
_KEY_BLOCKS = (1, 64, 128, 256, 512, 1024, _ALL_KEYS)
_LEAST_CONSTANT = 1e-15  # smaller fitted constants become 0
_SEEN = ("chunk", "prefix", "num_attention_heads", "num_key_value_heads", "head_dim")

# -- factors by size of the call
MAX_KNOTS = 20
_ROUNDS = 2  # number of rounds; each round fits the factors, then the constants
_POOR_FORM = 0.05  # mean error on the fitted rows above which factors by size are tried
_CLASSES_PER_DOUBLING = 2  # calls are grouped into classes by size
_KNOT_ERROR = 0.01
_LEAST_SHARE = 0.3  # minimum share of a call's time that depends on its elements; other calls are not used

Rates = TypeVar("Rates", bound=AttentionRates)
Sized = TypeVar("Sized", EagerRates, BlockedRates)

_DATA = JsonObject.read(Path(__file__).with_suffix(".json"), "attention")
_BOUNDS: Mapping[str, tuple[float, float]] = _DATA.get("bounds", Mapping[str, tuple[NonNegative, NonNegative]])


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashPreset:
    """A kind of flash kernel: its structure (from its source), start values, and which constants are fitted."""

    structure: Mapping[str, Any]  # fields of FlashRates that are not fitted
    tiles_per_sm: int  # tiles that a multiprocessor runs at once
    start: Mapping[str, NonNegative]
    fitted: tuple[str, ...]

    def rates(self, gpu: GpuSpec, constants: Constants) -> FlashRates:
        """Rates with these constants instead of the start values."""
        slots = gpu.num_sms * self.tiles_per_sm
        values: dict[str, Any] = {**self.structure, **self.start, **constants}
        return FlashRates(concurrent_tiles=slots, num_sms=gpu.num_sms, flops_per_s=peak_flops(gpu), **values)

    def parameters(self, gpu: GpuSpec) -> tuple[Parameter, ...]:
        """The parameters of a fit of the constants in `fitted`."""
        tops = {"append_bytes_per_s": gpu.hbm_bytes_per_s}
        bounds = {name: (low, min(high, tops.get(name, high))) for name, (low, high) in _BOUNDS.items()}
        return tuple(
            Parameter(name=name, start=self.start[name], low=bounds[name][0], high=bounds[name][1])
            for name in self.fitted
        )


PRESETS: Mapping[str, FlashPreset] = _DATA.get("presets", Mapping[str, FlashPreset])
KERNELS = (*PRESETS, "eager")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionRows(Columns):
    """Measured attention calls."""

    chunk: Array
    prefix: Array
    num_attention_heads: Array
    num_key_value_heads: Array
    head_dim: Array
    batch: Array
    expected_s: Array  # measured seconds
    element_bytes: int = 2

    @classmethod
    def of(cls, rows: Sequence[Measurement]) -> AttentionRows:
        """Convert attention measurements to arrays."""
        names = (*_SEEN, "batch", "expected_s")
        return cls(**{name: column(rows, name) for name in names}, element_bytes=element_bytes_of(rows))

    @property
    def call(self) -> AttentionCall:
        """All calls as one AttentionCall with arrays; the rates' formulas accept arrays."""
        return AttentionCall(
            chunk=self.chunk,
            prefix=self.prefix,
            causal=self.chunk * (self.prefix + 0.5 * self.chunk),
            num_attention_heads=cast(Any, self.num_attention_heads),
            num_key_value_heads=cast(Any, self.num_key_value_heads),
            head_dim=cast(Any, self.head_dim),
            score_bytes=LLAMA_SCORE_BYTES,
        )

    def predicted_s(self, rates: AttentionRates) -> Array:
        """Seconds as the simulator computes them."""
        return rates.seconds(self.call, cast(Any, self.batch), self.element_bytes)


@dataclass(frozen=True, kw_only=True)
class AttentionFit(Fit[Rates]):
    """Fit of one form of kernel to measured calls."""

    data: AttentionRows
    peak: float | None = None  # highest FLOP/s of any call; None: factors by size are not fitted

    @cached_property
    def rates(self) -> Rates:
        return self.rates_of(self.every)

    def rates_of(self, some: Some) -> Rates:
        """Alternate between robust least squares of the logarithms and factors by size."""
        rows = self.data.take(some)
        rates = super().rates_of(some)
        if self.peak is None:
            return rates
        for _ in range(_ROUNDS):
            factors = rows.predicted_s(with_sizes(rates, rows, self.peak)) / rows.predicted_s(rates)  # type: ignore[type-var]
            rates = self.make(self.constants_of(some, rows.expected_s / factors))
        return with_sizes(rates, rows, self.peak)  # type: ignore[type-var]

    def result(self, rows: Sequence[Measurement]) -> FitResult[Rates]:
        """The fit and its errors; `rows` are the rows of `data`. Cross-validation holds out whole chunk sizes."""
        chunks = self.data.chunk
        return FitResult(
            rates=self.rates,
            source=sources_of(rows),
            own=self.own,
            cross_validated=self.left_out("chunk sizes", chunks.tolist()).from_size(chunks, PROMISED_CHUNK, "chunk"),
            seen=ranges_of(rows, _SEEN),
        )


def usable_attention(rows: Sequence[Measurement], head_dim: int, dtypes: Sequence[str]) -> list[Measurement]:
    """Calls of one sequence in these dtypes, with this head_dim."""
    return [
        row
        for row in rows
        if row.operation == "attention" and row.dtype in dtypes and row.head_dim == head_dim and row.batch == 1
    ]


def is_decoding(row: Measurement) -> bool:
    """Whether the row is one query behind a prefix, for which engines have separate kernels."""
    return row.chunk == 1 and (row.prefix or 0) > 0


def fit_flash(
    rows: Sequence[Measurement], gpu: GpuSpec, *, kernel: str | None = None, narrow: Sequence[Measurement] = ()
) -> FitResult[FlashRates]:
    """Fit constants of one of PRESETS (None: the best-fitting one) to calls of one sequence with one head_dim.

    narrow: calls with narrower heads, which determine the seconds of softmax. Calls of one query behind a prefix are
    not fitted: engines have separate kernels for decoding. No call is predicted faster than its unmasked FLOPs at the
    datasheet's rate. Raises InputError for a kernel that is not among the presets.
    """
    if kernel is not None and kernel not in PRESETS:
        raise InputError("attention_kernel", kernel, ", ".join(KERNELS))
    return with_softmax(_best_flash(rows, gpu, [kernel] if kernel else list(PRESETS)), narrow)


def _best_flash(rows: Sequence[Measurement], gpu: GpuSpec, kernels: Sequence[str]) -> FitResult[FlashRates]:
    prefills = [row for row in rows if not is_decoding(row)]
    data = AttentionRows.of(prefills)
    forms = (
        _form(name, data, PRESETS[name].parameters(gpu), lambda values, name=name: PRESETS[name].rates(gpu, values))
        for name in kernels
    )
    return min((form.result(prefills) for form in forms), key=lambda one: one.cross_validated.errors().mape)


def _form(name: str, data: AttentionRows, parameters: Sequence[Parameter], make: Any, starts: int = 1) -> Any:
    return AttentionFit(
        label=f"{name}, ",
        measured_s=data.expected_s,
        parameters=parameters,
        make=make,
        seconds=lambda rates, some: data.take(some).predicted_s(rates),
        starts=starts,
        data=data,
    )


def with_softmax(fitted: FitResult[FlashRates], rows: Sequence[Measurement]) -> FitResult[FlashRates]:
    """The rates with softmax_s, which matters only to heads narrower than the fitted ones; unchanged without rows.

    softmax_s is at most block_s, and has no effect below half of block_s.
    """
    if not rows:
        return fitted
    data = AttentionRows.of(rows)
    rates = fitted.rates
    block_s = fitted.rates.block_s
    bounds = Parameter(name="softmax_s", start=0.7 * block_s, low=0.4 * block_s, high=block_s)
    fit = _form(f"heads of {NARROW_HEAD_DIM}", data, [bounds], lambda values: replace(rates, **values))
    ranges = dict(fitted.seen) | {"head_dim": (NARROW_HEAD_DIM, HEAD_DIM)}
    return replace(fitted, rates=fit.rates, seen=ranges)


def fit_eager(calls: Sequence[Measurement], gpu: GpuSpec) -> FitResult[EagerRates]:
    """Fit a rate of the FLOPs of QK^T and PV, a rate of device memory (28 bytes per score), and a start time.

    Where the form fits poorly, factors by size of the score matrix are added if they improve held-out calls.
    """
    peak = peak_flops(gpu, dtypes_of(calls))
    parameters = (
        Parameter(name="flops_per_s", start=0.7 * peak, low=1e-4 * peak, high=peak),
        Parameter(name="bytes_per_s", start=0.6 * gpu.hbm_bytes_per_s, low=1e8, high=gpu.hbm_bytes_per_s),
        Parameter(name="start_s", start=2e-5, low=0.0, high=1e-2),
    )
    form = _form("eager", AttentionRows.of(calls), parameters, lambda values: EagerRates(**values))
    return _with_factors_if_better(form, calls, peak)


def fit_blocked(
    calls: Sequence[Measurement], gpu: GpuSpec, *, name: str, skips_masked: bool
) -> FitResult[BlockedRates]:
    """Fit rates of the causal half and of the rectangle, start times of calls and of queries, and the size of blocks.

    Where the form fits poorly, factors by number of queries are added if they improve held-out calls.
    """
    data = AttentionRows.of(calls)
    peak = peak_flops(gpu, dtypes_of(calls))
    token_s = 4 * float(data.head_dim[0]) / peak
    parameters = [
        Parameter(name="causal_flops_per_s", start=0.4 * peak, low=1e-4 * peak, high=peak),
        Parameter(name="rectangle_flops_per_s", start=0.4 * peak, low=1e-4 * peak, high=peak),
        Parameter(name="start_s", start=2e-5, low=0.0, high=1e-2),
        Parameter(name="query_s", start=64 * token_s, low=0.0, high=1e-4),
    ]
    if skips_masked:
        parameters.append(Parameter(name="join_s", start=16 * token_s, low=0.0, high=1e-4))

    def form_with(key_block: int) -> AttentionFit[BlockedRates]:
        form = _form(name, data, parameters, lambda values: _block_rates(values, key_block, skips_masked), starts=4)
        return cast(AttentionFit[BlockedRates], form)

    def error(form: AttentionFit[BlockedRates]) -> float:
        return float(np.mean(np.abs(np.log(form.own.predicted_s / data.expected_s))))

    return _with_factors_if_better(min(map(form_with, _KEY_BLOCKS), key=error), calls, peak)


def _block_rates(values: Constants, key_block: int, skips_masked: bool) -> BlockedRates:
    rates: dict[str, Any] = {name: value if value >= _LEAST_CONSTANT else 0.0 for name, value in values.items()}
    if not skips_masked:  # the kernel computes masked scores, too
        rates["rectangle_flops_per_s"] = min(rates["rectangle_flops_per_s"], rates["causal_flops_per_s"])
    return BlockedRates(**rates, key_block=key_block, skips_masked=skips_masked)


def _with_factors_if_better(plain: AttentionFit[Rates], calls: Sequence[Measurement], peak: float) -> FitResult[Rates]:
    """The plain form, unless it fits poorly and factors by size are better on held-out calls."""
    simple = plain.result(calls)
    if simple.own.errors().mape <= _POOR_FORM:
        return simple
    richer = replace(plain, peak=peak).result(calls)
    return min(simple, richer, key=lambda fitted: fitted.cross_validated.errors().mape)


def with_sizes(rates: Sized, rows: AttentionRows, peak: float) -> Sized:
    """The rates with factors at some of the rows' sizes; no call is faster than its unmasked FLOPs at `peak` FLOP/s."""
    none = dict.fromkeys(("flops_per_s", "bytes_per_s", "causal_flops_per_s", "rectangle_flops_per_s"), 1e60)
    infinite: dict[str, Any] = {name: value for name, value in none.items() if name in rates.__slots__}
    plain = replace(rates, measured=None)
    whole_s = rows.predicted_s(plain)
    elements_s = whole_s - rows.predicted_s(replace(plain, **infinite))  # without the constant time of a call
    usable = elements_s >= _LEAST_SHARE * whole_s
    if not usable.any():
        return plain
    taken_s = np.maximum(rows.expected_s - (whole_s - elements_s), 0.1 * rows.expected_s)
    flops = 4.0 * rows.batch * rows.num_attention_heads * rows.head_dim * rows.call.causal
    taken_s = np.maximum(taken_s, flops / peak)
    sizes = rows.chunk if isinstance(plain, BlockedRates) else plain.elements(rows.call, cast(Any, rows.batch))
    return replace(plain, measured=_measured_sizes(sizes[usable], taken_s[usable] / elements_s[usable]))


def _measured_sizes(sizes: Array, factors: Array) -> MeasuredSizes:
    """The median factor of each class of sizes, at a few knots; no call is predicted faster than a smaller call."""
    classes = np.round(_CLASSES_PER_DOUBLING * np.log2(sizes))
    members = [classes == one for one in np.unique(classes)]
    places = np.array([np.mean(np.log(sizes[some])) for some in members])
    spent = places + np.array([np.median(np.log(factors[some])) for some in members])
    spent = 0.5 * (np.maximum.accumulate(spent) + np.minimum.accumulate(spent[::-1])[::-1])
    knots = choose_knots(places, spent - places, most=MAX_KNOTS, error=_KNOT_ERROR)
    rounded_sizes = np.array([to_digits(float(size), 6) for size in np.exp(places[knots])])
    return MeasuredSizes(
        sizes=tuple(rounded_sizes.tolist()),
        factors=tuple((np.maximum.accumulate(np.exp(spent[knots])) / rounded_sizes).tolist()),
    )


def with_blocks(rates: BlockedRates, rows: Sequence[Measurement]) -> BlockedRates:
    """Return the rates with a rate of unmasked blocks: the geometric mean over the rows; unchanged without rows.

    Start times are those of the other calls, but at most half of a row's seconds.
    """
    if not rows:
        return rates
    data = AttentionRows.of(rows)
    queries = data.num_attention_heads * data.chunk
    left_s = np.maximum(data.expected_s - rates.start_s - queries * rates.query_s, 0.5 * data.expected_s)
    return replace(rates, block_flops_per_s=mean_rate(4.0 * queries * data.head_dim * data.prefix / left_s))


def fit_latent_section(part: JsonObject, profile: CalibrationProfile) -> FitResult[LatentRates]:
    """Fit both forms of latent attention, each to its source in a recipe. Raises InputError for a bad source."""
    part.only(FORMS)
    return fit_latent({form: part.text(form) for form in FORMS if part.has(form)}, load_gpu(profile.gpu))


def fit_latent(sources: Mapping[LatentForm, str], gpu: GpuSpec) -> FitResult[LatentRates]:
    """Fit each form of DeepSeek-V3's calls as a flash kernel; the stated errors are those of the expanded form.

    Only kernels that skip masked blocks are fitted: calls without a prefix do not show the cost of masked blocks. Calls
    of one query are not fitted: engines have separate kernels for decoding.
    """
    causal = [name for name, preset in PRESETS.items() if preset.structure["causal"]]
    fits: dict[LatentForm, FitResult[FlashRates]] = {}
    for form, source in sources.items():
        rows = [row for row in read_latent(source, form, "recipes") if (row.chunk or 0) > 1 and row.batch == 1]
        fits[form] = _best_flash(rows, gpu, causal)
    expanded = fits["expanded"]
    absorbed = fits.get("absorbed")
    return FitResult(
        rates=LatentRates(expanded=expanded.rates, absorbed=None if absorbed is None else absorbed.rates),
        source="; ".join(f"{one.source} ({form})" for form, one in fits.items()),
        own=expanded.own,
        cross_validated=expanded.cross_validated,
        seen={name: span for name, span in expanded.seen.items() if name in ("chunk", "num_attention_heads")},
    )
