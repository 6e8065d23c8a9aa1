"""ElementwiseRates: seconds of kernels that do little but move bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from kvrsim.io.schema import NonNegative

ElementwiseOp = Literal["norm", "rotary", "activation", "residual", "copy", "embedding"]
ELEMENTWISE_OPS: tuple[ElementwiseOp, ...] = get_args(ElementwiseOp)
_RATE = {"unit": "bytes_per_s"}  # of fields whose name has none


class Traffic(NamedTuple):
    """What one step of a layer moves through device memory."""

    op: ElementwiseOp | Literal["merge"]
    nbytes: float  # read and written, a token
    kernels: int  # that do it


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementwiseRates:
    """Bytes a second by operation; a kernel that computes more a byte, or is written worse, has less."""

    fused: bool = False  # norm, rotary embedding and activation are one kernel each, as in serving engines
    fused_merge: bool = False  # one kernel merges partial results of a ring's attention; else see kvrsim.cost.merges
    start_s: NonNegative  # of every kernel, on the device
    norm: float = field(metadata=_RATE)
    rotary: float = field(metadata=_RATE)
    activation: float = field(metadata=_RATE)
    residual: float = field(metadata=_RATE)
    copy: float = field(metadata=_RATE)
    embedding: float = field(metadata=_RATE)
    merge_bytes_per_s: float | None = None  # of merging partial results as measured; None: see kvrsim.cost.merges
    mask_element_s: NonNegative = 0.0  # of an element of the attention mask, once a prefill

    @classmethod
    def uniform(
        cls, bytes_per_s: float, *, fused: bool, start_s: float = 0.0, fused_merge: bool = False
    ) -> ElementwiseRates:
        """The same rate for all."""
        rate = bytes_per_s
        return cls(
            fused=fused,
            fused_merge=fused_merge,
            start_s=start_s,
            norm=rate,
            rotary=rate,
            activation=rate,
            residual=rate,
            copy=rate,
            embedding=rate,
        )

    def bytes_per_s(self, op: ElementwiseOp | Literal["merge"]) -> float:
        """The rate of one operation."""
        if op == "merge":
            return self.residual if self.merge_bytes_per_s is None else self.merge_bytes_per_s
        return float(getattr(self, op))


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheCopies:
    """How often K and V are copied, each time read and written, on their way into the cache."""

    keep: NonNegative  # by every strategy, as where K and V are stacked into one tensor
    append: NonNegative  # more where a chunk is appended to a prefix (torch.cat)
    gather: NonNegative  # more where gathered pieces are put together (a list of outputs, then torch.cat)
    own: NonNegative = 0.0  # of the chunk's alone, where it is written into a buffer that holds the rest
