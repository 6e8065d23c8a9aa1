"""What a ring adds to a layer comes back from its rows: attention to blocks, and merging."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from calibrate.data import Measurement
from calibrate.fit.attention import AttentionRows, with_blocks
from calibrate.fit.elementwise import with_merges
from kvrsim.kernels.attention import BlockedRates
from kvrsim.kernels.elementwise import ElementwiseRates


def row(operation: str, median_s: float, kernel: str = "torch", **fields: Any) -> Measurement:
    told: dict[str, Any] = dict(device="CPU", dtype="fp32", source="made")
    return Measurement(operation=operation, median_s=median_s, kernel=kernel, **told, **fields)


@pytest.mark.parametrize("rate", [2e9, 6e10])
def test_blocks_and_merges_of_a_ring_come_back(rate: float) -> None:
    plain = BlockedRates(causal_flops_per_s=4e10, rectangle_flops_per_s=3e10, start_s=1e-5, query_s=1e-9, key_block=64)
    own = replace(plain, block_flops_per_s=rate)
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    rows = [row("block", 1.0, kernel="sdpa", chunk=chunk, prefix=chunk, **sizes) for chunk in (512, 1024, 2048)]
    call = replace(AttentionRows.of(rows).call, own=False)
    seconds = own.seconds(call, 1, 4)
    timed_rows = [replace(one, median_s=float(time)) for one, time in zip(rows, seconds, strict=True)]
    assert with_blocks(plain, timed_rows).block_flops_per_s == pytest.approx(rate, rel=1e-4)
    assert with_blocks(plain, []) == plain
    assert (own.least_seconds(call, 1, 4) <= seconds).all()
    whole = replace(call, own=True)
    np.testing.assert_array_equal(own.seconds(whole, 1, 4), plain.seconds(whole, 1, 4))
    rates = ElementwiseRates.uniform(1e10, fused=False)
    merges = [row("merge", nbytes / rate, tokens=nbytes, bytes=nbytes) for nbytes in (2**20, 2**22)]
    assert with_merges(rates, merges).merge_bytes_per_s == pytest.approx(rate, rel=1e-4)
    assert with_merges(rates, []) == rates
