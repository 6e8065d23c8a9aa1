"""Attention: calls, rates of eager and of fused kernels, and the costs of softmax and of latent attention.

Eager kernels write their score matrix to memory and read it back; fused kernels do not. FlashRates describe the fused
kernels of a GPU by their tiles. BlockedRates describe other fused kernels: those with blocks much smaller than the
chunk, such as on a CPU, and those that compute masked scores.

Latent attention (DeepSeek-V2, arXiv:2405.04434) has two forms. In the expanded form, every head has its own keys and
values, of different widths (192 and 128 in DeepSeek-V3). In the absorbed form, all heads attend to the latents (576 and
512); queries and outputs are multiplied by the expansion matrices. Both forms use flash kernels whose work grows with
the mean of the two widths. Engines use the expanded form in a prefill, for the chunk and all tokens before it, and the
absorbed form in decoding.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

import numpy as np

from kvrsim.errors import InputError, check_rising
from kvrsim.interp import log_interp
from kvrsim.io.schema import NonNegative, PositiveShare, Range, Share
from kvrsim.kernels.cost import CalibratedCost, Part, RooflineCost
from kvrsim.kernels.elementwise import (
    PYTORCH_SHARE,
    Traffic,
    eager_kernels,
    eager_score_bytes,
    measured_merge,
    merge,
    upcast,
)
from kvrsim.kernels.gemm import Product, pieces, products_of
from kvrsim.kernels.mixer import LayerSetting, MixerCost
from kvrsim.model.mixers import Attention, LatentAttention
from kvrsim.program import Array

ATTENTION_KERNELS = ("eager", "sdpa", "flash")
ATTENTION = Part("attention")
_LATENT = Part("latent")
_ROUNDING = 1e-9  # relative tolerance for rounding errors
_WIDEST_EXPANDED = 256  # largest width of an expanded head's key; wider keys are latents
_FP32_BYTES = 4
_NOT_COUNTED = np.full(1, np.nan)
_MOST_ELEMENTS = 2**13  # largest array that holds the blocks of all counts; larger arrays cause page faults


class AttentionCall(NamedTuple):
    """Size of one attention call."""

    chunk: Array  # queries
    prefix: Array  # keys before the first query; with a window only those that a query sees
    causal: Array  # score elements of one head that are not masked
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # width of queries and keys
    score_bytes: float  # bytes that an eager kernel moves per element of the score matrix
    v_head_dim: int | None = None  # width of values; None: the width of keys
    reach: int | None = None  # largest number of keys that a query sees, its own included; None: all keys up to its own
    own: bool = True  # whether the keys include the chunk's own, which are causally masked and appended to the cache
    latent: bool = False  # whether keys and values are expanded from one latent per token, or are the latents
    part_of_chunk: bool = False  # whether the queries are one of several equal blocks of a chunk, one call each

    @property
    def keys(self) -> Array:
        """Number of keys in the call."""
        if self.own:
            return self.prefix + self.chunk
        return self.prefix

    @property
    def mean_head_dim(self) -> float:
        """Mean width of keys and values: QK^T takes 2 FLOPs per element of a key, PV 2 per element of a value."""
        if self.v_head_dim is None:
            return self.head_dim
        return 0.5 * (self.head_dim + self.v_head_dim)

    @property
    def part(self) -> Part:
        """The kind of operation under which the call's seconds are counted."""
        if self.latent:
            return _LATENT
        return ATTENTION

    def measured_s(self, cost: CalibratedCost) -> Array:
        """Seconds at the profile's rates of this kernel, or at its rates of latent attention."""
        traits = cost.traits
        rates: AttentionRates = cost.rates.of(self, traits.kernel)
        if traits.lower_bound:
            seconds = rates.least_seconds(self, traits.batch, traits.element_bytes)
        else:
            seconds = rates.seconds(self, traits.batch, traits.element_bytes)
        if cost.compute_scale == 1.0:  # saves a product of arrays
            return seconds
        return cost.compute_scale * seconds

    def roofline_s(self, cost: RooflineCost) -> Array:
        """Seconds of the unmasked FLOPs; if eager, the longer of all FLOPs and the score matrix's traffic."""
        heads = cost.traits.batch * self.num_attention_heads
        flops_s = 4.0 * heads * self.mean_head_dim / cost.flops_per_s
        if cost.traits.kernel != "eager":
            return self.causal * flops_s
        traffic = heads * self.score_bytes * cost.traits.element_bytes / 2
        return self.chunk * self.keys * max(flops_s, traffic / cost.bytes_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSizes:
    """Ratio of measured to formula time by the size of a call, for example of score matrices that do not fit a cache.

    Between the sizes the ratio is interpolated on log scales; beyond them it is the ratio of the nearest size. `size *
    factor` does not fall with size. So where formula times rise at least in proportion to size, the product of time and
    factor does not fall.
    """

    sizes: tuple[float, ...]  # in rising order
    factors: tuple[float, ...]  # measured time over formula time

    def __post_init__(self) -> None:
        check_rising("sizes", self.sizes, "factors", self.factors)
        seconds = np.array(self.sizes) * np.array(self.factors)
        if (np.diff(seconds) < -_ROUNDING * seconds[1:]).any():
            raise InputError("factors", self.factors, "factors that fall no faster than sizes rise")

    def factor(self, size: Array) -> Array:
        """Factor for calls of `size`."""
        return log_interp(np.maximum(size, 1e-300), self.sizes, self.factors)

    def least_factor(self, size: Array) -> Array:
        """Least factor of this size and of all larger sizes."""
        larger = np.append(np.minimum.accumulate(self.factors[::-1])[::-1], np.inf)
        return np.asarray(np.minimum(self.factor(size), larger[np.searchsorted(self.sizes, size)]))


@dataclass(frozen=True, kw_only=True, slots=True)
class EagerRates:
    """Rates of separate kernels for QK^T, scaling, mask, softmax and PV, over all scores, masked ones included."""

    flops_per_s: float  # FLOP/s of QK^T and PV
    bytes_per_s: float  # rate of the score matrix's repeated passes over device memory
    start_s: NonNegative  # seconds to start all kernels of a call, on the device
    # Ratio of measured to formula time, by the number of score elements of all heads; None: 1.
    measured: MeasuredSizes | None = None
    score_bytes: Mapping[str, float] = field(default_factory=dict)  # bytes per score, fitted to TTFTs, by model type

    def seconds(self, call: AttentionCall, batch: int, element_bytes: int) -> Array:
        """Seconds of all elements of all heads' score matrices, masked ones included."""
        element_s = 4.0 * call.mean_head_dim / self.flops_per_s
        element_s += call.score_bytes * element_bytes / 2 / self.bytes_per_s
        factor: Array | float = 1.0
        if self.measured is not None:
            factor = self.measured.factor(self.elements(call, batch))
        return call.chunk * call.keys * (batch * call.num_attention_heads * element_s * factor) + self.start_s

    def elements(self, call: AttentionCall, batch: int) -> Array:
        """Elements of the score matrices of all heads."""
        return call.chunk * call.keys * (batch * call.num_attention_heads)

    def least_seconds(self, call: AttentionCall, batch: int, element_bytes: int) -> Array:
        """Lower bound of the seconds, which does not grow with the prefix where the chunk's end is fixed.

        A block of a chunk has the least factor of all sizes: if the chunk starts earlier, its early blocks may be
        smaller, while all blocks together have more elements.
        """
        if call.part_of_chunk and self.measured is not None:
            least = replace(self, measured=None).seconds(call, batch, element_bytes) - self.start_s
            return self.start_s + min(self.measured.factors) * least
        return self.seconds(call, batch, element_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockedRates:
    """Rates of a fused kernel by the scores that it computes.

    Without a prefix it computes the causal half of chunk x chunk. With a prefix, a kernel that takes a mask
    (scaled_dot_product_attention) computes the whole rectangle of chunk x (prefix + chunk). A kernel that skips masked
    scores computes the rectangle of chunk x prefix and the causal half, and joins both results by their log-sum-exp.
    """

    causal_flops_per_s: float  # FLOP/s of QK^T and PV in the chunk's own causal half
    rectangle_flops_per_s: float  # FLOP/s of QK^T and PV in the rectangle; with a mask, at most causal_flops_per_s
    start_s: NonNegative  # seconds to start a call
    query_s: NonNegative  # seconds per query and head, independent of the keys
    key_block: int  # keys per block; blocks on the diagonal are computed whole, so huge blocks compute all masked keys
    skips_masked: bool = False  # whether a call with a prefix skips masked scores
    join_s: NonNegative = 0.0  # seconds per query and head to join two parts
    block_flops_per_s: float | None = None  # FLOP/s on another rank's block, not masked; None: rectangle_flops_per_s
    # Ratio of measured to formula time, by the number of queries, on which the block size depends; None: 1.
    measured: MeasuredSizes | None = None

    def seconds(self, call: AttentionCall, batch: int, element_bytes: int) -> Array:
        """Seconds of a call: start, queries and scores. More queries or keys never take less time."""
        if self.block_flops_per_s is not None and not call.own:
            return self._call_s(call, batch, self._weighted_scores(call))
        joined_s = self.join_s * batch * call.num_attention_heads * call.chunk * (call.prefix > 0)
        return self._call_s(call, batch, self._weighted_scores(call) * self._factor(call.chunk)) + joined_s

    def least_seconds(self, call: AttentionCall, batch: int, element_bytes: int) -> Array:
        """Lower bound of the seconds, which does not grow with the prefix where the chunk's end is fixed.

        With a mask, a chunk that starts later has fewer scores; only the chunk from 0 has just its causal half. Where
        masked scores are skipped, the number of scores is a concave function of the start. So a chunk that starts
        earlier has at least the smaller of two numbers of scores: that of this chunk, and that of the chunk from 0. Its
        factor is at least the least factor of all larger numbers of queries.
        """
        if call.part_of_chunk:
            return self._least_of_part(call, batch)
        if self.block_flops_per_s is not None and not call.own:
            return self._call_s(call, batch, 0.0 * self._weighted_scores(call))
        if not self.skips_masked:
            end = call.prefix + call.chunk
            from_0 = self._causal_cost * self._half(end) * self._factor(end)
            return self._call_s(call, batch, np.minimum(self._weighted_scores(call) * self._factor(call.chunk), from_0))
        here = self._weighted_scores(call)
        bounds = self._masked_scores(call)
        from_0 = self._causal_cost * (call.causal + 0.5 * call.prefix * call.prefix) + bounds
        if self.measured is None:
            return self._call_s(call, batch, np.minimum(here, from_0))
        here = here * self.measured.least_factor(call.chunk)
        from_0 = from_0 * min(self.measured.factors)
        return self._call_s(call, batch, np.minimum(here, from_0))

    def _least_of_part(self, call: AttentionCall, batch: int) -> Array:
        """Lower bound of a block's seconds; its sum over a chunk's blocks does not grow where the chunk starts later.

        The bound is the time of the rectangle (of the unmasked scores if masked scores are skipped) at the least factor
        of this or a larger number of queries. It does not hold for a chunk from 0, which has only its causal half.
        """
        if self.skips_masked:
            covered = call.causal * min(1.0, self._causal_cost)
        else:
            covered = call.chunk * call.keys
        if self.measured is not None:
            covered = covered * self.measured.least_factor(call.chunk)
        return self._call_s(call, batch, covered)

    def _factor(self, queries: Array) -> Array | float:
        """Measured over formula time of a call with this number of queries."""
        if self.measured is None:
            return 1.0
        return self.measured.factor(queries)

    def _call_s(self, call: AttentionCall, batch: int, covered: Array) -> Array:
        heads = batch * call.num_attention_heads
        return self.start_s + heads * (
            call.chunk * self.query_s + covered * (4.0 * call.mean_head_dim * self._rectangle_s)
        )

    def _weighted_scores(self, call: AttentionCall) -> Array:
        """Scores computed per head; the weight of a score is its time divided by that of a score in the rectangle."""
        if not call.own:
            rectangle = call.chunk * call.prefix
            if self.block_flops_per_s is None:
                return rectangle
            return rectangle / (self.block_flops_per_s * self._rectangle_s)
        cost = self._causal_cost
        causal_half = 0.5 * call.chunk * call.chunk
        if self.skips_masked:
            # With a window, neither part has more than the unmasked elements.
            behind = np.minimum(call.chunk * call.prefix, call.causal) * max(0.0, 1.0 - cost)
            dearer = np.minimum(causal_half, call.causal) * max(0.0, cost - 1.0)
            return call.causal * min(1.0, cost) + behind + dearer + self._masked_scores(call)
        # A window shorter than the chunk also needs a mask.
        masked = (call.prefix > 0) | (call.causal < causal_half * (1 - _ROUNDING))
        return np.where(masked, call.chunk * (call.prefix + call.chunk), cost * self._half(call.chunk))

    def _half(self, queries: Array) -> Array:
        """Elements of one head in a causal half, including masked ones in the blocks that the diagonal cuts."""
        return 0.5 * queries * (queries + np.minimum(queries, self.key_block - 1))

    def _masked_scores(self, call: AttentionCall) -> Array:
        """Masked elements in the blocks that the diagonal cuts, weighted as in _weighted_scores."""
        return self._causal_cost * (self._half(call.chunk) - 0.5 * call.chunk * call.chunk)

    @property
    def _rectangle_s(self) -> float:
        """Seconds per FLOP in the rectangle."""
        rectangle_s = 1.0 / self.rectangle_flops_per_s
        if self.skips_masked:
            return rectangle_s
        return max(rectangle_s, 1.0 / self.causal_flops_per_s)

    @property
    def _causal_cost(self) -> float:
        """Time of a score in the causal half divided by the time of a score in the rectangle."""
        return 1.0 / (self.causal_flops_per_s * self._rectangle_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashRates:
    """Rates of a fused kernel whose tiles of queries step over blocks of keys, one tile per slot of the device.

    The first group of fields describes the kernel's code, the second group is fitted. Work and waves follow
    FlashAttention-2 (Dao, 2023); keys are split over idle slots as in FlashDecoding.
    """

    tile_rows: int  # queries per tile
    key_block: int  # keys per step
    concurrent_tiles: int  # slots: number of multiprocessors times concurrent tiles on each
    num_sms: int  # number of multiprocessors; a tile that is alone on one steps faster
    causal: bool = False  # whether blocks above the diagonal are skipped
    packs_heads: bool = False  # whether query heads of one KV head share a tile
    splits_keys: bool = False  # whether a call with few tiles splits them along the keys

    flops_per_s: float  # peak of the datasheet: no call is faster than its unmasked FLOPs at this rate
    launch_s: NonNegative  # seconds to launch a call
    tile_s: NonNegative  # seconds before and after a tile's steps
    block_s: float  # seconds of a step with a head width of 128
    alone_share: PositiveShare  # time of a tile alone on a multiprocessor divided by the time of a tile that shares it
    barrier_share: Share  # 0: slots are always busy; 1: a wave waits for its longest tile
    append_bytes_per_s: float  # rate of reading the chunk's own K, V and writing them into the cache
    query_s: NonNegative = 0.0  # seconds per query and head, independent of the keys
    split_s: NonNegative = 0.0  # seconds to join the parts of split keys
    split_share: PositiveShare = 1.0  # share of the slots that a split call keeps busy
    # Time of a step in the chunk's own square over the time of other steps.
    diagonal_cost: Annotated[float, Range(least=1.0, most=1e30)] = 1.0
    # Seconds of a step's softmax, which overlaps with the step's products: the longer one counts.
    softmax_s: NonNegative = 0.0

    @property
    def tiles_flops_per_s(self) -> float:
        """FLOP/s that the steps of tiles never exceed; if `flops_per_s` is above it, that limit changes no time."""
        step_flops = 4.0 * 128 * self.tile_rows * self.key_block
        slots = max(self.concurrent_tiles, self.num_sms / self.alone_share)
        return slots * step_flops / self.block_s

    def seconds(self, call: AttentionCall, batch: int, element_bytes: int) -> Array:
        """Seconds of a call: launch, tiles in waves, and append. More queries or keys never take less time."""
        return self._call_s(call, batch, element_bytes, self._scheduled_s(call, batch))

    def least_seconds(self, call: AttentionCall, batch: int, element_bytes: int) -> Array:
        """Lower bound of the seconds, which does not grow with the prefix where the chunk's end is fixed.

        The bound keeps all slots busy and has no partly empty tile or block. The blocks of a chunk together take as
        long as one call of the whole chunk, plus one launch per additional block; therefore a block ignores the limit
        of the datasheet.
        """
        keys = call.prefix + self._seen_share * call.chunk
        if self.causal and call.reach is not None:
            keys = np.minimum(keys, call.causal / np.maximum(call.chunk, 1.0))
        queries = call.chunk * (batch * call.num_attention_heads / self.tile_rows)
        tile_s = 0.0 if self.splits_keys else self.tile_s
        slots_s = queries * (tile_s + keys * (self._step_s(call) / self.key_block))
        slots = max(self.concurrent_tiles, self.num_sms / self.alone_share)
        if call.part_of_chunk:
            call = call._replace(causal=0.0 * call.causal)
        return self._call_s(call, batch, element_bytes, slots_s / slots)

    @property
    def _seen_share(self) -> float:
        """Mean share of the chunk's own keys that the kernel processes per query."""
        return 0.5 if self.causal else 1.0

    def _step_s(self, call: AttentionCall) -> Any:
        """Seconds of one tile of queries on one block of keys: products or softmax, whichever is longer.

        In a fit the result is an array, because rows have different head widths.
        """
        return np.maximum(self.block_s * call.mean_head_dim / 128, self.softmax_s)

    def _call_s(self, call: AttentionCall, batch: int, element_bytes: int, scheduled_s: Array) -> Array:
        """Seconds including launch and append, at least the seconds of the unmasked FLOPs at the datasheet's rate."""
        append_bytes = 4.0 * batch * call.num_key_value_heads * call.mean_head_dim * element_bytes / 2
        chunk_s = call.own * append_bytes / self.append_bytes_per_s + self.query_s * batch * call.num_attention_heads
        flops = 4.0 * batch * call.num_attention_heads * call.mean_head_dim
        least_s = call.causal * (flops / self.flops_per_s)
        return np.maximum(scheduled_s + self.launch_s + call.chunk * chunk_s, least_s)

    def _scheduled_s(self, call: AttentionCall, batch: int) -> Array:
        """Seconds of all tiles on the slots."""
        heads = call.num_attention_heads
        if self.packs_heads:
            heads = call.num_key_value_heads
        columns = batch * heads  # a column is all tiles of a head
        rows = self.tile_rows * heads / call.num_attention_heads  # tokens per tile
        tiles_per_column = pieces(call.chunk, rows)
        tiles = columns * tiles_per_column
        step_s = self._step_s(call)
        slots = self.concurrent_tiles
        most = pieces(call.keys, self.key_block)  # steps of the tile that sees the most keys
        first = most  # steps of a column's first tile, which sees the fewest keys
        if self.causal and call.own:
            first = pieces(call.prefix + np.minimum(rows, call.chunk), self.key_block)
        # Additional time of the steps in the chunk's own square, in steps of the usual time.
        dear: Array | float = call.own * (self.diagonal_cost - 1.0) / self.key_block
        if dear:
            dear = dear * call.chunk
        mean = 0.5 * (first + most)
        if self.causal and call.reach is not None:  # blocks that no query of the tile sees are skipped
            within = np.ceil((call.reach + 2 * rows) / self.key_block)  # the window's edges may cut blocks
            first = np.minimum(first, within)
            most = np.minimum(most, within)
            dear = np.minimum(dear, (self.diagonal_cost - 1.0) * within)
            blocks = (call.causal / np.maximum(call.chunk, 1.0) + 2 * rows) / self.key_block + 1.0
            mean = np.minimum(mean, np.clip(blocks, first, most))
        if np.any(dear):
            mean = mean + dear * self._seen_share
        longest_s = (most + dear) * step_s + self.tile_s
        busy_s = tiles * (mean * (step_s / slots) + self.tile_s / slots)
        full_s = busy_s
        if self.barrier_share:
            waves = np.ceil(tiles / slots)
            # The longest tiles run first, so each later wave begins with shorter tiles, along the slope of the
            # diagonal.
            half_fall = (most - first) / np.maximum(tiles_per_column - 1, 1) * (0.5 * step_s * slots / columns)
            full_s = np.maximum(waves * (longest_s - half_fall * (waves - 1)), busy_s)
            if self.barrier_share < 1:
                full_s = (1 - self.barrier_share) * busy_s + self.barrier_share * full_s
        full_s = np.maximum(full_s, longest_s)
        few = tiles <= self.num_sms
        if few.any():
            full_s = np.where(few, self.alone_share * longest_s, full_s)
        if not self.splits_keys:
            return np.asarray(full_s)
        steps = np.maximum(self.alone_share, tiles * mean * (1.0 / (slots * self.split_share)))
        return np.asarray(np.minimum(full_s, step_s * steps + (self.alone_share * self.tile_s + self.split_s)))


AttentionRates = EagerRates | BlockedRates | FlashRates


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentRates:
    """Flash kernels for expanded latent attention and, if measured, for absorbed latent attention."""

    expanded: FlashRates
    absorbed: FlashRates | None = None  # None: `expanded` is used for both

    def of(self, call: AttentionCall) -> FlashRates:
        """The rates that price a call."""
        if self.absorbed is not None and call.head_dim > _WIDEST_EXPANDED:
            return self.absorbed
        return self.expanded


class MergedCost(MixerCost):
    """A mixer that merges its results for blocks of keys in fp32, weighted by their log-sum-exp, as rings do."""

    mixer: Attention | LatentAttention

    def __init__(self, setting: LayerSetting, mixer: Attention | LatentAttention) -> None:
        super().__init__(setting, mixer)
        model = setting.model
        latent = isinstance(mixer, LatentAttention)
        self._sizes: dict[str, Any] = {
            "num_attention_heads": mixer.num_attention_heads,
            "num_key_value_heads": mixer.num_attention_heads if latent else mixer.num_key_value_heads,
            "head_dim": mixer.head_dim,
            "v_head_dim": mixer.v_head_dim,
            "latent": latent,
            "reach": mixer.reach,
            "score_bytes": self.traits.score_bytes.get(model.model_type, eager_score_bytes(model)),
        }

    @abstractmethod
    def keys_s(self, chunk: Array, keys: Array) -> Array:
        """Seconds of attention of the chunk's queries to `keys` tokens before them, without a merge."""

    def block_s(self, chunk: Array, start: Array, keys: Array, end: Array, *, part: bool = False) -> Array:
        """Seconds of attention of the chunk's queries to the `keys` tokens before `end`, and of merging the result.

        The first query is at `start`. A block that no query sees takes no time.
        part: the queries are a part of the rank's chunk.
        """
        visible = self._visible_before(start, keys, end)
        return np.where(visible > 0, self.keys_s(chunk, visible) + self.merge_s(chunk, part=part), 0.0)

    def share_s(self, chunk: Array, start: Array) -> Array:
        """Seconds of attention of the chunk's queries to a rank's share of the cached prefix, without a merge.

        The first query is at `start`. The share's tokens are evenly spaced, so a window has the same number in each
        share.
        """
        prefix = np.full_like(chunk, self.setting.cached_prefix)
        visible = self.setting.prefix.share * self._visible_before(start, prefix, prefix)
        return np.where(visible * chunk > 0, self.keys_s(chunk, visible), 0.0)

    def merge_s(self, chunk: Array, *, part: bool = False) -> Array:
        """Seconds to merge the result of a block for these queries into that of earlier blocks; `part`: see block_s."""
        if self.traits.measures_merge:
            return self.cost.traffic_s(chunk, (measured_merge(self.mixer),))
        return self._merging_s(chunk, merge(self.mixer, fused=self.traits.fused_merge, part=part))

    def upcast_s(self, chunk: Array) -> Array:
        """Seconds to convert the chunk's output to fp32 or back; 0 in fp32 if the rate of merges is measured."""
        if self.traits.measures_merge and self.setting.element_bytes == _FP32_BYTES:
            return 0.0 * chunk
        return self._merging_s(chunk, upcast(self.mixer))

    @property
    @abstractmethod
    def block_kernels(self) -> int:
        """Number of kernels of keys_s."""

    @property
    def merge_kernels(self) -> int:
        """Number of kernels of merge_s."""
        return merge(self.mixer, fused=self.traits.fused_merge, part=False).kernels

    def score_elements(self, chunk: Array, keys: Array) -> Array:
        """Elements of all heads' score matrices, masked or not."""
        return chunk * keys * float(self.setting.batch * self.mixer.num_attention_heads)

    def gathered_prefix(self, chunk: Array, start: Array, total: Array) -> Array:
        """Prefix length of a call on gathered keys: the tokens before the chunk if flash; else all except the chunk."""
        if self.traits.kernel == "flash":
            return start
        return total - chunk

    def _visible_before(self, start: Array, keys: Array, end: Array) -> Array:
        """Number of tokens that a query at `start` sees, of the `keys` tokens before `end`."""
        reach = self.mixer.reach
        if reach is None:
            return keys
        return np.clip(reach - (start - end), 0.0, keys)

    def _call(self, chunk: Array, prefix: Array, causal: Array, *, own: bool = True) -> AttentionCall:
        return AttentionCall(chunk=chunk, prefix=prefix, causal=causal, own=own, **self._sizes)

    def _merging_s(self, chunk: Array, step: Traffic) -> Array:
        """Seconds of a merge; separate kernels are never faster than PyTorch's kernels."""
        seconds = self.cost.traffic_s(chunk, (step,))
        if self.traits.fused_merge:
            return seconds
        nbytes = chunk * (step.nbytes * self.setting.batch * self.setting.element_bytes / 2)
        start_s = self.cost.traffic_s(0.0 * chunk, (step,))
        return np.maximum(seconds, start_s + nbytes / (PYTORCH_SHARE * self.setting.hbm_bytes_per_s))


class SoftmaxCost(MergedCost):
    """Multi-head, grouped-query or multi-query attention."""

    mixer: Attention

    def __init__(self, setting: LayerSetting, mixer: Attention) -> None:
        super().__init__(setting, mixer)
        self._is_eager = self.traits.kernel == "eager"
        shares = mixer.num_key_value_heads != mixer.num_attention_heads
        self._repeats = self._is_eager and not self.traits.whole_attention and shares
        call = self._call(_NOT_COUNTED, _NOT_COUNTED, _NOT_COUNTED)
        cost = setting.cost
        all_keys_alike = False
        if isinstance(cost, CalibratedCost):
            rates = cost.rates.of(call, self.traits.kernel)
            all_keys_alike = isinstance(rates, EagerRates) and rates.measured is None
        # Whether the seconds of a block are linear in the keys before it.
        self._is_linear = mixer.reach is None and (self.traits.lower_bound or all_keys_alike)

    @property
    def kernels(self) -> int:
        copies = self.traits.copies
        return (copies.keep > 0) + (copies.own > 0) + self.block_kernels

    @property
    def block_kernels(self) -> int:
        if self._is_eager:
            return eager_kernels(self.setting.model, self.mixer, repeats=self._repeats)
        return 1

    def attention_s(self, chunk: Array, prefix: Array) -> Array:
        """Seconds of attention of the chunk's queries to prefix and chunk; eager code also repeats shared KV heads."""
        return self._call_s(self._call(chunk, self.visible(prefix), self._causal(chunk, prefix)))

    def in_blocks_s(self, chunk: Array, prefix: Array, counts: Sequence[int]) -> Array:
        """Seconds of attention with the chunk's queries in equal blocks, one call per block, for several block counts.

        Shape (counts, ...): seconds of the calls and of the copy that joins their outputs. The queries of a block see
        keys up to the block's end. Eager code repeats shared KV heads once. If the chunk begins the context, causal
        kernels use one call, which skips the masked half.
        """
        mixer = self.mixer
        numbers = [np.arange(float(count)) for count in counts]
        if self._is_linear:
            numbers = [number.mean(keepdims=True) for number in numbers]
        lengths = [len(number) for number in numbers]
        if len(counts) > 1 and sum(lengths) * np.size(chunk) > _MOST_ELEMENTS:
            return np.concatenate([self.in_blocks_s(chunk, prefix, (count,)) for count in counts])
        whole_s = self.attention_s(chunk, prefix)
        if counts == (1,):
            return whole_s[None]
        ones = (1,) * np.ndim(whole_s)
        calls = np.array(counts, dtype=float).reshape(-1, *ones)
        queries = chunk / calls
        if len(counts) > 1:
            queries = np.repeat(queries, lengths, axis=0)
        before = prefix + np.concatenate(numbers).reshape(-1, *ones) * queries
        queries = np.broadcast_to(queries, before.shape)
        blocks = self._call(queries, self.visible(before), self._causal(queries, before))
        blocks_s = self.cost.call_s(blocks._replace(part_of_chunk=True))
        if len(counts) == 1:
            seconds = blocks_s.sum(axis=0, keepdims=True)
        else:
            seconds = np.add.reduceat(blocks_s, np.cumsum([0, *lengths[:-1]]), axis=0)
        joined = Traffic("copy", 4.0 * mixer.num_attention_heads * mixer.v_head_dim, 1)
        seconds = seconds * (calls / np.reshape(lengths, calls.shape)) + self.cost.traffic_s(chunk, (joined,))
        if self._repeats:
            seconds = seconds + self._repeat_s(self.visible(prefix) + chunk)
        elif not self._is_eager and self.traits.lower_bound:
            seconds = np.minimum(seconds, self.attention_s(prefix + chunk, 0.0 * prefix))
        elif not self._is_eager:
            begins = prefix == 0
            if mixer.reach is not None:
                begins = begins & (chunk <= mixer.reach)
            seconds = np.where(begins, whole_s, seconds)
        return np.where(calls == 1, whole_s, seconds)

    def decode_s(self, keys: Array) -> Array:
        """Seconds of one token in a kernel that splits the keys over the device and reads K and V once."""
        keys = self.visible(keys)
        bytes_s = self.cost.traffic_s(keys, (Traffic("copy", self._half_token_bytes, 1),))
        token = np.ones_like(keys)
        return np.minimum(bytes_s, self._call_s(self._call(token, keys - token, keys)))

    def keys_s(self, chunk: Array, keys: Array) -> Array:
        return self._call_s(self._call(chunk, keys, chunk * keys, own=False))

    def _call_s(self, call: AttentionCall) -> Array:
        seconds = self.cost.call_s(call)
        if self._repeats:
            seconds = seconds + self._repeat_s(call.keys)
        return seconds

    def _repeat_s(self, keys: Array) -> Array:
        """Seconds to repeat K and V of `keys` tokens for each query head that shares them."""
        mixer = self.mixer
        heads = mixer.num_key_value_heads + mixer.num_attention_heads
        # The copy reads the KV heads and writes all heads; elements have two bytes.
        nbytes = 2.0 * heads * (mixer.head_dim + mixer.v_head_dim)
        return self.cost.traffic_s(keys, (Traffic("copy", nbytes, 2),))

    def _causal(self, chunk: Array, prefix: Array) -> Array:
        """Unmasked score elements of one head; NaN for an eager kernel, which computes all elements."""
        mixer = self.mixer
        if self._is_eager:
            return _NOT_COUNTED
        if mixer.attention_chunk is not None:
            return _in_chunks(prefix + chunk, mixer.attention_chunk) - _in_chunks(prefix, mixer.attention_chunk)
        if mixer.sliding_window is not None:
            return _in_window(prefix + chunk, mixer.sliding_window) - _in_window(prefix, mixer.sliding_window)
        return chunk * (prefix + 0.5 * chunk)


def _in_window(tokens: Array, window: int) -> Array:
    """Unmasked score elements of the first `tokens` queries when each sees at most `window` keys."""
    inside = np.minimum(tokens, window)
    return 0.5 * inside * inside + (tokens - inside) * window


def _in_chunks(tokens: Array, size: int) -> Array:
    """Unmasked score elements of the first `tokens` queries when each sees only its own chunk of `size` tokens."""
    full_chunks = np.floor(tokens / size)
    rest = tokens - full_chunks * size
    return np.asarray(0.5 * (full_chunks * size * size + rest * rest))


def absorbing(mixer: LatentAttention) -> tuple[Product, ...]:
    """The two products of each head: query to the latent's width, and attended latent to the output's width."""
    heads = mixer.num_attention_heads
    compute = mixer.expand.compute
    return (
        Product(mixer.qk_nope_head_dim, mixer.kv_lora_rank, heads, 1.0, compute),
        Product(mixer.kv_lora_rank, mixer.v_head_dim, heads, 1.0, compute),
    )


class LatentCost(MergedCost):
    """Cost of latent attention to all keys."""

    mixer: LatentAttention

    def __init__(self, setting: LayerSetting, mixer: LatentAttention) -> None:
        super().__init__(setting, mixer)
        # The rotated key is copied to every head's keys: the copy reads expanded keys and writes whole ones.
        width = mixer.num_attention_heads * (mixer.qk_nope_head_dim + mixer.head_dim)
        products = products_of((mixer.expand,), fused=self.traits.fused)
        self._expand = self.cost.row_cost(products, (Traffic("copy", 2.0 * width, 1),))
        self._absorb = self.cost.row_cost(absorbing(mixer), ())

    @property
    def kernels(self) -> int:
        """Number of kernels: expansion and joining with rotated keys (of chunk and of cache), attention, and a copy."""
        return 1 + self.block_kernels + (self.traits.copies.own > 0)

    @property
    def block_kernels(self) -> int:
        """Number of kernels: expansion, joining with rotated keys, and attention."""
        return 3

    def local_op_s(self, chunk: Array) -> Array:
        """Seconds to make the chunk's keys and values from its latents."""
        return self.expand_s(chunk)

    def expand_s(self, tokens: Array) -> Array:
        """Seconds to expand the latents of `tokens` tokens to keys and values."""
        return np.where(tokens > 0, self._expand(tokens), 0.0)

    def attention_s(self, chunk: Array, prefix: Array) -> Array:
        """Seconds of the prefix's expansion and of all heads' attention; the lower bound omits the expansion."""
        attention_s = self.cost.call_s(self._call(chunk, prefix, chunk * (prefix + 0.5 * chunk)))
        if self.traits.lower_bound:
            return attention_s
        return self.expand_s(prefix) + attention_s

    def absorbed_s(self, chunk: Array, prefix: Array) -> Array:
        """Seconds of the absorbed form: all heads attend to the latents."""
        return self._absorb(chunk) + self._to_latents_s(chunk, prefix)

    def decode_s(self, keys: Array) -> Array:
        """Seconds of one token in the absorbed form; the latents are read once."""
        bytes_s = self.cost.traffic_s(keys, (Traffic("copy", self._half_token_bytes, 1),))
        token = np.ones_like(keys)
        return self._absorb(token) + np.minimum(bytes_s, self._to_latents_s(token, keys - token))

    def keys_s(self, chunk: Array, keys: Array) -> Array:
        """Seconds to expand the keys' latents, and of attention."""
        return self.expand_s(keys) + self.cost.call_s(self._call(chunk, keys, chunk * keys, own=False))

    def _to_latents_s(self, chunk: Array, prefix: Array) -> Array:
        """Seconds of all heads' attention to the latents."""
        width = self.mixer.kv_lora_rank
        rotated = self.mixer.qk_rope_head_dim
        call = self._call(chunk, prefix, chunk * (prefix + 0.5 * chunk))
        return self.cost.call_s(call._replace(num_key_value_heads=1, head_dim=width + rotated, v_head_dim=width))
