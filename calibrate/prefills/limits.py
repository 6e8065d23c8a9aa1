"""Times that a measured prefill cannot have: less than the GPUs' peak allows, or in another unit than was read."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from math import log

from calibrate.prefills.fit import PrefillCase
from kvrsim.errors import InputError
from kvrsim.hardware import builtin_gpus
from kvrsim.scenario import Scenario
from kvrsim.units import format_seconds

MOST_RATIO = 200  # median of measured / predicted, or its inverse, beyond which the unit must be another one
_MEASURED_SHARE = 0.5  # a GPU without a datasheet has a measured peak, which other work on the machine may have lowered
_ANOTHER_UNIT = 20  # a time that is this many times below the peak has probably another unit
MILLISECONDS = "a column of milliseconds: ttft_ms, or `columns` ttft_ms=COLUMN"
SECONDS = "a column of seconds: ttft_s, or `columns` ttft_s=COLUMN"
UNITS_S = {"seconds": 1.0, "milliseconds": 1e-3}  # units that a column without one may have


def least_seconds(scenario: Scenario) -> float:
    """Seconds of a prefill's matrix products on all GPUs at the datasheet's peak: no TTFT is shorter.

    Products of quantised weights have the GPU's highest peak, and FP4's is twice that. Attention is not counted.
    """
    weights = 0
    low_bits = 16
    for layer in scenario.model.layers:
        experts = max(1, layer.num_experts_per_tok)
        weights += sum(gemm.num_weights for gemm in layer.matrices)
        weights += experts * sum(gemm.num_weights for gemm in layer.mlp)
        formats = [gemm.weights for gemm in (*layer.matrices, *layer.mlp) if gemm.weights is not None]
        low_bits = min([low_bits, *(weight_format.bits for weight_format in formats)])
    request = scenario.request
    peaks = scenario.cluster.gpu.peak_flops
    is_low = low_bits < 16 or request.dtype not in peaks
    peak = max(peaks.values()) if is_low else peaks[request.dtype]
    if low_bits <= 4:
        peak = 2 * peak
    flops = 2 * request.batch * request.new_tokens * weights
    return flops / (peak * scenario.num_gpus)


def check_times(cases: Sequence[PrefillCase]) -> tuple[tuple[PrefillCase, ...], tuple[str, ...]]:
    """The cases in the unit that their columns must have, and notes on units that no column names.

    A column without a unit has the one whose times are nearest to the predictions. Raises InputError, which names the
    line, for a time below the GPUs' peak, and for times that are MOST_RATIO times off in the median.
    """
    predicted_s = [case.ttft_s() for case in cases]
    notes: list[str] = []
    converted = list(cases)
    for column in dict.fromkeys(case.row.unitless for case in cases):
        places = [place for place, case in enumerate(cases) if case.row.unitless == column]
        if column is None:
            continue
        ratio = statistics.median(cases[place].row.ttft_s / predicted_s[place] for place in places)
        unit = likely_unit(ratio)
        notes.append(f"{column} is taken to be in {unit}, which agree with predictions; its name has no unit")
        for place in places:
            row = replace(cases[place].row, ttft_s=cases[place].row.ttft_s * UNITS_S[unit])
            converted[place] = replace(cases[place], row=row)
    for case in converted:
        _check_peak(case)
    times_off = statistics.median(
        case.row.ttft_s / seconds for case, seconds in zip(converted, predicted_s, strict=True)
    )
    if not 1 / MOST_RATIO <= times_off <= MOST_RATIO:
        row = converted[0].row
        hint = MILLISECONDS if times_off > 1 else SECONDS
        accepted = f"TTFTs within {MOST_RATIO} times the predictions; these are {times_off:.3g} times; {hint}"
        raise InputError(f"{row.where}: TTFT", format_seconds(row.ttft_s), accepted)
    return tuple(converted), tuple(notes)


def likely_unit(ratio: float) -> str:
    """The unit of a column without one. ratio: its values in seconds divided by predictions, in the median."""
    return min(UNITS_S, key=lambda name: abs(log(ratio * UNITS_S[name])))


def _check_peak(case: PrefillCase) -> None:
    """Raise InputError for a time that the GPUs cannot reach."""
    least_s = least_seconds(case.scenario)
    if case.scenario.cluster.gpu.name not in builtin_gpus():
        least_s = _MEASURED_SHARE * least_s
    if case.row.ttft_s >= least_s:
        return
    hint = "check the number of GPUs, the dtype and the cached prefix"
    if case.row.ttft_s < least_s / _ANOTHER_UNIT:
        hint = SECONDS
    accepted = f"at least {format_seconds(least_s)}, the matrix products of {case.row.case} at the GPUs' peak; {hint}"
    raise InputError(f"{case.row.where}: TTFT", format_seconds(case.row.ttft_s), accepted)
