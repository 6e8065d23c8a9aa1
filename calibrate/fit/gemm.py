"""fit_gemm: GemmRates from measured matrix products.

The form has four tiles, each with its share of the device's rate and a start; a launch; and a rate of device memory.
A CPU, whose few threads know no waves, has one small tile. Times are those at the burst clock (calibrate.fit.clock).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibrate.data.measurement import Measurement
from calibrate.fit.gemm_rows import HALF_BYTES, TYPE_KNOTS, GemmRows, Shape, with_tables
from calibrate.fit.solver import (
    HALF,
    Comparison,
    Fitted,
    Parameter,
    Some,
    cross_validated_s,
    dtypes_of,
    element_bytes_of,
    has_waves,
    peak_flops,
    rounded,
    seen_of,
    solve,
    sources_of,
)
from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec
from kvrsim.kernels.gemm import GemmRates, Product, Tile
from kvrsim.program import Array

TILES = ((256, 128), (128, 128), (128, 64), (64, 64))  # rows and columns of the output
FINE_TILES = ((16, 64),)  # where work goes in no waves: a prediction hardly steps
STEP = 64  # rows between which a prediction does not rise
PROMISED_ROWS = 128  # from here on, a prefill's chunks: what the profile's error is about

_ENOUGH = 20  # rows
_LEAST_WIDTH = 1024  # features of the narrowest matrix in the fit, where enough are wider
_STARTS = 24
_NOISE = (
    0.15  # libraries choose faster and slower kernels for similar shapes: the fit is to their mean, not to their mode
)
_USED_SHARE = 0.005  # of the rows that a tile is the fastest for; a tile with fewer is dropped
_CLASSES = (64, 128, 512, 2048, 8192)
_MOST_TYPE_ROWS = 4000  # of a quantised type
_TYPE_STARTS = 8
_MOST_SHARE = 0.92  # of the datasheet's rate in full waves; no product of random data on a GPU reaches more
_LONG_SUM = 16384  # features that are summed over in a product whose waves are full

# Datasheets' rates of quantised types, as multiples of the rate of a type that GpuSpec has.
_PEAKS: Mapping[str, tuple[float, tuple[str, ...]]] = {
    **dict.fromkeys(("fp8", "fp8_block"), (1.0, ("fp8",))),
    "nvfp4": (4.0, ("fp8",)),
    "int8": (2.0, HALF),
    "mxfp4_fp8": (1.0, ("fp8",)),
    **dict.fromkeys(("int4_wo", "int8_wo", "mxfp4_wo"), (1.0, HALF)),
}

Constants = Mapping[str, float]


def fit_gemm(
    rows: Sequence[Measurement], gpu: GpuSpec, *, keep_shapes: Collection[Shape] = (), narrow: bool = False
) -> Fitted[GemmRates]:
    """Constants from usable_gemm(rows), none faster than the datasheet; tables of the `keep_shapes` among them.

    `cross_validated` holds out shapes, or from three sources on whole sources (models), and uses the form without
    tables: the error for a model of other shapes. `interpolated` is the error of the tables, a tenth of the row counts
    held out at a time.
    """
    found = usable_gemm(rows, narrow=narrow)
    data = GemmRows.of(found)
    device = _Device(gpu=gpu, peak_flops=peak_flops(gpu, dtypes_of(found)))
    constants = _fit_form(data, device)
    form = _pruned(device.rates(constants), data)
    rates = with_tables(form, data, keep_shapes)
    sources = [row.source for row in found]
    labels, what = (sources, "models") if len(set(sources)) > 2 else (data.shapes, "shapes")

    def predict(train: Some, test: Some) -> Array:
        return data.take(test).form_s(device.rates(_fit_form(data.take(train), device, constants)))

    name = f"form alone, {what} left out"
    held_out = Comparison(label=name, measured_s=data.seconds, predicted_s=cross_validated_s(labels, predict))
    return Fitted(
        rates=rates,
        source=sources_of(found),
        own=Comparison(label="as shipped", measured_s=data.seconds, predicted_s=data.predicted_s(rates)),
        cross_validated=held_out.where(data.tokens >= PROMISED_ROWS, f"{name}, rows >= {PROMISED_ROWS}"),
        interpolated=_interpolated(rates, data),
        checks=tuple(held_out.by(data.tokens, _CLASSES, "rows")),
        seen=seen_of(found, ("tokens", "in_features", "out_features")),
    )


def fit_gemm_type(
    rows: Sequence[Measurement], gpu: GpuSpec, kind: str, *, keep_shapes: Collection[Shape] = ()
) -> Fitted[GemmRates]:
    """Rates of one of GEMM_TYPES; tables of the `keep_shapes` with few knots. Rows are thinned evenly by time."""
    found = sorted(usable_gemm(rows, (kind,)), key=lambda row: row.expected_s)
    data, some = GemmRows.of(found), np.arange(0, len(found), max(1, len(found) // _MOST_TYPE_ROWS))
    device = _Device(gpu=gpu, peak_flops=peak_of(gpu, kind))
    constants = _fit_form(data.take(some), device, starts=_TYPE_STARTS)
    form = _pruned(device.rates(constants), data)
    rates = with_tables(form, data, keep_shapes, TYPE_KNOTS)
    promised = data.tokens >= PROMISED_ROWS
    own = Comparison(label=f"{kind}, as shipped", measured_s=data.seconds, predicted_s=data.predicted_s(rates))
    alone = Comparison(label=f"{kind}, form alone", measured_s=data.seconds, predicted_s=data.form_s(form))
    return Fitted(
        rates=rates,
        source=sources_of(found),
        own=own,
        cross_validated=alone.where(promised, f"{alone.label}, rows >= {PROMISED_ROWS}"),
        seen=seen_of(found, ("tokens", "in_features", "out_features")),
    )


def peak_of(gpu: GpuSpec, kind: str | None) -> float:
    """The datasheet's FLOP/s of a type of product; None: half precision."""
    factor, known = (1.0, HALF) if kind is None else _PEAKS[kind]
    return factor * peak_flops(gpu, known)


