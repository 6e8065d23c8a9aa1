"""GemmRates: seconds of matrix products, from tiles that run in waves and from shapes that were measured.

The output of a product of `rows` tokens with a weight matrix is cut into tiles. The device computes one tile per
multiprocessor at a time, so the time rises in steps ("wave quantisation"; NVIDIA, Matrix Multiplication Background
User's Guide). If there are several tile sizes, the library uses the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kvrsim.errors import InputError, check_rising
from kvrsim.interp import log_interp
from kvrsim.io.schema import NonNegative, PositiveShare
from kvrsim.model.gemm import Gemm
from kvrsim.program import Array

_LAST_STEP = 512  # steps of the time table; beyond them time is proportional to rows


class GemmType(NamedTuple):
    """A type of product: bytes of one element of each operand, with the scales of quantisation groups."""

    weight: float
    input: float
    output: float
    quantised: float = 0.0  # bytes per input element that the quantising kernel moves before the product
    title: str = ""  # the type in words
    alike: tuple[str, ...] = ()  # substitutes where the type has no rates, most similar first


Width = int | GemmType  # bytes per element of all operands, or of each


def of_each(width: Width) -> GemmType:
    """Bytes per element of each operand."""
    return width if isinstance(width, GemmType) else GemmType(width, width, width)


# Types of products other than half precision. "_wo": only weights are quantised; the product is computed in half
# precision. The other types quantise their inputs first; this pass reads half precision, writes the type, and is part
# of the product's time, as in public tables. Scales: fp8_block has one fp32 per 128 x 128 weights and per 128 inputs;
# nvfp4 8 bits per 16 elements; int4_wo 16 bits per 128; mxfp4 8 bits per 32. Inputs of mxfp4_wo are in half precision,
# those of mxfp4_fp8 in MXFP8.
# Substitutes: INT8 has FP8's peak on Hopper and Ada. A device that lacks the arithmetic of a type computes in half
# precision from the same weights: FP8 before Ada, NVFP4 before Blackwell.
_FP4 = 0.5 + 1 / 16
_MX8 = 1.0 + 1 / 32
GEMM_TYPES: Mapping[str, GemmType] = {
    "fp8": GemmType(1.0, 1.0, 2.0, 3.0, "FP8", ("fp8_block", "int8_wo")),
    "fp8_block": GemmType(1.0, 1.0 + 4 / 128, 2.0, 3.0 + 4 / 128, "FP8 with a scale per block", ("fp8", "int8_wo")),
    "nvfp4": GemmType(_FP4, _FP4, 2.0, 2.0 + _FP4, "NVFP4", ("int4_wo", "int8_wo")),
    "int8": GemmType(1.0, 1.0, 2.0, 3.0, "INT8", ("fp8",)),
    "int4_wo": GemmType(0.5 + 2 / 128, 2.0, 2.0, 0.0, "half precision from 4-bit weights", ("int8_wo",)),
    "int8_wo": GemmType(1.0, 2.0, 2.0, 0.0, "half precision from 8-bit weights", ("int4_wo",)),
    "mxfp4_wo": GemmType(0.5 + 1 / 32, 2.0, 2.0, 0.0, "half precision from MXFP4 weights", ("int4_wo", "int8_wo")),
    "mxfp4_fp8": GemmType(
        *(0.5 + 1 / 32, _MX8, 2.0, 2.0 + _MX8, "FP8 from MXFP4 weights"),
        ("fp8_block", "fp8", "mxfp4_wo", "int4_wo", "int8_wo"),
    ),
}


def alike(compute: str | None) -> tuple[str, ...]:
    """The type of a product and its substitutes, most similar first; empty for half precision."""
    return () if compute is None else (compute, *GEMM_TYPES[compute].alike)


class Product(NamedTuple):
    """Matrix products of one shape that are issued together."""

    in_features: int
    out_features: int
    num_matrices: int = 1  # number of weight matrices of this shape, such as experts of a mixture
    share: float = 1.0  # share of the tokens that each matrix multiplies
    compute: str | None = None  # a key of GEMM_TYPES; None: the request's dtype

    @property
    def flops_per_row(self) -> float:
        """FLOPs per token."""
        return 2.0 * self.in_features * self.out_features * self.num_matrices * self.share


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One size of the tiles that the output is cut into."""

    rows: int
    cols: int
    flops_share: PositiveShare  # share of GemmRates.flops_per_s that the tile reaches
    start_s: NonNegative  # seconds of the prologue and epilogue of a wave


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredShape:
    """Measured times of products with one weight matrix."""

    in_features: int
    out_features: int
    rows: tuple[int, ...]  # in rising order
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        check_rising("rows", self.rows, "seconds", self.seconds)


