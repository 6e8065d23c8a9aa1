"""Shared rows: they hold no name of the user's, and validate reads a folder of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvrsim.cli import main as cli
from kvrsim.kernels.profile import load_profile
from kvrsim.model.load import config_path

KEYS = {
    *("gpu", "num_gpus", "profile", "engine", "engine_version", "model", "model_type", "strategy", "context_len"),
    *("batch", "cached_prefix", "dtype", "ttft_s", "queued_s", "predicted_s", "low_s", "high_s"),
}


def share(folder: Path, log: str, *options: str) -> dict[str, object]:
    (folder / "acme-cluster-7.csv").write_text(log)
    command = ["calibrate", "prefills", str(folder / "acme-cluster-7.csv"), "--share", str(folder / "row.json")]
    assert cli.main([*command, *options]) == 0
    content: dict[str, object] = json.loads((folder / "row.json").read_text())
    return content


LOG = "model,num_gpus,context_len,ttft_ms,host\n{0},1,2048,60,node-acme\n{0},1,8192,300,node-acme\n"


def test_the_file_has_no_name_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "acme-secret-model"
    model.mkdir()
    shutil.copy(config_path("llama-3.1-8b", "model"), model / "config.json")
    profile = tmp_path / "acme-profile.json"
    profile.write_text(json.dumps({}))
    load_profile("h100-flash").write(profile)
    content = share(tmp_path, LOG.format(model), "--profile", str(profile), "--engine", "vllm")
    text = json.dumps(content)
    assert "acme" not in text
    assert str(tmp_path) not in text
    assert "shared:" in capsys.readouterr().out
    rows = content["rows"]
    assert isinstance(rows, list)
    assert {*rows[0]} == KEYS
    assert (rows[0]["model"], rows[0]["model_type"], rows[0]["engine"]) == (None, "llama", "vllm")
    assert (rows[1]["context_len"], rows[1]["ttft_s"]) == (8192, 0.3)
    assert rows[1]["low_s"] < rows[1]["predicted_s"] < rows[1]["high_s"]


def test_validate_reads_a_folder_of_shared_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    options = ("--profile", "h100-flash", "--engine", "vllm")
    first = share(tmp_path, LOG.format("meta-llama/Llama-3.1-8B-Instruct"), *options)
    assert first["rows"][0]["model"] == "llama-3.1-8b"  # type: ignore[index]
    for name in ("a", "b"):
        (folder / f"{name}.json").write_text(json.dumps(first))
    capsys.readouterr()
    limits = ("--max-median-error", "100%", "--min-coverage", "0%")
    assert cli.main(["validate", str(folder), "--engine", "vllm", *limits, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 4
    for row, shared in zip(rows, 2 * first["rows"], strict=True):  # type: ignore[operator]
        assert row["measured_s"] == shared["ttft_s"]
        assert row["predicted_s"] == pytest.approx(shared["predicted_s"], rel=1e-3), "the same profile by default"
    assert cli.main(["validate", "prefills", str(tmp_path / "rows" / "none"), "--engine", "vllm"]) == 2
    (tmp_path / "empty").mkdir()
    assert cli.main(["validate", str(tmp_path / "empty")]) == 2
    assert "a folder with files .json" in capsys.readouterr().err
