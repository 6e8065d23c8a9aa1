"""Published prefills of serving engines of 2023 and 2024: rows, fits of known engines, and a gate on the errors."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvrsim.engine import NO_HOST, Engine, load_engine
from validate.serving import ENGINES, FIGURES, Comparison, case_of, compare, fit_engine, part, read_rows

pytestmark = pytest.mark.slow
MOST_WORSE = 0.01  # of an error, against the figures that are recorded; more is a regression


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare()


def test_rows_are_left_out_by_rule_alone() -> None:
    rows, compared = read_rows(compared=False), read_rows()
    assert {row.engine for row in rows} == set(ENGINES)
    assert {row.left_out for row in rows} == {"", "did_not_run", "tp_over_2048_tokens", "batch_over_prompt"}
    assert len(compared) == sum(not row.left_out for row in rows)
    rule = [row for row in rows if row.engine == "vllm-2023" and row.num_gpus >= 4 and row.tokens > 2048]
    assert all(row.left_out == "tp_over_2048_tokens" for row in rule)


@pytest.mark.parametrize("name", FIGURES and json.loads(FIGURES.read_text()))
def test_errors_have_not_grown(name: str, comparison: Comparison) -> None:
    recorded, now = json.loads(FIGURES.read_text())[name], comparison.figures()[name]
    assert now["n"] == recorded["n"]
    assert now["median_ape"] <= recorded["median_ape"] + MOST_WORSE
    assert now["mape"] <= recorded["mape"] + MOST_WORSE


def test_the_page_has_every_engine(comparison: Comparison) -> None:
    text = "\n".join(part(comparison))
    assert all(f"| {name} |" in text for name in ENGINES)


def engine_of(**terms: float) -> Engine:
    scale = terms.pop("kernel_scale")
    return replace(
        load_engine("tensorrt-llm-0.5"),
        host=replace(NO_HOST, **terms),
        kernel_scale={"a100-80gb": scale},
        decode_step=False,
    )


@pytest.mark.parametrize(
    "truth",
    [{"step_s": 4e-3, "layer_s": 2e-5, "kernel_scale": 1.12}, {"step_s": 1e-3, "layer_s": 6e-4, "kernel_scale": 0.97}],
)
def test_the_fit_of_a_known_engine(truth: dict[str, Any]) -> None:
    """Prefills that an engine of known terms predicts lead back to them, as far as they can tell them apart."""
    rows = [row for row in read_rows() if row.engine == "tensorrt-llm-0.5"]
    made = engine_of(**truth)
    predicted = [case_of(row, made).ttft_s() for row in rows]
    again = fit_engine(
        "tensorrt-llm-0.5", [replace(row, ttft_s=seconds) for row, seconds in zip(rows, predicted, strict=True)]
    )
    assert again.engine.kernel_scale["a100-80gb"] == pytest.approx(truth["kernel_scale"], rel=0.02)
    assert np.allclose(again.solution.after_s, predicted, rtol=0.02)
