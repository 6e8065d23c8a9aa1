"""Published prefills of serving engines of 2023 and 2024: rows, and a limit of the errors."""

from __future__ import annotations

import json

import pytest

from validate.serving import ENGINES, FIGURES, Comparison, compare, part

pytestmark = pytest.mark.slow
MOST_WORSE = 0.01  # largest accepted increase of an error over the recorded one


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare()


@pytest.mark.parametrize("name", FIGURES and json.loads(FIGURES.read_text()))
def test_errors_have_not_grown(name: str, comparison: Comparison) -> None:
    recorded, now = json.loads(FIGURES.read_text())[name], comparison.figures()[name]
    assert now["n"] == recorded["n"]
    assert now["median_ape"] <= recorded["median_ape"] + MOST_WORSE
    assert now["mape"] <= recorded["mape"] + MOST_WORSE


def test_the_page_has_every_engine(comparison: Comparison) -> None:
    text = "\n".join(part(comparison))
    assert all(f"| {name} |" in text for name in ENGINES)
