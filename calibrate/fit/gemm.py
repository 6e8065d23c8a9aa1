"""fit_gemm: GemmRates from measured matrix products; fit_clock: how far and how fast the clock falls under load.

The form has four tiles, each with a share of the device's rate and a start time; a launch time; and a rate of device
memory. A CPU runs few threads without waves and has one small tile. Times are those at the burst clock.

A collector runs a product again and again without a pause, so a row of L seconds was measured after `warmups` x L
seconds under load and during `repeats` x L more. Short products are timed at the burst clock, long ones at the
sustained clock; the time constant determines where the change lies. at_burst converts measured seconds to seconds at
the burst clock, which the rates of a profile refer to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

import numpy as np

from calibrate.data import Columns, Measurement, Some
from calibrate.fit.fit import (
    HALF,
    Constants,
    Fit,
    FitComparison,
    FitResult,
    Parameter,
    choose_knots,
    column,
    cross_validated_s,
    dtypes_of,
    element_bytes_of,
    has_waves,
    peak_flops,
    ranges_of,
    solve,
    sources_of,
    to_digits,
)
from calibrate.importers import read_source
from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec, load_gpu
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.gemm import GEMM_TYPES, GemmRates, MeasuredShape, Product, Tile, Width, join_products
from kvrsim.kernels.profile import CalibrationProfile, Clock
from kvrsim.model.gemm import Gemm
from kvrsim.model.load import builtin_models, load_model
from kvrsim.program import Array

TILES = ((256, 128), (128, 128), (128, 64), (64, 64))  # rows and columns of the output that a tile computes
FINE_TILES = ((16, 64),)  # tiles of devices without waves: small, so that predicted times have only small steps
STEP = 64  # number of rows for which a prediction is constant
PROMISED_ROWS = 128  # minimum number of rows of a product for which the profile states its error
HALF_BYTES = 2

_ENOUGH = 20  # minimum number of measurements of wide matrices; with fewer, all matrices are fitted
_LEAST_WIDTH = 1024  # minimum number of features of a wide matrix
_STARTS = 24
# Libraries choose faster and slower kernels for similar shapes: the fit follows their mean.
_NOISE = 0.15
_USED_SHARE = 0.005  # a tile that is the fastest for a smaller share of the rows is dropped
_MOST_TYPE_ROWS = 4000  # maximum number of measurements per quantised type
_TYPE_STARTS = 8
_MOST_SHARE = 0.92  # largest share of the datasheet's rate that products of random data reach on a GPU
_SATURATING_SIZE = 16384  # rows, inputs and outputs of a product at the highest rate of the form
_SEEN = ("tokens", "in_features", "out_features")

# Datasheets' rates of quantised types, as multiples of the rate of a type that GpuSpec has.
_PEAKS: Mapping[str, tuple[float, tuple[str, ...]]] = {
    **dict.fromkeys(("fp8", "fp8_block"), (1.0, ("fp8",))),
    "nvfp4": (4.0, ("fp8",)),
    "int8": (2.0, HALF),
    "mxfp4_fp8": (1.0, ("fp8",)),
    **dict.fromkeys(("int4_wo", "int8_wo", "mxfp4_wo"), (1.0, HALF)),
}

# -- tables of measured shapes
MAX_KNOTS = 40  # maximum number of knots in a shape's table
TYPE_KNOTS = 10  # maximum number of knots in a quantised type's table
_LEAST_KNOTS = 4
_KNOT_ERROR = 0.003  # relative error at which a table needs no more knots

# -- the clock, which is fitted to products that fill a GPU: rates of others depend more on their shape
_LEAST_TOKENS = 1024
_LEAST_FEATURES = 2048
_LEAST_ROWS = 200
_MOST_ROWS = 3000
# seconds under load: a fit needs rows above the first and rows below the second
_LONG_S = 0.3
_SHORT_S = 0.03
_MOST_SUSTAINED = 0.96  # with a larger sustained share the fall of the clock is lost in the spread over shapes
_LONGEST_S = 1.0  # longest time constant; a slower fall is an effect of sizes
_ITERATIONS = 12  # number of iterations in burst_seconds

Shape = tuple[int, int]  # in_features, out_features


def fit_gemm(rows: Sequence[Measurement], gpu: GpuSpec, *, keep_shapes: Collection[Shape] = ()) -> FitResult[GemmRates]:
    """Fit constants to products, none faster than the datasheet; add tables of the measured `keep_shapes`.

    `cross_validated` is the error of the form without tables, for a model of other shapes: shapes are held out, or,
    with three or more sources, whole sources (models). `interpolated` is the error of the tables: a tenth of the row
    counts is held out at a time.
    """
    data = GemmRows.of(rows)
    fit = data.fit(gpu, peak_flops(gpu, dtypes_of(rows)), "form alone, ", _STARTS)
    rates = with_tables(_prune(fit.rates, data), data, keep_shapes)
    sources = [row.source for row in rows]
    if len(set(sources)) > 2:
        held_out = fit.left_out("models", sources)
    else:
        held_out = fit.left_out("shapes", data.shapes)
    return FitResult(
        rates=rates,
        source=sources_of(rows),
        own=FitComparison(label="as shipped", measured_s=data.seconds, predicted_s=data.predicted_s(rates)),
        cross_validated=held_out.from_size(data.tokens, PROMISED_ROWS, "rows"),
        interpolated=_interpolate(rates, data),
        seen=ranges_of(rows, _SEEN),
    )


def fit_gemm_type(
    rows: Sequence[Measurement], gpu: GpuSpec, kind: str, *, keep_shapes: Collection[Shape] = ()
) -> FitResult[GemmRates]:
    """Fit one of GEMM_TYPES, with small tables of the `keep_shapes`. Rows are thinned evenly by time."""
    by_time = sorted(rows, key=lambda row: row.expected_s)
    data = GemmRows.of(by_time)
    thinned = data.take(np.arange(0, len(by_time), max(1, len(by_time) // _MOST_TYPE_ROWS)))
    form = _prune(thinned.fit(gpu, peak_of(gpu, kind), "", _TYPE_STARTS).rates, data)
    rates = with_tables(form, data, keep_shapes, TYPE_KNOTS)
    shipped = FitComparison(label=f"{kind}, as shipped", measured_s=data.seconds, predicted_s=data.predicted_s(rates))
    alone = FitComparison(label=f"{kind}, form alone", measured_s=data.seconds, predicted_s=data.form_s(form))
    return FitResult(
        rates=rates,
        source=sources_of(by_time),
        own=shipped,
        cross_validated=alone.from_size(data.tokens, PROMISED_ROWS, "rows"),
        seen=ranges_of(by_time, _SEEN),
    )


def fit_types_section(part: JsonObject, profile: CalibrationProfile) -> FitResult[Mapping[str, GemmRates]]:
    """Fit a recipe's types of products, each from its own source."""
    gpu = load_gpu(profile.gpu)
    fits = []
    rates = dict(profile.kernels.gemm_types)
    for kind in part.fields:
        rows = usable_gemm(read_source(part.text(kind), "recipes"), (kind,))
        fit = fit_gemm_type(at_burst(rows, profile.kernels.clock), gpu, kind, keep_shapes=builtin_shapes())
        fits.append(fit)
        rates[kind] = fit.rates
    return FitResult(
        rates=rates,
        source="; ".join(fit.source for fit in fits),
        own=FitComparison.join("as shipped", [fit.own for fit in fits]),
        cross_validated=FitComparison.join("form alone", [fit.cross_validated for fit in fits]),
        seen=fits[0].seen,
    )


