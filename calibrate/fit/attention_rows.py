"""AttentionRows: measured attention calls as arrays, for the formulas of the rates.

with_sizes: adds correction factors by size of the call to rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np

from calibrate.data.measurement import Measurement
from calibrate.fit.solver import Some, column, element_bytes_of, rounded, thinned
from kvrsim.kernels.attention import AttentionCall, AttentionRates, BlockedRates, EagerRates, MeasuredSizes
from kvrsim.program import Array

LLAMA_SCORE_BYTES = 28.0  # see kvrsim/kernels/elementwise.py
_ARRAYS = ("chunk", "prefix", "num_attention_heads", "num_key_value_heads", "head_dim", "batch", "expected_s")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionRows:
    """As many attention calls as the arrays are long."""

    chunk: Array
    prefix: Array
    num_attention_heads: Array
    num_key_value_heads: Array
    head_dim: Array
    batch: Array
    expected_s: Array  # measured
    element_bytes: int = 2

    @classmethod
    def of(cls, rows: Sequence[Measurement]) -> AttentionRows:
        """The attention measurements."""
        return cls(**{name: column(rows, name) for name in _ARRAYS}, element_bytes=element_bytes_of(rows))

    def take(self, indices: Some) -> AttentionRows:
        """Some of them, by index or mask."""
        return replace(self, **{name: getattr(self, name)[indices] for name in _ARRAYS})

    @property
    def keys(self) -> Array:
        """Of the last query."""
        return self.prefix + self.chunk

    @property
    def call(self) -> AttentionCall:
        """As the rates' formulas take it, which take arrays of shapes as well."""
        return AttentionCall(
            chunk=self.chunk,
            prefix=self.prefix,
            causal=self.chunk * (self.prefix + 0.5 * self.chunk),
            num_attention_heads=cast(Any, self.num_attention_heads),
            num_key_value_heads=cast(Any, self.num_key_value_heads),
            head_dim=cast(Any, self.head_dim),
            score_bytes=LLAMA_SCORE_BYTES,
        )

    def predicted_s(self, rates: AttentionRates) -> Array:
        """As the simulator takes them."""
        return rates.seconds(self.call, cast(Any, self.batch), self.element_bytes)

    def sizes(self, rates: EagerRates | BlockedRates) -> Array:
        """What MeasuredSizes of such rates go by."""
        if isinstance(rates, BlockedRates):
            return self.chunk
        return rates.elements(self.call, cast(Any, self.batch))


MAX_KNOTS = 20
_A_DOUBLING = 2  # classes of size
_KNOT_ERROR = 0.01
_LEAST_SHARE = 0.3  # of a call's time that depends on its elements; calls with less are not used

Sized = TypeVar("Sized", EagerRates, BlockedRates)


def with_sizes(rates: Sized, rows: AttentionRows, peak_flops: float) -> Sized:
    """The rates with factors at some of the rows' sizes; no call beats its unmasked FLOPs at `peak_flops`."""
    plain = replace(rates, measured=None)
    whole_s = rows.predicted_s(plain)
    elements_s = whole_s - rows.predicted_s(_without_elements(plain))
    says = elements_s >= _LEAST_SHARE * whole_s
    if not says.any():
        return plain
    taken_s = np.maximum(rows.expected_s - (whole_s - elements_s), 0.1 * rows.expected_s)
    flops = 4.0 * rows.batch * rows.num_attention_heads * rows.head_dim * rows.call.causal
    taken_s = np.maximum(taken_s, flops / peak_flops)
    return replace(plain, measured=_sizes(rows.sizes(plain)[says], taken_s[says] / elements_s[says]))


def _without_elements(rates: Sized) -> Sized:
    """The rates with only the constant time of a call."""
    none = dict.fromkeys(("flops_per_s", "bytes_per_s", "causal_flops_per_s", "rectangle_flops_per_s"), 1e60)
    values: dict[str, Any] = {name: value for name, value in none.items() if name in rates.__slots__}
    return replace(rates, **values)


def _sizes(sizes: Array, factors: Array) -> MeasuredSizes:
    """Medians of classes of size, with few knots, such that longer calls never take less time."""
    classes = np.round(_A_DOUBLING * np.log2(sizes))
    knots = sorted(set(classes.tolist()))
    places = np.array([np.mean(np.log(sizes[classes == knot])) for knot in knots])
    spent = places + np.array([np.median(np.log(factors[classes == knot])) for knot in knots])
    spent = 0.5 * (np.maximum.accumulate(spent) + np.minimum.accumulate(spent[::-1])[::-1])
    kept = thinned(places, spent - places, most=MAX_KNOTS, error=_KNOT_ERROR)
    rounded_sizes = np.array([rounded(float(size), 6) for size in np.exp(places[kept])])
    return MeasuredSizes(
        sizes=tuple(rounded_sizes.tolist()),
        factors=tuple((np.maximum.accumulate(np.exp(spent[kept])) / rounded_sizes).tolist()),
    )


def with_blocks(rates: BlockedRates, rows: Sequence[Measurement]) -> BlockedRates:
    """With the rate of attention to blocks that are not masked, in the geometric mean of the rows; none without rows.

    Start and queries take what they do in other calls, but no more than half of a row's seconds.
    """
    if not rows:
        return rates
    heads, chunk, keys, head_dim, seconds = (
        column(rows, name) for name in ("num_attention_heads", "chunk", "prefix", "head_dim", "expected_s")
    )
    left_s = np.maximum(seconds - rates.start_s - heads * chunk * rates.query_s, 0.5 * seconds)
    flops_per_s = 4.0 * heads * head_dim * chunk * keys / left_s
    return replace(rates, block_flops_per_s=rounded(float(np.exp(np.log(flops_per_s).mean()))))
