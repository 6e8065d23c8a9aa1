"""The search on the machine: its decisions, and the table that it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrsim.builder import make_scenario
from kvrsim.cli.main import main
from kvrsim.model.load import load_model
from planner.confirm import search
from planner.confirm.hardware import Hardware
from planner.confirm.search import Chunks, HardwareSearch, SearchTask
from tests.planner.confirm.confirm_setup import arguments, folder_with, made_up_profile, said


def bowl(best: Chunks, each_s: float = 1.0) -> Callable[[Chunks], tuple[float, float]]:
    """A simulated machine whose TTFT grows with the distance from the best partition."""
    seconds = 0.0

    def measure(chunks: Chunks) -> tuple[float, float]:
        nonlocal seconds
        seconds += each_s
        return 1 + sum(abs(one - other) for one, other in zip(chunks, best, strict=True)) / sum(chunks), seconds

    return measure


def task_of(seed: Chunks, budget_s: float = 1e9) -> SearchTask:
    model = load_model("llama-7b")
    scenario, _ = make_scenario(ctx=sum(seed), gpus=len(seed), model=model, profile=made_up_profile())
    hardware = Hardware(config="llama-7b", repeats=2)
    return SearchTask(scenario=scenario, hardware=hardware, seed=seed, budget_s=budget_s, journal=Path("unused"))


@pytest.mark.parametrize(("seed", "best"), [((2048, 2048), (2300, 1796)), ((1024,) * 4, (1100, 1050, 1000, 946))])
def test_it_ends_near_the_machines_best(seed: Chunks, best: Chunks) -> None:
    result = HardwareSearch(seed=seed, center=seed)
    result.run(task_of(seed), bowl(best))
    assert result.median_s(result.best) < result.median_s(result.seed)
    partitions = set().union(*result.stages)
    assert all(sum(chunks) == 4096 and min(chunks) >= 1 for chunks in partitions)
    assert all(len(times_s) == 2 for stage in result.stages for times_s in stage.values())
    if len(seed) == 2:
        assert abs(result.best[0] - best[0]) <= 2 * 4096 / len(seed) / 64
    assert result.ended == "the finest stride is done"


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_the_time_bounds_it() -> None:
    result = HardwareSearch(seed=(2048, 2048), center=(2048, 2048))
    result.run(task_of((2048, 2048), budget_s=60.0), bowl((2300, 1796), each_s=10.0))
    assert "the time is up" in result.ended
    assert result.seconds <= 60 + 2 * 2 * 10, "and the plan's against the best"
    assert len(result.stages[-1][result.seed]) == 2


def test_an_interrupted_search_resumes_and_writes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, table, journal = folder_with(tmp_path), tmp_path / "table.json", tmp_path / "table.json.search"
    words = arguments(folder, "confirm", "--search", "-o", str(table), "--minutes", "0.05", "--repeats", "1", "--json")
    with monkeypatch.context() as patch:
        patch.setattr(search, "_write_table", interrupt)
        assert main(words) == 130
    lines = journal.read_text().splitlines()
    code, result, errors = said(words)
    assert code == 0, errors
    assert f"resumed from {len(lines) - 1} prefills" in errors
    assert result["prefills"] == len(lines) - 1
    assert not journal.exists()
    code, looked_up, _ = said(["table", "lookup", str(table), "--gpus", "2", "--ctx", "96", "--json"])
    assert (code, looked_up["source"], looked_up["partition"]) == (0, "exact", result["partition"])
    assert json.loads(table.read_text())["_measured"]["measured_ttft_s"] == result["measured_ttft_s"]
