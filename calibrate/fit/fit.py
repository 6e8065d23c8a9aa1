"""Fit: rates from measured rows by least squares, with their errors on fitted rows and on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from calibrate.data import Measurement, Some
from kvrsim.engine import DEVIATES_OF_80_PERCENT
from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec
from kvrsim.kernels.profile import Gather, OperationFit
from kvrsim.program import Array
from kvrsim.scenario import dtype_bytes

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

Rates = TypeVar("Rates")
Constants = Mapping[str, float]  # values of constants by name
Span = tuple[float, float]  # smallest and largest value

HALF = ("fp16", "bf16")
FULL = ("fp32",)
_LEAST_SMS = 8

_MAX_STEPS = 300
_TRIAL_ROWS = 1000
_BEST_STARTS = 3  # number of starts that continue with all rows
_TRIAL_STEPS = 50
_FOLDS = 10
_SEED = 0  # seed of starts and folds: the same rows give the same fit


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of a fit, on a logarithmic scale, or on a linear scale if the parameter may be 0."""

    name: str
    start: float
    low: float  # lower bound; 0: linear scale
    high: float  # upper bound: the datasheet's value where there is one

    def encode(self, value: float) -> float:
        """Convert to the scale of the solver."""
        if self.low > 0:
            return math.log(value)
        return value / self.start

    def decode(self, value: float) -> float:
        """Convert from the scale of the solver and clip to the bounds."""
        if self.low > 0:
            decoded = math.exp(value)
        else:
            decoded = value * self.start
        return min(max(decoded, self.low), self.high)


def solve(
    parameters: Sequence[Parameter],
    predict: Callable[[Constants, Some], Array],
    measured_s: Array,
    *,
    weights: Array | None = None,
    starts: int = 1,
    noise: float = 0.03,
) -> dict[str, float]:
    """Fit parameters inside their bounds by robust least squares (soft_l1) of log(predicted / measured).

    `predict(values, rows)` gets values by name and indices of rows, and returns seconds. `noise`: rows with a larger
    relative error have less weight. With several starts, the given start and random ones between the bounds (fixed
    seed) are each tried on some of the rows; the best few continue with all rows. Results have four digits.
    """
    from scipy.optimize import least_squares

    low = np.array([parameter.encode(parameter.low) for parameter in parameters])
    first = np.array([parameter.encode(parameter.start) for parameter in parameters])
    high = np.array([parameter.encode(parameter.high) for parameter in parameters])
    margin = 1e-6 * (high - low)  # starts are inside the bounds
    log_measured = np.log(measured_s)

    def named(values: Array) -> dict[str, float]:
        pairs = zip(parameters, values.tolist(), strict=True)
        return {parameter.name: parameter.decode(value) for parameter, value in pairs}

    def minimum(start: Array, rows: Some, max_steps: int) -> OptimizeResult:
        scale: Array | float = 1.0
        if weights is not None:
            scale = np.sqrt(weights[rows] / np.mean(weights))
        return least_squares(
            lambda values: scale * (np.log(predict(named(values), rows)) - log_measured[rows]),
            np.clip(start, low + margin, high - margin),
            bounds=(low, high),
            loss="soft_l1",
            f_scale=noise,
            diff_step=1e-3,
            max_nfev=max_steps,
        )

    def best(starting: Sequence[Array], rows: Some, max_steps: int, count: int) -> list[Array]:
        minima = [minimum(start, rows, max_steps) for start in starting]
        minima.sort(key=lambda result: float(result.cost))
        return [np.asarray(result.x) for result in minima[:count]]

    starting = [first]
    if starts > 1:
        random = np.random.default_rng(_SEED)
        rows = np.sort(random.permutation(len(measured_s))[:_TRIAL_ROWS])
        others = [random.uniform(low, high) for _ in range(starts - 1)]
        starting = best([first, *others], rows, _TRIAL_STEPS, _BEST_STARTS)
    [values] = best(starting, np.arange(len(measured_s)), _MAX_STEPS, 1)
    results = named(values)
    return {parameter.name: min(to_digits(results[parameter.name]), parameter.high) for parameter in parameters}


def cross_validated_s(labels: Iterable[Hashable], predict: Callable[[Some, Some], Array], count: int = _FOLDS) -> Array:
    """Cross-validated predictions: every row is predicted by a fit without the rows of the same label.

    `predict(train, test)` gets indices of rows and returns seconds for `test`. Labels are assigned to `count` folds
    with a fixed seed.
    """
    labels = list(labels)
    names = sorted(set(labels), key=repr)
    fold_of = dict(zip(names, np.random.default_rng(_SEED).permutation(len(names)) % count, strict=True))
    folds = np.array([fold_of[label] for label in labels])
    seconds = np.empty(len(folds))
    for fold in np.unique(folds):
        test = np.flatnonzero(folds == fold)
        seconds[test] = predict(np.flatnonzero(folds != fold), test)
    return seconds


