"""Host time: what a layer's kernels take to launch, before, in and after attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvrsim.builder import make_scenario
from kvrsim.engine import NO_HOST, HostRates
from kvrsim.kernels.attention import EagerRates
from kvrsim.kernels.layer import LayerCosts


def costs_of(model: str, profile: str, host: HostRates | None = None) -> LayerCosts:
    """Costs of the model's layers on one GPU, with the profile's host or another."""
    scenario, _ = make_scenario(ctx=1024, gpus=1, model=model, profile=profile)
    if host is not None:
        assert scenario.profile is not None
        scenario = replace(scenario, profile=replace(scenario.profile, host=host))
    return scenario.layer_costs()[0]


@pytest.mark.parametrize(
    ("model", "kernels"),
    [
        ("llama-7b", (17, 8, 15)),  # 6 of a norm, 3 products, 8 of rotary; 7 and the stacked cache; 15
        ("llama-7b-gqa8", (17, 10, 15)),  # keys and values repeated
        ("falcon-7b", (22, 9, 7)),  # one norm, one product, 8 and 12 of rotary; one norm for attention and MLP
        ("falcon-1b", (2, 9, 8)),  # ALiBi instead of rotary
    ],
)
def test_kernels_of_a_layer_in_eager_code(model: str, kernels: tuple[int, int, int]) -> None:
    assert costs_of(model, "a100-eager").kernels == kernels


def test_code_that_repeats_cos_and_sin_waits_for_the_device() -> None:
    """Falcon's with rotary embedding, by the profile of that code alone."""
    host = HostRates(layer_s=0.0, gather_piece_s=0.0, resume_s=5.0)
    chunk = np.array([64.0])
    for model, profile, waits in (
        ("falcon-7b", "a100-eager", True),
        ("falcon-1b", "a100-eager", False),
        ("llama-7b", "a100-eager", False),
        ("falcon-7b", "a100-flash", False),
    ):
        more_s = costs_of(model, profile, host).qkv_s(chunk) - costs_of(model, profile, NO_HOST).qkv_s(chunk)
        assert more_s == pytest.approx([5.0 if waits else 0.0])


def test_fitted_bytes_of_the_score_matrix_go_by_the_type_of_the_model() -> None:
    scenario, _ = make_scenario(ctx=1024, gpus=1, model="falcon-7b", profile="a100-eager")
    roofline, _ = make_scenario(ctx=1024, gpus=1, model="falcon-7b", profile="roofline")
    assert scenario.profile is not None
    eager = scenario.profile.kernels.attention["eager"]
    assert isinstance(eager, EagerRates)
    assert scenario.traits.score_bytes == eager.score_bytes
    assert not roofline.traits.score_bytes


def test_engines_launch_fewer_kernels() -> None:
    """One kernel a norm, one product for Q, K and V, one for all experts."""
    assert costs_of("llama-7b", "a100-flash").kernels == (3, 1, 7)
    assert costs_of("mixtral-8x7b", "a100-flash").kernels.after == 8


def test_shares_of_a_layer_add_up() -> None:
    costs = costs_of("llama-7b", "a100-eager", HostRates(layer_s=0.003, gather_piece_s=1e-4))
    assert costs.host_qkv_s + costs.host_attention_s + costs.host_output_mlp_s == pytest.approx(0.003)
    assert costs.host_all_gather_s(4) == pytest.approx(4e-4)


@pytest.mark.parametrize("model", ["llama-7b", "falcon-1b"])
def test_host_time_grows_with_kernels(model: str) -> None:
    costs = costs_of(model, "a100-eager", HostRates(layer_s=0.0, gather_piece_s=0.0, kernel_s=2.0))
    found = (costs.host_qkv_s, costs.host_attention_s, costs.host_output_mlp_s)
    assert found == tuple(2.0 * kernels for kernels in costs.kernels)
