"""Comparison of saved answers: differences, their sizes, and files that are not answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvrsim
from kvrsim.cli.main import main
from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.units import format_seconds
from kvrsim.views.compare import SavedAnswer, bests, differences, limits, page, strategies
from kvrsim.views.page import render
from kvrsim.views.table import Cell

NAMES = ("tsp", "kvr-e", "tp")


@pytest.fixture(scope="module")
def plans() -> dict[str, kvrsim.Plan]:
    return {ctx: kvrsim.plan(gpus=4, ctx=ctx, strategies=NAMES) for ctx in ("2k", "8k")}


def saved(name: str, content: dict[str, Any]) -> SavedAnswer:
    return SavedAnswer.of(name, JsonObject(fields=json.loads(json.dumps(content)), where=name))


@pytest.fixture(scope="module")
def answers(plans: dict[str, kvrsim.Plan]) -> list[SavedAnswer]:
    return [saved(name, plan.to_dict()) for name, plan in plans.items()]


def test_only_what_differs_is_listed_of_the_questions(answers: list[SavedAnswer]) -> None:
    assert differences(answers).texts() == [("context", "2048", "8192")]
    assert differences(answers[:1] * 2).rows == []


def test_times_are_those_of_the_plans(answers: list[SavedAnswer], plans: dict[str, kvrsim.Plan]) -> None:
    rows = {str(row[0]): row[1:] for row in strategies(answers).rows}
    assert set(rows) == set(NAMES)
    for name, cells in rows.items():
        times = [plan[name].ttft_s for plan in plans.values()]
        assert [cell.value for cell in cells if isinstance(cell, Cell)] == times
        assert f"({times[1] / times[0]:.2f}×)" in cells[1].shown  # type: ignore[union-attr]
    best = {row[0]: row[1:3] for row in bests(answers).texts()}
    assert best == {name: (one.best.strategy, format_seconds(one.best.ttft_s)) for name, one in plans.items()}
    sums = [sum(row[place].value for row in limits(answers).rows if isinstance(row[place], Cell)) for place in (1, 2)]
    assert sums == pytest.approx([plan.best.ttft_s for plan in plans.values()], rel=0.03)


def test_a_simulation_and_a_plan_that_does_not_fit_are_compared_too(answers: list[SavedAnswer]) -> None:
    run = saved("run", kvrsim.simulate(strategy="tsp", gpus=4, ctx="2k").to_dict())
    large = saved("large", kvrsim.plan(gpus=2, ctx="256k", strategies=["tsp"]).to_dict())
    assert bests([run, large]).texts()[1][1] == "nothing fits"
    row = next(row for row in strategies([answers[0], run, large]).texts() if row[0] == "tsp")
    assert row[2].endswith("(1.00×)")
    assert row[3].endswith("does not fit")
    assert "2k, run and large compared" in render(page([answers[0], run, large]))


def test_the_command_writes_the_page(plans: dict[str, kvrsim.Plan], tmp_path: Path, capsys: Any) -> None:
    files = [tmp_path / f"{name}.json" for name in plans]
    for file, plan in zip(files, plans.values(), strict=True):
        file.write_text(json.dumps(plan.to_dict()))
    assert main(["compare", *map(str, files), "--html", str(tmp_path / "both.html")]) == 0
    assert "context" in capsys.readouterr().out
    assert "kvr-e" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({}, "question"),
        ({"question": {}}, "strategies"),
        ({"question": {}, "strategies": [{"strategy": "tp"}]}, r"strategies\[0\].ttft_s"),
        ({"question": {}, "strategy": "tp", "ttft_s": 1}, "ttft_low_s"),
    ],
)
def test_a_file_that_is_no_answer_is_refused_by_its_key(content: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=key):
        saved("x", content)
