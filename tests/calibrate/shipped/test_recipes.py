"""Sections of a profile are fitted separately; the rest of the profile and of its page does not change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.fit.fit import FitComparison, FitResult
from calibrate.fit.profile import FitReport
from calibrate.shipped.recipes import Recipe, RecipeTable, fit_sections, recipe_names
from kvrsim.errors import InputError
from kvrsim.hardware import load_gpu
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.profile import CalibrationProfile, builtin_profiles, load_profile

PROFILE = load_profile("h200-flash")
SHIPPED = FitReport(profile=PROFILE, lines={}, notes=())


def fit(part: JsonObject, profile: CalibrationProfile) -> FitResult[Any]:
    """A fit of the start of element-wise kernels, with the errors of two rows."""
    rates = replace(profile.kernels.elementwise, start_s=part.number("start_s"))
    own = FitComparison(label="two rows", measured_s=np.array([1.0, 2.0]), predicted_s=np.array([1.1, 2.2]))
    return FitResult(rates=rates, source="a test", own=own, cross_validated=own, seen={})


def test_only_the_section_changes() -> None:
    result = fit_sections(SHIPPED, {"elementwise": {"start_s": 1.0}}, fits={"elementwise": fit})
    assert result.profile.kernels.elementwise.start_s == 1.0
    assert result.profile.operations["elementwise"].mape == pytest.approx(0.1)
    assert list(result.profile.operations) == list(PROFILE.operations)
    kernels = replace(result.profile.kernels, elementwise=PROFILE.kernels.elementwise)
    assert replace(result.profile, kernels=kernels, operations=PROFILE.operations) == PROFILE
    assert fit_sections(SHIPPED, {}, fits={"elementwise": fit}).profile == PROFILE


def test_a_section_that_is_unknown_is_named() -> None:
    with pytest.raises(InputError, match="other"):
        fit_sections(SHIPPED, {"other": {}}, fits={"elementwise": fit})


@pytest.mark.parametrize("name", recipe_names())
def test_each_recipe_has_shipped(name: str) -> None:
    assert name in builtin_profiles()
    profile, recipe = load_profile(name), Recipe.read(name)
    assert (profile.gpu, profile.links.link) == (recipe.gpu, recipe.link)
    assert profile.description == recipe.description
    assert profile.attention_kernels == ("flash",)
    gpu = load_gpu(profile.gpu)
    assert profile.kernels.gemm.flops_per_s <= gpu.peak_flops["bf16"]
    assert profile.kernels.gemm.bytes_per_s <= gpu.hbm_bytes_per_s


def test_tables_of_an_unpacked_wheel_are_those_of_the_recipe(tmp_path: Path) -> None:
    for place, inside in ((tmp_path, f"{tmp_path}:"), (None, "")):
        sparse = Recipe.read("b200-flash", place).sections["sparse"]
        assert sparse["keys"] == f"aisimulate:{inside}b200_sxm/sglang/0.5.14"


def test_unknown_recipe_is_refused() -> None:
    with pytest.raises(InputError, match="NAME: got 'z100', accepted: a100-flash"):
        Recipe.read("z100")


def test_products_of_unfilled_memory_are_refused() -> None:
    with pytest.raises(InputError, match=r"source: .* accepted: for gemm a table of random data"):
        RecipeTable(source="aisimulate:a100_sxm/vllm/0.14.0", operations=("gemm",))
