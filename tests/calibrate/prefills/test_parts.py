"""Where measured TTFT goes: parts of known size, intervals, and what to fix first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from calibrate.prefills.fit import PrefillCase, check_prefills, make_cases
from calibrate.prefills.parts import TtftPart, first_step, parts_of
from calibrate.prefills.rows import PrefillRow
from kvrsim.engine import load_engine
from kvrsim.kernels.profile import load_profile
from planner.candidates import partition_of
from planner.uncertainty.intervals import interval

ENGINE = load_engine("vllm")


def cases(*, gpus: int, factor: float = 1.0, queued_s: float | None = None) -> tuple[PrefillCase, ...]:
    """Two prefills that take `factor` times their prediction."""
    rows = []
    for length in (2048, 8192):
        row = PrefillRow(
            ttft_s=1.0, where="a test", model="llama-3.1-8b", num_gpus=gpus, context_len=length, queued_s=queued_s
        )
        rows.append(row)
    made = make_cases(rows, load_profile("h100-flash"), partition_of, {"engine": ENGINE}).cases
    return tuple(replace(case, row=replace(case.row, ttft_s=factor * case.ttft_s())) for case in made)


def parts(**question: object) -> dict[str, TtftPart]:
    made = cases(**question)  # type: ignore[arg-type]
    return {part.name: part for part in parts_of(made, check_prefills(made, interval).rows)}


def test_parts_add_up_to_the_measured_ttft() -> None:
    made = cases(gpus=8, factor=1.1, queued_s=0.02)
    found = parts(gpus=8, factor=1.1, queued_s=0.02)
    assert sum(part.seconds for part in found.values()) == pytest.approx(sum(one.row.ttft_s for one in made) + 0.04)
    assert sum(part.share for part in found.values()) == pytest.approx(1)
    assert all(part.low_s <= part.seconds <= part.high_s for part in found.values())
    assert found["queue"].low_s == found["queue"].high_s == 0.04


def test_parts_of_known_size() -> None:
    found = parts(gpus=1)
    host = ENGINE.host_of("llama")
    assert found["front end"].seconds == pytest.approx(2 * host.request_s + (2048 + 8192) * host.token_s)
    assert "links" not in found, "one GPU sends nothing"
    assert found["response"].seconds == pytest.approx(0, abs=1e-9)
    assert "queue" not in found, "the file does not tell"
    assert parts(gpus=8)["links"].seconds > 0


def test_what_to_fix_first_is_the_largest_certain_part() -> None:
    def first(**question: object) -> str:
        return first_step(tuple(parts(**question).values()))

    assert first(gpus=1).startswith("kernels, ")
    assert first(gpus=1, queued_s=5.0).startswith("queue, ")
    assert first(gpus=1, factor=5.0).startswith("response, ")
    assert first(gpus=1, factor=0.2).startswith("kernels, "), "a prediction that is too slow explains nothing"