def peak_of(gpu: GpuSpec, kind: str | None) -> float:
    """The datasheet's FLOP/s of a type of product; None: half precision."""
    if kind is None:
        return peak_flops(gpu, HALF)
    factor, dtypes = _PEAKS[kind]
    return factor * peak_flops(gpu, dtypes)


def computes_in(gpu: GpuSpec, kind: str) -> bool:
    """Whether the GPU's datasheet has a rate for products of that type."""
    return any(dtype in _PEAKS[kind][1] for dtype in gpu.peak_flops)


def check_full_waves(rates: GemmRates, gpu: GpuSpec, argument: str) -> None:
    """Raise InputError if products reach a larger share of the GPU's datasheet rate than random data allow."""
    if not has_waves(gpu) or not rates.tiles:
        return
    product = Product(_SATURATING_SIZE, _SATURATING_SIZE)
    rows = np.array([float(_SATURATING_SIZE)])
    share = float(rows[0] * product.flops_per_row / rates.form_s(rows, product, HALF_BYTES)[0]) / peak_flops(gpu)
    if share > _MOST_SHARE:
        got = f"gemm rows that come to {share:.0%} of the datasheet of {gpu.name}"
        accepted = f"products of random data, which reach at most {_MOST_SHARE:.0%}"
        raise InputError(argument, got, f"{accepted} (unfilled or zero matrices take less power and keep the clock)")