def computes_in(gpu: GpuSpec, kind: str) -> bool:
    """Whether the GPU's datasheet has a rate for products of that type."""
    return any(dtype in _PEAKS[kind][1] for dtype, _ in gpu.peak_flops)


def check_full_waves(rates: GemmRates, gpu: GpuSpec, argument: str) -> None:
    """Raises InputError where products on a GPU come nearer to its datasheet than random data allow."""
    if not has_waves(gpu) or not rates.tiles:
        return
    product = Product(_LONG_SUM, _LONG_SUM)
    rows = np.array([float(_LONG_SUM)])
    share = float(rows[0] * product.flops_per_row / rates.form_s(rows, product, HALF_BYTES)[0]) / peak_flops(gpu)
    if share > _MOST_SHARE:
        got = f"gemm rows that come to {share:.0%} of the datasheet of {gpu.name}"
        accepted = f"products of random data, which reach at most {_MOST_SHARE:.0%}"
        raise InputError(argument, got, f"{accepted} (unfilled or zero matrices take less power and keep the clock)")


def usable_gemm(
    rows: Sequence[Measurement], dtypes: Sequence[str] | None = None, *, narrow: bool = False
) -> list[Measurement]:
    """Products in these dtypes (None: dtypes_of(rows)) of at least one step of rows.

    Of wide matrices where there are enough of them, but with `narrow` of all.
    """
    wanted = dtypes_of(rows) if dtypes is None else dtypes
    found = [row for row in rows if row.operation == "gemm" and row.dtype in wanted and (row.tokens or 0) >= STEP]
    wide = [row for row in found if min(row.in_features or 0, row.out_features or 0) >= _LEAST_WIDTH]
    return wide if len(wide) >= _ENOUGH and not narrow else found


