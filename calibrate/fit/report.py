"""FitReport: a fitted profile with the errors of each operation, also of whole layers as sums of their parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrate.data import Measurement
from calibrate.fit.fit import Comparison, Errors, column
from kvrsim.io.schema import fields_to_json, to_json
from kvrsim.kernels.cost import CalibratedCost
from kvrsim.kernels.layer import LayerCosts
from kvrsim.kernels.mixer import LayerSetting
from kvrsim.kernels.profile import CalibrationProfile
from kvrsim.model.spec import ModelSpec
from kvrsim.scenario import dtype_bytes

LAYERS = "layers, sum of parts"

TITLES = {
    "gemm": "matrix products",
    "attention": "attention",
    "latent": "latent attention",
    "sparse": "sparse attention",
    "experts": "experts",
    "recurrence": "recurrences",
    "elementwise": "element-wise kernels",
    "send_recv": "messages",
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "host": "host",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FitReport:
    """The profile, and the errors of each operation that was measured."""

    profile: CalibrationProfile
    lines: Mapping[str, Sequence[Errors]]  # errors by operation
    notes: tuple[str, ...]  # notes on omitted rows, and on values from other sources
    layers: Comparison | None = None  # whole layers, predicted as the sum of their parts; None: none were measured

    @property
    def layers_note(self) -> tuple[str, ...]:
        """Note on the error of whole layers, which no fit used."""
        if self.layers is None:
            return ()
        errors = self.layers.errors()
        return (
            f"{errors.num_rows} whole layers, which were not fitted, by the sum of their parts: mean error"
            f" {errors.mape:.1%}, median {errors.median_ape:.1%}, bias {errors.bias:+.1%}",
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values, without the rates: the profile has them."""
        profile = self.profile
        return {
            "profile": profile.name,
            **fields_to_json(profile, "gpu", "description", "not_covered"),
            "operations": {
                kind: to_json(fit) | {"errors": to_json(self.lines.get(kind, ()))}
                for kind, fit in profile.operations.items()
            },
            "layers": None if self.layers is None else to_json(self.layers.errors()),
            "notes": [*self.layers_note, *self.notes],
            "provenance": dict(profile.provenance),
        }


# -- whole layers, predicted as the sum of their parts


def layer_costs(profile: CalibrationProfile, model: ModelSpec, kernel: str, dtype: str) -> LayerCosts:
    """Costs of the model's first kind of layer by a profile, for one sequence on one device."""
    rates = profile.kernels
    cost = CalibratedCost(rates=rates, traits=rates.traits(kernel, 1, dtype_bytes(dtype)))
    return LayerCosts(LayerSetting(model=model, cost=cost, host=profile.host), model.layer_kinds[0])


def compare_layers(profile: CalibrationProfile, model: ModelSpec, rows: Sequence[Measurement]) -> Comparison | None:
    """Compare `layer` rows of one sequence in a dtype and kernel of the profile; None if there are no such rows.

    A row with an unknown kernel belongs to the profile's attention kernel, if the profile has only one.
    """
    pairs = [(row, kernel) for row in rows if (kernel := _kernel(profile, row)) is not None]
    if not pairs:
        return None
    predicted = np.array([_layer_s(profile, model, row, kernel) for row, kernel in pairs])
    return Comparison(label=LAYERS, measured_s=column([row for row, _ in pairs], "expected_s"), predicted_s=predicted)


def _kernel(profile: CalibrationProfile, row: Measurement) -> str | None:
    if row.operation != "layer" or row.batch != 1 or row.dtype not in profile.valid.dtypes:
        return None
    kernels = profile.attention_kernels
    if row.kernel in kernels:
        return row.kernel
    return kernels[0] if len(kernels) == 1 else None


def _layer_s(profile: CalibrationProfile, model: ModelSpec, row: Measurement, kernel: str) -> float:
    costs = layer_costs(profile, model, kernel, row.dtype or "")
    chunk, prefix = np.array([float(row.chunk or 0)]), np.array([float(row.prefix or 0)])
    parts = (costs.qkv_s(chunk), costs.mixer.append_s(chunk, prefix), costs.mixer.attention_s(chunk, prefix))
    return float((sum(parts, np.zeros(1)) + costs.output_mlp_s(chunk))[0])
