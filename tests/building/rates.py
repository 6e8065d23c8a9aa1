"""Random rates of every kind of kernel; no kernel is faster than the datasheet of its GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvrsim.hardware import GpuSpec
from kvrsim.kernels.attention import BlockedRates, EagerRates, FlashRates, MeasuredSizes
from kvrsim.kernels.elementwise import ELEMENTWISE_OPS, CacheCopies, ElementwiseRates
from kvrsim.kernels.experts import ExpertRates, GroupedRates
from kvrsim.kernels.gemm import GEMM_TYPES, GemmRates, MeasuredShape, Product, Tile
from kvrsim.kernels.profile import KernelRates
from tests.building.drawing import Draws, log, maybe


def any_gemm(rng: Draws, gpu: GpuSpec, *, shapes: Sequence[Product] = ()) -> GemmRates:
    """Rates of matrix products with zero to four tiles; with tiles, some of the shapes have measured times."""
    peak = gpu.peak_flops["fp16"]
    share = log(rng, -3, 0)
    tiles = [
        Tile(
            rows=rng.choice([16, 64, 128, 256, rng.randint(1, 300)]),
            cols=rng.choice([32, 64, 128, 256]),
            flops_share=maybe(rng, 1.0, lambda: rng.uniform(0.05, 1.0)),
            start_s=maybe(rng, 0.0, lambda: log(rng, -8, -5)),
        )
        for _ in range(rng.choice([0, 0, 0, 0, 1, 2, 3, 4]))
    ]
    rates = GemmRates(
        flops_per_s=peak * share,
        bytes_per_s=gpu.hbm_bytes_per_s * log(rng, -2, 0),
        launch_s=maybe(rng, 0.0, lambda: log(rng, -7, -5)),
        concurrent_tiles=rng.choice([1, 108, rng.randint(2, 300)]),
        tiles=tuple(tiles),
    )
    chosen = [product for product in shapes if tiles and rng.random() < 0.25]
    return replace(rates, measured=tuple(_measured(rng, rates, product, share) for product in chosen))


def _measured(rng: Draws, rates: GemmRates, product: Product, share: float) -> MeasuredShape:
    """Measured times of a shape: 1/4 to 4 times the formula's, within the datasheet, and rising with the rows."""
    rows = sorted(rng.sample(range(1, 9000), rng.randint(1, 6)))
    form_s = rates.form_s(np.array(rows, dtype=float), product, 2)
    seconds = [float(one) * max(share, log(rng, -0.6, 0.6)) for one in form_s]
    width = dict(in_features=product.in_features, out_features=product.out_features)
    return MeasuredShape(**width, rows=tuple(rows), seconds=tuple(np.maximum.accumulate(seconds).tolist()))


def any_eager(rng: Draws, gpu: GpuSpec) -> EagerRates:
    """Rates of eager attention, between 0.1 % and 100 % of the datasheet's."""
    return EagerRates(
        flops_per_s=gpu.peak_flops["fp16"] * log(rng, -3, 0),
        bytes_per_s=gpu.hbm_bytes_per_s * log(rng, -3, 0),
        start_s=maybe(rng, 0.0, lambda: log(rng, -7, -4)),
    )


def any_flash(rng: Draws, gpu: GpuSpec) -> FlashRates:
    """Rates of any flash kernel; a step takes 1 to 1000 times as long as the datasheet's peak allows."""
    peak = gpu.peak_flops["fp16"]
    tile_rows, key_block = rng.choice([1, 16, 64, 128, 192]), rng.choice([1, 16, 64, 128, 256])
    num_sms = rng.choice([1, 108, 132, rng.randint(2, 300)])
    concurrent_tiles = num_sms * rng.choice([1, 2, 3])
    block_s = 4 * 128 * tile_rows * key_block * concurrent_tiles / (peak * log(rng, -3, 0))
    return FlashRates(
        tile_rows=tile_rows,
        key_block=key_block,
        concurrent_tiles=concurrent_tiles,
        num_sms=num_sms,
        causal=rng.random() < 0.5,
        packs_heads=rng.random() < 0.5,
        splits_keys=rng.random() < 0.5,
        flops_per_s=peak,
        launch_s=maybe(rng, 0.0, lambda: log(rng, -7, -4)),
        tile_s=maybe(rng, 0.0, lambda: block_s * log(rng, -1, 2)),
        block_s=block_s,
        alone_share=maybe(rng, 1.0, lambda: rng.uniform(0.1, 1.0)),
        barrier_share=rng.choice([0.0, 1.0, rng.random()]),
        append_bytes_per_s=maybe(rng, 1e30, lambda: gpu.hbm_bytes_per_s * log(rng, -3, 0)),
        query_s=maybe(rng, 0.0, lambda: log(rng, -12, -8)),
        split_s=maybe(rng, 0.0, lambda: log(rng, -6, -4)),
        split_share=maybe(rng, 1.0, lambda: rng.uniform(0.1, 1.0)),
        diagonal_cost=maybe(rng, 1.0, lambda: rng.uniform(1.0, 3.0)),
    )


