"""LatentRates: seconds of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) between its products.

Expanded, every head has keys and values of its own, of unlike width (192 and 128 in DeepSeek-V3). Absorbed, all heads
attend to the latents themselves (576 and 512), and their products with the expansion are made before and after. Both
are flash kernels whose work grows with the mean of the two widths.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrsim.profile.rates.attention import AttentionCall, FlashRates
from kvrsim.program import Array
from kvrsim.units import format_seconds

_WIDEST_EXPANDED = 256  # of a head's key; wider ones are latents


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentRates:
    """Flash kernels for expanded and, where they were measured, for absorbed latent attention."""

    expanded: FlashRates
    absorbed: FlashRates | None = None  # None: expanded stands for both

    def of(self, call: AttentionCall) -> FlashRates:
        """The rates that price a call."""
        wide = call.head_dim > _WIDEST_EXPANDED
        return self.absorbed if wide and self.absorbed is not None else self.expanded

    def seconds(self, call: AttentionCall, batch: int, element_bytes: int) -> Array:
        """As of FlashRates."""
        return self.of(call).seconds(call, batch, element_bytes)

    def least_seconds(self, call: AttentionCall, batch: int, element_bytes: int) -> Array:
        """As of FlashRates."""
        return self.of(call).least_seconds(call, batch, element_bytes)

    def describe(self) -> str:
        """What was found, in a sentence a form."""
        forms = {"Expanded": self.expanded, "Absorbed": self.absorbed}
        return " ".join(_described(name, rates) for name, rates in forms.items() if rates is not None)


def _described(name: str, rates: FlashRates) -> str:
    flops = 4 * 128 * rates.tile_rows * rates.key_block
    reached = flops * rates.concurrent_tiles / rates.block_s / 1e12
    return (
        f"{name}: launch {format_seconds(rates.launch_s)}, tiles of {rates.tile_rows} queries"
        f" {format_seconds(rates.tile_s)} each, their steps over {rates.key_block} keys at {reached:.0f} TFLOP/s."
    )