def usable_gemm(rows: Sequence[Measurement], dtypes: Sequence[str], *, narrow: bool = False) -> list[Measurement]:
    """Products in these dtypes with at least STEP rows.

    Only wide matrices if there are enough of them; with `narrow` all matrices.
    """
    products = [row for row in rows if row.operation == "gemm" and row.dtype in dtypes and (row.tokens or 0) >= STEP]
    wide = [row for row in products if min(row.in_features or 0, row.out_features or 0) >= _LEAST_WIDTH]
    if narrow or len(wide) < _ENOUGH:
        return products
    return wide


def head_bytes_per_s(rows: Sequence[Measurement], gpu: GpuSpec) -> float | None:
    """Rate at which the head reads its weights for one token, at most the datasheet's; None if not measured."""
    if not rows:
        return None
    nbytes = column(rows, "in_features") * column(rows, "out_features") * element_bytes_of(rows)
    return min(to_digits(float(np.median(nbytes / column(rows, "expected_s")))), gpu.hbm_bytes_per_s)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GemmRows(Columns):
    """Measured matrix products."""

    tokens: Array  # rows of the input
    in_features: Array
    out_features: Array
    seconds: Array  # measured seconds
    element_bytes: Width = HALF_BYTES

    @classmethod
    def of(cls, rows: Sequence[Measurement]) -> GemmRows:
        """Convert gemm measurements to arrays: all of one quantised type, or all in half precision or in fp32."""
        width: Width = element_bytes_of(rows)
        types = {row.dtype or "" for row in rows}
        if len(types) == 1:
            width = GEMM_TYPES.get(types.pop(), width)
        return cls(
            tokens=column(rows, "tokens"),
            in_features=column(rows, "in_features"),
            out_features=column(rows, "out_features"),
            seconds=column(rows, "expected_s"),
            element_bytes=width,
        )

    @property
    def shapes(self) -> list[Shape]:
        """Shape of each row's product."""
        return list(zip(self.in_features.astype(int).tolist(), self.out_features.astype(int).tolist(), strict=True))

    def by_shape(self) -> Iterator[tuple[Shape, Some]]:
        """Each shape and the indices of its rows."""
        places: dict[Shape, list[int]] = {}
        for index, shape in enumerate(self.shapes):
            places.setdefault(shape, []).append(index)
        for shape in sorted(places):
            yield shape, np.array(places[shape])

    def form_s(self, rates: GemmRates) -> Array:
        """Seconds by the form without tables; its formula accepts arrays of shapes."""
        product = Product(cast(Any, self.in_features), cast(Any, self.out_features))
        return rates.form_s(self.tokens, product, self.element_bytes)

    def predicted_s(self, rates: GemmRates) -> Array:
        """Seconds as the simulator computes them."""
        seconds = np.empty(len(self.tokens))
        for shape, indices in self.by_shape():
            seconds[indices] = rates.seconds(self.tokens[indices], (Product(*shape),), self.element_bytes)
        return seconds

    def fit(self, gpu: GpuSpec, peak: float, label: str, starts: int) -> Fit[GemmRates]:
        """Fit the form, in which full waves reach at most `peak` FLOP/s."""
        tiles: tuple[tuple[int, int], ...] = FINE_TILES
        if has_waves(gpu):
            tiles = TILES
        return Fit(
            label=label,
            measured_s=self.seconds,
            parameters=_parameters(gpu, tiles),
            make=lambda values: _rates(values, gpu, tiles, peak),
            seconds=lambda rates, rows: self.take(rows).form_s(rates),
            weighted=True,
            starts=starts,
            noise=_NOISE,
            warm=True,
        )


def _parameters(gpu: GpuSpec, tiles: Sequence[tuple[int, int]]) -> list[Parameter]:
    hbm = gpu.hbm_bytes_per_s
    most_launch_s = 1e-3
    least_share = 0.01
    if has_waves(gpu):
        most_launch_s = 2e-5
        least_share = 0.3
    parameters = [
        Parameter(name="bytes_per_s", start=0.65 * hbm, low=0.1 * hbm, high=hbm),
        Parameter(name="launch_s", start=3e-6, low=0.0, high=most_launch_s),
    ]
    for index, (height, width) in enumerate(tiles):
        share = 0.85 * (height * width / (tiles[0][0] * tiles[0][1])) ** 0.1
        parameters.append(Parameter(name=f"share_{index}", start=share, low=least_share, high=1.0))
        parameters.append(Parameter(name=f"start_{index}", start=3e-6, low=0.0, high=2e-5))
    return parameters


