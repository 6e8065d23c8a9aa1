"""fit_elementwise: bytes per second of each kind of element-wise kernel, and the start time of a kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from calibrate.data.measurement import ELEMENTWISE, Measurement
from calibrate.fit.solver import (
    Comparison,
    Fitted,
    Parameter,
    Some,
    column,
    cross_validated_s,
    dtypes_of,
    has_waves,
    rounded,
    seen_of,
    solve,
    sources_of,
)
from kvrsim.hardware import GpuSpec
from kvrsim.kernels.elementwise import ELEMENTWISE_OPS, ElementwiseRates
from kvrsim.program import Array

PROMISED_TOKENS = 128  # from here on, a prefill's chunks: what the profile's error is about
KINDS = (*ELEMENTWISE, "copy")  # copies are measured as cache_append
_LIKE = {"copy": "residual"}  # a kind that is rarely measured, and one with the same access pattern
_ENOUGH = 3  # rows of a kind
_CPU_CACHES = 20.0  # times the memory's rate: on a CPU, the output of a kernel may still be in a cache for the next one


def fit_elementwise(
    rows: Sequence[Measurement], gpu: GpuSpec, *, fused: bool, kernels: Mapping[str, int] | None = None
) -> Fitted[ElementwiseRates]:
    """One rate per kind, at most the datasheet's memory bandwidth; one start time for all, at least 0.

    Without cache_append rows, a copy has the rate of a residual addition; other kinds with too few rows have the
    datasheet's. `kernels`: kernels of one row of each kind; default 1. `cross_validated` holds sizes out, a tenth at a
    time.
    """
    found = usable_elementwise(rows)
    kinds = np.array([KINDS.index(_kind(row)) for row in found])
    nbytes, seconds = (column(found, name) for name in ("bytes", "expected_s"))
    tokens = np.array([row.chunk if row.tokens is None else row.tokens for row in found], dtype=float)
    starts = np.array([(kernels or {}).get(kind, 1) for kind in KINDS], dtype=float)[kinds]
    measured = [kind for index, kind in enumerate(KINDS) if (kinds == index).sum() >= _ENOUGH]

    def fit(some: Some) -> Mapping[str, float]:
        def predict(values: Mapping[str, float], inside: Some) -> Array:
            return _seconds(values, gpu, kinds[some][inside], nbytes[some][inside], starts[some][inside])

        return solve(_parameters(measured, gpu), predict, seconds[some], weights=np.sqrt(seconds[some]))

    constants = fit(np.arange(len(found)))
    predicted = cross_validated_s(
        nbytes.tolist(), lambda train, test: _seconds(fit(train), gpu, kinds[test], nbytes[test], starts[test])
    )
    own = Comparison(label="fitted", measured_s=seconds, predicted_s=_seconds(constants, gpu, kinds, nbytes, starts))
    held_out = Comparison(label="sizes left out", measured_s=seconds, predicted_s=predicted)
    promised = tokens >= PROMISED_TOKENS
    by_kind = [own.where((kinds == KINDS.index(kind)) & promised, f"{kind}, fitted") for kind in measured]
    return Fitted(
        rates=_rates(constants, gpu, fused=fused),
        source=sources_of(found),
        own=own,
        cross_validated=held_out.where(promised, f"{held_out.label}, tokens >= {PROMISED_TOKENS}")
        if promised.any()
        else held_out,
        checks=tuple(one for one in by_kind if len(one.measured_s)),
        seen=seen_of(found, ("tokens", "bytes")),
    )


def with_merges(rates: ElementwiseRates, rows: Sequence[Measurement]) -> ElementwiseRates:
    """With the rate of merging partial results, the geometric mean of the rows; none without rows."""
    if not rows:
        return rates
    logs = np.log(column(rows, "bytes") / column(rows, "expected_s"))
    return replace(rates, merge_bytes_per_s=rounded(float(np.exp(logs.mean()))))


def usable_elementwise(rows: Sequence[Measurement], dtypes: Sequence[str] | None = None) -> list[Measurement]:
    """Element-wise kernels and copies into the cache, in these dtypes (None: dtypes_of(rows))."""
    wanted = dtypes_of(rows) if dtypes is None else dtypes
    return [row for row in rows if _kind(row) in KINDS and row.dtype in wanted]


def _kind(row: Measurement) -> str:
    return "copy" if row.operation == "cache_append" else row.operation


def _parameters(kinds: Sequence[str], gpu: GpuSpec) -> list[Parameter]:
    hbm = gpu.hbm_bytes_per_s
    high = hbm if has_waves(gpu) else _CPU_CACHES * hbm
    rates = [Parameter(name=kind, start=0.5 * hbm, low=1e-4 * hbm, high=high) for kind in kinds]
    return [Parameter(name="start_s", start=2e-6, low=0.0, high=1e-4), *rates]


def _seconds(values: Mapping[str, float], gpu: GpuSpec, kinds: Some, nbytes: Array, starts: Array) -> Array:
    rates = np.array([values.get(kind, gpu.hbm_bytes_per_s) for kind in KINDS])
    return np.asarray(starts * values["start_s"] + nbytes / rates[kinds])


def _rates(values: Mapping[str, float], gpu: GpuSpec, *, fused: bool) -> ElementwiseRates:
    rates: dict[str, float] = {
        op: values.get(op, values.get(_LIKE.get(op, op), gpu.hbm_bytes_per_s)) for op in ELEMENTWISE_OPS
    }
    return ElementwiseRates(fused=fused, fused_merge=False, start_s=values["start_s"], **rates)
