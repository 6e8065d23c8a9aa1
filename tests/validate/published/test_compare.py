"""Published rows are read unchanged, and the accuracy of predictions does not get worse."""

from __future__ import annotations

import json
from typing import Any

import pytest

from validate import accuracy
from validate.published import compare as gate
from validate.published.compare import part, read_rows, run, summary

pytestmark = pytest.mark.slow  # 161 cases, 78 of them searched


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return run()


def test_rows_are_plausible_and_distinct() -> None:
    rows = read_rows()
    assert len(rows) == len(set(rows)) == 161
    assert all(0.05 < row.ttft_s < 10 and row.num_gpus in (1, 2, 4, 8) for row in rows)
    assert sum(row.used_for_calibration for row in rows) == 141
    assert all(row.used_for_calibration == (row.link in ("300GB/s", "none")) for row in rows)


def test_blind_rows_are_marked() -> None:
    blind = [row for row in read_rows() if row.blind_until]
    assert {row.blind_until for row in blind} == {"2026-11-21"}
    models = {row.model for row in blind if row.link == "300GB/s"}
    assert models == {"llama-13b", "llama-30b", "llama-7b-mqa", "falcon-1b"}
    assert sum(row.link == "1GB/s" for row in blind) == 10
    assert len(blind) == 82


def test_targets(result: dict[str, Any]) -> None:
    assert result["ok"]
    assert result["calibration"]["mape"] <= 0.03
    assert max(errors["mape"] for errors in result["by_model"].values()) <= 0.05
    slow = [abs(row["rel_error"]) for row in result["rows"] if row["link"] == "10GB/s"]
    assert sorted(slow)[len(slow) // 2] <= 0.15


def test_the_page_has_every_model(result: dict[str, Any]) -> None:
    json.dumps(result, allow_nan=False)
    paper = part(result)
    page = "\n".join(accuracy.page([paper]))
    assert all(model in page for model in {row["model"] for row in result["rows"]})


def test_accuracy_on_the_paper_is_no_worse_than_the_gate(result: dict[str, Any]) -> None:
    assert gate.worse(gate.figures(result), gate.stored_figures()) == {}


def test_the_gate_allows_a_point() -> None:
    stored = {"left_out": 0.02, "all": 0.03}
    assert gate.worse({"left_out": 0.0299, "all": 0.01}, stored) == {}
    assert gate.worse({"left_out": 0.031, "all": 0.03}, stored) == {"left_out": (0.031, 0.02)}
    assert set(gate.worse({"left_out": 0.02}, stored)) == {"all"}


def test_summary_of_nothing_is_none() -> None:
    assert summary([]) == {"n": 0, "mape": None, "median_ape": None, "max_ape": None, "coverage": None}
    two = summary([{"rel_error": -0.1, "inside": True}, {"rel_error": 0.3, "inside": False}])
    assert two["mape"] == pytest.approx(0.2)
    assert two["coverage"] == 0.5
