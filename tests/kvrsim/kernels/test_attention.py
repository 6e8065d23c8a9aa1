"""Attention times computed by hand: steps over keys, rectangles and halves, latent attention, merging of blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.compile import build_program
from kvrsim.errors import InputError
from kvrsim.executors.batch import run_batch
from kvrsim.io.schema import JsonObject
from kvrsim.io.schema import read as read_schema
from kvrsim.kernels.attention import AttentionCall, BlockedRates, EagerRates, FlashRates, LatentRates, MeasuredSizes
from kvrsim.kernels.cost import CalibratedCost
from kvrsim.kernels.elementwise import merge, upcast
from kvrsim.kernels.profile import builtin_profiles, load_profile
from kvrsim.model.load import load_model
from kvrsim.model.mixers import Attention
from kvrsim.placement import PlacedScenario
from kvrsim.program import Array, RingPass, beside_message_s
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import get_strategy
from tests.building import Draws, any_partition, any_scenario, draws, examples, executed, tokens

STEPS = FlashRates(  # one second per step, no other costs
    tile_rows=64,
    key_block=64,
    concurrent_tiles=1,
    num_sms=1,
    causal=True,
    packs_heads=False,
    splits_keys=False,
    flops_per_s=1e30,
    launch_s=0.0,
    tile_s=0.0,
    block_s=1.0,
    alone_share=1.0,
    barrier_share=0.0,
    append_bytes_per_s=1e30,
)


def call_of(chunk: Array, prefix: Array, heads: int, kv_heads: int, head_dim: int) -> AttentionCall:
    """Causal attention of a chunk after a prefix, with the bytes per score of eager code."""
    return AttentionCall(
        chunk=chunk,
        prefix=prefix,
        causal=chunk * (prefix + chunk / 2),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        score_bytes=28.0,
    )


def flash_s(rates: FlashRates, chunk: float, prefix: float, **shape: int) -> float:
    heads = shape.get("heads", 1), shape.get("kv_heads", 1), shape.get("head_dim", 128)
    return float(rates.seconds(call_of(tokens(chunk), tokens(prefix), *heads), shape.get("batch", 1), 2).item())


def test_tiles_step_over_the_keys_that_they_see() -> None:
    """Two tiles of 64 queries take 1 + 2 steps, 2 + 3 after a block of keys, and 2 + 2 if no masked step is skipped."""
    assert flash_s(STEPS, 128, 0) == pytest.approx(3)
    assert flash_s(STEPS, 128, 64) == pytest.approx(5)
    assert flash_s(STEPS, 65, 0) == pytest.approx(3)
    assert flash_s(replace(STEPS, causal=False), 128, 0) == pytest.approx(4)
    assert flash_s(STEPS, 128, 0, heads=4, kv_heads=2, batch=3) == pytest.approx(3 * 4 * 3)


def test_few_tiles_run_side_by_side() -> None:
    """With at most one tile per slot, the longest tile counts; with one tile per multiprocessor it is twice as fast."""
    wide = replace(STEPS, concurrent_tiles=16, num_sms=8, alone_share=0.5)
    assert flash_s(wide, 256, 0) == pytest.approx(2)
    assert flash_s(wide, 256, 0, heads=2, kv_heads=2) == pytest.approx(2)
    assert flash_s(wide, 256, 0, heads=3, kv_heads=3) == pytest.approx(4)


def test_a_wave_may_wait_for_its_longest_tile() -> None:
    """Three tiles of four steps on two slots take six steps if no slot is idle, and eight in two waves."""
    rates = replace(STEPS, concurrent_tiles=2, num_sms=2, causal=False)
    for share, want in ((0.0, 6), (0.5, 7), (1.0, 8)):
        rates = replace(rates, barrier_share=share)
        assert flash_s(rates, 64, 192, heads=3, kv_heads=3) == pytest.approx(want)


@pytest.mark.parametrize(("head_dim", "steps"), [(32, 0.75), (64, 0.75), (96, 0.75), (128, 1.0), (256, 2.0)])
def test_narrow_heads_wait_for_softmax(head_dim: int, steps: float) -> None:
    rates = replace(STEPS, softmax_s=0.75)
    assert flash_s(rates, 64, 0, head_dim=head_dim) == pytest.approx(steps)
    assert flash_s(STEPS, 64, 0, head_dim=head_dim) == pytest.approx(head_dim / 128)


def test_packed_heads_share_a_tile() -> None:
    """With eight query heads per KV head, a packed tile holds eight queries of each head."""
    packed = replace(STEPS, packs_heads=True)
    assert flash_s(packed, 8, 56, heads=8) == pytest.approx(1)
    assert flash_s(STEPS, 8, 56, heads=8) == pytest.approx(8)


def test_split_keys_keep_idle_slots_busy() -> None:
    """Eight slots share the 64 steps of one tile and join the results; with a tile on every slot, nothing is split."""
    split = replace(STEPS, concurrent_tiles=8, num_sms=8, splits_keys=True, split_s=0.25)
    assert flash_s(split, 1, 64 * 64 - 1) == pytest.approx(8.25)
    assert flash_s(replace(split, split_share=0.5), 1, 64 * 64 - 1) == pytest.approx(16.25)
    assert flash_s(split, 1, 64 * 64 - 1, heads=8, kv_heads=8) == pytest.approx(64)


def test_what_else_a_flash_call_takes() -> None:
    """Further costs of a call: launch, start per tile, append of K and V, time per query, diagonal, limit of FLOPs."""
    assert flash_s(replace(STEPS, launch_s=7.0), 64, 0) == pytest.approx(8)
    assert flash_s(replace(STEPS, tile_s=3.0), 128, 0) == pytest.approx(3 + 6)
    assert flash_s(replace(STEPS, query_s=0.5), 64, 0, heads=2) == pytest.approx(2 + 64)
    assert flash_s(replace(STEPS, append_bytes_per_s=128.0), 64, 0, heads=2, kv_heads=1) == pytest.approx(
        2 + 64 * 8 / 2
    )
    assert flash_s(replace(STEPS, diagonal_cost=2.0), 128, 0) == pytest.approx(3 + 2 * 2 / 2)
    assert flash_s(replace(STEPS, flops_per_s=1.0), 128, 0) == pytest.approx(4 * 128 * 128 * 64)


def test_eager_covers_the_rectangle() -> None:
    call = call_of(tokens(3), tokens(7), 2, 1, 16)
    rates = EagerRates(flops_per_s=4.0, bytes_per_s=2.0, start_s=9.0)
    for batch, element_bytes in ((1, 2), (5, 1)):
        want = 9 + batch * 2 * 30 * (16 + 28 * element_bytes / 2 / 2)
        assert rates.seconds(call, batch, element_bytes) == pytest.approx([want])
        assert rates.least_seconds(call, batch, element_bytes) == pytest.approx([want])


BLOCKED = BlockedRates(  # one second per element of the score matrix with head_dim 16, no other costs
    causal_flops_per_s=64.0, rectangle_flops_per_s=64.0, start_s=0.0, query_s=0.0, key_block=1, skips_masked=False
)


def blocked_s(rates: BlockedRates, chunk: float, prefix: float, heads: int = 1, batch: int = 1) -> float:
    return float(rates.seconds(call_of(tokens(chunk), tokens(prefix), heads, heads, 16), batch, 4).item())


def test_a_mask_costs_the_whole_rectangle() -> None:
    """6 tokens take 18 s; after a prefix of 10, 6 x 16 s with a mask, or 60 + 18 s if masked elements are skipped."""
    assert blocked_s(BLOCKED, 6, 0) == pytest.approx(18)
    assert blocked_s(BLOCKED, 6, 10) == pytest.approx(96)
    merged = replace(BLOCKED, skips_masked=True)
    assert blocked_s(merged, 6, 0) == pytest.approx(18)
    assert blocked_s(merged, 6, 10) == pytest.approx(18 + 60)
    assert blocked_s(merged, 6, 10, heads=3, batch=2) == pytest.approx(6 * 78)


def test_halves_and_rectangles_have_their_own_rates() -> None:
    for causal, rectangle, half, rest in ((32.0, 128.0, 2, 0.5), (256.0, 64.0, 0.25, 1)):
        merged = replace(
            BLOCKED, causal_flops_per_s=causal, rectangle_flops_per_s=rectangle, skips_masked=True, join_s=7.0
        )
        assert blocked_s(merged, 6, 0) == pytest.approx(18 * half)
        assert blocked_s(merged, 6, 10) == pytest.approx(18 * half + 60 * rest + 6 * 7)
    dear = replace(BLOCKED, causal_flops_per_s=32.0, rectangle_flops_per_s=128.0)
    assert blocked_s(dear, 6, 10) == pytest.approx(2 * 96)  # a mask never makes a call faster


def test_blocks_that_the_diagonal_cuts_are_whole() -> None:
    """With blocks of four keys, each row of a causal half has on average 1.5 masked elements more."""
    whole = replace(BLOCKED, key_block=4)
    assert blocked_s(whole, 8, 0) == pytest.approx(32 + 12)
    assert blocked_s(whole, 2, 0) == pytest.approx(4)
    assert blocked_s(whole, 8, 5) == pytest.approx(8 * 13)
    assert blocked_s(replace(whole, skips_masked=True), 8, 5) == pytest.approx(44 + 40)


def test_factors_fall_no_faster_than_sizes_rise() -> None:
    def read(sizes: list[float], factors: list[float]) -> MeasuredSizes:
        return read_schema(MeasuredSizes, JsonObject(fields={"sizes": sizes, "factors": factors}, where="test"))

    assert read([1.0, 4.0], [4.0, 1.0]).factor(tokens(0, 2, 9)) == pytest.approx([4, 2, 1])
    assert read([1.0, 4.0, 9.0], [4.0, 1.0, 2.0]).least_factor(tokens(0.5, 1, 2, 4, 6, 99)) == pytest.approx(
        [1, 1, 1, 1, 2 ** (np.log(1.5) / np.log(9 / 4)), 2]
    )
    for sizes, factors in (([1.0, 4.0], [4.0, 0.9]), ([4.0, 1.0], [1.0, 1.0]), ([1.0], [1.0, 2.0]), ([], [])):
        with pytest.raises(InputError, match=r"test: (sizes|factors)"):
            read(sizes, factors)


def test_scores_that_leave_the_cache_take_longer() -> None:
    rates = EagerRates(
        flops_per_s=64.0, bytes_per_s=1e30, start_s=9.0, measured=MeasuredSizes(sizes=(60.0, 240.0), factors=(1.0, 4.0))
    )
    call = call_of(tokens(3, 6, 60), tokens(7, 14, 0), 2, 2, 16)
    assert rates.seconds(call, 1, 4) == pytest.approx([9 + 60, 9 + 240 * 4, 9 + 7200 * 4])


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
H200 = load_profile("h200-flash").kernels


def rates() -> LatentRates:
    assert H200.latent is not None
    return H200.latent


def test_a_latent_call_takes_them_and_no_other_does() -> None:
    cost = CalibratedCost(rates=H200, traits=H200.traits("flash", 1, 2))
    assert cost.call_s(EXPANDED) == pytest.approx(rates().expanded.seconds(EXPANDED, 1, 2))
    plain = EXPANDED._replace(latent=False)
    flash = H200.attention["flash"].seconds(plain, 1, 2)
    assert cost.call_s(plain) == pytest.approx(flash)
    assert not np.allclose(cost.call_s(EXPANDED), flash, rtol=0.01)
    unmeasured = replace(cost, rates=replace(H200, latent=None))
    assert unmeasured.call_s(EXPANDED) == pytest.approx(flash)
    least = replace(cost, traits=replace(cost.traits, lower_bound=True))
    assert least.call_s(EXPANDED) == pytest.approx(rates().expanded.least_seconds(EXPANDED, 1, 2))


@pytest.mark.parametrize("name", [name for name in builtin_profiles() if name.endswith("-flash")])
def test_shipped_profiles_price_it_below_the_peak(name: str) -> None:
    """A long prefill reaches 40 % to 100 % of the peak FLOP/s; only unmasked elements count."""
    profile = load_profile(name)
    latent = profile.kernels.latent
    assert latent is not None
    assert profile.operations["latent"].num_rows > 100
    call = EXPANDED._replace(chunk=np.array([16384.0]), prefix=np.zeros(1), causal=np.array([16384.0**2 / 2]))
    flops = 2 * 16 * (192 + 128) * 16384**2 / 2
    reached = flops / latent.expanded.seconds(call, 1, 2) / latent.expanded.flops_per_s
    assert 0.4 < reached < 1.0


RINGS = ("ring", "striped", "zigzag-ring")


def test_bytes_by_hand() -> None:
    """Bytes and kernels for one token of 32 heads of 128: elements of the output, and one log-sum-exp per head."""
    mixer = load_model("llama-3-8b").main_mixer
    assert isinstance(mixer, Attention)
    output, heads = 32 * 128, 32
    separate = [6, 4 + 4 + 4, 4 + 4, 4 + 4 + 4]
    of_heads = [4 + 4 + 4, 4 + 4, 4 + 4 + 4, 4 + 4, 4 + 4 + 4]
    whole = merge(mixer, fused=False, part=False)
    assert whole.nbytes == output * sum(separate) + heads * sum(of_heads)
    assert whole.kernels == len(separate) + len(of_heads)
    part = merge(mixer, fused=False, part=True)
    assert (part.nbytes - whole.nbytes, part.kernels - whole.kernels) == (8 * (output + heads), 2)
    fused = merge(mixer, fused=True, part=False)
    assert fused == merge(mixer, fused=True, part=True)
    assert (fused.nbytes, fused.kernels) == (output * (4 + 2 + 4) + heads * (4 + 4 + 4), 1)
    assert (upcast(mixer).nbytes, upcast(mixer).kernels) == (output * (2 + 4), 1)


@given(
    work=st.floats(0, 1e3),
    flight=st.floats(0, 1e3),
    longer=st.floats(0, 1e3),
    share=st.floats(0, 0.9),
    more=st.floats(0, 0.9),
)
@examples(100)
def test_work_beside_a_message(work: float, flight: float, longer: float, share: float, more: float) -> None:
    """Work runs at 1 - share of its rate during a message, and at its full rate afterwards."""
    took_s = beside_message_s(np.array([work]), np.array([flight]), share).item()
    slow_s = min(took_s, flight)
    assert slow_s * (1 - share) + (took_s - slow_s) == pytest.approx(work, rel=1e-9, abs=1e-9)
    assert beside_message_s(np.array([work]), np.array([flight + longer]), share) >= took_s * (1 - 1e-12)
    assert beside_message_s(np.array([work]), np.array([flight]), max(share, more)) >= took_s * (1 - 1e-12)
    assert beside_message_s(np.array([work]), np.array([flight]), 0.0) == work


@examples(10)
@given(rng=draws(), rate=st.floats(1e6, 1e13))
def test_a_measured_merge_moves_two_results_and_writes_one(rng: Draws, rate: float) -> None:
    scenario, cut = measured(rng)
    assert scenario.profile is not None
    kernels = scenario.profile.kernels
    elementwise = replace(kernels.elementwise, merge_bytes_per_s=rate)
    own = replace(scenario, profile=replace(scenario.profile, kernels=replace(kernels, elementwise=elementwise)))
    for costs in PlacedScenario.of(own).layer_costs():
        mixer = costs.layer.mixer
        if not isinstance(mixer, Attention) or mixer.is_sparse:
            continue
        heads, width = mixer.num_attention_heads, 3 * own.request.dtype_bytes
        nbytes = own.request.batch * cut[0] * heads * width * (mixer.v_head_dim + 1)
        seconds = float(costs.block_mixer.merge_s(np.array([float(cut[0])]))[0])
        assert seconds == pytest.approx(own.cost.scale * nbytes / rate)  # type: ignore[attr-defined]


def measured(rng: Draws) -> tuple[Scenario, tuple[int, ...]]:
    scenario = any_scenario(rng, num_gpus=(2, 6), roofline=False)
    return scenario, any_partition(rng, scenario.request.new_tokens, scenario.cluster.num_gpus)


def finish_s(scenario: Scenario, name: str, cut: tuple[int, ...]) -> float:
    program = build_program(executed(scenario, get_strategy(name)), [np.array([float(chunk)]) for chunk in cut])
    return float(run_batch(program, scenario.cluster).max())


def with_merges(scenario: Scenario, *, fused: bool, sms: int) -> Scenario:
    assert scenario.profile is not None
    profile = scenario.profile
    kernels = replace(profile.kernels, elementwise=replace(profile.kernels.elementwise, fused_merge=fused))
    return replace(scenario, profile=replace(profile, kernels=kernels, links=replace(profile.links, message_sms=sms)))


@pytest.mark.parametrize("name", RINGS)
@given(rng=draws(), sms=st.integers(0, 64))
@examples(25)
def test_separate_kernels_and_held_multiprocessors_only_add(name: str, rng: Draws, sms: int) -> None:
    scenario, cut = measured(rng)
    least_s = finish_s(with_merges(scenario, fused=True, sms=0), name, cut)
    separate_s = finish_s(with_merges(scenario, fused=False, sms=0), name, cut)
    all_s = finish_s(with_merges(scenario, fused=False, sms=sms), name, cut)
    assert least_s <= separate_s * (1 + 1e-12)
    assert separate_s <= all_s * (1 + 1e-12)


@pytest.mark.parametrize("name", RINGS)
@pytest.mark.parametrize("sends", ["overlap", "rendezvous"])
@given(rng=draws(), sms=st.integers(1, 200))
@examples(15)
def test_messages_hold_multiprocessors(name: str, sends: str, rng: Draws, sms: int) -> None:
    scenario = with_merges(any_scenario(rng, num_gpus=(2, 6), roofline=False, sends=sends), fused=False, sms=sms)
    cut = Partition.even(scenario.request.new_tokens, scenario.cluster.num_gpus).chunk_lens
    program = build_program(executed(scenario, get_strategy(name)), [np.array([float(chunk)]) for chunk in cut])
    (ring,) = {op.message_share for ranks in program.layers for ops in ranks for op in ops if isinstance(op, RingPass)}
    assert ring == min(0.9, sms / scenario.cluster.gpu.num_sms)
    assert scenario.without_communication.message_share == 0.0
