"""The gate of the model of time: a sample of its rows meets the limits, and every fault breaks one."""

from __future__ import annotations

import pytest

from validate.gate import FAULTS, NO_FAULT, GateRow, ModelFault, missed_limits, page, read_gate_rows, read_limits

LIMITS = read_limits()
SAMPLED = {"paper": 6, "engines of 2023": 3}  # every sixth row, every third


@pytest.fixture(scope="module")
def rows() -> list[GateRow]:
    return read_gate_rows()


@pytest.fixture(scope="module")
def sample(rows: list[GateRow]) -> list[GateRow]:
    """Few rows, because all of them take half a minute with all faults."""
    return [row for group, step in SAMPLED.items() for row in [row for row in rows if row.group == group][::step]]


def test_every_group_has_limits_and_every_limit_rows(rows: list[GateRow]) -> None:
    assert {row.group for row in rows} == set(LIMITS)
    assert all(limit.median_error is not None and limit.interval_score is not None for limit in LIMITS.values())


def test_a_sample_meets_the_limits(sample: list[GateRow]) -> None:
    assert missed_limits(sample, NO_FAULT, LIMITS) == {}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_breaks_a_limit(fault: ModelFault, sample: list[GateRow]) -> None:
    assert missed_limits(sample, fault, LIMITS)


def test_the_page_says_so_if_a_limit_is_missed(sample: list[GateRow]) -> None:
    few = [row for row in sample if row.group == "paper"][:4]
    strict = {"paper": type(LIMITS["paper"])(median_error=1e-6)}
    lines, holds = page(few, strict)
    assert not holds
    assert any(line.startswith("**Limits are missed in these groups: paper.") for line in lines)
