"""What Falcon's code counts and what its rows say, side by side: a section of the accuracy page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from scipy.optimize import minimize_scalar

from kvrsim.profile.profile import CalibrationProfile, load_profile
from kvrsim.profile.rates.attention import EagerRates
from validate.published.constants import Partitions, errors, partitions_for, scenario_of
from validate.published.reference import Row, read_rows

# Bytes a score element that each model's code of 2023 moves, operation by operation, in half precision.
COUNTED = {
    "falcon-1b": "44: QK^T w2, to fp32 r2w4, biases r4w4, scaling r4w4, mask r4w4, to half r4w2, softmax r2w2, V r2",
    "falcon-7b": "12: QK^T w2, mask r2w2, softmax r2w2, times V r2; 16 where scaling is a kernel of its own, r2w2",
    "llama-7b": "28: QK^T w2, scaling r2w2, mask r2w2, max r2w2, softmax in fp32 r2w4, to half r4w2, times V r2",
}


def section() -> list[str]:
    """Markdown lines."""
    profile = load_profile("a100-eager")
    eager, host = profile.kernels.attention["eager"], profile.host
    assert isinstance(eager, EagerRates)
    rows = [row for row in read_rows() if row.used_for_calibration]
    partitions = partitions_for(rows, profile)
    lines = [
        "### What Falcon's code counts and what the rows say",
        "",
        "Bytes that eager attention moves per element of the score matrix. *Rows alone*: the value at which the rows",
        "of the model itself fit best, all other constants as in the profile. Falcon's code of 2023 calls",
        "`scaled_dot_product_attention` without ALiBi, and writes each operation out with it. Neither count agrees",
        "with its rows. One value for both models does, so that value is fitted, not counted.",
        "",
        "| model | the code counts | profile | rows alone |",
        "|---|---|---|---|",
    ]
    for model, counted in COUNTED.items():
        own = [row for row in rows if row.model == model]
        family = scenario_of(own[0], profile).model.model_type
        used = f"{eager.score_bytes[family]:.1f} (fitted)" if family in eager.score_bytes else "28 (counted)"
        alone = _best(own, partitions, partial(_with_bytes, profile, family), (8.0, 60.0))
        lines.append(f"| {model} | {counted} | {used} | {alone:.1f} |")
    lines += [
        "",
        f"Host time of a layer: {host.layer_s * 1e3:.2f} ms and {host.kernel_s * 1e6:.1f} us a kernel. LayerNorm is one"
        " kernel, RMSNorm six; Falcon 1B has no rotary embedding. Falcon 7B's rotary embedding (transformers 4.34)"
        " repeats cos and sin for every head, 12 kernels more, and waits for the device while it does so.",
        "",
        "| model | kernels a layer | host, profile | host, rows alone |",
        "|---|---|---|---|",
    ]
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        kernels = sum(scenario_of(own[0], profile).layer_costs()[0].kernels)
        host_s = host.layer_s + host.kernel_s * kernels
        alone = _best(own, partitions, partial(_with_host, profile), (1e-3, 5e-3))
        lines.append(f"| {model} | {kernels} | {host_s * 1e3:.2f} ms | {alone * 1e3:.2f} ms |")
    return [*lines, ""]


def _best(
    rows: Sequence[Row],
    partitions: Partitions,
    profile_of: Callable[[float], CalibrationProfile],
    bounds: tuple[float, float],
) -> float:
    """The value at which the rows' errors are smallest, by their soft absolute value."""

    def cost(value: float) -> float:
        scaled = errors(rows, profile_of(value), partitions) / 0.03
        return float(np.mean(np.sqrt(1.0 + scaled**2)))

    return float(minimize_scalar(cost, bounds=bounds, method="bounded", options={"xatol": 1e-3 * bounds[0]}).x)


def _with_bytes(profile: CalibrationProfile, family: str, value: float) -> CalibrationProfile:
    eager = profile.kernels.attention["eager"]
    assert isinstance(eager, EagerRates)
    attention = {"eager": replace(eager, score_bytes={family: value})}
    return replace(profile, kernels=replace(profile.kernels, attention=attention))


def _with_host(profile: CalibrationProfile, layer_s: float) -> CalibrationProfile:
    return replace(profile, host=replace(profile.host, layer_s=layer_s, kernel_s=0.0))