@dataclass(frozen=True, kw_only=True)
class Fit(Generic[Rates]):
    """Rates from measured rows, and predictions of rows that a fit has not used.

    `seconds(rates, rows)` predicts some of the rows, which are given by index.
    """

    label: str  # first words of the lines of a report
    measured_s: Array
    parameters: Sequence[Parameter]
    make: Callable[[Constants], Rates]
    seconds: Callable[[Rates, Some], Array]
    weighted: bool = False  # whether each row has a weight, the square root of its seconds
    starts: int = 1
    noise: float = 0.03  # see `solve`
    warm: bool = False  # whether fits to some of the rows start from the fit to all rows

    @property
    def every(self) -> Some:
        return np.arange(len(self.measured_s))

    @cached_property
    def constants(self) -> dict[str, float]:
        """Constants of the fit to all rows."""
        return self.constants_of(self.every, self.measured_s)

    @cached_property
    def rates(self) -> Rates:
        """Rates of the fit to all rows."""
        return self.make(self.constants)

    def rates_of(self, rows: Some) -> Rates:
        """Rates fitted to some of the rows."""
        return self.make(self.constants_of(rows, self.measured_s[rows], warm=self.warm))

    def constants_of(self, rows: Some, seconds: Array, *, warm: bool = False) -> dict[str, float]:
        """Constants fitted to given seconds of some of the rows; warm: start from the constants of all rows."""
        parameters = list(self.parameters)
        starts = self.starts
        if warm:
            starts = 1
            for index, parameter in enumerate(parameters):
                parameters[index] = replace(parameter, start=self.constants[parameter.name] or parameter.start)
        weights = None
        if self.weighted:
            weights = np.sqrt(seconds)
        return solve(
            parameters,
            lambda values, inside: self.seconds(self.make(values), rows[inside]),
            seconds,
            weights=weights,
            starts=starts,
            noise=self.noise,
        )

    def compare(self, label: str, predicted_s: Array) -> FitComparison:
        """Compare all rows with predictions."""
        return FitComparison(label=f"{self.label}{label}", measured_s=self.measured_s, predicted_s=predicted_s)

    @cached_property
    def own(self) -> FitComparison:
        """Predictions of all rows by the rates fitted to them."""
        return self.compare("fitted", self.seconds(self.rates, self.every))

    def left_out(self, what: str, labels: Iterable[Hashable]) -> FitComparison:
        """Predictions of each row by a fit without the rows of the same label."""
        predicted = cross_validated_s(labels, lambda train, test: self.seconds(self.rates_of(train), test))
        return self.compare(f"{what} left out", predicted)


