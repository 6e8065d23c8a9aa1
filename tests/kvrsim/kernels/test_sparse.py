"""Sparse attention: elements that a call covers, times of its kernels, and laws for any rates."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from kvrsim.errors import InputError
from kvrsim.hardware import load_gpu
from kvrsim.io.schema import JsonObject, read
from kvrsim.kernels.cost import CalibratedCost, RooflineCost, no_time
from kvrsim.kernels.profile import builtin_profiles, load_profile
from kvrsim.kernels.sparse import AttendRates, ScoreRates, SparseCall, SparseKernels, SparseRates, sparse_call
from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers import Attention, CompressedAttention, Indexer
from kvrsim.units import scale
from tests.building import tokens

CALL = SparseCall(
    chunk=tokens(100.0),
    prefix=tokens(300.0),
    num_attention_heads=2,
    head_dim=3,
    v_head_dim=2,
    top_k=50,
    index_heads=4,
    index_head_dim=8,
)
# One second per FLOP of scores and of attention.
KERNELS = SparseKernels(
    score=ScoreRates(start_s=1.0, flops_per_s=1.0, full_heads=0.0),
    attend=AttendRates(start_s=100.0, flops_per_s=1.0, query_keys=5.0, full_queries=0.0, least_heads=1),
)


def test_a_call_of_chosen_keys() -> None:
    assert (CALL.mean_keys, CALL.keys, CALL.kernel_keys) == (350.0, 400.0, 50.0)
    assert CALL.score_flops == 100 * 350 * 2 * 4 * 8
    assert CALL.attention_flops == 100 * 50 * 2 * 2 * (3 + 2)
    few = CALL._replace(prefix=tokens(0.0), chunk=tokens(40.0))
    assert (few.kernel_keys, few.chooses, few.score_flops) == (40.0, 0.0, 0.0)


def test_no_limit_counts_more_than_queries_see() -> None:
    """The count equals the mean of min(keys, top_k) over all queries."""
    for prefix, chunk in ((0, 400), (20, 100), (300, 100)):
        call = CALL._replace(prefix=tokens(prefix), chunk=tokens(chunk))
        seen = np.minimum(prefix + np.arange(chunk) + 0.5, 50).sum()
        assert call.least_attention_flops == pytest.approx(seen * 2 * 2 * 5, rel=0.01)
        assert (call.least_attention_flops <= call.attention_flops).all()


def test_kernels_come_one_after_another() -> None:
    chosen = 1 + CALL.score_flops
    attended = 100 + 100 * 2 * (50 + 5) * 2 * 5
    assert KERNELS.seconds(CALL, 1) == pytest.approx(chosen + attended)
    shared = CALL._replace(index_heads=0)
    assert KERNELS.seconds(shared, 1) == pytest.approx([attended]), "another layer chose"
    two = (KERNELS.seconds(CALL, 2) - 101) / (KERNELS.seconds(CALL, 1) - 101)
    assert two == pytest.approx([2.0]), "twice the sequences"


def test_few_queries_take_as_long_as_those_that_fill_the_device() -> None:
    full = replace(
        KERNELS,
        score=replace(KERNELS.score, full_heads=800.0),
        attend=replace(KERNELS.attend, full_queries=200.0, least_heads=4),
    )
    chosen = 1 + 2 * CALL.score_flops
    assert full.seconds(CALL, 1) == pytest.approx(chosen + 100 + 200 * 4 * 55 * 10)
    assert full.seconds(CALL, 1, least=True) == pytest.approx(
        replace(KERNELS, attend=replace(KERNELS.attend, least_heads=4)).seconds(CALL, 1)
    )


def test_kinds_have_kernels_of_their_own() -> None:
    other, third = (replace(KERNELS, score=replace(KERNELS.score, flops_per_s=rate)) for rate in (2.0, 3.0))
    rates = SparseRates(keys=KERNELS, blocks=other)
    assert rates.of(CALL) is KERNELS
    entries = CALL._replace(compress_ratio=4, window=16)
    assert rates.of(entries) is KERNELS
    assert replace(rates, entries=third).of(entries) is third
    assert rates.of(CALL._replace(block=128)) is other
    assert SparseRates(keys=KERNELS).of(CALL._replace(block=128)) is None
    with pytest.raises(InputError, match="keys"):
        SparseRates()
    fields = json.loads(json.dumps(asdict(rates)))
    assert read(SparseRates, JsonObject(fields=fields, where="test")) == rates


SHIPPED = [name for name in builtin_profiles() if load_profile(name).kernels.sparse is not None]


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("block", [1, 128])
def test_shipped_rates_rise_and_stay_below_the_datasheet(name: str, block: int) -> None:
    profile = load_profile(name)
    cost = CalibratedCost(rates=profile.kernels, traits=profile.kernels.traits("flash", 1, 2))
    gpu = load_gpu(profile.gpu)
    floor = RooflineCost.of(gpu, cost.traits, "bf16")
    real = CALL._replace(
        num_attention_heads=64, head_dim=576, v_head_dim=512, top_k=2048, index_heads=32, index_head_dim=128
    )
    sizes = np.unique(np.round(np.geomspace(1, 262144, 60)))
    for chunk, prefix in ((sizes, 0 * sizes), (sizes, 0 * sizes + 7000), (0 * sizes + 4096, sizes)):
        call = real._replace(chunk=chunk, prefix=prefix, block=block)
        seconds = cost.call_s(call)
        assert (np.diff(seconds) >= -1e-12).all()
        assert (seconds > floor.call_s(call)).all()
        least = replace(cost, traits=replace(cost.traits, lower_bound=True)).call_s(call)
        assert (least <= seconds).all()
    ends = real._replace(chunk=65536 - sizes[sizes < 65536], prefix=sizes[sizes < 65536], block=block)
    least = replace(cost, traits=replace(cost.traits, lower_bound=True)).call_s(ends)
    assert (np.diff(least) <= 1e-12).all(), "at a fixed end, no more for a later start"


@pytest.mark.parametrize("name", ["a100-flash", "l40s-flash", "a100-eager"])
def test_without_rates_it_is_counted(name: str) -> None:
    """Without rates, sparse attention takes more than the datasheet's limit, in proportion to the profile's rates."""
    profile = load_profile(name)
    assert profile.kernels.sparse is None
    kernel = profile.attention_kernels[0]
    cost = CalibratedCost(rates=profile.kernels, traits=profile.kernels.traits(kernel, 2, 2))
    call = CALL._replace(chunk=tokens(4096.0), prefix=tokens(65536.0), top_k=2048, index_head_dim=128)
    seconds = cost.call_s(call)
    floor = RooflineCost.of(load_gpu(profile.gpu), cost.traits, "fp16")
    assert (seconds > floor.call_s(call)).all()
    assert replace(cost, rates=scale(profile.kernels, 0.5)).call_s(call) == pytest.approx(0.5 * seconds)
    assert replace(cost, scale=3.0).call_s(call) == pytest.approx(3 * seconds)
    assert (no_time(cost.traits).call_s(call) == 0).all()


CHUNK, PREFIX = np.array([1000.0]), np.array([8000.0])
INDEXER = Indexer(num_heads=4, head_dim=128, top_k=2048)
ONE = (Gemm(name="q", in_features=8, out_features=8),)
COMPRESSED = CompressedAttention(
    projections=ONE,
    output=ONE,
    num_attention_heads=16,
    head_dim=512,
    rotary_dim=64,
    sliding_window=128,
    compress_ratio=4,
    indexer=INDEXER,
)


def test_entries_and_the_window() -> None:
    call = sparse_call(COMPRESSED, CHUNK, PREFIX)
    assert (call.keys, call.kernel_keys) == (2250, 128 + 2048)
    every = sparse_call(replace(COMPRESSED, compress_ratio=128, indexer=None), CHUNK, PREFIX)
    assert (every.kernel_keys, every.chooses) == (128 + 9000 / 128, 0)
    window = sparse_call(replace(COMPRESSED, compress_ratio=0, indexer=None), CHUNK, PREFIX)
    assert (window.kernel_keys, window.chooses) == (128, 0)


def test_blocks_are_chosen_of_keys_of_heads() -> None:
    mixer = Attention(
        projections=ONE,
        output=ONE,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        v_head_dim=128,
        indexer=replace(INDEXER, block=128),
    )
    call = sparse_call(mixer, CHUNK, PREFIX)
    assert (call.block, call.head_dim, call.v_head_dim, call.kernel_keys) == (128, 128, 128, 2048)
