"""Tables with slow cells are told from those without."""

from __future__ import annotations

import math

import pytest

from calibrate.data import Measurement
from calibrate.shipped.slow_cells import slow_share


def products(*seconds: float, tokens: int = 1024) -> list[Measurement]:
    about = dict(operation="gemm", kernel="k", device="d", dtype="bf16", tokens=tokens, in_features=2048, source="s")
    return [
        Measurement(out_features=1024 * (place + 1), median_s=one, **about)  # type: ignore[arg-type]
        for place, one in enumerate(seconds)
    ]


def test_the_share_is_of_products_that_both_time_at_the_burst_clock() -> None:
    other = products(1e-4, 2e-4, 4e-4, 1e-5, 1e-3)
    assert slow_share(products(1e-4, 2.2e-4, 4.8e-4, 9e-5, 9e-3), other) == pytest.approx(1 / 3)
    assert slow_share(other, other) == 0
    assert math.isnan(slow_share(products(1e-4, tokens=64), other))