def _rates(values: Constants, gpu: GpuSpec, tiles: Sequence[tuple[int, int]], peak: float) -> GemmRates:
    """Make the rates. `values` has shares of the datasheet's rate, GemmRates shares of the best tile's rate."""
    best = max(values[f"share_{index}"] for index in range(len(tiles)))
    rated_tiles = []
    for index, (height, width) in enumerate(tiles):
        share = to_digits(values[f"share_{index}"] / best)
        rated_tiles.append(Tile(rows=height, cols=width, flops_share=share, start_s=values[f"start_{index}"]))
    return GemmRates(
        flops_per_s=to_digits(best * peak),
        bytes_per_s=values["bytes_per_s"],
        launch_s=values["launch_s"],
        concurrent_tiles=gpu.num_sms,
        tiles=tuple(rated_tiles),
    )


def _prune(rates: GemmRates, rows: GemmRows) -> GemmRates:
    """Drop tiles that are the fastest for hardly any row; the smallest tile stays because it sets the step."""
    alone = [rows.form_s(replace(rates, tiles=(tile,))) for tile in rates.tiles]
    wins = np.bincount(np.argmin(alone, axis=0), minlength=len(rates.tiles)) / len(rows.tokens)
    tiles = [tile for tile, share in zip(rates.tiles, wins, strict=True) if share >= _USED_SHARE]
    if rates.tiles[-1] not in tiles:
        tiles.append(rates.tiles[-1])
    best = max(tile.flops_share for tile in tiles)
    return replace(
        rates,
        flops_per_s=to_digits(rates.flops_per_s * best),
        tiles=tuple(replace(tile, flops_share=to_digits(tile.flops_share / best)) for tile in tiles),
    )


def _interpolate(rates: GemmRates, rows: GemmRows) -> FitComparison | None:
    """Cross-validate tables: each row is predicted by tables without the tenth of the row counts with this row."""
    shapes = {(shape.in_features, shape.out_features) for shape in rates.measured}
    large = rows.tokens >= PROMISED_ROWS
    large &= np.array([shape in shapes for shape in rows.shapes])
    if not large.any():
        return None
    data = rows.take(large)

    def predict(train: Some, test: Some) -> Array:
        return data.take(test).predicted_s(with_tables(replace(rates, measured=()), data.take(train), shapes))

    return FitComparison(
        label=f"shapes with tables, row counts left out, rows >= {PROMISED_ROWS}",
        measured_s=data.seconds,
        predicted_s=cross_validated_s(zip(data.tokens.tolist(), data.shapes, strict=True), predict),
    )


def with_tables(form: GemmRates, rows: GemmRows, shapes: Collection[Shape], most: int = MAX_KNOTS) -> GemmRates:
    """The rates with tables of at most `most` knots for the shapes that were measured often enough."""
    distinct = set(shapes)
    tables = []
    for shape, indices in rows.by_shape():
        if shape in distinct:
            table = _table(form, shape, rows.take(indices), most)
            if table is not None:
                tables.append(table)
    return replace(form, measured=tuple(tables))


def _table(form: GemmRates, shape: Shape, rows: GemmRows, most: int) -> MeasuredShape | None:
    """Table of a shape, with knots where the ratio to the form changes most; None if too few steps were measured.

    The ratio at a step is that of the row at the step's end if it was measured, else the median over the step.
    """
    ends = np.ceil(rows.tokens / form.step) * form.step
    errors = np.log(rows.seconds / rows.form_s(form))
    knots = np.unique(ends)
    if len(knots) < _LEAST_KNOTS:
        return None
    logs = np.empty(len(knots))
    for index, end in enumerate(knots):
        of_step = rows.tokens == end
        if not of_step.any():
            of_step = ends == end
        logs[index] = np.median(errors[of_step])
    points = choose_knots(np.log(knots), logs, most=most, error=_KNOT_ERROR)
    seconds = form.form_s(knots[points], Product(*shape), rows.element_bytes) * np.exp(logs[points])
    return MeasuredShape(
        in_features=shape[0],
        out_features=shape[1],
        rows=tuple(int(knot) for knot in knots[points]),
        seconds=tuple(to_digits(float(value)) for value in seconds),
    )


def builtin_shapes() -> frozenset[Shape]:
    """(in_features, out_features) of all products of the built-in models, without the experts of mixtures."""
    return frozenset(chain.from_iterable(map(model_shapes, builtin_models())))


