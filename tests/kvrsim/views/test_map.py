"""The page of a map, without a browser: data, text and file."""

from __future__ import annotations

import pytest

import kvrsim
from kvrsim.views.map import map_data
from planner.map.map import StrategyMap


@pytest.fixture(scope="module")
def found() -> StrategyMap:
    return kvrsim.map_strategies(
        ctx="2,1k,4k", gpus="2,4", link_bandwidths=["1GB/s", "200GB/s"], strategies=["tsp", "tp"]
    )


def test_a_place_of_the_data_is_that_of_the_map(found: StrategyMap) -> None:
    data = map_data(found)
    places = [
        (rate, length, count) for rate in found.bandwidths for length in found.lengths for count in found.gpu_counts
    ]
    for index, (rate, length, count) in enumerate(places):
        here = found.at(length, rate, count)
        for one in data["strategies"]:
            if one["name"] in here:
                point = here[one["name"]]
                assert one["ttft_s"][index] == pytest.approx(point.ttft_s, rel=1e-3)
                assert one["low_s"][index] <= one["ttft_s"][index] <= one["high_s"][index]
                assert bool(one["fits"][index]) is point.fits
            else:
                assert one["ttft_s"][index] is None
    assert any(not found.at(length, rate, count) for rate, length, count in places)  # e.g. 2 tokens on 4 GPUs
