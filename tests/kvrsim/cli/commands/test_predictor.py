"""`kvrsim predictor`: building, lookups, and one-line errors."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.building.commands import answer, refusal, screen

BUILD = shlex.split("predictor build llama-7b a100-nvlink --gpus 2 --ctx 1k --batch 2 --jobs 1 --strategy tp")


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The file of a small predictor."""
    monkeypatch.chdir(tmp_path)
    content = answer(capsys, *BUILD, "-o", "ttft.json")
    assert (content["output"], content["strategies"], content["longest_context"]) == ("ttft.json", ["tp"], 1024)
    return "ttft.json"


def test_lookup(built: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = ("--ctx", "900", "--cached-prefix", "512")
    content = answer(capsys, "predictor", "lookup", built, *prompt)
    assert list(content)[:4] == ["ttft_s", "ttft_low_s", "ttft_high_s", "strategy"]
    assert content["num_gpus"] == 2
    assert {"model", "cluster", "profile", "engine"} < set(content)
    simulated = answer(capsys, "simulate", "--strategy", "tp", "--gpus", "2", *prompt)
    assert content["ttft_s"] == pytest.approx(simulated["ttft_s"], rel=0.03)
    out = screen(capsys, "predictor", "lookup", built, "--ctx", "900", "--batch", "2")
    assert out.startswith("TTFT: tp, ")
    assert "2 GPUs of" in out
    line = refusal(capsys, "predictor", "lookup", built, "--ctx", "1k", "--cached-prefix", "1k")
    assert "--cached-prefix: got " in line


@pytest.mark.parametrize(
    "words",
    [
        [*BUILD, "-o", "missing/ttft.json"],
        [*BUILD, "--strategy", "nonsense", "-o", "ttft.json"],
        ["predictor", "lookup", "empty.json", "--ctx", "1k"],
    ],
)
def test_mistakes(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.json").write_text("{}")
    assert refusal(capsys, *words)
