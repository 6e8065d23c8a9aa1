"""Span: one stretch of time on a rank or a link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvrsim.program import Payload, WorkKind

SpanKind = Literal["compute", "wait", "transfer"]
# all-gather: of the ranks' K and V; collective: among the GPUs that a rank stands for
SpanOp = WorkKind | Payload | Literal["all-gather", "collective", "stall"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One stretch of time on a rank's compute stream (compute, wait) or on a link (transfer)."""

    rank: int  # rank that computes or waits; of a transfer, the sender
    kind: SpanKind
    op: SpanOp  # what a compute span works on, what a transfer carries, what a wait is for
    name: str  # the operation, such as "attention" or "kv to rank 3"
    layer: int | None  # decoder layer, None for embedding and head
    start_s: float
    end_s: float
    peer: int | None = None  # of a transfer, the receiver
    nbytes: float | None = None  # of a transfer

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s
