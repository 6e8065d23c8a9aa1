"""ElementwiseRates: seconds of kernels that do little but move bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from kvrsim.io.json_text import JsonObject

ElementwiseOp = Literal["norm", "rotary", "activation", "residual", "copy", "embedding"]
ELEMENTWISE_OPS: tuple[ElementwiseOp, ...] = get_args(ElementwiseOp)


class Traffic(NamedTuple):
    """What one step of a layer moves through device memory."""

    op: ElementwiseOp
    nbytes: float  # read and written, a token
    kernels: int  # that do it


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementwiseRates:
    """Bytes a second by operation; a kernel that computes more a byte, or is written worse, has less."""

    fused: bool  # norm, rotary embedding and activation are one kernel each, as in serving engines
    start_s: float  # of every kernel, on the device
    norm: float
    rotary: float
    activation: float
    residual: float
    copy: float
    embedding: float
    mask_element_s: float = 0.0  # of an element of the attention mask, once a prefill

    @classmethod
    def uniform(cls, bytes_per_s: float, *, fused: bool, start_s: float = 0.0) -> ElementwiseRates:
        """The same rate for all."""
        rate = bytes_per_s
        return cls(
            fused=fused,
            start_s=start_s,
            norm=rate,
            rotary=rate,
            activation=rate,
            residual=rate,
            copy=rate,
            embedding=rate,
        )

    @classmethod
    def read(cls, data: JsonObject) -> ElementwiseRates:
        """Check the keys of the profile's elementwise section."""
        data.only(cls.__slots__)
        fused, start_s = data.flag("fused", False), data.number("start_s", allow_zero=True)
        rates: dict[str, float] = {op: data.number(op) for op in ELEMENTWISE_OPS}
        return cls(
            fused=fused,
            start_s=start_s,
            mask_element_s=data.number("mask_element_s", allow_zero=True) if data.has("mask_element_s") else 0.0,
            **rates,
        )

    def bytes_per_s(self, op: ElementwiseOp) -> float:
        """The rate of one operation."""
        return float(getattr(self, op))

    def faster(self, factor: float) -> ElementwiseRates:
        """Every rate `factor` times as high."""
        rates: dict[str, float] = {op: self.bytes_per_s(op) * factor for op in ELEMENTWISE_OPS}
        seconds = {"start_s": self.start_s / factor, "mask_element_s": self.mask_element_s / factor}
        return replace(self, **seconds, **rates)  # type: ignore[arg-type]
