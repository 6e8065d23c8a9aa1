"""`kvrsim validate ROWS.csv`: pass or fail by limits, exit codes, and one line for every mistake."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from calibrate.prefills.fit import PrefillCheck, RowCheck
from calibrate.prefills.verdict import AccuracyLimits
from kvrsim.cli import main as cli
from tests.building.commands import answer, refusal

# Measured on vLLM of late 2023, whose record predicts them well; the GPU says which profile is checked.
ROWS = """\
model,accelerator,gpus,tokens,ttft_ms
llama-2-70b,H100-SXM-80GB,2,512,83.8
llama-2-70b,H100-SXM-80GB,2,2048,310.3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with rows.csv."""
    (tmp_path / "rows.csv").write_text(ROWS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


CHECKED = ("validate", "rows.csv", "--engine", "vllm-2023", "--columns", "context_len=tokens")


def test_rows_pass_and_the_first_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*CHECKED]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Pass: the predictions of 2 rows meet every limit: median error ")
    assert "profile:             h100-flash, engine vllm-2023" in out


def test_rows_fail_by_a_limit_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, *CHECKED, "--max-median-error", "0.1%", "--min-coverage", "0%", code=1)
    assert not result["ok"]
    assert [(limit["name"], limit["limit"], limit["ok"]) for limit in result["limits"]] == [
        ("median_error", 0.001, False),
        ("coverage", 0.0, True),
    ]
    assert result["limits"][0]["value"] == result["median_ape"]
    assert result["n"] == len(result["rows"]) == 2
    assert cli.main([*CHECKED, "--max-median-error", "0.1%"]) == 1
    assert capsys.readouterr().out.startswith("Fail: the predictions of 2 rows miss ")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("validate", "none.csv"), "none.csv"),
        (("validate", "rows.csv"), "context_len"),
        ((*CHECKED, "--max-median-error", "10"), "a share of at most 100%"),
        ((*CHECKED, "--max-interval-score", "0"), "max_interval_score"),
        ((*CHECKED, "--profile", "roofline"), "roofline"),
    ],
)
def test_mistakes_give_one_line(words: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in refusal(capsys, *words)


def test_without_a_gpu_the_profile_is_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rows.csv").write_text("model,tokens,ttft_s\nllama-2-7b,512,1\n", encoding="utf-8")
    assert "profile" in refusal(capsys, *CHECKED)


def _check(measured_s: float, low_s: float, high_s: float) -> RowCheck:
    return RowCheck(case="", measured_s=measured_s, predicted_s=1.0, low_s=low_s, high_s=high_s)


def test_limits_decide_in_their_direction() -> None:
    """At a limit, predictions meet it."""
    predictions = PrefillCheck(rows=(_check(0.5, 0.9, 1.1), _check(1.0, 0.5, 2.0), _check(1.25, 0.5, 2.0)))
    limits = AccuracyLimits(median_error=0.2, largest_error=1.0, coverage=2 / 3, interval_score=10.0)
    assert all(limit.ok for limit in limits.check(predictions))
    stricter = AccuracyLimits(median_error=0.19, largest_error=0.99, coverage=0.7, interval_score=0.5)
    assert not any(limit.ok for limit in stricter.check(predictions))
    assert AccuracyLimits().check(predictions) == ()


def test_the_interval_score_is_width_and_ten_times_the_miss() -> None:
    assert _check(1.0, 0.5, 2.0).interval_score == pytest.approx(math.log(4))
    assert _check(4.0, 0.5, 2.0).interval_score == pytest.approx(math.log(4) + 10 * math.log(2))
    assert _check(0.25, 0.5, 2.0).interval_score == pytest.approx(math.log(4) + 10 * math.log(2))
