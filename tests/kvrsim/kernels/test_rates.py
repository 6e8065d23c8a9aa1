"""Rates by hand: tiles and waves, steps over keys, measured shapes, the ring's two protocols."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace

import numpy as np
import pytest

from kvrsim.errors import InputError
from kvrsim.executors.batch import run_batch
from kvrsim.executors.event import EventSimulation
from kvrsim.io.schema import JsonObject
from kvrsim.io.schema import read as read_schema
from kvrsim.kernels.attention import AttentionCall, AttentionRates, BlockedRates, EagerRates, FlashRates, MeasuredSizes
from kvrsim.kernels.gemm import GEMM_TYPES, GemmRates, MeasuredShape, Product, Tile, merged
from kvrsim.kernels.links import GatherRates
from kvrsim.program import AllGather, Array, Program
from tests.building import any_cluster


def tokens(*values: float) -> Array:
    return np.array(values, dtype=float)


# -- matrix products

# A wave of four tiles takes 2 x 64 x 128 x 128 x 4 FLOPs: eight seconds.
WIDE = Tile(rows=128, cols=128, flops_share=1.0, start_s=0.0)
GEMM = GemmRates(flops_per_s=2.0**20, bytes_per_s=1e30, launch_s=0.0, concurrent_tiles=4, tiles=(WIDE,), measured=())
SQUARE = Product(64, 256)


def test_time_rises_by_waves() -> None:
    """Two tiles a 128 rows: 256 rows fill a wave of four."""
    assert GEMM.seconds(tokens(0, 1, 128, 256, 257, 512, 513), (SQUARE,), 2) == pytest.approx([0, 8, 8, 8, 16, 16, 24])


def test_without_tiles_time_is_proportional_to_rows() -> None:
    smooth = replace(GEMM, tiles=())
    assert smooth.seconds(tokens(0, 1, 128), (SQUARE,), 2) == pytest.approx([0, 2**-5, 4])


def test_beyond_its_table_time_is_proportional_to_rows() -> None:
    """512 steps of 128 rows are 256 waves."""
    seconds = GEMM.seconds(tokens(512 * 128, 512 * 128 + 1, 1024 * 128), (SQUARE,), 2)
    assert seconds == pytest.approx([256 * 8, 256 * 8 + 4, 512 * 8])


def test_waves_and_launches_have_a_start() -> None:
    late = replace(GEMM, launch_s=0.5, tiles=(replace(WIDE, start_s=3.0, flops_share=0.5),))
    assert late.seconds(tokens(1, 257), (SQUARE,), 2) == pytest.approx([0.5 + 19, 0.5 + 38])


def test_the_library_takes_the_fastest_tile() -> None:
    """A tile of a quarter of the area fills the device with 64 rows, at half the rate."""
    small = Tile(rows=64, cols=64, flops_share=0.5, start_s=0.0)
    both = replace(GEMM, tiles=(WIDE, small))
    assert both.step == 64
    assert both.seconds(tokens(1, 64, 65, 128, 129), (SQUARE,), 2) == pytest.approx([4, 4, 8, 8, 8])


def test_weights_and_activations_cross_memory() -> None:
    """64 x 256 weights and 64 + 256 a row, of rows as the tile has them."""
    slow = replace(GEMM, bytes_per_s=1.0)
    for size in (1, 2):
        want = [size * (64 * 256 + 128 * 320), size * (64 * 256 + 256 * 320)]
        assert slow.seconds(tokens(1, 129), (SQUARE,), size) == pytest.approx(want)


@pytest.mark.parametrize("name", GEMM_TYPES)
def test_operands_may_have_different_widths(name: str) -> None:
    width = GEMM_TYPES[name]
    want = width.weight * 64 * 256 + 128 * ((width.input + width.quantised) * 64 + width.output * 256)
    assert replace(GEMM, bytes_per_s=1.0).seconds(tokens(1), (SQUARE,), width) == pytest.approx([want])


def test_experts_share_a_launch_and_their_waves() -> None:
    """Eight experts of a quarter of the tokens: 16 tiles up to 512 tokens, in one launch."""
    late = replace(GEMM, launch_s=0.5)
    experts = Product(64, 256, 8, 0.25)
    assert experts.flops_per_row == 2 * SQUARE.flops_per_row
    assert late.seconds(tokens(1, 512, 513), (experts,), 2) == pytest.approx([32.5, 32.5, 64.5])
    assert late.seconds(tokens(1), (SQUARE, SQUARE), 2) == pytest.approx([2 * 8.5])


def test_measured_shapes_correct_the_form() -> None:
    """Between its rows by the ratio to the form, on a log scale; beyond them by the outermost."""
    shape = MeasuredShape(in_features=64, out_features=256, rows=(256, 1024), seconds=(4.0, 128.0))
    rates = replace(GEMM, measured=(shape,))
    assert rates.measured_shape(SQUARE) is not None
    assert rates.product_s(tokens(1, 256, 512, 1024, 2048), SQUARE, 2) == pytest.approx([4, 4, 16 * 2**0.5, 128, 256])
    assert rates.seconds(tokens(1024), (SQUARE,), 2) == pytest.approx([128])
    for other in (Product(256, 64), Product(64, 256, 8, 0.25)):
        assert rates.measured_shape(other) is None
        assert rates.product_s(tokens(512), other, 2) == pytest.approx(GEMM.product_s(tokens(512), other, 2))


def test_more_rows_never_take_less_than_was_measured_for_fewer() -> None:
    shape = MeasuredShape(in_features=64, out_features=256, rows=(256, 512), seconds=(100.0, 10.0))
    rates = replace(GEMM, measured=(shape,))
    assert rates.seconds(tokens(128, 256, 512), (SQUARE,), 2) == pytest.approx([55, 55, 55])  # between the two


def test_products_of_one_input_merge() -> None:
    qkv = [Product(64, 64), Product(64, 16), Product(64, 16)]
    assert merged([*qkv, Product(16, 8)]) == (Product(64, 96), Product(16, 8))
    assert merged([Product(64, 8, 4, 0.5), Product(64, 8)]) == (Product(64, 8, 4, 0.5), Product(64, 8))
    assert merged([]) == ()


# -- attention

STEPS = FlashRates(  # a second a step, nothing else
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


def flash_s(
    rates: FlashRates,
    chunk: float,
    prefix: float,
    heads: int = 1,
    kv_heads: int = 1,
    batch: int = 1,
    head_dim: int = 128,
) -> float:
    call = AttentionCall(
        chunk=tokens(chunk),
        prefix=tokens(prefix),
        causal=tokens(chunk * (prefix + chunk / 2)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        score_bytes=28.0,
    )
    return float(rates.seconds(call, batch, 2).item())


def test_tiles_step_over_the_keys_that_they_see() -> None:
    """Two tiles of 64 queries: 1 + 2 steps from the start, 2 + 3 after a block, 2 + 2 where nothing is skipped."""
    assert flash_s(STEPS, 128, 0) == pytest.approx(3)
    assert flash_s(STEPS, 128, 64) == pytest.approx(5)
    assert flash_s(STEPS, 65, 0) == pytest.approx(3)
    assert flash_s(replace(STEPS, causal=False), 128, 0) == pytest.approx(4)
    assert flash_s(STEPS, 128, 0, heads=4, kv_heads=2, batch=3) == pytest.approx(3 * 4 * 3)


def test_few_tiles_run_side_by_side() -> None:
    """The longest tile alone, where each has a multiprocessor; faster where it has one for itself."""
    wide = replace(STEPS, concurrent_tiles=16, num_sms=8, alone_share=0.5)
    assert flash_s(wide, 256, 0) == pytest.approx(2)
    assert flash_s(wide, 256, 0, heads=2, kv_heads=2) == pytest.approx(2)
    assert flash_s(wide, 256, 0, heads=3, kv_heads=3) == pytest.approx(4)


def test_a_wave_may_wait_for_its_longest_tile() -> None:
    """Three tiles of four steps on two slots: six if slots are always busy, eight in two waves."""
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
    """Eight query heads of one KV head: a tile has eight queries of each."""
    packed = replace(STEPS, packs_heads=True)
    assert flash_s(packed, 8, 56, heads=8) == pytest.approx(1)
    assert flash_s(STEPS, 8, 56, heads=8) == pytest.approx(8)


def test_split_keys_keep_idle_slots_busy() -> None:
    """A tile of 64 steps over eight slots, and the joining; not where tiles fill the slots."""
    split = replace(STEPS, concurrent_tiles=8, num_sms=8, splits_keys=True, split_s=0.25)
    assert flash_s(split, 1, 64 * 64 - 1) == pytest.approx(8.25)
    assert flash_s(replace(split, split_share=0.5), 1, 64 * 64 - 1) == pytest.approx(16.25)
    assert flash_s(split, 1, 64 * 64 - 1, heads=8, kv_heads=8) == pytest.approx(64)


def test_what_else_a_flash_call_takes() -> None:
    """Launch, a start a tile, K and V of the chunk in the cache, and queries whatever their keys."""
    assert flash_s(replace(STEPS, launch_s=7.0), 64, 0) == pytest.approx(8)
    assert flash_s(replace(STEPS, tile_s=3.0), 128, 0) == pytest.approx(3 + 6)
    assert flash_s(replace(STEPS, query_s=0.5), 64, 0, heads=2) == pytest.approx(2 + 64)
    assert flash_s(replace(STEPS, append_bytes_per_s=128.0), 64, 0, heads=2, kv_heads=1) == pytest.approx(
        2 + 64 * 8 / 2
    )
    assert flash_s(replace(STEPS, diagonal_cost=2.0), 128, 0) == pytest.approx(3 + 2 * 2 / 2)
    assert flash_s(replace(STEPS, flops_per_s=1.0), 128, 0) == pytest.approx(4 * 128 * 128 * 64)


def test_eager_covers_the_rectangle() -> None:
    call = AttentionCall(
        chunk=tokens(3),
        prefix=tokens(7),
        causal=tokens(3 * 8.5),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        score_bytes=28.0,
    )
    rates = EagerRates(flops_per_s=4.0, bytes_per_s=2.0, start_s=9.0)
    for batch, element_bytes in ((1, 2), (5, 1)):
        want = 9 + batch * 2 * 30 * (16 + 28 * element_bytes / 2 / 2)
        assert rates.seconds(call, batch, element_bytes) == pytest.approx([want])
        assert rates.least_seconds(call, batch, element_bytes) == pytest.approx([want])


BLOCKED = BlockedRates(  # a second an element of a head of 16, nothing else
    causal_flops_per_s=64.0,
    rectangle_flops_per_s=64.0,
    start_s=0.0,
    query_s=0.0,
    key_block=1,
    skips_masked=False,
)


def blocked_s(rates: BlockedRates, chunk: float, prefix: float, heads: int = 1, batch: int = 1) -> float:
    call = AttentionCall(
        chunk=tokens(chunk),
        prefix=tokens(prefix),
        causal=tokens(chunk * (prefix + chunk / 2)),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=16,
        score_bytes=28.0,
    )
    return float(rates.seconds(call, batch, 4).item())


def test_a_mask_costs_the_whole_rectangle() -> None:
    """A causal half without a prefix; behind one 6 x 16 with the mask, 6 x 10 and the half where that is skipped."""
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
    assert blocked_s(dear, 6, 10) == pytest.approx(2 * 96)  # a mask makes nothing cheaper


def test_blocks_that_the_diagonal_cuts_are_whole() -> None:
    """Of blocks of four keys, three more an element of the diagonal, on average one and a half."""
    whole = replace(BLOCKED, key_block=4)
    assert blocked_s(whole, 8, 0) == pytest.approx(32 + 12)
    assert blocked_s(whole, 2, 0) == pytest.approx(4)
    assert blocked_s(whole, 8, 5) == pytest.approx(8 * 13)
    assert blocked_s(replace(whole, skips_masked=True), 8, 5) == pytest.approx(44 + 40)


def test_what_else_a_blocked_call_takes() -> None:
    """A start, queries, and a factor by their number; between sizes on a log scale."""
    sizes = MeasuredSizes(sizes=(4.0, 16.0), factors=(4.0, 1.0))
    for chunk, factor in ((1, 4), (4, 4), (8, 2), (16, 1), (64, 1)):
        half = chunk * chunk / 2
        assert blocked_s(replace(BLOCKED, measured=sizes), chunk, 0) == pytest.approx(factor * half)
    late = replace(BLOCKED, start_s=5.0, query_s=0.5, measured=sizes)
    assert blocked_s(late, 16, 0, heads=2) == pytest.approx(5 + 16 + 256)


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
    call = AttentionCall(
        chunk=tokens(3, 6, 60),
        prefix=tokens(7, 14, 0),
        causal=tokens(1, 1, 1),
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        score_bytes=28.0,
    )
    assert rates.seconds(call, 1, 4) == pytest.approx([9 + 60, 9 + 240 * 4, 9 + 7200 * 4])


def test_a_flash_section_may_be_of_either_kind() -> None:
    for rates in (STEPS, replace(BLOCKED, skips_masked=True, measured=MeasuredSizes(sizes=(2.0,), factors=(1.5,)))):
        fields = {"flash": json.loads(json.dumps(asdict(rates)))}
        assert JsonObject(fields=fields, where="test").get("flash", AttentionRates) == rates


# -- all-gathers

GATHER = GatherRates(
    launch_s=100.0, hop_s=10.0, small_bytes_per_s=1.0, large_bytes_per_s=4.0, setup_s=4.0, own_share=0.5
)


def test_short_gathers_take_one_protocol_and_long_ones_another() -> None:
    """Three pieces of 2 bytes: 2.5 of them cross a link, 5 s; of 40 bytes 100 x 1 s, or (5 + 2)^2 s."""
    assert GATHER.seconds(tokens(6, 120), 3) == pytest.approx([100 + 20 + 5, 100 + 20 + 49])
    assert GATHER.step_s(tokens(2, 40), 3) == pytest.approx([10 + 2.5, 10 + 24.5])


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_both_executors_gather_in_that_time(ranks: int) -> None:
    cluster = any_cluster(random.Random(0), ranks, topologies=("switch",))
    cluster = cluster.with_measured(replace(cluster.link, latency_s=1000.0, gather=GATHER))
    gather = (AllGather(nbytes=tokens(40)),)
    none = ((),) * ranks
    twice = Program(strategy="test", prologue=none, layers=((gather,) * ranks,), layer_kind_index=(0, 0), epilogue=none)
    want = [2 * GATHER.seconds(tokens(40 * ranks), ranks).item()] * ranks
    assert run_batch(twice, cluster)[:, 0] == pytest.approx(want)
    assert EventSimulation(twice, cluster).finish_s == pytest.approx(want)
