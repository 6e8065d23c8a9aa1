"""fit_profile: a CalibrationProfile from measurements, and a report of how well they agree, also on whole layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from calibrate.data.measurement import Measurement
from calibrate.data.provenance import Provenance
from calibrate.fit.inputs import FilteredRows, FitChoices, notes_on
from calibrate.fit.operations import DEFAULT_HOST, OperationFits
from calibrate.fit.report import TITLES, FitReport
from calibrate.fit.solver import Comparison, column, rounded
from kvrsim.engine import PRIOR_ENGINE, HostRates
from kvrsim.hardware import GpuSpec, LinkSpec
from kvrsim.kernels.calibrated import CalibratedCost
from kvrsim.kernels.layer import LayerCosts
from kvrsim.kernels.profile import (
    CalibrationProfile,
    KernelRates,
)
from kvrsim.model.spec import ModelSpec
from kvrsim.request import dtype_bytes
from kvrsim.results.quartiles import QUARTILE_RANGE_SD

LAYERS = "layers, sum of parts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """Name and description of a profile."""

    name: str
    description: str | None = None  # None: the devices measured
    not_covered: str = ""  # what was not measured is added
    provenance: Mapping[str, str] | None = None  # more than the rows say


def fit_profile(
    rows: Sequence[Measurement],
    label: Label,
    *,
    gpu: GpuSpec,
    link: LinkSpec,
    host: HostRates | None = None,
    choices: FitChoices | None = None,
    argument: str = "compute",
    origins: Sequence[Mapping[str, Any]] = (),
) -> tuple[CalibrationProfile, FitReport]:
    """A profile of one GPU and its link; gemm and attention are required, the rest defaults to the datasheet.

    `host` None: from host_layer and host_collective rows, or else DEFAULT_HOST, which predictions replace by a serving
    engine's; a CPU is its own host. `origins`: what
    read_origin found in the files of the rows. With a Hugging Face model among them, nothing is fused, attention's
    times contain everything between the cache and the output projection, and whole layers are compared.

    Raises InputError naming `argument` for rows that are too few, vary too much, are of several devices or kernels, or
    that no fit reproduces.
    """
    chosen, origin = choices or FitChoices(), Provenance.of(origins, argument)
    filtered = FilteredRows.of(
        rows,
        head_dim=chosen.head_dim,
        kernel=chosen.attention_kernel,
        argument=argument,
        own=origin.is_hugging_face,
    )
    fit = OperationFits(rows=filtered, gpu=gpu, link=link, choices=chosen, argument=argument, origin=origin)
    prepare = fit.prepare()
    kernels = KernelRates(
        gemm=fit.gemm(),
        attention=fit.attention(),
        elementwise=replace(fit.elementwise(), mask_element_s=prepare.mask_element_s),
        copies=fit.copies(),
        clock=fit.clock,
        gemm_types=fit.gemm_types(),
        head_on_all_tokens=False,
        whole_attention=origin.is_hugging_face,
    )
    links = replace(fit.links(), pending_share=fit.pending_share(rows))
    host_rates = replace(fit.host(host, rows), step_s=prepare.step_s)
    devices = ", ".join(sorted({row.device for row in fit.used if row.operation in ("gemm", "attention")}))
    profile = CalibrationProfile(
        name=label.name,
        gpu=gpu.name,
        description=label.description or f"fitted to measurements of {devices}{_model_of(origin)}.",
        not_covered=" ".join(part for part in (label.not_covered, _beyond(origin), *fit.missing) if part)
        or "what was not measured.",
        kernels=kernels,
        host=host_rates,
        links=links,
        valid=fit.valid(),
        operations={kind: fit.operations[kind] for kind in TITLES if kind in fit.operations},
        residual=None,
        provenance=provenance_of(fit.used) | origin.provenance() | _clock(fit) | dict(label.provenance or {}),
        run_to_run_log_sd=_run_to_run_log_sd(rows),
        cluster=origin.cluster(label.name, gpu, link, fit.most_ranks()),
        engine=PRIOR_ENGINE if host_rates == DEFAULT_HOST else None,
    )
    layers = None if origin.model is None else compare_layers(profile, origin.model, rows)
    report = FitReport(
        profile=profile,
        lines={kind: [*found.lines(), *fit.others.get(kind, ())] for kind, found in fit.found.items()},
        fits={kind: found.own for kind, found in fit.found.items()},
        notes=(*notes_on(rows, fit.used, filtered.dtypes), *fit.missing),
        layers=layers,
    )
    return profile, report


def _run_to_run_log_sd(rows: Sequence[Measurement]) -> float | None:
    """Run-to-run variation of whole layers: drift affects all layers of a prefill alike."""
    spreads = [row.spread_s / row.median_s for row in rows if row.operation == "layer" and row.spread_s is not None]
    return rounded(float(np.median(spreads)) / QUARTILE_RANGE_SD) if spreads else None


def _clock(fit: OperationFits) -> dict[str, str]:
    return {} if fit.fitted_clock is None else {"clock": fit.fitted_clock.describe()}


def _model_of(origin: Provenance) -> str:
    if not origin.is_hugging_face:
        return ""
    return f", layers of {origin.data.text('model_name', 'a model')} by Hugging Face transformers"


def _beyond(origin: Provenance) -> str:
    return "Batches above 1, windows and mixtures of experts were not measured." if origin.is_hugging_face else ""


def provenance_of(rows: Sequence[Measurement]) -> dict[str, str]:
    """Provenance of measured rows."""
    kernels = {row.kernel for row in rows if row.operation == "attention"}
    listed = {
        "source": {row.source for row in rows},
        "devices": {row.device for row in rows},
        "attention kernels": kernels,
        "dtypes": {row.dtype for row in rows if row.dtype is not None},
    }
    return {name: "; ".join(sorted(values)) for name, values in listed.items() if values}


def layer_costs(profile: CalibrationProfile, model: ModelSpec, kernel: str, dtype: str) -> LayerCosts:
    """Costs of the model's first kind of layer by a profile: one sequence, on one device."""
    element_bytes = dtype_bytes(dtype)
    cost = CalibratedCost(rates=profile.kernels, kernel=kernel, batch=1, element_bytes=element_bytes)
    first = model.layer_kinds[0]
    return LayerCosts(model, first, cost, profile.host, 1, element_bytes, 0, True, 0.0, kernel)


def compare_layers(profile: CalibrationProfile, model: ModelSpec, rows: Sequence[Measurement]) -> Comparison | None:
    """The `layer` rows of one sequence whose dtype and kernel the profile has; None without any.

    A row whose kernel is not an attention kernel is assumed to be of the profile's only one, if it has just one.
    """
    used = [(row, kernel) for row in rows if (kernel := _kernel(profile, row)) is not None]
    if not used:
        return None
    predicted = np.array([_layer_s(profile, model, row, kernel) for row, kernel in used])
    return Comparison(label=LAYERS, measured_s=column([row for row, _ in used], "expected_s"), predicted_s=predicted)


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