def any_sizes(rng: Draws, least: float) -> MeasuredSizes:
    """Measured factors of up to 30, and at least `least`; longer calls never take less time."""
    sizes = np.unique(10 ** np.array([rng.uniform(0, 9) for _ in range(rng.randint(1, 12))]))
    seconds = sizes * np.array([max(least, log(rng, -1, 1.5)) for _ in sizes])
    factors = np.maximum.accumulate(seconds) / sizes
    return MeasuredSizes(sizes=tuple(map(float, sizes)), factors=tuple(map(float, factors)))


def any_blocked(rng: Draws, gpu: GpuSpec) -> BlockedRates:
    """Rates between 0.1 % and 100 % of the datasheet's; half of the time one rate for causal halves and rectangles."""
    peak = gpu.peak_flops["fp16"]
    shares = [log(rng, -3, 0) for _ in range(2)]
    return BlockedRates(
        causal_flops_per_s=peak * shares[0],
        rectangle_flops_per_s=peak * rng.choice(shares),
        start_s=maybe(rng, 0.0, lambda: log(rng, -7, -4)),
        query_s=maybe(rng, 0.0, lambda: log(rng, -12, -8)),
        key_block=rng.choice([1, 64, 512]),
        skips_masked=rng.random() < 0.5,
        join_s=maybe(rng, 0.0, lambda: log(rng, -12, -8)),
        measured=maybe(rng, None, lambda: any_sizes(rng, max(shares))),
    )


def any_elementwise(rng: Draws, gpu: GpuSpec) -> ElementwiseRates:
    """One rate for all kernels or one rate per kernel, with or without a constant time per kernel."""
    rates = ElementwiseRates.uniform(
        gpu.hbm_bytes_per_s * log(rng, -3, 0),
        fused=rng.random() < 0.5,
        fused_merge=rng.random() < 0.5,
        start_s=maybe(rng, 0.0, lambda: log(rng, -7, -5)),
    )
    if rng.random() < 0.5:
        return rates
    own: dict[str, Any] = {op: gpu.hbm_bytes_per_s * log(rng, -3, 0) for op in ELEMENTWISE_OPS}
    return replace(rates, **own)


def any_experts(rng: Draws, gpu: GpuSpec) -> ExpertRates:
    """Rates of experts in half precision and in some quantised types; none is above the datasheet."""
    return ExpertRates(
        half=_any_grouped(rng, gpu), types={name: _any_grouped(rng, gpu) for name in GEMM_TYPES if rng.random() < 0.3}
    )


def _any_grouped(rng: Draws, gpu: GpuSpec) -> GroupedRates:
    return GroupedRates(
        flops_per_s=gpu.peak_flops["fp16"] * log(rng, -3, 0),
        weight_bytes_per_s=gpu.hbm_bytes_per_s * log(rng, -2, 0),
        row_bytes_per_s=gpu.hbm_bytes_per_s * log(rng, -2, 0),
        tile_rows=maybe(rng, 0.0, lambda: rng.uniform(1, 300)),
        tile_features=maybe(rng, 0.0, lambda: rng.uniform(1, 2000)),
        start_s=maybe(rng, 0.0, lambda: log(rng, -6, -4)),
    )


def any_kernels(rng: Draws, gpu: GpuSpec, *, shapes: Sequence[Product] = ()) -> KernelRates:
    """Rates of all kinds of kernels, between 0.1 % and 100 % of the datasheet's."""
    return KernelRates(
        gemm=any_gemm(rng, gpu, shapes=shapes),
        attention={"eager": any_eager(rng, gpu), "flash": any_flash(rng, gpu)},
        elementwise=any_elementwise(rng, gpu),
        copies=CacheCopies(**{key: rng.choice([0.0, 1.0, 3.0]) for key in CacheCopies.__slots__}),
        head_on_all_tokens=rng.random() < 0.5,
        gemm_types={name: any_gemm(rng, gpu, shapes=shapes) for name in GEMM_TYPES if rng.random() < 0.2},
        experts=maybe(rng, None, lambda: any_experts(rng, gpu)),
    )
