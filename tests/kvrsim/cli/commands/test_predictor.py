"""`kvrsim predictor`: build, look up, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrsim.cli import main as cli

BUILD = [
    "predictor",
    "build",
    "llama-7b",
    "a100-nvlink",
    "--gpus",
    "2",
    "--ctx",
    "1k",
    "--batch",
    "2",
    "--jobs",
    "1",
    "--strategy",
    "tp",
]


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """A small predictor's file."""
    monkeypatch.chdir(tmp_path)
    assert cli.main([*BUILD, "-o", "ttft.json", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["output"], told["strategies"], told["longest_context"]) == ("ttft.json", ["tp"], 1024)
    return "ttft.json"


def test_lookup(built: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["predictor", "lookup", built, "--ctx", "900", "--cached-prefix", "512", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told)[:4] == ["ttft_s", "ttft_low_s", "ttft_high_s", "strategy"]
    assert told["num_gpus"] == 2
    assert {"model", "cluster", "profile", "engine"} < set(told)
    simulate = ("simulate", "--strategy", "tp", "--gpus", "2", "--ctx", "900", "--cached-prefix", "512", "--json")
    assert cli.main([*simulate]) == 0
    assert told["ttft_s"] == pytest.approx(json.loads(capsys.readouterr().out)["ttft_s"], rel=0.03)
    assert cli.main(["predictor", "lookup", built, "--ctx", "900", "--batch", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("TTFT: tp, ")
    assert "2 GPUs of" in out


def test_build_refuses_before_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*BUILD, "-o", "missing/ttft.json"]) == 2
    assert cli.main([*BUILD, "--strategy", "nonsense", "-o", "ttft.json"]) == 2
    Path("ttft.json").write_text("{}")
    assert cli.main(["predictor", "lookup", "ttft.json", "--ctx", "1k"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_outside_is_one_line(built: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["predictor", "lookup", built, "--ctx", "1k", "--cached-prefix", "1k"]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith("kvrsim: error: --cached-prefix: got ")
