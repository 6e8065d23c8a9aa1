"""What a profile has no rates for is said, and only that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import kvrsim
from kvrsim.kernels.attention import LatentCost
from kvrsim.kernels.coverage import coverage_notes, head_dims
from kvrsim.kernels.profile import load_profile

FLASH = load_profile("h100-flash")
BARE = replace(FLASH, kernels=replace(FLASH.kernels, latent=None, sparse=None, experts=None, recurrence=None))


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        ("llama-3-8b", []),
        ("mixtral-8x7b", ["such experts"]),
        ("deepseek-v3", ["latent attention", "such experts"]),
        ("deepseek-v3.2", ["attention to chosen keys", "such experts"]),
        ("qwen3.5-27b", ["gated delta rule"]),
        ("nemotron-h-56b", ["Mamba-2"]),
    ],
)
def test_what_is_counted_is_said(model: str, missing: list[str]) -> None:
    spec = kvrsim.load_model(model)
    notes = list(coverage_notes(spec, BARE, 2))
    assert len(notes) == len(missing)
    assert all(f"profile h100-flash has no rates of {one}" in note for one, note in zip(missing, notes, strict=True))
    assert model == "nemotron-h-56b" or not list(coverage_notes(spec, FLASH, 2))


def test_a_recurrence_without_rates_takes_those_of_another() -> None:
    """The tables that h100-flash was fitted to have no Mamba-2."""
    (note,) = coverage_notes(kvrsim.load_model("nemotron-h-56b"), FLASH, 2)
    assert note.endswith("priced as the most similar recurrence that it has")


def test_widths_of_heads_that_attention_prices() -> None:
    """Latents with rates of their own, chosen keys and states are not among them."""
    found = {name: head_dims(kvrsim.load_model(name), FLASH.kernels) for name in ("llama-3-8b", "deepseek-v3")}
    assert found == {"llama-3-8b": (128,), "deepseek-v3": ()}
    assert head_dims(kvrsim.load_model("deepseek-v3"), BARE.kernels) == (192,)
    assert head_dims(kvrsim.load_model("deepseek-v3.2"), BARE.kernels) == ()
    assert head_dims(kvrsim.load_model("qwen3.5-27b"), FLASH.kernels) == (256,)


def test_a_decoded_token_absorbs_once() -> None:
    """Where attention to the latents is the shorter, and where reading them is: one absorption either way."""
    scenario, _ = kvrsim.make_scenario(ctx="4k", gpus=8, model="deepseek-v3", cluster="h200-nvlink")
    mixing = scenario.layer_costs()[0].mixer
    assert isinstance(mixing, LatentCost)
    keys = np.array([1.0, 64.0, 4096.0, 65536.0])
    one = np.ones_like(keys)
    assert (mixing.decode_s(keys) <= mixing.absorbed_s(one, keys - one) * (1 + 1e-12)).all()
