"""AttentionRows: measured attention calls as arrays, put to the rates' own formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from calibrate.fitted import HALF_BYTES, Some, column
from calibrate.measurement import Measurement
from kvrsim.program import Array
from kvrsim.rates.attention import AttentionCall, AttentionRates

LLAMA_SCORE_BYTES = 28.0  # see kvrsim/cost/traffic.py


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionRows:
    """As many attention calls as the arrays are long."""

    chunk: Array
    prefix: Array
    num_attention_heads: Array
    num_key_value_heads: Array
    head_dim: Array
    batch: Array
    median_s: Array  # measured

    @classmethod
    def of(cls, rows: Sequence[Measurement]) -> AttentionRows:
        """The attention measurements."""
        return cls(**{field.name: column(rows, field.name) for field in fields(cls)})

    def take(self, indices: Some) -> AttentionRows:
        """Some of them, by index or mask."""
        return AttentionRows(**{field.name: getattr(self, field.name)[indices] for field in fields(self)})

    @property
    def keys(self) -> Array:
        """Of the last query."""
        return self.prefix + self.chunk

    def predicted_s(self, rates: AttentionRates) -> Array:
        """As the simulator takes them."""
        call = AttentionCall(
            chunk=self.chunk,
            prefix=self.prefix,
            causal=self.chunk * (self.prefix + 0.5 * self.chunk),
            # The formulas take arrays of shapes as well.
            num_attention_heads=cast(Any, self.num_attention_heads),
            num_key_value_heads=cast(Any, self.num_key_value_heads),
            head_dim=cast(Any, self.head_dim),
            score_bytes=LLAMA_SCORE_BYTES,
        )
        return rates.seconds(call, cast(Any, self.batch), HALF_BYTES)
