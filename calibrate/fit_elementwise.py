"""fit_elementwise: bytes a second of each kind of element-wise kernel, and what each kernel takes to start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from calibrate.fitted import HALF, Comparison, Fitted, Some, Unknown, column, left_out, seen_of, solve, sources_of
from calibrate.measurement import ELEMENTWISE, Measurement
from kvrsim.hardware import GpuSpec
from kvrsim.program import Array
from kvrsim.rates.elementwise import ELEMENTWISE_OPS, ElementwiseRates

PROMISED_TOKENS = 128  # from here on, a prefill's chunks: what the profile's error is about
_LIKE = {"copy": "residual"}  # a kind that no one measures, and the kind that streams as it does
_ENOUGH = 3  # rows of a kind


def fit_elementwise(rows: Sequence[Measurement], gpu: GpuSpec, *, fused: bool) -> Fitted[ElementwiseRates]:
    """One rate a kind, none above the datasheet's memory; one start for all, of at least nothing.

    A copy takes the rate of a residual addition; a kind with hardly a row takes the datasheet's. `crossed` leaves
    sizes out, a tenth at a time.
    """
    found = usable_elementwise(rows)
    kinds = np.array([ELEMENTWISE.index(row.operation) for row in found])
    nbytes, seconds, tokens = (column(found, name) for name in ("bytes", "median_s", "tokens"))
    measured = [kind for index, kind in enumerate(ELEMENTWISE) if (kinds == index).sum() >= _ENOUGH]

    def fit(some: Some) -> Mapping[str, float]:
        def predict(values: Mapping[str, float], inside: Some) -> Array:
            return _seconds(values, gpu, kinds[some][inside], nbytes[some][inside])

        return solve(_unknowns(measured, gpu), predict, seconds[some], weights=np.sqrt(seconds[some]))

    constants = fit(np.arange(len(found)))
    predicted = left_out(nbytes.tolist(), lambda train, test: _seconds(fit(train), gpu, kinds[test], nbytes[test]))
    own = Comparison(label="fitted", measured_s=seconds, predicted_s=_seconds(constants, gpu, kinds, nbytes))
    crossed = Comparison(label="sizes left out", measured_s=seconds, predicted_s=predicted)
    promised = tokens >= PROMISED_TOKENS
    by_kind = [own.where((kinds == ELEMENTWISE.index(kind)) & promised, f"{kind}, fitted") for kind in measured]
    return Fitted(
        rates=_rates(constants, gpu, fused=fused),
        source=sources_of(found),
        own=own,
        crossed=crossed.where(promised, f"{crossed.label}, tokens >= {PROMISED_TOKENS}") if promised.any() else crossed,
        checks=tuple(one for one in by_kind if len(one.measured_s)),
        seen=seen_of(found, ("tokens", "bytes")),
    )


def usable_elementwise(rows: Sequence[Measurement]) -> list[Measurement]:
    """Element-wise kernels in half precision."""
    return [row for row in rows if row.operation in ELEMENTWISE and row.dtype in HALF]


def _unknowns(kinds: Sequence[str], gpu: GpuSpec) -> list[Unknown]:
    hbm = gpu.hbm_bytes_per_s
    rates = [Unknown(name=kind, start=0.5 * hbm, low=1e-4 * hbm, high=hbm) for kind in kinds]
    return [Unknown(name="start_s", start=2e-6, low=0.0, high=1e-4), *rates]


def _seconds(values: Mapping[str, float], gpu: GpuSpec, kinds: Some, nbytes: Array) -> Array:
    rates = np.array([values.get(kind, gpu.hbm_bytes_per_s) for kind in ELEMENTWISE])
    return np.asarray(values["start_s"] + nbytes / rates[kinds])


def _rates(values: Mapping[str, float], gpu: GpuSpec, *, fused: bool) -> ElementwiseRates:
    rates = {op: values.get(op, values.get(_LIKE.get(op, op), gpu.hbm_bytes_per_s)) for op in ELEMENTWISE_OPS}
    return ElementwiseRates(fused=fused, start_s=values["start_s"], **rates)
