"""Growth, served share, and price: each is asked again, counted or added up in another way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvrsim
from kvrsim.cli import main as cli
from kvrsim.views.capacity import page_data, size_and_price, verdict
from planner.capacity.result import CapacityPlan, format_share
from planner.capacity.search import FleetSimulator
from planner.capacity.times import StrategyPolicy, service_times

SYNTHETIC = "synthetic:bursty,rate=6,requests=300,context=lognormal:1k:0.8,max=6k,output=lognormal:200:0.5"
DIURNAL = "synthetic:diurnal,rate=5,requests=300,period=60s,context=lognormal:2k:0.6,max=6k,output=200"
ON: dict[str, Any] = {"model": "llama-3.1-8b", "cluster": "h100-nvlink", "slo_ttft": "0.6s", "strategies": ["tp"]}
SMALL: dict[str, Any] = {"group_sizes": "1,2", "replications": 2, "percentile": 95}


def trace(path: Path) -> str:
    """Write requests of which half have a cached prefix, and 3 % are too long for two A100s with a large model."""
    rng = np.random.default_rng(5)
    count = 300
    arrival_s = np.cumsum(rng.exponential(0.2, count))
    context = rng.integers(100, 4000, count)
    context[::33] = 90_000
    cached = np.where(rng.random(count) < 0.5, context // 2, 0)
    cached[::33] = 0
    rows = zip(arrival_s, context, cached, rng.integers(50, 300, count), strict=True)
    lines = [f"{arrival:.3f},{tokens},{hit},{output}" for arrival, tokens, hit, output in rows]
    path.write_text("\n".join(["arrival_s,context_tokens,cached_tokens,output_tokens", *lines]) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("requests", "times", "more"),
    [
        (SYNTHETIC, 3.0, {"tpot": "20ms"}),
        (SYNTHETIC, 1.5, {"tpot": "12ms", "sure": True, "slo_ttft": "3s"}),
        (DIURNAL, 2.0, {"uniform_only": True, "max_num_batched_tokens": "2k"}),
        ("trace", 3.0, {"tpot": "20ms", "max_gpus": 6, "slo_ttft": "5s"}),
    ],
)
def test_growth_is_the_answer_to_the_same_question_with_more_requests(
    tmp_path: Path, requests: str, times: float, more: dict[str, Any]
) -> None:
    question = ON | SMALL | more | {"requests": trace(tmp_path / "trace.csv") if requests == "trace" else requests}
    plan = kvrsim.capacity(**question)
    assert [growth.times for growth in plan.growth] == [1.5, 2.0, 3.0]
    (growth,) = (growth for growth in plan.growth if growth.times == times)
    again = kvrsim.capacity(**question, rate_scale=times)
    assert growth.num_gpus == (None if again.answer is None else again.answer.total_gpus)
    if again.answer is not None and again.answer.decode is not None:
        assert growth.decode_gpus == again.answer.decode.num_gpus
    content = json.loads(json.dumps(plan.to_dict()))
    assert content["growth"] == content["answer"]["growth"]


LARGE: dict[str, Any] = {"model": "llama-3.1-70b", "cluster": "a100-nvlink", "slo_ttft": "60s", "group_sizes": "2,4"}


@pytest.fixture(scope="module")
def long_prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trace(tmp_path_factory.mktemp("long") / "trace.csv")


def test_the_served_share_decides_whether_there_is_an_answer(long_prompts: str) -> None:
    """Groups of two A100s hold the weights of 70B, and few tokens besides: 10 of 300 prompts never fit."""
    options = LARGE | {"requests": long_prompts, "group_sizes": "2", "strategies": ["tp", "pp"]}
    enough = kvrsim.capacity(**options, percentile=96)
    assert enough.answer is not None
    unserved = sum(int(np.isinf(run.ttft_s).sum()) for run in enough.answer.runs)
    assert unserved == 10
    assert enough.answer.served_share == pytest.approx(290 / 300)
    assert format_share(290 / 300) in verdict(enough)
    assert enough.to_dict()["served_share"] == enough.to_dict()["answer"]["served_share"] == enough.answer.served_share
    assert enough.answer.longest_served < 90_000
    too_few = kvrsim.capacity(**options, percentile=97)
    assert too_few.answer is None
    assert not too_few.feasible
    assert too_few.to_dict()["served_share"] < 0.97
    assert format_share(290 / 300) in verdict(too_few)
    assert too_few.growth == ()


def test_of_fleets_of_one_price_that_which_serves_more_is_the_answer(tmp_path: Path) -> None:
    """On two GPUs a pipeline takes longer prompts than tensor parallelism, which gathers more activations."""
    longest = {}
    for name in ("tp", "pp"):
        options = LARGE | {"group_sizes": "2", "strategies": [name], "percentile": 30}
        plan = kvrsim.capacity(**options, requests="synthetic:poisson,rate=0.1,requests=400,context=lognormal:20k:1")
        assert plan.answer is not None
        longest[name] = plan.answer.longest_served
    assert longest["tp"] != longest["pp"]
    more = max(longest, key=lambda name: longest[name])
    between = sum(longest.values()) // 2
    path = tmp_path / "few.csv"
    rows = [f"{20 * number},{between if number % 10 == 0 else 500},10" for number in range(50)]
    path.write_text("\n".join(["arrival_s,context_tokens,output_tokens", *rows]) + "\n")
    options = LARGE | {"group_sizes": "2", "strategies": ["tp", "pp"], "percentile": 80, "requests": str(path)}
    answer = kvrsim.capacity(**options).answer
    assert answer is not None
    assert answer.served_share == 1
    assert answer.groups[0].strategy == more


@pytest.fixture(scope="module")
def priced() -> CapacityPlan:
    question = ON | SMALL | {"slo_ttft": "0.4s", "tpot": "14ms"}  # some fleets are safe and some are not
    return kvrsim.capacity(**question, requests=SYNTHETIC, price_per_gpu_hour="1=2.5,2=3")


def test_all_forms_have_one_price(priced: CapacityPlan) -> None:
    answer = priced.answer
    assert answer is not None
    prices = {1: 2.5, 2: 3.0}
    groups = [*answer.groups, *([answer.decode] if answer.decode else [])]
    cost = sum(prices[group.gpus_per_group] * group.gpus_per_group * group.replicas for group in groups)
    assert answer.total_cost_per_hour == pytest.approx(cost)
    assert f", {cost:.4g} $/h," in size_and_price(priced)
    content = priced.to_dict()
    assert content["answer"]["total_cost_per_hour"] == pytest.approx(cost)
    data = page_data(priced)
    met = [one for one in data["tried"] if one["ttft_s"][data["percentiles"].index(95)] <= priced.slo_ttft_s]
    assert min(one["gpus"] for one in met) == answer.total_gpus
    assert cost in [one["cost"] for one in met]
    assert cost in [point["total_cost_per_hour"] for point in content["pareto"]]
    axes = priced.plot().axes[0]
    rings = [line for line in axes.get_lines() if line.get_label() == "the answer"]
    assert rings[0].get_xdata() == [pytest.approx(cost)]
    assert priced.to_frame()["total_cost_per_hour"][0] == pytest.approx(cost)


def test_the_picture_marks_every_fleet_that_is_not_safe(priced: CapacityPlan) -> None:
    """Without `sure`, too: each mark is that of the fleet's own interval, also where it follows from another fleet."""
    answer = priced.answer
    assert answer is not None
    assert answer.interval is not None
    assert answer.meets
    assert answer.is_safe is answer.interval.safe
    assert len({fleet.is_safe for fleet in priced.tried}) == 2
    workloads = priced.request.workloads()
    scenario = priced.scenario
    policy = StrategyPolicy(names=tuple(ON["strategies"]))
    simulator = FleetSimulator(priced.request, workloads, service_times(scenario, workloads, policy))
    for fleet in priced.tried:
        interval = simulator.interval(fleet.fleet, simulator.runs(fleet.fleet))
        assert fleet.is_safe is (fleet.meets and interval is not None and interval.safe), fleet.describe()
    assert marked_costs(priced) == sorted(one.total_cost_per_hour for one in priced.tried if not one.is_safe)
    safe = {one["cost"] for one in page_data(priced)["tried"] if one["safe"]}
    assert safe == {one.total_cost_per_hour for one in priced.tried if one.is_safe}