def pieces(amount: Array, size: float | Array) -> Array:
    """Number of pieces of `size` that cover `amount`; in a fit, `size` is an array."""
    # Most sizes are powers of 2: their inverse is exact, and a product is faster than a division.
    if isinstance(size, int | float) and math.frexp(size)[0] == 0.5:
        return np.asarray(np.ceil(amount * (1.0 / size)))
    return np.asarray(np.ceil(amount / size))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCost:
    """Seconds as a function of rows: steps of a table, and a slope."""

    rows_per_step: float | None  # rows per step of the table; None: no steps
    table: Array  # seconds of 0, 1, ... steps; beyond the last step in proportion to steps
    row_s: float  # seconds per row, added to the table's seconds

    def __call__(self, rows: Array) -> Array:
        if self.rows_per_step is None:
            return np.asarray(rows * self.row_s + self.table[0])
        steps = pieces(rows, self.rows_per_step)
        last = len(self.table) - 1
        seconds = np.asarray(self.table.take(steps.astype(np.intp), mode="clip"))
        if self.row_s:
            seconds += rows * self.row_s
        if steps.max(initial=0.0) > last:
            seconds += np.maximum(steps - last, 0.0) * (self.table[-1] / last)
        return seconds


def sum_costs(costs: Sequence[RowCost]) -> RowCost:
    """Cost of all `costs` in sequence; if their steps differ, the result has the shortest steps."""
    steps = [cost.rows_per_step for cost in costs if cost.rows_per_step is not None]
    row_s = sum(cost.row_s for cost in costs)
    if not steps:
        return RowCost(rows_per_step=None, table=sum((cost.table for cost in costs), np.zeros(1)), row_s=row_s)
    step = min(steps)
    rows = step * np.arange(_LAST_STEP + 1, dtype=float)
    table = np.zeros(_LAST_STEP + 1)
    for cost in costs:
        if cost.rows_per_step == step:
            table = table + cost.table
        else:
            table = table + (cost(rows) - rows * cost.row_s)
    return RowCost(rows_per_step=step, table=table, row_s=row_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmRates:
    """Rates of matrix products on one device with one library."""

    flops_per_s: float  # FLOP/s of the whole device in full waves, at the burst clock
    bytes_per_s: float  # rate of weights and activations over device memory
    launch_s: NonNegative  # seconds to launch a kernel, on the device
    concurrent_tiles: int  # tiles that run at the same time: number of multiprocessors
    tiles: tuple[Tile, ...] = ()  # empty: flops_per_s alone gives the time
    measured: tuple[MeasuredShape, ...] = ()
    head_bytes_per_s: float | None = None  # rate of reading weights for one token's logits; None: bytes_per_s

    def __post_init__(self) -> None:
        if self.measured and not self.tiles:
            raise InputError("tiles", self.tiles, "at least one tile where shapes are measured")

    def __hash__(self) -> int:
        """Hash of the main rates. Tables are looked up by rates for every layer; all measured shapes take too long."""
        return hash((self.flops_per_s, self.bytes_per_s, self.launch_s, self.concurrent_tiles))

    def seconds(self, rows: Array, products: tuple[Product, ...], element_bytes: Width) -> Array:
        """Seconds of all products in sequence; `rows`: tokens, any shape, not necessarily whole numbers."""
        return self.row_cost(products, element_bytes)(rows)

    def row_cost(self, products: tuple[Product, ...], element_bytes: Width) -> RowCost:
        """Precomputed seconds of all products as a function of rows."""
        if not self.tiles:
            flops = sum(product.flops_per_row for product in products)
            return RowCost(rows_per_step=None, table=np.zeros(1), row_s=flops / self.flops_per_s)
        tables = [_time_table(self, product, element_bytes) for product in products]
        return RowCost(rows_per_step=self.step, table=sum(tables, np.zeros(_LAST_STEP + 1)), row_s=0.0)

    def in_decode(self, half: GemmRates) -> GemmRates:
        """Rates in a decode step, for a type that quantises its inputs; half: rates of half precision.

        Public tables time the quantising pass as kernels of its own. For a few rows, engines quantise in the norm or
        activation before the product, so that a product starts and streams its weights like one in half precision.
        """
        return replace(
            self,
            launch_s=min(self.launch_s, half.launch_s),
            bytes_per_s=max(self.bytes_per_s, half.bytes_per_s),
            measured=(),
        )

    @property
    def step(self) -> int:
        """Rows of the smallest tile; within this step the time is constant."""
        return min(tile.rows for tile in self.tiles)

    def form_s(self, rows: Array, product: Product, element_bytes: Width) -> Array:
        """Seconds of one product by the formula alone: waves of the fastest tile, or bytes if these take longer.

        For types that quantise the inputs, the pass that quantises them is added.
        """
        rows_each = rows * product.share
        width = of_each(element_bytes)
        token_bytes = product.in_features * width.input + product.out_features * width.output
        weight_bytes = product.in_features * product.out_features * width.weight
        nbytes = product.num_matrices * (weight_bytes + rows_each * token_bytes)
        waves_s: Array = np.min([self._waves_s(tile, rows_each, product) for tile in self.tiles], axis=0)
        inputs = product.num_matrices * rows_each * product.in_features
        before_s = self.launch_s + inputs * (width.quantised / self.bytes_per_s)
        return np.asarray(before_s + np.maximum(waves_s, nbytes / self.bytes_per_s))

    def _waves_s(self, tile: Tile, rows: Array, product: Product) -> Array:
        tiles = product.num_matrices * np.ceil(rows / tile.rows) * np.ceil(product.out_features / tile.cols)
        flops = 2.0 * product.in_features * tile.rows * tile.cols * self.concurrent_tiles
        wave_s = flops / (self.flops_per_s * tile.flops_share) + tile.start_s
        return np.asarray(np.ceil(tiles / self.concurrent_tiles) * wave_s)

    def measured_shape(self, product: Product) -> MeasuredShape | None:
        """The times of the product's weight matrix; None if not measured."""
        if product.num_matrices != 1:
            return None
        for shape in self.measured:
            if (shape.in_features, shape.out_features) == (product.in_features, product.out_features):
                return shape
        return None

    def product_s(self, rows: Array, product: Product, element_bytes: Width) -> Array:
        """Seconds by the formula; for a measured shape, times the interpolated ratio of measured to formula time."""
        seconds = self.form_s(rows, product, element_bytes)
        shape = self.measured_shape(product)
        if shape is None:
            return seconds
        grid = np.array(shape.rows, dtype=float)
        ratios = np.array(shape.seconds) / self.form_s(grid, product, element_bytes)
        return np.asarray(seconds * log_interp(np.maximum(rows, 1.0), grid, ratios))


@lru_cache(maxsize=256)
def _time_table(rates: GemmRates, product: Product, element_bytes: Width) -> Array:
    """Seconds of a product for 0, 1, ... steps of rows; more rows never take less time.

    Measured times may fall as rows grow. The table is then the mean of two monotonic curves: the running maximum from
    the left and the running minimum from the right.
    """
    rows = rates.step * np.arange(_LAST_STEP + 1, dtype=float)
    seconds = rates.product_s(rows, product, element_bytes)
    seconds[0] = 0.0
    return 0.5 * (np.maximum.accumulate(seconds) + np.minimum.accumulate(seconds[::-1])[::-1])


def join_products(products: Sequence[Product]) -> tuple[Product, ...]:
    """Products; products of the same input are joined into one, as serving engines fuse Q, K and V, or gate and up."""
    widths: dict[Product, int] = {}
    for product in products:
        key = product._replace(out_features=0)
        widths[key] = widths.get(key, 0) + product.out_features
    return tuple(key._replace(out_features=width) for key, width in widths.items())


def products_of(gemms: Sequence[Gemm], *, fused: bool) -> tuple[Product, ...]:
    """Products of one input with several weight matrices; joined if the engine fuses."""
    products = tuple(
        Product(gemm.in_features // gemm.groups, gemm.out_features // gemm.groups, gemm.groups, 1.0, gemm.compute)
        for gemm in gemms
    )
    if fused:
        return join_products(products)
    return products


def launches(products: Sequence[Product], *, fused: bool) -> int:
    """Number of kernels: products, and passes that quantise inputs. Engines use one kernel for several matrices."""
    kernels = 0
    for product in products:
        if fused:
            kernels += 1
        else:
            kernels += product.num_matrices
        if product.compute is not None and GEMM_TYPES[product.compute].quantised > 0:
            kernels += 1
    return kernels
