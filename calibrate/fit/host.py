"""fit_host and fit_prepare: CPU launch overhead, and the time of a prefill before its first layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from calibrate.data.measurement import Measurement
from calibrate.fit.solver import Parameter, column, rounded, solve
from kvrsim.engine import HostRates
from kvrsim.kernels.profile import OperationFit
from kvrsim.program import Array

_GATHERS = 2  # all-gathers of one layer: K and V
_LEAST_LOG_SD = 0.05
_UNMASKED = "flash"  # a kernel that takes no mask


def fit_host(
    layers: Sequence[Measurement], gathers: Sequence[Measurement], messages: Sequence[Measurement] = ()
) -> tuple[HostRates, OperationFit]:
    """Medians of host_layer rows, at least one, of host_collective rows a rank, and of host_message rows.

    Without timed collectives, a rank's part in one is a send and a receive, as in the runtime's ring.
    """
    seconds = column(layers, "expected_s")
    mape = rounded(float(np.mean(np.abs(seconds / np.median(seconds) - 1))))
    operation = OperationFit(
        source="; ".join(sorted({row.source for row in layers})),
        num_rows=len(layers) + len(gathers) + len(messages),
        mape=mape,
        cross_validated_mape=mape,
        log_sd=rounded(max(float(np.std(np.log(seconds))), _LEAST_LOG_SD)),
        seen={},
    )
    message_s = float(np.median(column(messages, "expected_s"))) if messages else 0.0
    piece_s = 2 * message_s
    if gathers:
        piece_s = _GATHERS * float(np.median(column(gathers, "median_s") / column(gathers, "ranks")))
    rates = HostRates(
        layer_s=rounded(float(np.median(seconds))),
        gather_piece_s=rounded(piece_s),
        resume_s=0.0,
        message_s=rounded(message_s),
    )
    return rates, operation


def fit_pending_share(rows: Sequence[Measurement]) -> float:
    """Share of a layer's compute rate that a pending receive takes: the median over shapes; 0 without rows.

    From layer_pending rows and the layer_alone row of the same shape and ranks.
    """
    alone = {_shape(row): row.expected_s for row in rows if row.operation == "layer_alone"}
    lost = [
        1.0 - alone[_shape(row)] / row.expected_s
        for row in rows
        if row.operation == "layer_pending" and _shape(row) in alone
    ]
    return rounded(float(np.clip(np.median(lost), 0.0, 0.9))) if lost else 0.0


def _shape(row: Measurement) -> tuple[object, ...]:
    return row.kernel, row.device, row.dtype, row.chunk, row.prefix


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareRates:
    """Seconds before the first layer: a constant, and a rate per element of the mask."""

    step_s: float
    mask_element_s: float


def fit_prepare(rows: Sequence[Measurement]) -> PrepareRates:
    """From at least one prepare row; rows of kernels without a mask determine only the constant."""
    seconds = column(rows, "expected_s")
    masked = np.array([row.kernel != _UNMASKED for row in rows])
    elements = np.where(masked, column(rows, "chunk") * (column(rows, "chunk") + column(rows, "prefix")), 0.0)
    if len(set(elements.tolist())) == 1:
        return PrepareRates(step_s=rounded(float(np.median(seconds))), mask_element_s=0.0)
    longest = float(elements.max())
    parameters = (
        Parameter(name="step_s", start=float(seconds.min()), low=0.0, high=float(seconds.max())),
        Parameter(name="mask_element_s", start=float(seconds.max()) / longest, low=0.0, high=1.0),
    )

    def predict(values: Mapping[str, float], some: Array) -> Array:
        return np.asarray(values["step_s"] + elements[some] * values["mask_element_s"] + 1e-12)

    return PrepareRates(**solve(parameters, predict, seconds))
