"""The page of a capacity plan, without a browser: data, text and file."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvrsim
from kvrsim.views.capacity import page_data, waiting
from planner.capacity.fleet import FleetRun
from planner.capacity.result import CapacityPlan
from tests.planner.capacity.made_requests import made

SMALL = "synthetic:poisson,rate=4,requests=600,context=lognormal:1k:0.8,max=4k"


@pytest.fixture(scope="module")
def plan() -> CapacityPlan:
    options = {"model": "llama-7b", "cluster": "a100-nvlink", "requests": SMALL, "slo_ttft": "1s", "group_sizes": "1,2"}
    return kvrsim.capacity(**options, replications=1, strategies=["single", "tp"])


def test_every_fleet_is_in_the_data(plan: CapacityPlan) -> None:
    data = page_data(plan)
    assert [one["fleet"] for one in data["tried"]] == [one.describe() for one in plan.tried]
    assert len(data["tried"][0]["ttft_s"]) == len(data["percentiles"])
    assert len(data["requests"]["arrival_s"]) == data["requests"]["count"] == 600
    assert data["price_per_gpu_hour"] is None
    json.dumps(data, allow_nan=False)


def run(count: int) -> FleetRun:
    rng = np.random.default_rng(0)
    workload = made(rng.exponential(1.0, count - 1), 1)
    begin_s = np.maximum.accumulate(workload.arrival_s + rng.exponential(1.0, count))
    pool = np.zeros(count, dtype=np.int64)
    return FleetRun(workload=workload, ttft_s=begin_s, begin_s=begin_s, pool=pool, busy_gpu_s=0.0)


def test_of_a_long_queue_the_longest_in_each_part_is_kept() -> None:
    exact_s, exact = waiting(run(2000), 10_000, 10)
    assert exact.min() == 0
    assert exact[-1] == 0
    times_s, most = waiting(run(2000), 100, 50)
    assert len(times_s) == 51
    assert most.max() == exact.max()
    for begin, end, value in zip(times_s, times_s[1:], most, strict=False):
        inside = exact[(exact_s >= begin) & (exact_s < end)]
        assert value >= inside.max(initial=0.0)
