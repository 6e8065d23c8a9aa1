"""Routed experts as grouped products: laws for any rates, and the imbalance between GPUs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.kernels.experts import ExpertsCall, mean_imbalance
from kvrsim.kernels.gemm import GEMM_TYPES
from kvrsim.kernels.profile import builtin_profiles, load_profile
from kvrsim.units import scale
from tests.building import Draws, any_experts, any_gpu, draws

TOKENS = np.unique(np.geomspace(1, 1e5, 200).round())
KINDS = (None, *GEMM_TYPES)


def any_call(rng: Draws) -> ExpertsCall:
    experts = rng.choice([1, 8, 128, 512])
    return ExpertsCall(
        tokens=TOKENS,
        hidden_size=rng.choice([256, 2048, 7168]),
        intermediate_size=rng.choice([64, 768, 14336]),
        gated=rng.random() < 0.5,
        num_experts=experts,
        num_experts_per_tok=rng.choice([0.25, 1.0, min(8.0, experts)]),
        compute=rng.choice(KINDS),
        imbalance=rng.choice([1.0, 1.5]),
    )


@given(rng=draws(), batch=st.integers(1, 4))
def test_laws_of_grouped_products(rng: Draws, batch: int) -> None:
    """Time never falls with tokens or imbalance, respects the datasheet, and is proportional to the rates' scale."""
    gpu = any_gpu(rng)
    call = any_call(rng)
    if (measured := any_experts(rng, gpu).of(call)) is None:
        assert call.compute is not None
        return
    rates, width = measured
    seconds = rates.seconds(call, batch, width)
    assert seconds.shape == TOKENS.shape
    assert (np.diff(seconds) >= -1e-12 * seconds[1:]).all()
    least = call.rows(batch) * 2.0 * call.expert_weights / gpu.peak_flops["fp16"]
    assert (seconds >= least * (1 - 1e-12)).all()
    np.testing.assert_allclose(scale(rates, 2.0).seconds(call, batch, width), 2 * seconds)
    assert (rates.seconds(call._replace(imbalance=2.0), batch, width) >= seconds * (1 - 1e-12)).all()
    twice = rates.seconds(call._replace(tokens=2 * call.tokens), batch, width)
    np.testing.assert_allclose(rates.seconds(call, 2 * batch, width), twice)
    wider = rates.seconds(call._replace(intermediate_size=2 * call.intermediate_size), batch, width)
    assert (wider > seconds).all()


def test_a_type_without_rates_is_priced_as_the_most_similar() -> None:
    kernels = load_profile("h100-flash").kernels
    rates = kernels.experts
    assert rates is not None
    assert [rates.rates_type(kind) for kind in ("fp8", "int8", "mxfp4_fp8", "nvfp4")] == [
        *("fp8", "fp8", "fp8_block", "int4_wo")
    ]
    assert not replace(rates, types={}).covers("fp8", 2)
    assert not rates.covers(None, 4)


@pytest.mark.parametrize("name", [name for name in builtin_profiles() if name.endswith("-flash")])
def test_shipped_rates(name: str) -> None:
    """Each flash profile has rates of experts; in FP8 they take at most 25 % longer than in half precision."""
    profile = load_profile(name)
    rates = profile.kernels.experts
    assert rates is not None
    fit = profile.operations["experts"]
    assert fit.num_rows > 1000
    assert 0 < fit.log_sd < 0.25
    call = ExpertsCall(
        tokens=np.array([8192.0]),
        hidden_size=7168,
        intermediate_size=2048,
        gated=True,
        num_experts=256,
        num_experts_per_tok=8.0,
    )
    half = rates.half.seconds(call, 1, 2)[0]
    flops = 8192 * 8 * 2 * call.expert_weights
    assert 0.15 < flops / half / rates.half.flops_per_s < 1
    if (measured := rates.of(call._replace(compute="fp8_block"))) is not None:
        assert measured[0].seconds(call, 1, measured[1])[0] < 1.25 * half


def test_imbalance_over_gpus() -> None:
    """The imbalance is 1 on one GPU, grows with the GPUs, and falls with the number of experts per GPU."""
    assert mean_imbalance(256, 8, 1) == 1.0
    over_gpus = [mean_imbalance(256, 8, num_gpus) for num_gpus in (2, 4, 8, 16, 32)]
    assert over_gpus == sorted(over_gpus)
    assert over_gpus[0] > 1
    assert mean_imbalance(256, 8, 8) == pytest.approx(1.48, abs=0.01)
    assert mean_imbalance(64, 8, 8) > mean_imbalance(256, 8, 8)
    assert mean_imbalance(8, 2, 8) <= 4.0
