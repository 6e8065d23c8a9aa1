"""AttentionCall: what one attention call covers, whatever kernel does it.

BlockedRates: seconds of a fused attention kernel by what it covers, masked or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvrsim.io.schema import NonNegative
from kvrsim.profile.rates.sizes import MeasuredSizes
from kvrsim.program import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """What one attention call covers."""

    chunk: Array  # queries
    prefix: Array  # keys before the first query's own, as far as the window lets any query see
    causal: Array  # elements of one head's score matrix that are not masked
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # of queries and keys
    v_head_dim: int | None = None  # of values; None: as of keys
    score_bytes: float  # that an eager kernel moves per element of the score matrix
    reach: int | None = None  # keys that a query sees at most, itself included; None: all up to its own
    own: bool = True  # the chunk's own keys follow the prefix, and are masked and appended; False: the prefix alone
    latent: bool = False  # keys and values are made of one latent a token, or are the latents
    part: bool = False  # the queries are one of several equal blocks of a chunk, each a call of its own

    @property
    def keys(self) -> Array:
        """Keys that the kernel is given."""
        return self.prefix + self.chunk if self.own else self.prefix

    @property
    def mean_head_dim(self) -> float:
        """Of keys and values: QK^T takes 2 FLOPs an element of a key, PV 2 an element of a value."""
        return self.head_dim if self.v_head_dim is None else 0.5 * (self.head_dim + self.v_head_dim)


_ROUNDING = 1e-9  # relative


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockedRates:
    """A fused kernel by what it covers: the chunk's own causal half, and the rectangle that a prefix makes of it.

    Without a prefix only what is not masked is computed. With one, either the rectangle of chunk x (prefix + chunk),
    mask and all (scaled_dot_product_attention with a mask), or, where what is masked is skipped, the rectangle of
    chunk x prefix and the causal half, joined by their log-sum-exp.
    """

    causal_flops_per_s: float  # of QK^T and PV in the chunk's own causal half
    rectangle_flops_per_s: float  # of QK^T and PV in the rectangle; with a mask no more than without
    start_s: NonNegative  # of a call
    query_s: NonNegative  # of a query and head, whatever its keys
    key_block: int  # keys of a block; one that the diagonal cuts is computed whole (if it is huge, all that is masked)
    skips_masked: bool = False  # whether what is masked is skipped behind a prefix, too
    join_s: NonNegative = 0.0  # of a query and head, more where two parts are joined
    block_flops_per_s: float | None = None  # of another rank's block, none of it masked; None: as the rectangle
    measured: MeasuredSizes | None = None  # by queries, by which blocks are chosen; None: all as the rates have them

    def seconds(self, call: AttentionCall, batch: int, element_bytes: int) -> Array:
        """Start, queries and elements, whose size is in the rates; more queries or keys never take less."""
        if self.block_flops_per_s is not None and not call.own:
            return self._called_s(call, batch, self._covered(call))
        joined_s = self.join_s * batch * call.num_attention_heads * call.chunk * (call.prefix > 0)
        return self._called_s(call, batch, self._covered(call) * self._factor(call.chunk)) + joined_s

    def least_seconds(self, call: AttentionCall, batch: int, element_bytes: int) -> Array:
        """What no call beats, and what, at a fixed end of the chunk, does not grow with the prefix.

        Masked: it falls with the start, but for the one that starts at 0 and covers its causal half alone. Skipping:
        what it covers is concave in the start, besides what falls; so none of an earlier start covers less than both
        it and the one that starts at 0. No earlier start has a lesser factor than the queries from there on.
        """
        if call.part:
            return self._least_of_part(call, batch)
        if self.block_flops_per_s is not None and not call.own:
            return self._called_s(call, batch, 0.0 * self._covered(call))
        if not self.skips_masked:
            end = call.prefix + call.chunk
            from_0 = self._causal_cost * self._half(end) * self._factor(end)
            return self._called_s(call, batch, np.minimum(self._covered(call) * self._factor(call.chunk), from_0))
        here, cut = self._covered(call), self._cut(call)
        from_0 = self._causal_cost * (call.causal + 0.5 * call.prefix * call.prefix) + cut
        if self.measured is None:
            return self._called_s(call, batch, np.minimum(here, from_0))
        here, from_0 = here * self.measured.least_factor(call.chunk), from_0 * min(self.measured.factors)
        return self._called_s(call, batch, np.minimum(here, from_0))

    def _least_of_part(self, call: AttentionCall, batch: int) -> Array:
        """What no block of a chunk beats; all its blocks together take no more where the chunk starts later.

        Rectangles, or what is not masked, at the least factor of as many queries or more; not for a chunk that starts
        at 0, which is no rectangle.
        """
        covered = call.causal * min(1.0, self._causal_cost) if self.skips_masked else call.chunk * call.keys
        factor = 1.0 if self.measured is None else self.measured.least_factor(call.chunk)
        return self._called_s(call, batch, covered * factor)

    def _factor(self, queries: Array) -> Array | float:
        return 1.0 if self.measured is None else self.measured.factor(queries)

    def _called_s(self, call: AttentionCall, batch: int, covered: Array) -> Array:
        heads = batch * call.num_attention_heads
        return self.start_s + heads * (
            call.chunk * self.query_s + covered * (4.0 * call.mean_head_dim * self._rectangle_s)
        )

    def _covered(self, call: AttentionCall) -> Array:
        """What one head covers, as so many elements of the rectangle."""
        if not call.own:
            whole = call.chunk * call.prefix
            return whole if self.block_flops_per_s is None else whole / (self.block_flops_per_s * self._rectangle_s)
        cost, own = self._causal_cost, 0.5 * call.chunk * call.chunk
        if self.skips_masked:
            # Behind a window neither part is more than what is not masked.
            behind = np.minimum(call.chunk * call.prefix, call.causal) * max(0.0, 1.0 - cost)
            dearer = np.minimum(own, call.causal) * max(0.0, cost - 1.0)
            return call.causal * min(1.0, cost) + behind + dearer + self._cut(call)
        # A window shorter than the chunk needs a mask, too.
        masked = (call.prefix > 0) | (call.causal < own * (1 - _ROUNDING))
        return np.where(masked, call.chunk * (call.prefix + call.chunk), cost * self._half(call.chunk))

    def _half(self, queries: Array) -> Array:
        """Elements of one head of a causal half, with the rest of the blocks that the diagonal cuts."""
        return 0.5 * queries * (queries + np.minimum(queries, self.key_block - 1))

    def _cut(self, call: AttentionCall) -> Array:
        """That rest."""
        return self._causal_cost * (self._half(call.chunk) - 0.5 * call.chunk * call.chunk)

    @property
    def _rectangle_s(self) -> float:
        """A FLOP of the rectangle."""
        own_s = 1.0 / self.rectangle_flops_per_s
        return own_s if self.skips_masked else max(own_s, 1.0 / self.causal_flops_per_s)

    @property
    def _causal_cost(self) -> float:
        """An element of the causal half, in elements of the rectangle."""
        return 1.0 / (self.causal_flops_per_s * self._rectangle_s)
