"""Halves of each engine's rows: how they are cut, and what a fit to one says of the other."""

from __future__ import annotations

import re

import numpy as np
import pytest

from validate.serving.half import (
    LEAST_ROWS,
    MOST_MEDIAN_APE,
    PAGE,
    HalvedError,
    groups,
    halves,
    median_ape,
    report,
    run_all,
)

_POINT = 0.01


def test_both_halves_span_the_machines_and_the_lengths() -> None:
    for rows in groups().values():
        cut = np.array(halves(rows))
        assert abs(cut.mean() - 0.5) <= 0.15
        for half in (0, 1):
            own = [row for row, one in zip(rows, cut, strict=True) if one == half]
            machines = {(row.num_gpus, row.strategy, row.model) for row in rows}
            several = {machine for machine in machines if sum(_on(row, machine) for row in rows) > 1}
            assert {machine for machine in several if any(_on(row, machine) for row in own)} == several
            assert len({row.tokens for row in own}) > 1


def _on(row: object, machine: tuple[int, str, str]) -> bool:
    return (row.num_gpus, row.strategy, row.model) == machine  # type: ignore[attr-defined]


def test_rows_that_a_rule_leaves_out_are_not_used() -> None:
    found = groups()
    assert all(len(rows) >= LEAST_ROWS for rows in found.values())
    assert not any(row.left_out for rows in found.values() for row in rows)
    assert {"vllm-2023", "tensorrt-llm-0.5", "lmdeploy-0.1", "loongserve-2024"} <= {engine for engine, _ in found}


def test_the_page_shows_medians_by_length() -> None:
    row = next(row for rows in groups().values() for row in rows if row.tokens >= 512)
    found = [
        HalvedError(row=row, before_s=row.ttft_s * 2, predicted_s=row.ttft_s * factor, low_s=0.0, high_s=row.ttft_s)
        for factor in (0.9, 1.02, 1.04)
    ]
    page = report({(row.engine, row.cluster): tuple(found)})
    assert f"| {row.engine} | {row.cluster} | 3 | 100.0% | 4.0% | 4.0% |  | 100% |" in page
    assert "| -10.0% |" in page


@pytest.mark.slow
def test_half_of_the_rows_predicts_the_other_half() -> None:
    """And no worse than the page says by more than a point."""
    median = median_ape(row.rel_error for rows in run_all().values() for row in rows)
    assert median is not None
    assert median <= MOST_MEDIAN_APE
    shown = re.search(r"^\| all \| \| \d+ \| [\d.]+% \| ([\d.]+)% \|", PAGE.read_text("utf-8"), re.M)
    assert shown is not None
    assert median <= float(shown[1]) / 100 + _POINT
