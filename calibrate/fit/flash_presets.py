"""FlashPreset: the structure of a kind of flash kernel, and which of its constants are fitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from calibrate.fit.solver import Parameter, peak_flops
from kvrsim.hardware import GpuSpec
from kvrsim.kernels.attention import FlashRates

# Bounds of what may be fitted, in seconds or as shares; append_bytes_per_s ends at the datasheet's HBM rate.
_BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "launch_s": (5e-7, 3e-5),
        "tile_s": (1e-8, 3e-5),
        "block_s": (2e-7, 5e-5),
        "query_s": (1e-12, 1e-7),
        "split_s": (1e-8, 3e-5),
        "append_bytes_per_s": (2e10, 1e30),
        "alone_share": (0.3, 1.0),
        "barrier_share": (0.0, 1.0),
        "split_share": (0.2, 1.0),
        "diagonal_cost": (1.0, 4.0),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashPreset:
    """Structure of the kernel (from its source) and start values; the constants in `fitted` are fitted."""

    tile_rows: int
    key_block: int
    tiles_per_sm: int  # that a multiprocessor runs at once
    causal: bool
    packs_heads: bool
    splits_keys: bool
    start: Mapping[str, float]
    fitted: tuple[str, ...]

    def rates(self, gpu: GpuSpec, constants: Mapping[str, float]) -> FlashRates:
        """Rates with these constants instead of the start values."""
        values = {**self.start, **constants}
        return FlashRates(
            tile_rows=self.tile_rows,
            key_block=self.key_block,
            concurrent_tiles=gpu.num_sms * self.tiles_per_sm,
            num_sms=gpu.num_sms,
            causal=self.causal,
            packs_heads=self.packs_heads,
            splits_keys=self.splits_keys,
            flops_per_s=peak_flops(gpu),
            **values,
        )

    def parameters(self, gpu: GpuSpec) -> tuple[Parameter, ...]:
        """The parameters of a fit."""
        listed = []
        for name in self.fitted:
            low, high = _BOUNDS[name]
            high = min(high, gpu.hbm_bytes_per_s) if name == "append_bytes_per_s" else high
            listed.append(Parameter(name=name, start=self.start[name], low=low, high=high))
        return tuple(listed)


_FA2 = FlashPreset(
    tile_rows=64,
    key_block=128,
    tiles_per_sm=2,
    causal=True,
    packs_heads=False,
    splits_keys=False,
    start=MappingProxyType(
        dict(
            launch_s=5e-6,
            tile_s=4e-6,
            block_s=4.8e-6,
            alone_share=0.75,
            barrier_share=1.0,
            append_bytes_per_s=8e11,
        )
    ),
    fitted=("launch_s", "tile_s", "block_s", "alone_share", "append_bytes_per_s"),
)

PRESETS: Mapping[str, FlashPreset] = MappingProxyType(
    {
        # FlashAttention-2 on Ampere; FlashInfer's prefill, which packs the query heads of a KV head.
        "fa2": _FA2,
        "flashinfer": replace(_FA2, tile_rows=128, key_block=64, packs_heads=True),
        # FlashAttention over a paged cache as sarathi called it: all blocks of the rectangle, keys split.
        "paged": FlashPreset(
            tile_rows=64,
            key_block=128,
            tiles_per_sm=2,
            causal=False,
            packs_heads=False,
            splits_keys=True,
            start=MappingProxyType(
                dict(
                    launch_s=5e-6,
                    tile_s=0.0,
                    block_s=5e-6,
                    alone_share=1.0,
                    barrier_share=0.3,
                    append_bytes_per_s=2.5e11,
                    query_s=2e-9,
                    split_s=1e-5,
                    split_share=0.85,
                    diagonal_cost=1.25,
                )
            ),
            fitted=(
                *("launch_s", "block_s", "barrier_share", "split_s"),
                *("query_s", "diagonal_cost", "append_bytes_per_s"),
            ),
        ),
        # FlashAttention-3 on Hopper: one tile a multiprocessor, keys split.
        "fa3": FlashPreset(
            tile_rows=128,
            key_block=64,
            tiles_per_sm=1,
            causal=True,
            packs_heads=False,
            splits_keys=True,
            start=MappingProxyType(
                dict(
                    launch_s=7e-6,
                    tile_s=4e-6,
                    block_s=8e-7,
                    alone_share=1.0,
                    barrier_share=0.3,
                    append_bytes_per_s=1e12,
                    split_s=5e-6,
                    split_share=0.55,
                )
            ),
            fitted=(
                *("launch_s", "tile_s", "block_s", "barrier_share"),
                *("append_bytes_per_s", "split_s", "split_share"),
            ),
        ),
    }
)
