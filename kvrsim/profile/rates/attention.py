"""Seconds of attention: eager kernels, whose score matrix goes through memory, and fused kernels, whose does not.

Of the fused ones, FlashRates know how a GPU's kernel is cut into tiles; BlockedRates (in blocked.py) are for any that
works through blocks small against the chunk, as on a CPU, or that does not skip what is masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, cast

import numpy as np

from kvrsim.io.json_text import JsonObject
from kvrsim.io.schema import Limits, NonNegative, PositiveShare, Share, read
from kvrsim.profile.rates.blocked import AttentionCall, BlockedRates
from kvrsim.profile.rates.gemm import pieces
from kvrsim.profile.rates.sizes import MeasuredSizes
from kvrsim.program import Array

ATTENTION_KERNELS = ("eager", "sdpa", "flash")


@dataclass(frozen=True, kw_only=True, slots=True)
class EagerRates:
    """QK^T, scaling, masking, softmax and PV as kernels of their own over the whole, masked rectangle."""

    flops_per_s: float  # of QK^T and PV
    bytes_per_s: float  # at which the score matrix crosses device memory, again and again
    start_s: NonNegative  # of all its kernels together, on the device
    measured: MeasuredSizes | None = None  # by elements of all heads' scores; None: all are as the rates have them
    score_bytes: Mapping[str, float] = field(default_factory=dict)  # fitted to TTFTs, a score element, by model type

    def seconds(self, call: AttentionCall, batch: int, element_bytes: int) -> Array:
        """All elements of all heads' score matrices, masked ones too."""
        element_s = 4.0 * call.mean_head_dim / self.flops_per_s
        element_s += call.score_bytes * element_bytes / 2 / self.bytes_per_s
        if self.measured is None:
            return call.chunk * call.keys * (batch * call.num_attention_heads * element_s) + self.start_s
        elements = self.elements(call, batch)
        return self.start_s + elements * element_s * self.measured.factor(elements)

    def elements(self, call: AttentionCall, batch: int) -> Array:
        """Of the score matrices of all heads."""
        return call.chunk * call.keys * (batch * call.num_attention_heads)

    def least_seconds(self, call: AttentionCall, batch: int, element_bytes: int) -> Array:
        """What it takes: at a fixed end of the chunk, it does not grow with the prefix.

        Of a block of a chunk with the least factor: an early block may shrink where the chunk grows to the left, and
        all of them together have more elements.
        """
        if call.part and self.measured is not None:
            least = replace(self, measured=None).seconds(call, batch, element_bytes) - self.start_s
            return self.start_s + min(self.measured.factors) * least
        return self.seconds(call, batch, element_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashRates:
    """A fused kernel: tiles of queries step over blocks of keys, as many at a time as the device has slots.

    The first group is how the kernel is written, the second what was fitted. Work and waves follow
    FlashAttention-2 (Dao, 2023), splitting of the keys over idle slots FlashDecoding.
    """

    tile_rows: int  # queries of a tile
    key_block: int  # keys of a step
    concurrent_tiles: int  # slots: multiprocessors times tiles that each holds at once
    num_sms: int  # multiprocessors; a tile that has one for itself steps faster
    causal: bool = False  # blocks above the diagonal are skipped
    packs_heads: bool = False  # query heads of one KV head share a tile
    splits_keys: bool = False  # few tiles are split along the keys

    flops_per_s: float  # datasheet: no call is faster than its unmasked FLOPs at this rate
    launch_s: NonNegative  # of a call
    tile_s: NonNegative  # before and after a tile's steps
    block_s: float  # of a step with heads of 128
    alone_share: PositiveShare  # of block_s where a tile has a multiprocessor for itself
    barrier_share: Share  # 0: slots are always busy; 1: a wave waits for its longest tile
    append_bytes_per_s: float  # at which the chunk's own K, V are read and written into the cache
    query_s: NonNegative = 0.0  # of a query and head, whatever its keys
    split_s: NonNegative = 0.0  # of joining what was split
    split_share: PositiveShare = 1.0  # of the slots that a split call keeps busy
    diagonal_cost: Annotated[float, Limits(least=1.0, most=1e30)] = (
        1.0  # of a step in the chunk's own square, in steps elsewhere
    )
    softmax_s: NonNegative = 0.0  # of a step's softmax, which runs beside its products: narrow heads wait for it

    def seconds(self, call: AttentionCall, batch: int, element_bytes: int) -> Array:
        """Launch, tiles by waves, the append; more queries or keys never take less."""
        return self._called_s(call, batch, element_bytes, self._scheduled_s(call, batch))

    def least_seconds(self, call: AttentionCall, batch: int, element_bytes: int) -> Array:
        """What no call beats, and what, at a fixed end of the chunk, does not grow with the prefix.

        Slots are always busy, and no tile or block is there for part of its queries or keys. Of blocks of a chunk this
        adds up to what one call takes, and a launch more each; so it does with no regard to the datasheet.
        """
        keys = call.prefix + (0.5 if self.causal else 1.0) * call.chunk
        if self.causal and call.reach is not None:
            keys = np.minimum(keys, call.causal / np.maximum(call.chunk, 1.0))
        queries = call.chunk * (batch * call.num_attention_heads / self.tile_rows)
        tile_s = 0.0 if self.splits_keys else self.tile_s
        slots_s = queries * (tile_s + keys * (self._step_s(call) / self.key_block))
        slots = max(self.concurrent_tiles, self.num_sms / self.alone_share)
        counted = replace(call, causal=0.0 * call.causal) if call.part else call
        return self._called_s(counted, batch, element_bytes, slots_s / slots)

    def _step_s(self, call: AttentionCall) -> float:
        """Of a tile of queries and a block of keys: the longer of its products and its softmax."""
        products_s = self.block_s * call.mean_head_dim / 128
        if isinstance(products_s, float):
            return max(products_s, self.softmax_s)
        return cast(float, np.maximum(products_s, self.softmax_s))  # a fit has heads for each of its rows

    def _called_s(self, call: AttentionCall, batch: int, element_bytes: int, scheduled_s: Array) -> Array:
        """With launch and append; never less than the unmasked FLOPs at the datasheet's rate."""
        append_bytes = 4.0 * batch * call.num_key_value_heads * call.mean_head_dim * element_bytes / 2
        chunk_s = call.own * append_bytes / self.append_bytes_per_s + self.query_s * batch * call.num_attention_heads
        flops = 4.0 * batch * call.num_attention_heads * call.mean_head_dim
        least_s = call.causal * (flops / self.flops_per_s)
        return np.maximum(scheduled_s + self.launch_s + call.chunk * chunk_s, least_s)

    def _scheduled_s(self, call: AttentionCall, batch: int) -> Array:
        """All tiles over the slots."""
        heads = call.num_key_value_heads if self.packs_heads else call.num_attention_heads
        columns = batch * heads
        rows = self.tile_rows * heads / call.num_attention_heads
        tiles_a_column = pieces(call.chunk, rows)
        tiles = columns * tiles_a_column
        step_s, slots = self._step_s(call), self.concurrent_tiles
        most = first = pieces(call.keys, self.key_block)  # steps of the tile that sees most keys
        if self.causal and call.own:
            first = pieces(call.prefix + np.minimum(rows, call.chunk), self.key_block)
        dear: Array | float = call.own * (self.diagonal_cost - 1.0) / self.key_block
        dear = dear * call.chunk if dear else 0.0
        mean = 0.5 * (first + most)
        if self.causal and call.reach is not None:  # blocks that no query of the tile sees are skipped
            within = np.ceil((call.reach + 2 * rows) / self.key_block)  # its edges cut blocks
            first, most = np.minimum(first, within), np.minimum(most, within)
            dear = np.minimum(dear, (self.diagonal_cost - 1.0) * within)
            seen = (call.causal / np.maximum(call.chunk, 1.0) + 2 * rows) / self.key_block + 1.0
            mean = np.minimum(mean, np.clip(seen, first, most))
        if np.any(dear):
            mean = mean + dear * (0.5 if self.causal else 1.0)
        longest_s = (most + dear) * step_s + self.tile_s
        full_s = busy_s = tiles * (mean * (step_s / slots) + self.tile_s / slots)
        if self.barrier_share:
            waves = np.ceil(tiles / slots)
            # Longest tiles first: each further wave begins that much lower on the staircase under the diagonal.
            half_fall = (most - first) / np.maximum(tiles_a_column - 1, 1) * (0.5 * step_s * slots / columns)
            full_s = np.maximum(waves * (longest_s - half_fall * (waves - 1)), busy_s)
            if self.barrier_share < 1:
                full_s = (1 - self.barrier_share) * busy_s + self.barrier_share * full_s
        full_s = np.maximum(full_s, longest_s)
        if (few := tiles <= self.num_sms).any():
            full_s = np.where(few, self.alone_share * longest_s, full_s)
        if not self.splits_keys:
            return np.asarray(full_s)
        steps = np.maximum(self.alone_share, tiles * mean * (1.0 / (slots * self.split_share)))
        return np.minimum(full_s, step_s * steps + (self.alone_share * self.tile_s + self.split_s))


AttentionRates = EagerRates | BlockedRates | FlashRates


def read_attention(kernel: str, data: JsonObject) -> AttentionRates:
    """The rates of one of ATTENTION_KERNELS; a flash section with FLOPs of a causal half holds BlockedRates."""
    if kernel == "eager":
        return read(EagerRates, data)
    is_blocked = kernel == "sdpa" or data.has("causal_flops_per_s")
    return read(BlockedRates, data) if is_blocked else read(FlashRates, data)