@dataclass(frozen=True, kw_only=True, slots=True)
class FitErrors:
    """A line of a fit's report: relative errors of predicted seconds."""

    label: str  # name of the rows and of the predictor
    num_rows: int
    mape: float  # mean absolute error, as a fraction
    median_ape: float
    bias: float  # mean error; above 0: predictions are too long
    log_sd: float  # standard deviation of log(predicted / measured), from the 80th percentile of its absolute value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FitComparison:
    """Predicted and measured seconds of some rows."""

    label: str
    measured_s: Array
    predicted_s: Array

    @classmethod
    def join(cls, label: str, parts: Sequence[FitComparison]) -> FitComparison:
        """The rows of all parts."""
        return cls(
            label=label,
            measured_s=np.concatenate([part.measured_s for part in parts]),
            predicted_s=np.concatenate([part.predicted_s for part in parts]),
        )

    def from_size(self, sizes: Array, least: float, what: str) -> FitComparison:
        """The rows of at least this size; all rows if there are none."""
        large = sizes >= least
        if not large.any():
            return self
        label = f"{self.label}, {what} >= {least}"
        return replace(self, label=label, measured_s=self.measured_s[large], predicted_s=self.predicted_s[large])

    def errors(self) -> FitErrors:
        """Errors of the rows, at least one."""
        error = self.predicted_s / self.measured_s - 1.0
        return FitErrors(
            label=self.label,
            num_rows=len(error),
            mape=to_digits(float(np.mean(np.abs(error)))),
            median_ape=to_digits(float(np.median(np.abs(error)))),
            bias=to_digits(float(np.mean(error))),
            log_sd=to_digits(float(np.percentile(np.abs(np.log1p(error)), 80)) / DEVIATES_OF_80_PERCENT),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FitResult(Generic[Rates]):
    """Rates of one kind of operation, and how well they are known."""

    rates: Rates
    source: str  # authors of the measurements, in a few words
    own: FitComparison  # predictions of the fitted rows
    cross_validated: FitComparison  # predictions of held-out rows; the profile states their error
    interpolated: FitComparison | None = None  # predictions of shapes that have tables in the profile
    seen: Mapping[str, Span]  # smallest and largest value of each size
    gather: Gather | None = None  # algorithm of the all-gathers
    systematic_log_sd: float | None = None  # see OperationFit

    @property
    def operation(self) -> OperationFit:
        """The errors as a profile states them."""
        own = self.own.errors()
        held_out = self.cross_validated.errors()
        interpolated_log_sd = None
        if self.interpolated is not None:
            interpolated_log_sd = self.interpolated.errors().log_sd
        return OperationFit(
            source=self.source,
            num_rows=own.num_rows,
            mape=own.mape,
            cross_validated_mape=held_out.mape,
            log_sd=held_out.log_sd,
            interpolated_log_sd=interpolated_log_sd,
            systematic_log_sd=self.systematic_log_sd,
            seen=self.seen,
            gather=self.gather,
        )

    def lines(self) -> list[FitErrors]:
        """All lines of a report."""
        lines = [self.own.errors(), self.cross_validated.errors()]
        if self.interpolated is not None:
            lines.append(self.interpolated.errors())
        return lines


def column(rows: Iterable[Measurement], name: str) -> Array:
    """One field of all rows, as floats."""
    return np.array([getattr(row, name) for row in rows], dtype=float)


def dtypes_of(rows: Iterable[Measurement]) -> tuple[str, ...]:
    """Dtypes of the rows that a fit uses: half precision, or fp32 where there is no half precision."""
    dtypes = {row.dtype for row in rows}
    if dtypes.isdisjoint(HALF) and "fp32" in dtypes:
        return FULL
    return HALF


def element_bytes_of(rows: Iterable[Measurement]) -> int:
    """Bytes of an element in the rows that a fit uses."""
    return dtype_bytes(dtypes_of(rows)[0])


def peak_flops(gpu: GpuSpec, dtypes: Sequence[str] = HALF) -> float:
    """The highest FLOP/s of these dtypes on the datasheet. Raises InputError if the datasheet has none of them."""
    rates = [flops for dtype, flops in gpu.peak_flops.items() if dtype in dtypes]
    if not rates:
        raise InputError("gpu", gpu.name, f"a GPU that computes in {' or '.join(dtypes)}")
    return max(rates)


def has_waves(gpu: GpuSpec) -> bool:
    """Whether the device runs work in waves of tiles; threads of a CPU share the work evenly."""
    return gpu.num_sms >= _LEAST_SMS


def choose_knots(places: Array, values: Array, *, most: int, error: float) -> list[int]:
    """Indices of at most `most` knots, between which linear interpolation is within `error` of all values.

    Knots are added one at a time, where the interpolation is worst.
    """
    knots = sorted({0, len(places) - 1})
    while len(knots) < min(most, len(places)):
        off = np.abs(np.interp(places, places[knots], values[knots]) - values)
        worst = int(np.argmax(off))
        if off[worst] < error:
            break
        knots = sorted([*knots, worst])
    return knots


def to_digits(value: float, digits: int = 4) -> float:
    """Round to `digits` significant digits, as profiles are written."""
    return float(f"{value:.{digits}g}")


def mean_rate(rates: Array) -> float:
    """The geometric mean."""
    return to_digits(float(np.exp(np.log(rates).mean())))


def log_ratio(fitted: Mapping[Hashable, float], other: Mapping[Hashable, float], least: int = 20) -> list[float]:
    """The median of log(other seconds / fitted seconds) over common shapes; empty with fewer than `least` shapes."""
    shapes = fitted.keys() & other.keys()
    if len(shapes) < least:
        return []
    return [float(np.median([np.log(other[shape] / fitted[shape]) for shape in shapes]))]


def root_mean_square(values: Sequence[float]) -> float | None:
    """Root mean square; None without values."""
    if not values:
        return None
    return float(np.sqrt(np.mean(np.square(values))))


def span_of(arrays: Sequence[Array]) -> Span:
    """Smallest and largest value over all arrays."""
    values = np.concatenate([np.ravel(array) for array in arrays])
    return float(values.min()), float(values.max())


def ranges_of(rows: Sequence[Measurement], names: Iterable[str]) -> dict[str, Span]:
    """Smallest and largest value above 0 of each field; a field without such a value is dropped."""
    ranges = {}
    for name in names:
        values = column(rows, name)
        if (values > 0).any():
            ranges[name] = span_of([values[values > 0]])
    return ranges


def sources_of(rows: Iterable[Measurement], most: int = 3) -> str:
    """The sources of the rows, shortened."""
    names = sorted({row.source for row in rows})
    text = "; ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text
