"""Latent attention: the two forms have rates of their own, and only calls that are latent take them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvrsim.kernels.attention import AttentionCall, LatentRates
from kvrsim.kernels.cost import CalibratedCost
from kvrsim.kernels.profile import builtin_profiles, load_profile

CHUNK = np.array([1.0, 128.0, 4096.0])
EXPANDED = AttentionCall(
    chunk=CHUNK,
    prefix=0 * CHUNK,
    causal=CHUNK * CHUNK / 2,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=192,
    v_head_dim=128,
    score_bytes=28.0,
    latent=True,
)
ABSORBED = replace(EXPANDED, num_key_value_heads=1, head_dim=576, v_head_dim=512)
H200 = load_profile("h200-flash").kernels


def rates() -> LatentRates:
    assert H200.latent is not None
    return H200.latent


def test_each_form_has_its_rates() -> None:
    found = rates()
    assert found.absorbed is not None
    for call, form in ((EXPANDED, found.expanded), (ABSORBED, found.absorbed)):
        assert found.of(call) is form
        assert (found.seconds(call, 1, 2) == form.seconds(call, 1, 2)).all()
        assert (found.least_seconds(call, 1, 2) == form.least_seconds(call, 1, 2)).all()
    assert replace(found, absorbed=None).of(ABSORBED) is found.expanded
    assert found.describe().count("TFLOP/s") == 2


def test_a_latent_call_takes_them_and_no_other_does() -> None:
    cost = CalibratedCost(rates=H200, traits=H200.traits("flash", 1, 2))
    assert cost.call_s(EXPANDED) == pytest.approx(rates().seconds(EXPANDED, 1, 2))
    plain = replace(EXPANDED, latent=False)
    flash = H200.attention["flash"].seconds(plain, 1, 2)
    assert cost.call_s(plain) == pytest.approx(flash)
    assert not np.allclose(cost.call_s(EXPANDED), flash, rtol=0.01)
    unmeasured = replace(cost, rates=replace(H200, latent=None))
    assert unmeasured.call_s(EXPANDED) == pytest.approx(flash)
    least = replace(cost, traits=replace(cost.traits, lower_bound=True))
    assert least.call_s(EXPANDED) == pytest.approx(rates().least_seconds(EXPANDED, 1, 2))


@pytest.mark.parametrize("name", [name for name in builtin_profiles() if name.endswith("-flash")])
def test_shipped_profiles_price_it_below_the_peak(name: str) -> None:
    """A long prefill: between 40 % and all of the datasheet's FLOPs of what is not masked."""
    profile = load_profile(name)
    latent = profile.kernels.latent
    assert latent is not None
    assert profile.operations["latent"].num_rows > 100
    call = replace(EXPANDED, chunk=np.array([16384.0]), prefix=np.zeros(1), causal=np.array([16384.0**2 / 2]))
    flops = 2 * 16 * (192 + 128) * 16384**2 / 2
    reached = flops / latent.seconds(call, 1, 2) / latent.expanded.flops_per_s
    assert 0.4 < reached < 1.0
