"""What to buy: kinds of GPUs, whole nodes, spare ones, the size at the ends of the error, what a fleet withstands."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

import kvrsim
from kvrsim.cli import main as cli
from kvrsim.views.capacity import signature
from planner.capacity.fleet import FleetLimits
from planner.capacity.result import CapacityPlan

REQUESTS = "synthetic:poisson,rate=30,requests=250,context=lognormal:2k:0.6,max=8k,output=lognormal:150:0.5"
ASKED: dict[str, Any] = {
    **{"model": "llama-3.1-8b", "engine": "vllm", "requests": REQUESTS, "slo_ttft": "1s", "tpot": "25ms"},
    **{"replications": 1, "group_sizes": "1,2", "strategies": ["single", "tp"], "uniform_only": True},
}


@pytest.fixture(scope="module")
def plan() -> CapacityPlan:
    return kvrsim.capacity(**ASKED, cluster="8xh100,8xb200", price_per_gpu_hour="2.5,6", node_granularity=4, spare=1)


def test_the_cheapest_of_several_clusters_is_the_answer(plan: CapacityPlan) -> None:
    content = json.loads(json.dumps(plan.to_dict()))
    assert [found["cluster"] for found in content["by_cluster"]] == ["8xh100", "8xb200"]
    prices = [found["answer"]["total_cost_per_hour"] for found in content["by_cluster"]]
    assert content["answer"]["total_cost_per_hour"] == min(prices)
    for found, price in zip(content["by_cluster"], (2.5, 6.0), strict=True):
        assert found["answer"]["total_cost_per_hour"] == pytest.approx(price * found["answer"]["total_gpus"])
        assert [step["times"] for step in found["growth"]] == [1.5, 2.0, 3.0]


def test_whole_nodes_are_rented_and_one_is_spare(plan: CapacityPlan) -> None:
    answer = plan.answer
    assert answer is not None
    assert answer.total_gpus == 4 * math.ceil(answer.working_gpus / 4) + 4
    assert all(growth.num_gpus is not None and growth.num_gpus % 4 == 0 for growth in plan.growth)
    assert f"{answer.total_gpus} " in signature(plan)


def test_the_size_grows_with_the_times_and_the_signature_has_both_ends(plan: CapacityPlan) -> None:
    answer = plan.answer
    assert answer is not None
    sizes = answer.size_interval
    assert sizes is not None
    assert sizes.low_gpus is not None
    assert sizes.low_gpus <= answer.total_gpus
    assert sizes.high_gpus is None or answer.total_gpus <= sizes.high_gpus
    assert f"{sizes.low_gpus}" in signature(plan).split("(")[1]


def test_a_fleet_withstands_what_it_says_and_not_twice_as_much() -> None:
    plan = kvrsim.capacity(**ASKED, cluster="8xh100", colocated=True)
    answer = plan.answer
    assert answer is not None
    assert answer.withstands is not None
    assert 1 <= answer.withstands < 4
    (workload,) = plan.request.workloads()
    assert len(workload) == 250
    assert answer.in_time >= 0.99
    for growth in plan.growth:  # the same requests as copies: about as hard as arriving faster
        if growth.num_gpus is not None and growth.times < 0.8 * answer.withstands:
            assert growth.num_gpus <= answer.total_gpus


@pytest.mark.parametrize(("working", "largest", "idle"), [(7, 2, 1 + 8), (8, 4, 8), (9, 16, 7 + 16)])
def test_idle_gpus_fill_nodes_and_replace_one(working: int, largest: int, idle: int) -> None:
    assert FleetLimits(node_gpus=8, spare=1).idle_gpus(working, largest) == idle
    assert FleetLimits().idle_gpus(working, largest) == 0
    assert FleetLimits(spare=2).idle_gpus(working, largest) == 2 * largest


def test_as_many_prices_as_clusters_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--requests", REQUESTS, "--slo-ttft", "1s", "--price-per-gpu-hour", "1,2,3"]
    assert cli.main(["capacity", "llama-3.1-8b", "8xh100,8xb200", *options]) == 2
    assert "--price-per-gpu-hour: got '1,2,3', accepted: 2 prices" in capsys.readouterr().err
