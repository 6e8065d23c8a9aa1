"""Times of matrix products computed by hand: tiles, waves and measured shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrsim.kernels.gemm import GEMM_TYPES, GemmRates, MeasuredShape, Product, Tile, join_products
from tests.building import tokens

# A wave of four tiles takes 2 x 64 x 128 x 128 x 4 FLOPs at 2^20 FLOP/s: eight seconds.
WIDE = Tile(rows=128, cols=128, flops_share=1.0, start_s=0.0)
GEMM = GemmRates(flops_per_s=2.0**20, bytes_per_s=1e30, launch_s=0.0, concurrent_tiles=4, tiles=(WIDE,), measured=())
SQUARE = Product(64, 256)


def test_time_rises_by_waves() -> None:
    """128 rows have two tiles, so 256 rows fill a wave of four tiles."""
    assert GEMM.seconds(tokens(0, 1, 128, 256, 257, 512, 513), (SQUARE,), 2) == pytest.approx([0, 8, 8, 8, 16, 16, 24])


def test_without_tiles_time_is_proportional_to_rows() -> None:
    smooth = replace(GEMM, tiles=())
    assert smooth.seconds(tokens(0, 1, 128), (SQUARE,), 2) == pytest.approx([0, 2**-5, 4])


def test_beyond_its_table_time_is_proportional_to_rows() -> None:
    """The table ends at 512 steps of 128 rows, which are 256 waves."""
    seconds = GEMM.seconds(tokens(512 * 128, 512 * 128 + 1, 1024 * 128), (SQUARE,), 2)
    assert seconds == pytest.approx([256 * 8, 256 * 8 + 4, 512 * 8])


def test_waves_and_launches_have_a_start() -> None:
    late = replace(GEMM, launch_s=0.5, tiles=(replace(WIDE, start_s=3.0, flops_share=0.5),))
    assert late.seconds(tokens(1, 257), (SQUARE,), 2) == pytest.approx([0.5 + 19, 0.5 + 38])


def test_the_library_takes_the_fastest_tile() -> None:
    """A tile with a quarter of the area and half of the rate is faster for up to 64 rows."""
    small = Tile(rows=64, cols=64, flops_share=0.5, start_s=0.0)
    both = replace(GEMM, tiles=(WIDE, small))
    assert both.step == 64
    assert both.seconds(tokens(1, 64, 65, 128, 129), (SQUARE,), 2) == pytest.approx([4, 4, 8, 8, 8])


def test_weights_and_activations_cross_memory() -> None:
    """64 x 256 weights cross memory once, and 64 + 256 activations per row; rows are rounded up to whole tiles."""
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
    """Eight experts, each with a quarter of the tokens, have 16 tiles for up to 512 tokens, in one launch."""
    late = replace(GEMM, launch_s=0.5)
    experts = Product(64, 256, 8, 0.25)
    assert experts.flops_per_row == 2 * SQUARE.flops_per_row
    assert late.seconds(tokens(1, 512, 513), (experts,), 2) == pytest.approx([32.5, 32.5, 64.5])
    assert late.seconds(tokens(1), (SQUARE, SQUARE), 2) == pytest.approx([2 * 8.5])


def test_measured_shapes_correct_the_form() -> None:
    """The ratio measured / formula is interpolated on a log scale between the rows and constant outside of them."""
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
    assert rates.seconds(tokens(128, 256, 512), (SQUARE,), 2) == pytest.approx([55, 55, 55])  # the mean of 100 and 10


def test_products_of_one_input_merge() -> None:
    qkv = [Product(64, 64), Product(64, 16), Product(64, 16)]
    assert join_products([*qkv, Product(16, 8)]) == (Product(64, 96), Product(16, 8))
    assert join_products([Product(64, 8, 4, 0.5), Product(64, 8)]) == (Product(64, 8, 4, 0.5), Product(64, 8))
    assert join_products([]) == ()
