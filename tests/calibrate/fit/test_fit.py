"""What all fits share, and the recipes of the profiles that ship."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.fit.fit import Parameter, cross_validated_s, solve
from calibrate.shipped.recipes import Recipe, recipe_names
from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.hardware import builtin_clusters, load_gpu
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.profile import builtin_profiles, load_profile


def test_left_out_rows_are_not_seen() -> None:
    labels = [index % 7 for index in range(50)]

    def predict(train: Any, test: Any) -> Any:
        assert not {labels[index] for index in train} & {labels[index] for index in test}
        return np.asarray(test, dtype=float)

    np.testing.assert_array_equal(cross_validated_s(labels, predict, count=4), np.arange(50.0))


def test_solve_keeps_to_its_bounds() -> None:
    sizes = np.geomspace(1.0, 100.0, 20)
    parameters = [
        Parameter(name="start", start=1.0, low=0.0, high=5.0),
        Parameter(name="rate", start=1.0, low=0.1, high=2.0),
    ]
    found = solve(parameters, lambda values, some: values["start"] + sizes[some] / values["rate"], sizes / 8)
    assert found == {"start": pytest.approx(0.0, abs=1e-4), "rate": 2.0}


@pytest.mark.parametrize("name", recipe_names())
def test_each_recipe_has_shipped(name: str) -> None:
    assert name in builtin_profiles()
    profile, recipe = load_profile(name), Recipe.read(name, Path())
    assert (profile.gpu, profile.links.link) == (recipe.data.text("gpu"), recipe.data.text("link"))
    assert profile.description == recipe.data.text("description")
    assert profile.attention_kernels == ("flash",)
    gpu = load_gpu(profile.gpu)
    assert profile.kernels.gemm.flops_per_s <= dict(gpu.peak_flops)["bf16"]
    assert profile.kernels.gemm.bytes_per_s <= gpu.hbm_bytes_per_s


def test_unknown_recipe_is_refused() -> None:
    with pytest.raises(InputError, match="NAME: got 'z100', accepted: a100-flash"):
        Recipe.read("z100", Path())


def test_products_of_unfilled_memory_are_refused() -> None:
    source = {"source": "aiconfigurator:a100_sxm/vllm/0.14.0", "operations": ["gemm"]}
    recipe = Recipe(name="mine", data=JsonObject(fields={"sources": [source]}, where="recipes"), vidur=Path())
    with pytest.raises(InputError, match=r"sources\[0\].source: .* accepted: for gemm a table of random data"):
        recipe.rows()


def test_a_cluster_has_the_profile_of_its_gpu() -> None:
    for name in builtin_clusters():
        scenario, _ = make_scenario(ctx=4096, gpus=2, cluster=name, model="llama-3-8b")
        gpu = scenario.cluster.gpu.name
        assert (None if scenario.profile is None else scenario.profile.gpu) == (None if gpu == "a100-40gb" else gpu)