def marked_costs(plan: CapacityPlan) -> list[float]:
    """The places of the fleets that the picture marks as not safe, in order."""
    lines = plan.plot().axes[0].get_lines()
    (marks,) = (line for line in lines if str(line.get_label()).startswith("not safe"))
    return sorted(marks.get_xdata())


def test_no_drawn_fleet_that_is_safe_is_cheaper_than_the_sure_answer() -> None:
    plan = kvrsim.capacity(**(ON | {"slo_ttft": "3s"}), **SMALL, requests=SYNTHETIC, tpot="20ms", sure=True)
    assert plan.answer is not None
    assert plan.answer.is_safe
    assert all(one.is_safe is one.meets for one in plan.tried)
    assert all(one.interval.safe for one in plan.tried if one.meets)
    assert min(one.total_gpus for one in plan.tried if one.is_safe) == plan.answer.total_gpus


def test_the_reason_why_there_is_no_answer_is_the_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["capacity", "llama-3.1-8b", "h100-nvlink", "--requests", SYNTHETIC, "--slo-ttft", "5s"]
    few = ["--replications", "1", "--group-sizes", "1", "--strategies", "tp"]
    assert cli.main([*options, *few, "--tpot", "1ms"]) == 1
    first = capsys.readouterr().out.split("\ntarget:")[0]
    assert "no group decodes at 1 ms per token" in " ".join(first.split())
    assert cli.main([*options, *few, "--tpot", "1ms", "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["answer"] is None
    [change] = [text for text in content["would_meet"] if text.startswith("--tpot")]
    tpot = change.removeprefix("--tpot ").split(",")[0]
    assert cli.main([*options, *few, "--tpot", tpot, "--json"]) == 0
