"""with_softmax: what a flash kernel's steps take however narrow the heads are, from calls with heads of 64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from calibrate.data.measurement import Measurement
from calibrate.fit.attention_rows import AttentionRows
from calibrate.fit.solver import Comparison, Fitted, Parameter, Some, cross_validated_s, solve
from kvrsim.kernels.attention import FlashRates
from kvrsim.program import Array

NARROW_HEAD_DIM = 64


def with_softmax(fitted: Fitted[FlashRates], rows: Sequence[Measurement]) -> Fitted[FlashRates]:
    """The same rates with softmax_s, which only heads narrower than those of the fit see; no rows: as they are.

    One more check: the narrow calls, whole chunk sizes left out.
    """
    if not rows:
        return fitted
    data, rates = AttentionRows.of(rows), fitted.rates
    held_out = cross_validated_s(
        data.chunk.tolist(), lambda train, test: data.take(test).predicted_s(_solved(rates, data.take(train)))
    )
    label = f"heads of {NARROW_HEAD_DIM}, chunk sizes left out"
    check = Comparison(label=label, measured_s=data.expected_s, predicted_s=held_out)
    _, widest = fitted.seen["head_dim"]
    seen = dict(fitted.seen) | {"head_dim": (NARROW_HEAD_DIM, widest)}
    return replace(fitted, rates=_solved(rates, data), checks=(*fitted.checks, check), seen=seen)


def _solved(rates: FlashRates, data: AttentionRows) -> FlashRates:
    """Softmax takes no longer than the products of the fit's heads, and matters from half of that on."""

    def predict(found: Mapping[str, float], some: Some) -> Array:
        return data.take(some).predicted_s(replace(rates, softmax_s=found["softmax_s"]))

    block_s = rates.block_s
    bounds = Parameter(name="softmax_s", start=0.7 * block_s, low=0.4 * block_s, high=block_s)
    return replace(rates, softmax_s=solve((bounds,), predict, data.expected_s)["softmax_s"])
