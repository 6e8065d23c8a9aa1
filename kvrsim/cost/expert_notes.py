"""How routed experts are priced and spread, in words."""

from __future__ import annotations

from collections.abc import Iterator

from kvrsim.cost.experts import ExpertPlacement
from kvrsim.cost.precision import EXPLAINED
from kvrsim.model.spec import ModelSpec
from kvrsim.profile.profile import CalibrationProfile


def expert_notes(model: ModelSpec, profile: CalibrationProfile | None, placement: ExpertPlacement) -> Iterator[str]:
    """Of a mixture of experts: which rates its experts have, and how unevenly tokens are spread over GPUs.

    profile: None is the datasheet's roofline.
    """
    sparse = [layer for layer in model.layer_kinds if layer.num_experts]
    if not sparse:
        return
    if profile is not None:
        yield from _priced(list(dict.fromkeys(layer.mlp[0].compute for layer in sparse)), profile)
    if placement.num_gpus > 1:
        held = sorted({layer.num_experts // placement.num_gpus for layer in sparse})
        each = " or ".join(map(str, held))
        source = "as given"
        if placement.imbalance is None:
            source = "experts' loads vary by a power law of exponent 1.01, as aiconfigurator takes it for DeepSeek"
        worst = max(placement.of_model(layer) for layer in sparse)
        yield (
            f"expert parallelism: {each} of each layer's experts on each of {placement.num_gpus} GPUs; the busiest has"
            f" {worst:.2f} times the mean rows ({source}; --expert-imbalance)"
        )


def _priced(types: list[str | None], profile: CalibrationProfile) -> Iterator[str]:
    """Nothing where experts are counted, which kvrsim.cost.coverage says."""
    rates, fit = profile.kernels.experts, profile.operations.get("experts")
    covered = [kind for kind in types if rates is not None and rates.covers(kind, 2)]
    if rates is None or not covered:
        return
    error = "" if fit is None else f", {fit.cross_validated_mape:.0%} off on average for models left out"
    yield (
        "mixture of experts: routed experts are priced as grouped products, whose rates stand for tokens spread evenly"
        f" and by power laws alike{error}"
    )
    for kind in covered:
        if kind is not None and (priced := rates.priced_as(kind)) is not None and priced != kind:
            yield f"profile {profile.name} has no rates of experts in {EXPLAINED[kind]}; priced as {EXPLAINED[priced]}"
