"""`kvrsim capacity` and `kvrsim.capacity`: JSON, exit codes, files, and errors with the name of the option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvrsim
from kvrsim.cli import main as cli
from planner.capacity import plan as planning
from planner.capacity.search import FleetSimulator
from planner.capacity.times import StrategyPolicy, service_times

SMALL = "synthetic:poisson,rate=4,requests=600,context=lognormal:1k:0.8,max=4k,output=40"
FEW = ("--group-sizes", "1,2", "--replications", "2")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["capacity", "llama-7b", "a100-nvlink", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    got, out, err = run(capsys, *arguments, "--json")
    assert (got, err) == (code, "")
    return json.loads(out, parse_constant=lambda constant: pytest.fail(f"{constant} in JSON"))


def trace(path: Path, count: int = 800, seed: int = 0) -> Path:
    """Write a small CSV with many short and some long prompts, half of them with cached prefixes."""
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(0.25, count))
    context = np.where(rng.random(count) < 0.1, rng.integers(3000, 8000, count), rng.integers(10, 1500, count))
    cached = (context * rng.choice([0.0, 0.5], count)).astype(int)
    rows = zip(arrival_s, context, cached, rng.integers(1, 90, count), strict=True)
    lines = [f"{a:.4f},{c},{h},{o}" for a, c, h, o in rows]
    path.write_text("\n".join(["arrival_s,context_tokens,cached_tokens,output_tokens", *lines]) + "\n")
    return path


def test_json_has_the_fields_that_others_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    requests = str(trace(tmp_path / "trace.csv"))
    result = answer(
        capsys, "--requests", requests, "--slo-ttft", "1s", "--percentile", "99", "--price-per-gpu-hour", "2.5", *FEW
    )
    assert {"answer", "alternatives", "infeasible"} <= set(result)
    best = result["answer"]
    assert {"num_gpus", "groups", "p50_ttft_s", "p95_ttft_s", "p99_ttft_s", "utilisation", "cost_per_hour"} <= set(best)
    assert best["num_gpus"] == sum(group["gpus_per_group"] * group["replicas"] for group in best["groups"])
    assert best["cost_per_hour"] == pytest.approx(2.5 * best["num_gpus"])
    assert best["p50_ttft_s"] <= best["p95_ttft_s"] <= best["target_ttft_s"] == best["p99_ttft_s"] <= 1.0
    assert best["interval"]["low_s"] <= best["target_ttft_s"] <= best["interval"]["high_s"]
    assert best["interval"]["safe"] == (best["interval"]["high_s"] <= 1.0)
    assert best["unserved"] == 0
    assert sum(group["requests"] for group in best["groups"]) == 800
    ranges = [group["context_range"] for group in best["groups"]]
    assert ranges[0][0] == 1
    assert all(low == before[1] + 1 for before, (low, _) in zip(ranges, ranges[1:], strict=False))
    others = [one["num_gpus"] for one in result["alternatives"]]
    assert others == sorted(others)
    assert all(gpus >= best["num_gpus"] for gpus in others)
    front = [(point["num_gpus"], point["ttft_s"]) for point in result["pareto"]]
    assert [gpus for gpus, _ in front] == sorted({gpus for gpus, _ in front})
    assert [ttft for _, ttft in front] == sorted((ttft for _, ttft in front), reverse=True)
    assert result["workload"]["requests"] == 800
    assert result["workload"]["cached_share"] > 0


def test_nothing_fits_is_exit_code_1_with_the_nearest_miss(capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, "--requests", SMALL, "--slo-ttft", "1ms", "--max-gpus", "4", *FEW, code=1)
    assert result["answer"] is None
    assert result["alternatives"] == []
    assert result["nearest_miss"]["num_gpus"] == 4
    assert result["nearest_miss"]["target_ttft_s"] > 0.001
    assert [one["gpus_per_group"] for one in result["infeasible"]] == [1, 2, None]
    assert "even with no queue" in result["infeasible"][0]["why"]


def test_contexts_that_fit_in_no_memory_count_as_late(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text("arrival_s,context_tokens,output_tokens\n" + "".join(f"{i},60000,5\n" for i in range(50)))
    options = ("--requests", str(path), "--slo-ttft", "1000s", "--group-sizes", "1,2")
    result = answer(capsys, *options, "--strategies", "single,tsp,kvr-s", code=1)
    assert "do not fit in memory" in result["infeasible"][0]["why"]
    assert result["nearest_miss"]["unserved"] == 50
    assert result["nearest_miss"]["p99_ttft_s"] is None
    assert result["infeasible"][0]["code"] == "memory"
    assert not any("do not fit in the memory" in note for note in result["warnings"])  # `infeasible` has the reason
    assert {group["weights"] for group in answer(capsys, *options)["answer"]["groups"]} <= {"tp", "pp"}
    assert any("60000 tokens exceed the max_position_embeddings" in note for note in result["warnings"])


def test_short_prompts_that_share_steps_take_fewer_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    short = "synthetic:poisson,rate=30,requests=800,context=lognormal:200:0.5,max=1k"
    options = ("--requests", short, "--slo-ttft", "1s", "--uniform-only", *FEW)
    alone, packed = answer(capsys, *options), answer(capsys, *options, "--max-num-batched-tokens", "1k")
    assert packed["answer"]["num_gpus"] < alone["answer"]["num_gpus"]
    assert "share steps of up to 1024" in packed["dispatch"]


def test_a_sure_answer_is_no_smaller_and_its_interval_meets_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--requests", SMALL, "--slo-ttft", "1s", *FEW)
    likely, sure = answer(capsys, *options)["answer"], answer(capsys, *options, "--sure")["answer"]
    assert sure["num_gpus"] >= likely["num_gpus"]
    assert sure["interval"]["high_s"] <= 1.0
    assert sure["interval"]["safe"]


def test_long_traces_are_searched_on_a_stretch_and_judged_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(planning, "LONG", 300)
    path = trace(tmp_path / "trace.csv", count=900)
    result = kvrsim.capacity(model="llama-7b", cluster="a100-nvlink", requests=path, slo_ttft="1s", group_sizes="1,2")
    assert result.answer is not None
    assert sum(group.requests for group in result.answer.groups) == 900
    assert result.answer.in_time >= 0.99
    assert any("compared on 300 of the 900 requests" in note for note in result.warnings)
    fleet = result.answer.fleet
    times = service_times(result.scenario, result.request.workloads(), StrategyPolicy(deployable=True))
    simulator = FleetSimulator(result.request, result.request.workloads(), times)
    assert simulator.answer(fleet).meets
    for index, group in enumerate(fleet):
        if group.replicas > 1:
            smaller = (*fleet[:index], group.of(group.replicas - 1), *fleet[index + 1 :])
            assert not simulator.answer(smaller).meets


def test_a_share_instead_of_a_percentage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--requests", SMALL, "--slo-ttft", "1s", "--percentile", "0.95")
    assert (code, out) == (2, "")
    assert "--percentile: got '0.95'" in err
    assert err.rstrip().endswith("did you mean 95?")
