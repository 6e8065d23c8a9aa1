"""Comparison of saved fleets: the cheapest, ratios, more requests, and files of other commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvrsim
from kvrsim.cli.main import main
from kvrsim.io.schema import JsonObject
from kvrsim.views.compare import differences
from kvrsim.views.fleets import SavedFleet, bests, growth, headline
from planner.capacity.result import CapacityPlan

ASK = {"model": "llama-3.1-8b", "requests": "synthetic:poisson,rate=12,requests=200,context=2k,output=100"}
FEW = {"slo_ttft": "1s", "tpot": "30ms", "replications": 1, "group_sizes": "1", "strategies": ["single"]}


@pytest.fixture(scope="module")
def plans() -> dict[str, CapacityPlan]:
    return {
        "a100": kvrsim.capacity(**ASK, **FEW, cluster="a100-nvlink", price_per_gpu_hour=1.5),
        "h100": kvrsim.capacity(**ASK, **FEW, cluster="h100-nvlink", price_per_gpu_hour=2.5),
    }


@pytest.fixture(scope="module")
def fleets(plans: dict[str, CapacityPlan]) -> list[SavedFleet]:
    contents = {name: json.loads(json.dumps(plan.to_dict())) for name, plan in plans.items()}
    return [SavedFleet.of(name, JsonObject(fields=content, where=name)) for name, content in contents.items()]


def test_the_cheapest_is_first_and_others_have_their_ratio(
    fleets: list[SavedFleet], plans: dict[str, CapacityPlan]
) -> None:
    costs = {name: plan.answer.total_cost_per_hour for name, plan in plans.items() if plan.answer is not None}
    least, most = sorted(costs, key=lambda name: costs[name] or 0)
    assert headline(fleets).startswith(f"{least} is the cheapest: ")
    assert f"{costs[most] / costs[least]:.2f}×" in headline(fleets)  # type: ignore[operator]
    rows = {row[0]: row for row in bests(fleets).texts()}
    for name, plan in plans.items():
        assert plan.answer is not None
        assert rows[name][4] == str(plan.answer.total_gpus)
        assert rows[name][5] == f"{plan.answer.total_cost_per_hour:.2f}"
    assert growth(fleets).texts() == [
        (f"{ours.times:g} times", f"{ours.num_gpus} GPUs", f"{theirs.num_gpus} GPUs")
        for ours, theirs in zip(plans["a100"].growth, plans["h100"].growth, strict=True)
    ]
    assert "price per gpu hour" in {row[0] for row in differences(fleets).texts()}


def test_files_are_compared_on_the_command_line(
    plans: dict[str, CapacityPlan], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, plan in plans.items():
        Path(f"{name}.json").write_text(json.dumps(plan.to_dict()))
    assert main(["compare", "a100.json", "h100.json", "--html", "both.html"]) == 0
    assert "is the cheapest" in capsys.readouterr().out
    assert "More requests" in Path("both.html").read_text()
    Path("plan.json").write_text(json.dumps(kvrsim.plan(gpus=2, ctx="1k", strategies=["tsp"]).to_dict()))
    assert main(["compare", "plan.json", "h100.json"]) == 2
    assert "answer: got 'h100.json', accepted: fleets only, or plans" in capsys.readouterr().err