def model_shapes(name: str) -> Iterator[Shape]:
    """Weight matrices of one model as serving engines multiply them: joint Q, K, V, and joint gate and up."""
    for layer in load_model(name).layer_kinds:
        groups: list[Sequence[Gemm]] = []  # matrices with one input
        if layer.mixer is not None:
            groups.append(layer.mixer.projections)
            groups += [(gemm,) for gemm in layer.mixer.output]
        if not layer.num_experts:
            groups.append(layer.mlp)
        for gemms in groups:
            for product in join_products([Product(gemm.in_features, gemm.out_features) for gemm in gemms]):
                yield product.in_features, product.out_features


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockFit:
    """A clock, and the rows that it was fitted to."""

    clock: Clock
    source: str
    num_rows: int

    def describe(self) -> str:
        """One line for a profile's provenance."""
        share = self.clock.sustained_share
        tau = self.clock.time_constant_s
        of = f"{self.num_rows} products of at least {_LEAST_TOKENS} tokens and {_LEAST_FEATURES} features"
        return f"{share:.1%} of the burst rate after long load, time constant {1e3 * tau:.0f} ms; {of}: {self.source}"


def fit_clock(rows: Sequence[Measurement], gpu: GpuSpec) -> ClockFit | None:
    """Fit the clock to half-precision products with known loops; None if there are too few, or if they show no fall.

    Rows of several sources may have loops of different length, which separates an effect of time from one of size. Each
    source has its own rate.
    """
    products = [row for row in rows if _fills(row) and row.has_loop]
    loaded_s = (column(products, "warmups") + column(products, "repeats")) * column(products, "expected_s")
    if len(products) < _LEAST_ROWS or loaded_s.max() < _LONG_S or loaded_s.min() > _SHORT_S:
        return None
    products = [products[index] for index in np.argsort(loaded_s)[:: max(1, len(products) // _MOST_ROWS)]]
    flops = 2.0 * column(products, "tokens") * column(products, "in_features") * column(products, "out_features")
    loops = _Loops(warmups=column(products, "warmups"), repeats=column(products, "repeats"))
    peak = max(gpu.peak_flops.values())
    sources = sorted({row.source for row in products})
    names = np.array([f"rate_{sources.index(row.source)}" for row in products])

    def predict(values: Constants, indices: Some) -> Array:
        rates = np.array([values[name] for name in names[indices]])
        return loops.take(indices).mean_s(_clock(values), flops[indices] / rates)

    solved = solve(
        (
            Parameter(name="sustained_share", start=0.88, low=0.3, high=1.0),
            Parameter(name="time_constant_s", start=0.1, low=2e-3, high=_LONGEST_S),
            *(Parameter(name=name, start=0.4 * peak, low=1e-2 * peak, high=peak) for name in sorted(set(names))),
        ),
        predict,
        column(products, "expected_s"),
        starts=4,
    )
    if solved["sustained_share"] > _MOST_SUSTAINED or solved["time_constant_s"] >= _LONGEST_S:
        return None
    return ClockFit(clock=_clock(solved), source=sources_of(products), num_rows=len(products))


def _clock(values: Constants) -> Clock:
    return Clock(sustained_share=values["sustained_share"], time_constant_s=values["time_constant_s"])


def _fills(row: Measurement) -> bool:
    """Whether the row is a product that fills a GPU."""
    return (
        row.operation == "gemm"
        and row.dtype in HALF
        and (row.tokens or 0) >= _LEAST_TOKENS
        and min(row.in_features or 0, row.out_features or 0) >= _LEAST_FEATURES
    )


def at_burst(rows: Sequence[Measurement], clock: Clock | None) -> list[Measurement]:
    """The rows with seconds at the burst clock; rows with an unknown loop stay as they are."""
    timed = [row for row in rows if row.has_loop]
    if clock is None or not timed:
        return list(rows)
    measured_s = column(timed, "expected_s")
    burst_s = burst_seconds(measured_s, column(timed, "warmups"), column(timed, "repeats"), clock)
    factors = iter((burst_s / measured_s).tolist())
    rows_at_burst = []
    for row in rows:
        if row.has_loop:
            row = row.times(next(factors))
        rows_at_burst.append(row)
    return rows_at_burst


def burst_seconds(measured_s: Array, warmups: Array, repeats: Array, clock: Clock | None) -> Array:
    """Seconds at the burst clock, from loops with these numbers of warm-up and timed runs."""
    if clock is None:
        return measured_s
    loops = _Loops(warmups=warmups, repeats=repeats)
    burst_s = measured_s
    for _ in range(_ITERATIONS):
        burst_s = burst_s * measured_s / loops.mean_s(clock, burst_s)
    return burst_s


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Loops(Columns):
    """Numbers of warm-up and of timed runs of each row."""

    warmups: Array
    repeats: Array

    def mean_s(self, clock: Clock, busy_s: Array) -> Array:
        """Mean seconds that a loop measures for an operation of `busy_s` seconds at the burst clock."""
        before_s = clock.loaded_s(self.warmups * busy_s)
        return (clock.loaded_s((self.warmups + self.repeats) * busy_s) - before_s) / self.repeats