def head_bytes_per_s(rows: Sequence[Measurement], gpu: GpuSpec) -> float | None:
    """At which one token's logits read their weights, at most the datasheet's; None where they were not measured."""
    width = element_bytes_of(rows)
    rates = [(row.in_features or 0) * (row.out_features or 0) * width / row.expected_s for row in rows]
    return min(rounded(float(np.median(rates))), gpu.hbm_bytes_per_s) if rates else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Device:
    """What constants are bounded by, and made into rates with."""

    gpu: GpuSpec
    peak_flops: float  # in the dtypes of the rows

    @property
    def tiles(self) -> tuple[tuple[int, int], ...]:
        return TILES if has_waves(self.gpu) else FINE_TILES

    def parameters(self, near: Constants) -> list[Parameter]:
        hbm, waves = self.gpu.hbm_bytes_per_s, has_waves(self.gpu)
        listed = [
            Parameter(name="bytes_per_s", start=0.65 * hbm, low=0.1 * hbm, high=hbm),
            Parameter(name="launch_s", start=3e-6, low=0.0, high=2e-5 if waves else 1e-3),
        ]
        for index, (height, width) in enumerate(self.tiles):
            share = 0.85 * (height * width / (self.tiles[0][0] * self.tiles[0][1])) ** 0.1
            listed.append(Parameter(name=f"share_{index}", start=share, low=0.3 if waves else 0.01, high=1.0))
            listed.append(Parameter(name=f"start_{index}", start=3e-6, low=0.0, high=2e-5))
        return [replace(parameter, start=near.get(parameter.name) or parameter.start) for parameter in listed]

    def rates(self, values: Constants) -> GemmRates:
        """Shares are of the datasheet's rate here, and of the best tile's in a profile."""
        shares = [values[f"share_{index}"] for index in range(len(self.tiles))]
        return GemmRates(
            flops_per_s=rounded(max(shares) * self.peak_flops),
            bytes_per_s=values["bytes_per_s"],
            launch_s=values["launch_s"],
            concurrent_tiles=self.gpu.num_sms,
            tiles=tuple(
                Tile(
                    rows=height, cols=width, flops_share=rounded(share / max(shares)), start_s=values[f"start_{index}"]
                )
                for index, ((height, width), share) in enumerate(zip(self.tiles, shares, strict=True))
            ),
        )


def _fit_form(rows: GemmRows, device: _Device, near: Constants | None = None, starts: int = _STARTS) -> Constants:
    """Rows weigh by the square root of their time: long products make a prefill. `near`: where to start."""
    return solve(
        device.parameters(near or {}),
        lambda values, some: rows.take(some).form_s(device.rates(values)),
        rows.seconds,
        weights=np.sqrt(rows.seconds),
        starts=starts if near is None else 1,
        noise=_NOISE,
    )


def _pruned(rates: GemmRates, rows: GemmRows) -> GemmRates:
    """Without the tiles that hardly any row depends on; the smallest tile stays, for its step."""
    alone = [rows.form_s(replace(rates, tiles=(tile,))) for tile in rates.tiles]
    wins = np.bincount(np.argmin(alone, axis=0), minlength=len(rates.tiles)) / len(rows.tokens)
    kept = [tile for tile, share in zip(rates.tiles, wins, strict=True) if share >= _USED_SHARE]
    if rates.tiles[-1] not in kept:
        kept.append(rates.tiles[-1])
    best = max(tile.flops_share for tile in kept)
    return replace(
        rates,
        flops_per_s=rounded(rates.flops_per_s * best),
        tiles=tuple(replace(tile, flops_share=rounded(tile.flops_share / best)) for tile in kept),
    )


def _interpolated(rates: GemmRates, rows: GemmRows) -> Comparison | None:
    """Rows of measured shapes, each predicted by tables made without a tenth of the row counts."""
    shapes = {(shape.in_features, shape.out_features) for shape in rates.measured}
    wanted = rows.tokens >= PROMISED_ROWS
    wanted &= np.array([shape in shapes for shape in rows.shapes])
    if not wanted.any():
        return None
    data = rows.take(wanted)

    def predict(train: Some, test: Some) -> Array:
        return data.take(test).predicted_s(with_tables(replace(rates, measured=()), data.take(train), shapes))

    labels = list(zip(data.tokens.tolist(), data.shapes, strict=True))
    return Comparison(
        label=f"shapes with tables, row counts left out, rows >= {PROMISED_ROWS}",
        measured_s=data.seconds,
        predicted_s=cross_validated_s(labels, predict),
    )
