"""AttentionRows: measured attention calls as arrays, put to the rates' own formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from calibrate.fitted import Some, column, element_bytes_of
from calibrate.measurement import Measurement
from kvrsim.program import Array
from kvrsim.rates.attention import AttentionCall, AttentionRates, BlockedRates, EagerRates

LLAMA_SCORE_BYTES = 28.0  # see kvrsim/cost/traffic.py
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
