"""The evidence holds: published rows are read as they stand, and accuracy does not get worse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from validate.published.compare import report, run, summary
from validate.published.reference import read_rows

pytestmark = pytest.mark.slow

ACCURACY = Path(__file__).parents[3] / "docs" / "results" / "accuracy.md"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return run()


def test_rows_are_plausible_and_distinct() -> None:
    rows = read_rows()
    assert len(rows) == len(set(rows)) >= 79
    assert all(0.05 < row.ttft_s < 10 and row.num_gpus in (1, 2, 4, 8) for row in rows)
    assert sum(row.used_for_calibration for row in rows) == 69


def test_accuracy_is_no_worse_than_the_page_says(result: dict[str, Any]) -> None:
    """More than a point worse is a regression."""
    page = ACCURACY.read_text()
    for title, key in (("used for calibration", "calibration"), ("not used", "held_out")):
        printed = re.search(rf"^\| {title} \| (\d+) \| ([\d.]+)% \| ([\d.]+)% ", page, re.M)
        assert printed is not None
        assert result[key]["n"] == int(printed[1])
        assert result[key]["mape"] <= float(printed[2]) / 100 + 0.01
        assert result[key]["median_ape"] <= float(printed[3]) / 100 + 0.01


def test_targets(result: dict[str, Any]) -> None:
    assert result["ok"]
    assert result["calibration"]["mape"] <= 0.05
    slow = [abs(row["rel_error"]) for row in result["rows"] if row["link"] == "10GB/s"]
    assert sorted(slow)[len(slow) // 2] <= 0.15


def test_the_report_has_every_row(result: dict[str, Any]) -> None:
    json.dumps(result, allow_nan=False)
    page = report(result, "accuracy.png")
    assert all(f"| {row['case']} |" in page for row in result["rows"])


def test_summary_of_nothing_is_none() -> None:
    assert summary([]) == {"n": 0, "mape": None, "median_ape": None, "max_ape": None, "coverage": None}
    two = summary([{"rel_error": -0.1, "inside": True}, {"rel_error": 0.3, "inside": False}])
    assert two["mape"] == pytest.approx(0.2)
    assert two["coverage"] == 0.5
