"""Recurrences: FLOPs, bytes and steps of a scan, and their rates."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.errors import InputError
from kvrsim.hardware import load_gpu
from kvrsim.kernels.cost import CalibratedCost, KernelTraits, RooflineCost, no_time
from kvrsim.kernels.layer import mixer_cost
from kvrsim.kernels.mixer import LayerSetting
from kvrsim.kernels.profile import load_profile
from kvrsim.kernels.recurrence import (
    RECURRENCES,
    ConvolutionCall,
    ConvolutionRates,
    KindRates,
    RecurrenceCall,
    RecurrenceRates,
    ScanCall,
    ScanRates,
)
from kvrsim.model.gemm import Gemm
from kvrsim.model.load import load_model
from kvrsim.model.mixers import Recurrence

SCAN = ScanRates(start_s=4e-5, chunk_s=1.5e-6, flops_per_s=2e14, cached_bytes=50e6, bytes_per_s=2e12)
CONVOLUTION = ConvolutionRates(start_s=4e-6, cached_bytes_per_s=5e12, cached_bytes=30e6, bytes_per_s=2.3e12)
RATES = KindRates(scan=SCAN, convolution=CONVOLUTION)


def call(tokens: object = 4096.0, kind: str = "gated_delta", **shape: int) -> RecurrenceCall:
    dims = dict(num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128)
    channels = dict(conv_channels=8192, conv_kernel=4)
    return RecurrenceCall(tokens=np.asarray(tokens), kind=kind, **{**dims, **channels, **shape})


def test_flops_of_a_delta_rule_are_those_of_its_products() -> None:
    """FLOPs of one head and one chunk are counted product by product, for 64 keys, queries and values."""
    chunk, keys, values = 64, 128, 96
    inside = [(chunk, keys, chunk), (chunk, chunk, keys), (chunk, chunk, values), (chunk, keys, chunk)]
    inside += [(chunk, chunk, values)]
    with_state = [(chunk, keys, values), (chunk, keys, values), (keys, chunk, values)]
    flops = sum(2.0 * rows * inner * columns for rows, inner, columns in inside + with_state)
    one = call(num_key_heads=1, num_value_heads=1, key_head_dim=keys, value_head_dim=values)
    assert one.scan_flops * chunk == pytest.approx(flops)


def test_a_groups_scores_are_computed_once_for_its_heads() -> None:
    shape = dict(num_value_heads=64, key_head_dim=128, value_head_dim=64)
    grouped, alone = (call(kind="mamba2", num_key_heads=groups, **shape) for groups in (8, 64))
    assert alone.scan_flops - grouped.scan_flops == 56 * 128 * 128
    assert alone.scan_elements - grouped.scan_elements == 56 * 2 * 128


@given(
    tokens=st.lists(st.integers(1, 1 << 20), min_size=2, max_size=8),
    kind=st.sampled_from(RECURRENCES),
    heads=st.sampled_from((1, 8, 64)),
    batch=st.integers(1, 8),
)
def test_more_tokens_or_heads_never_take_less(tokens: list[int], kind: str, heads: int, batch: int) -> None:
    rates = RecurrenceRates(kinds={"gated_delta": RATES}, alike_log_sd=0.3)
    few = call(sorted(map(float, tokens)), kind, num_value_heads=heads, num_key_heads=heads)
    more = replace(few, num_value_heads=2 * heads)
    scan = rates.of(few).scan
    result = scan.seconds(few, batch, 2)
    assert (np.diff(result) >= 0).all()
    assert (np.diff(rates.of(few).convolution.seconds(few, batch, 2)) >= 0).all()
    assert (scan.seconds(more, batch, 2) > result).all()
    assert (scan.seconds(few, batch + 1, 2) > result).all()


def test_what_the_cache_holds_does_not_cross_memory() -> None:
    """Up to cached_bytes only FLOPs and steps take time; more tokens also take time for their bytes."""
    moved = call().scan_elements * 2
    rates = replace(SCAN, cached_bytes=4096 * moved)
    within = rates.seconds(call(4096.0), 1, 2)
    flops_s = 4096 * call().scan_flops / SCAN.flops_per_s
    assert within == pytest.approx(4e-5 + 64 * 1.5e-6 + flops_s)
    beyond = rates.seconds(call(5096.0), 1, 2) - within
    assert beyond == pytest.approx(1000 * (call().scan_flops / 2e14 + moved / 2e12 + 1.5e-6 / 64))


def test_a_kind_without_rates_takes_those_of_one_alike() -> None:
    slower = replace(RATES, scan=replace(SCAN, flops_per_s=1e14))
    both = RecurrenceRates(kinds={"gated_delta": RATES, "kda": slower}, alike_log_sd=0.3)
    assert [both.rates_type(kind) for kind in RECURRENCES] == ["gated_delta", "kda", *["gated_delta"] * 3]
    only = RecurrenceRates(kinds={"kda": slower}, alike_log_sd=0.3)
    assert {only.rates_type(kind) for kind in RECURRENCES} == {"kda"}
    with pytest.raises(InputError, match="kinds"):
        RecurrenceRates(kinds={}, alike_log_sd=0.3)


@pytest.mark.parametrize("kind", RECURRENCES)
def test_counted_is_above_the_datasheets_limit(kind: str) -> None:
    profile = load_profile("a100-flash")
    assert profile.kernels.recurrence is None
    gpu = load_gpu(profile.gpu)
    traits = profile.kernels.traits("flash", 2, 2)
    cost, limits = CalibratedCost(rates=profile.kernels, traits=traits), RooflineCost.of(gpu, traits, "bf16")
    for operation in (ScanCall, ConvolutionCall):
        one = operation(**asdict(call([64.0, 4096.0, 65536.0], kind)))
        assert (cost.call_s(one) > limits.call_s(one)).all()
        assert (no_time(traits).call_s(one) == 0).all()


def test_the_roofline_is_flops_or_bytes() -> None:
    limits = no_time(KernelTraits(kernel="flash", batch=1, element_bytes=2))
    flops_bound, bytes_bound = replace(limits, flops_per_s=1e12), replace(limits, bytes_per_s=1e12)
    scan, convolution = (one(**asdict(call(1e6))) for one in (ScanCall, ConvolutionCall))
    assert flops_bound.call_s(scan) == pytest.approx(1e6 * call().scan_flops / 1e12)
    assert bytes_bound.call_s(scan) == pytest.approx(1e6 * 2 * (16 + 32) * 128 * 2 / 1e12)
    assert bytes_bound.call_s(convolution) == pytest.approx(1e6 * 2 * 8192 * 2 / 1e12)


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
H100 = load_profile("h100-flash").kernels
COST = CalibratedCost(rates=H100, traits=H100.traits("flash", 2, 2))
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
