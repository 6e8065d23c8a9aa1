"""compare_layers: whole layers as they were measured, and as the sum of what a profile says of their parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from calibrate.data.measurement import Measurement
from calibrate.fit.solver import Comparison, column
from kvrsim.cost.kernels import CalibratedCost
from kvrsim.cost.layer import LayerCosts
from kvrsim.model.spec import ModelSpec
from kvrsim.profile.profile import CalibrationProfile
from kvrsim.request import dtype_bytes

LABEL = "layers, sum of parts"


def layer_costs(profile: CalibrationProfile, model: ModelSpec, kernel: str, dtype: str) -> LayerCosts:
    """What a profile says of the model's first kind of layer: one sequence, on one device."""
    element_bytes = dtype_bytes(dtype)
    cost = CalibratedCost(rates=profile.kernels, kernel=kernel, batch=1, element_bytes=element_bytes)
    first = model.layer_kinds[0]
    return LayerCosts(model, first, cost, profile.host, 1, element_bytes, 0, True, 0.0, kernel)


def compare_layers(profile: CalibrationProfile, model: ModelSpec, rows: Sequence[Measurement]) -> Comparison | None:
    """The `layer` rows of one sequence whose dtype and kernel the profile has; None without any.

    A row whose kernel is no attention kernel's name is taken to be of the profile's only one, if it has one.
    """
    used = [(row, kernel) for row in rows if (kernel := _kernel(profile, row)) is not None]
    if not used:
        return None
    predicted = np.array([_layer_s(profile, model, row, kernel) for row, kernel in used])
    return Comparison(label=LABEL, measured_s=column([row for row, _ in used], "expected_s"), predicted_s=predicted)


def _kernel(profile: CalibrationProfile, row: Measurement) -> str | None:
    if row.operation != "layer" or row.batch != 1 or row.dtype not in profile.valid.dtypes:
        return None
    kernels = profile.attention_kernels
    if row.kernel in kernels:
        return row.kernel
    return kernels[0] if len(kernels) == 1 else None


def _layer_s(profile: CalibrationProfile, model: ModelSpec, row: Measurement, kernel: str) -> float:
    assert row.dtype is not None
    costs = layer_costs(profile, model, kernel, row.dtype)
    chunk, prefix = np.array([float(row.chunk or 0)]), np.array([float(row.prefix or 0)])
    parts = (costs.qkv_s(chunk), costs.append_s(chunk, prefix), costs.attention_s(chunk, prefix))
    return float((sum(parts, np.zeros(1)) + costs.output_mlp_s(chunk))[0])
