"""Layers with a state: what waits for it, and what does not."""

from __future__ import annotations

import numpy as np
import pytest

from kvrsim.kernels.cost import CalibratedCost
from kvrsim.kernels.layer import mixer_cost
from kvrsim.kernels.mixer import LayerSetting
from kvrsim.kernels.profile import load_profile
from kvrsim.model.gemm import Gemm
from kvrsim.model.load import load_model
from kvrsim.model.mixers import Recurrence

MIXER = Recurrence(
    kind="gated_delta",
    projections=(Gemm(name="in_proj", in_features=2048, out_features=12288),),
    output=(Gemm(name="out_proj", in_features=4096, out_features=2048),),
    num_key_heads=16,
    num_value_heads=32,
    key_head_dim=128,
    value_head_dim=128,
    conv_channels=8192,
    conv_kernel=4,
)
RATES = load_profile("h100-flash").kernels
COST = CalibratedCost(rates=RATES, traits=RATES.traits("flash", 2, 2))
SETTING = LayerSetting(model=load_model("llama-3-8b"), cost=COST, hbm_bytes_per_s=3.35e12)
TOKENS = np.array([512.0, 4096.0])


def test_a_scan_does_not_depend_on_how_many_tokens_came_before() -> None:
    mixing = mixer_cost(MIXER, SETTING)
    none, many = (mixing.attention_s(TOKENS, np.full(2, prefix)) for prefix in (0.0, 1e6))
    assert (none == many).all()
    assert (mixing.local_op_s(TOKENS) > 0).all()
    assert (np.diff(none) > 0).all()


def test_what_is_handed_on_is_a_state_whatever_the_tokens() -> None:
    mixing = mixer_cost(MIXER, SETTING)
    state = 32 * 128 * 128 * 4 + 3 * 8192 * 2
    assert mixing.needed_bytes(TOKENS).tolist() == [2 * state] * 2
    assert mixing.needed_bytes(np.zeros(1)).tolist() == [0]


def test_a_decoded_token_reads_and_writes_the_states() -> None:
    seconds = mixer_cost(MIXER, SETTING).decode_s(TOKENS)
    elementwise = COST.rates.elementwise
    expected = 2 * 2 * MIXER.state_bytes(2) / elementwise.copy + elementwise.start_s
    assert seconds == pytest.approx([expected] * 2)
