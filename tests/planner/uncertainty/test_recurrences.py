"""Linear attention in breakdowns and intervals: what was measured, what another kind stands for, what is counted."""

from __future__ import annotations

import math

import pytest

import kvrsim
from kvrsim.kernels.profile import load_profile
from kvrsim.kernels.sensitivity import Part
from planner.uncertainty.sensitivities import part_errors

KINDS = {"qwen3.5-35b-a3b": "gated delta rule", "nemotron-3-nano-30b-a3b": "Mamba-2"}


@pytest.mark.parametrize(
    ("model", "profile", "basis"),
    [
        ("qwen3.5-35b-a3b", "h200-flash", "interpolated"),
        ("nemotron-3-nano-30b-a3b", "h200-flash", "extrapolated"),  # no table has Mamba-2's scan
        ("qwen3.5-35b-a3b", "a100-flash", "extrapolated"),  # counted
    ],
)
def test_the_basis_of_a_scan(model: str, profile: str, basis: str) -> None:
    cluster = "h200-nvlink" if profile.startswith("h200") else "a100-nvlink"
    run = kvrsim.simulate(
        strategy="kvr-e", ctx="16k", gpus=2, model=model, profile=profile, cluster=cluster, breakdown=True
    )
    assert run.breakdown is not None
    rows = [row for row in run.breakdown.rows if row.kind == "recurrence"]
    assert {row.rank for row in rows} == {0, 1}
    assert {row.what for row in rows} == {KINDS[model]}
    assert {row.basis for row in rows} == {basis}
    assert all(row.roofline_share is not None and 0 < row.roofline_share < 1 for row in rows)


def test_a_kind_that_another_stands_for_is_known_less_well() -> None:
    profile = load_profile("h200-flash")
    fit, rates = profile.operations["recurrence"], profile.kernels.recurrence
    assert rates is not None
    parts = [Part("recurrence", variant=kind) for kind in ("gated_delta", "mamba2")]
    (measured, other) = (log_sd for of in part_errors(profile, parts).values() for log_sd in of.values())
    assert measured == fit.log_sd
    assert other == pytest.approx(math.hypot(fit.log_sd, rates.alike_log_sd))
    counted = part_errors(load_profile("a100-flash"), parts)
    assert all(log_sd == 0.5 for of in counted.values() for log_sd in of.values())


@pytest.mark.parametrize("engine", ["none", "serving"])
def test_an_interval_widens_by_the_recurrence(engine: str) -> None:
    """With an engine whose whole prefills were compared, too: none of these had a recurrence."""
    asked = {"strategy": "kvr-e", "ctx": "16k", "gpus": 2, "cluster": "h200-nvlink", "engine": engine}
    run = kvrsim.simulate(model="qwen3.5-27b", **asked)
    for cause in ("recurrence", "table and clock"):
        low, high = run.interval_causes[cause]
        assert low < -0.001
        assert high > 0.001
    assert "recurrence" not in kvrsim.simulate(model="qwen3-32b", **asked).interval_causes
