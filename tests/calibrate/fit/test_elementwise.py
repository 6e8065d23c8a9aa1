"""Fits recover the rates of merging ring blocks, of attention to a block, and of the work before the first layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from calibrate.fit.attention import AttentionRows, with_blocks
from calibrate.fit.elementwise import fit_prepare, with_merges
from kvrsim.kernels.attention import BlockedRates
from kvrsim.kernels.elementwise import ElementwiseRates
from tests.building import measurements as small


@pytest.mark.parametrize("rate", [2e9, 6e10])
def test_blocks_and_merges_of_a_ring_come_back(rate: float) -> None:
    plain = BlockedRates(causal_flops_per_s=4e10, rectangle_flops_per_s=3e10, start_s=1e-5, query_s=1e-9, key_block=64)
    own = replace(plain, block_flops_per_s=rate)
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    rows = [small.row("block", 1.0, kernel="sdpa", chunk=chunk, prefix=chunk, **sizes) for chunk in (512, 1024, 2048)]
    call = AttentionRows.of(rows).call._replace(own=False)
    seconds = own.seconds(call, 1, 4)
    assert with_blocks(plain, small.timed(rows, seconds)).block_flops_per_s == pytest.approx(rate, rel=1e-4)
    assert with_blocks(plain, []) == plain
    assert (own.least_seconds(call, 1, 4) <= seconds).all()
    whole = call._replace(own=True)
    np.testing.assert_array_equal(own.seconds(whole, 1, 4), plain.seconds(whole, 1, 4))
    rates = ElementwiseRates.uniform(1e10, fused=False)
    merges = [small.row("merge", nbytes / rate, tokens=nbytes, bytes=nbytes) for nbytes in (2**20, 2**22)]
    assert with_merges(rates, merges).merge_bytes_per_s == pytest.approx(rate, rel=1e-4)
    assert with_merges(rates, []) == rates


# -- the user's own machine


def test_what_comes_before_the_first_layer() -> None:
    assert fit_prepare(small.prepare_rows()) == pytest.approx((small.REQUEST_S, small.MASK_S), rel=0.02)
    without_mask = fit_prepare([replace(one, kernel="flash", median_s=small.REQUEST_S) for one in small.prepare_rows()])
    assert without_mask == (pytest.approx(small.REQUEST_S), 0.0)
