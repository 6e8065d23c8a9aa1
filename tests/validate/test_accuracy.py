"""The accuracy of predictions does not get worse, and the page has every model and engine."""

from __future__ import annotations

import json
from typing import Any

import pandas
import pytest

from validate import accuracy, serving
from validate.published import compare as paper
from validate.report import summary

pytestmark = pytest.mark.slow  # 161 cases of the paper, 78 of them searched, and 85 of serving engines


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return paper.run()


@pytest.fixture(scope="module")
def prefills() -> pandas.DataFrame:
    return serving.compare()


def test_targets(result: dict[str, Any]) -> None:
    assert result["ok"]
    assert result["calibration"]["mape"] <= 0.03
    assert max(errors["mape"] for errors in result["by_model"].values()) <= 0.055
    slow = [abs(row["rel_error"]) for row in result["rows"] if row["link"] == "10GB/s"]
    assert sorted(slow)[len(slow) // 2] <= 0.15


def test_accuracy_is_no_worse_than_the_gate(result: dict[str, Any], prefills: pandas.DataFrame) -> None:
    now, stored = accuracy.figures(result, prefills), json.loads(accuracy.GATE.read_text())
    assert {name: now[name] for name, value in stored.items() if now[name] > value + accuracy.MOST_WORSE} == {}


def test_the_page_has_every_model_and_engine(result: dict[str, Any], prefills: pandas.DataFrame) -> None:
    json.dumps(result, allow_nan=False)
    page = "\n".join(accuracy.page([paper.part(result), serving.part(prefills)]))
    assert all(model in page for model in {row["model"] for row in result["rows"]})
    assert all(f"| {name} |" in page for name in serving.ENGINES)


def test_summary_of_nothing_is_none() -> None:
    assert set(summary([], []).values()) == {0, None}
    two = summary([-0.1, 0.3], [True, False])
    assert (two["mape"], two["median"], two["coverage"]) == (pytest.approx(0.2), pytest.approx(0.1), 0.5)
