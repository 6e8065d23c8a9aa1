"""Fits of element-wise kernels, of kernel launches by the CPU, and of the work before the first layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from calibrate.data import ELEMENTWISE, Measurement, Some
from calibrate.fit.fit import (
    Constants,
    Fit,
    FitResult,
    Parameter,
    column,
    has_waves,
    mean_rate,
    ranges_of,
    solve,
    sources_of,
    to_digits,
)
from kvrsim.engine import HostRates
from kvrsim.hardware import GpuSpec
from kvrsim.kernels.elementwise import ELEMENTWISE_OPS, ElementwiseRates
from kvrsim.kernels.profile import OperationFit
from kvrsim.program import Array

PROMISED_TOKENS = 128  # minimum number of tokens of a chunk for which the profile states its error
KINDS = (*ELEMENTWISE, "copy")  # copies are measured as cache_append
# A kind without measurements takes the rate of this kind, which has the same access pattern.
_LIKE = {"copy": "residual"}
_ENOUGH = 3  # minimum number of rows of a kind for a fit of its rate
_CPU_CACHES = 20.0  # upper bound of rates as a multiple of the memory's rate: a CPU's caches may hold the last output
_GATHERS = 2  # all-gathers of one layer: K and V
_LEAST_LOG_SD = 0.05
_UNMASKED = "flash"  # a kernel that takes no mask


def fit_elementwise(
    rows: Sequence[Measurement], gpu: GpuSpec, *, fused: bool, kernels: Mapping[str, int] | None = None
) -> FitResult[ElementwiseRates]:
    """Fit one rate per kind, at most the datasheet's memory bandwidth, and one start time for all, at least 0.

    Without cache_append rows, a copy has the rate of a residual addition; other kinds with too few rows have the
    datasheet's. `kernels`: number of kernels that one row of each kind contains; default 1. `cross_validated` holds out
    a tenth of the sizes at a time.
    """
    hbm = gpu.hbm_bytes_per_s
    nbytes = column(rows, "bytes")
    kinds = np.array([KINDS.index(_kind(row)) for row in rows])
    tokens = column(rows, "tokens")
    tokens = np.where(np.isnan(tokens), column(rows, "chunk"), tokens)
    kernels = kernels or {}
    starts = np.array([kernels.get(kind, 1) for kind in KINDS], dtype=float)[kinds]
    high = hbm
    if not has_waves(gpu):
        high = _CPU_CACHES * hbm
    parameters = [Parameter(name="start_s", start=2e-6, low=0.0, high=1e-4)]
    for index, kind in enumerate(KINDS):
        if (kinds == index).sum() >= _ENOUGH:
            parameters.append(Parameter(name=kind, start=0.5 * hbm, low=1e-4 * hbm, high=high))

    def seconds(values: Constants, indices: Some) -> Array:
        rates = np.array([values.get(kind, hbm) for kind in KINDS])
        return np.asarray(starts[indices] * values["start_s"] + nbytes[indices] / rates[kinds[indices]])

    fit: Fit[Constants] = Fit(
        label="",
        measured_s=column(rows, "expected_s"),
        parameters=parameters,
        make=dict,
        seconds=seconds,
        weighted=True,
    )
    rates = {op: fit.constants.get(op, fit.constants.get(_LIKE.get(op, op), hbm)) for op in ELEMENTWISE_OPS}
    return FitResult(
        rates=ElementwiseRates(fused=fused, fused_merge=False, start_s=fit.constants["start_s"], **rates),
        source=sources_of(rows),
        own=fit.own,
        cross_validated=fit.left_out("sizes", nbytes.tolist()).from_size(tokens, PROMISED_TOKENS, "tokens"),
        seen=ranges_of(rows, ("tokens", "bytes")),
    )


def with_merges(rates: ElementwiseRates, rows: Sequence[Measurement]) -> ElementwiseRates:
    """Return the rates with a rate of merging partial results: the geometric mean over the rows."""
    if not rows:
        return rates
    return replace(rates, merge_bytes_per_s=mean_rate(column(rows, "bytes") / column(rows, "expected_s")))


def usable_elementwise(rows: Sequence[Measurement], dtypes: Sequence[str]) -> list[Measurement]:
    """Element-wise kernels and copies into the cache, in these dtypes."""
    return [row for row in rows if _kind(row) in KINDS and row.dtype in dtypes]


def _kind(row: Measurement) -> str:
    if row.operation == "cache_append":
        return "copy"
    return row.operation


def fit_host(
    layers: Sequence[Measurement], gathers: Sequence[Measurement], messages: Sequence[Measurement] = ()
) -> tuple[HostRates, OperationFit]:
    """Make HostRates: medians of host_layer rows (at least one), host_collective rows per rank, and host_message rows.

    Without host_collective rows, the host's time per rank of a collective is that of a send and a receive, as in the
    runtime's ring.
    """
    seconds = column(layers, "expected_s")
    mape = to_digits(float(np.mean(np.abs(seconds / np.median(seconds) - 1))))
    operation = OperationFit(
        source="; ".join(sorted({row.source for row in layers})),
        num_rows=len(layers) + len(gathers) + len(messages),
        mape=mape,
        cross_validated_mape=mape,
        log_sd=to_digits(max(float(np.std(np.log(seconds))), _LEAST_LOG_SD)),
        seen={},
    )
    message_s = 0.0
    if messages:
        message_s = float(np.median(column(messages, "expected_s")))
    piece_s = 2 * message_s
    if gathers:
        piece_s = _GATHERS * float(np.median(column(gathers, "median_s") / column(gathers, "ranks")))
    rates = HostRates(
        layer_s=to_digits(float(np.median(seconds))),
        gather_piece_s=to_digits(piece_s),
        resume_s=0.0,
        message_s=to_digits(message_s),
    )
    return rates, operation


def fit_pending_share(rows: Sequence[Measurement]) -> float:
    """Share of the compute rate that a layer loses during a pending receive: median over shapes; 0 without rows.

    Each layer_pending row is compared with the layer_alone row of the same shape, kernel and device.
    """

    def shape(row: Measurement) -> tuple[object, ...]:
        return row.kernel, row.device, row.dtype, row.chunk, row.prefix

    alone = {shape(row): row.expected_s for row in rows if row.operation == "layer_alone"}
    pending = [row for row in rows if row.operation == "layer_pending" and shape(row) in alone]
    if not pending:
        return 0.0
    lost = [1.0 - alone[shape(row)] / row.expected_s for row in pending]
    return to_digits(float(np.clip(np.median(lost), 0.0, 0.9)))


def fit_prepare(rows: Sequence[Measurement]) -> tuple[float, float]:
    """Fit the prepare rows: seconds before the first layer, and seconds per element of the mask; 0 without rows."""
    if not rows:
        return 0.0, 0.0
    seconds = column(rows, "expected_s")
    chunk = column(rows, "chunk")
    masked = np.array([row.kernel != _UNMASKED for row in rows])
    elements = np.where(masked, chunk * (chunk + column(rows, "prefix")), 0.0)
    if len(set(elements.tolist())) == 1:
        return to_digits(float(np.median(seconds))), 0.0  # no mask was measured
    longest_s = float(seconds.max())
    parameters = (
        Parameter(name="step_s", start=float(seconds.min()), low=0.0, high=longest_s),
        Parameter(name="mask_element_s", start=longest_s / float(elements.max()), low=0.0, high=1.0),
    )

    def predict(values: Constants, indices: Some) -> Array:
        return np.asarray(values["step_s"] + elements[indices] * values["mask_element_s"] + 1e-12)

    solved = solve(parameters, predict, seconds)
    return solved["step_s"], solved["mask_element_s"]
