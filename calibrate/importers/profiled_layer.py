"""ProfiledLayer: what the columns of a decoder layer's profile time, as vidur takes it.

Read from vidur/profiling/mlp/mlp_impl.py: QKV is one product, and so are gate and up; with n tensor-parallel workers
one worker is timed, which holds 1/n of the heads and of the intermediate size, and all of the hidden size. Bytes are
counted plainly, two an element: a kernel reads its inputs and writes its output once. For one token these are, in
elements: norm and embedding 2 of the hidden size, rotary 2 of Q and K, a gated activation 3 of the intermediate size
(else 2), an addition 3 of the hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from calibrate.data.csv import CsvRow

ELEMENT_BYTES = 2  # fp16
SHAPE_COLUMNS = ("num_tokens", "num_tensor_parallel_workers", "n_embd", "n_expanded_embd", "n_head", "n_kv_head")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledLayer:
    """The shapes of one profiled decoder layer, of the whole model."""

    tokens: int  # rows
    workers: int  # tensor-parallel workers
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    gated: bool  # whether the MLP has a gate, fused with up
    residual_adds: int  # additions that the `add` column times

    @classmethod
    def from_row(cls, row: CsvRow, *, gated: bool, residual_adds: int) -> ProfiledLayer:
        tokens, workers, hidden, intermediate, heads, kv_heads = (row.whole(name) for name in SHAPE_COLUMNS)
        if heads % workers or kv_heads % workers or intermediate % workers:
            raise row.error("num_tensor_parallel_workers", "a divisor of n_head, n_kv_head and n_expanded_embd")
        if hidden % heads:
            raise row.error("n_head", "a divisor of n_embd")
        return cls(
            tokens=tokens,
            workers=workers,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            gated=gated,
            residual_adds=residual_adds,
        )

    def operations(self) -> dict[str, dict[str, Any]]:
        """By the name of the profiled column what it timed: fields of Measurement."""
        head_dim = self.hidden_size // self.num_attention_heads
        q_width = self.num_attention_heads * head_dim // self.workers
        kv_width = self.num_key_value_heads * head_dim // self.workers
        width = self.intermediate_size // self.workers
        fused = 2 if self.gated else 1
        norm = self._elementwise("norm", 2 * self.hidden_size)
        return {
            "emb": self._elementwise("embedding", 2 * self.hidden_size),
            "input_layernorm": norm,
            "attn_pre_proj": self._gemm(self.hidden_size, q_width + 2 * kv_width),
            "attn_rope": self._elementwise("rotary", 2 * (q_width + kv_width)),
            "attn_post_proj": self._gemm(q_width, self.hidden_size),
            "post_attention_layernorm": norm,
            "mlp_up_proj": self._gemm(self.hidden_size, fused * width),
            "mlp_act": self._elementwise("activation", (fused + 1) * width),
            "mlp_down_proj": self._gemm(width, self.hidden_size),
            "add": self._elementwise("residual", 3 * self.residual_adds * self.hidden_size),
        }

    def _gemm(self, in_features: int, out_features: int) -> dict[str, Any]:
        return dict(operation="gemm", tokens=self.tokens, in_features=in_features, out_features=out_features)

    def _elementwise(self, operation: str, elements: int) -> dict[str, Any]:
        """`elements`: read and written for one token."""
        return dict(operation=operation, tokens=self.tokens, bytes=self.tokens * elements * ELEMENT_BYTES)
