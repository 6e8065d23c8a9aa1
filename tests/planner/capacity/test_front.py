"""Fleets around the answer: what was simulated at other rates is what a plan of them says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import kvrsim
from planner.capacity import front
from planner.capacity.answer import CapacityPlan, TriedFleet

SMALL = "synthetic:poisson,rate=4,requests=600,context=lognormal:1k:0.8,max=4k"
FEW = {"slo_ttft": "1s", "group_sizes": "1,2", "replications": 2, "uniform_only": True}


@pytest.fixture(scope="module")
def explored() -> CapacityPlan:
    return kvrsim.capacity(requests=SMALL, price_per_gpu_hour=2, **FEW).explored()


def at(plan: CapacityPlan, rate: float) -> dict[str, TriedFleet]:
    return {one.fleet: one for one in plan.tried if one.rate == rate}


def test_the_answer_is_among_them(explored: CapacityPlan) -> None:
    assert explored.answer is not None
    index = explored.percentiles.index(explored.percentile)
    values = [one.ttft_s[index] for one in explored.tried if one.num_gpus == explored.answer.num_gpus and one.rate == 1]
    assert explored.answer.target.value_s in values


def test_the_front_is_what_a_plan_without_other_rates_has(explored: CapacityPlan) -> None:
    plain = kvrsim.capacity(requests=SMALL, price_per_gpu_hour=2, **FEW)
    assert plain.pareto == explored.pareto
    assert {one.rate for one in plain.tried} == {1.0}


def test_another_rate_is_the_same_requests_replayed(tmp_path: Path) -> None:
    def written(gap_s: float) -> Path:
        rows = [f"{gap_s * i},{300 + 7 * i % 900},5" for i in range(600)]
        path = tmp_path / f"{gap_s}.csv"
        path.write_text("\n".join(["arrival_s,context_tokens,output_tokens", *rows]) + "\n")
        return path

    few = FEW | {"replications": 1}
    slow, fast = (kvrsim.capacity(requests=written(gap_s), **few) for gap_s in (0.2, 0.1))
    replayed, asked = at(slow.explored(), 2.0), at(fast, 1.0)
    both = replayed.keys() & asked.keys()
    assert both
    for name in both:
        assert replayed[name].ttft_s == pytest.approx(asked[name].ttft_s, rel=1e-9)


def test_more_requests_in_the_same_time_wait_longer(explored: CapacityPlan) -> None:
    for name in {one.fleet for one in explored.tried}:
        rising = sorted((one.rate, one.ttft_s) for one in explored.tried if one.fleet == name)
        for (_, slow), (_, fast) in zip(rising, rising[1:], strict=False):
            assert all(a <= b * (1 + 1e-9) for a, b in zip(slow, fast, strict=True))


def test_where_nothing_meets_the_target_the_largest_fleets_are_shown() -> None:
    plan = kvrsim.capacity(requests=SMALL, **FEW | {"slo_ttft": "1ms"}, max_gpus=4).explored()
    assert plan.answer is None
    assert max(one.num_gpus for one in plan.tried) == 4
    assert {one.rate for one in plan.tried} == {1.0, *front.RATES}


def test_long_traces_are_replayed_at_their_busiest_stretch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrival_s = [*(0.5 * i for i in range(1500)), *(750 + 0.1 * i for i in range(1500))]
    rows = [f"{arrival},{300 + i % 500},5" for i, arrival in enumerate(arrival_s)]
    (tmp_path / "t.csv").write_text("\n".join(["arrival_s,context_tokens,output_tokens", *rows]) + "\n")
    monkeypatch.setattr(front, "_SIMULATED", 1)
    plan = kvrsim.capacity(requests=tmp_path / "t.csv", slo_ttft="1s", group_sizes="1").explored()
    assert {one.requests for one in plan.tried if one.rate == 1} == {3000}
    others = [one for one in plan.tried if one.rate != 1]
    assert all(1000 <= one.requests < 3000 for one in others)
    assert all(math.isfinite(one.ttft_s[0]) for one in others)
