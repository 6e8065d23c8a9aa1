"""Bad input: exit code 2 and one line that names the argument, its value and what is accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrsim.cli import main as cli

PLAN = ("plan", "--gpus", "2", "--ctx", "512")
SIMULATE = ("simulate", "--strategy", "kvr-e", "--gpus", "2", "--ctx", "512")

MISTAKES = [
    (("plna",), "plna"),
    (("profiles",), "profiles"),
    (("profiles", "shwo"), "shwo"),
    (("--frobnicate",), "--frobnicate"),
    (("plan",), "--ctx"),
    (("plan", "--ctx"), "--ctx"),
    (("plan", "--gpu", "8", "--ctx", "1k"), "--gpu"),
    ((*PLAN, "more"), "more"),
    ((*PLAN, "--json=yes"), "--json"),
    (("plan", "--gpus", "0", "--ctx", "512"), "--gpus"),
    (("plan", "--gpus", "-1", "--ctx", "512"), "--gpus"),
    (("plan", "--gpus", "two", "--ctx", "512"), "--gpus"),
    (("plan", "--gpus", "2.5", "--ctx", "512"), "--gpus"),
    (("plan", "--gpus", "1e9", "--ctx", "512"), "--gpus"),
    (("plan", "--gpus", "", "--ctx", "512"), "--gpus"),
    (("plan", "--gpus", "8", "--ctx", "4"), "--gpus"),
    (("plan", "--ctx", "0"), "--ctx"),
    (("plan", "--ctx", "-5"), "--ctx"),
    (("plan", "--ctx", "sixteen"), "--ctx"),
    (("plan", "--ctx", "nan"), "--ctx"),
    (("plan", "--ctx", "inf"), "--ctx"),
    (("plan", "--ctx", "16kB"), "--ctx"),
    (("plan", "--ctx", "1.0001k"), "--ctx"),
    (("plan", "--ctx", "9" * 100), "--ctx"),
    ((*PLAN, "--model", "gpt-99"), "--model"),
    ((*PLAN, "--model", ""), "--model"),
    ((*PLAN, "--model", "truncated.json"), "--model"),
    ((*PLAN, "--model", "list.json"), "--model"),
    ((*PLAN, "--model", "empty"), "--model"),
    ((*PLAN, "--model", "binary.json"), "--model"),
    ((*PLAN, "--profile", "b300"), "--profile"),
    ((*PLAN, "--profile", "truncated.json"), "--profile"),
    ((*PLAN, "--profile", "profile_nan.json"), "attention.eager.flops_per_s"),
    ((*PLAN, "--profile", "profile_old.json"), "schema_version"),
    ((*PLAN, "--profile", "empty"), "--profile"),
    ((*PLAN, "--cluster", "moon"), "--cluster"),
    ((*PLAN, "--cluster", "truncated.json"), "--cluster"),
    ((*PLAN, "--cluster", "cluster_nan.json"), "--cluster"),
    ((*PLAN, "--link-bandwidth", "10"), "--link-bandwidth"),
    ((*PLAN, "--link-bandwidth", "0GB/s"), "--link-bandwidth"),
    ((*PLAN, "--link-bandwidth", "infGB/s"), "--link-bandwidth"),
    ((*PLAN, "--link-latency", "5"), "--link-latency"),
    ((*PLAN, "--link-latency", "-5us"), "--link-latency"),
    ((*PLAN, "--link-latency", "nan"), "--link-latency"),
    ((*PLAN, "--topology", "torus"), "--topology"),
    ((*PLAN, "--topology", "nodes"), "--topology"),
    ((*PLAN, "--attention", "flesh"), "--attention"),
    ((*PLAN, "--attention", "flash", "--profile", "a100-eager"), "--attention"),
    ((*PLAN, "--attention", "flesh", "--profile", "roofline"), "--attention"),
    ((*PLAN, "--batch", "0"), "--batch"),
    ((*PLAN, "--cached-prefix", "512"), "--cached-prefix"),
    ((*PLAN, "--cached-prefix", "-1"), "--cached-prefix"),
    ((*PLAN, "--dtype", "int4"), "--dtype"),
    ((*PLAN, "--memory-fraction", "90"), "--memory-fraction"),
    ((*PLAN, "--memory-fraction", "0"), "--memory-fraction"),
    ((*PLAN, "--memory-fraction", "x"), "--memory-fraction"),
    ((*PLAN, "--dtype", "fp8", "--profile", "roofline"), "--dtype"),
    ((*PLAN, "--strategies", "tsp,,kvr-s"), "--strategies"),
    ((*PLAN, "--strategies", "tsp,rank"), "--strategies"),
    ((*PLAN, "--strategies", "kvr-p"), "--table"),
    ((*PLAN, "--strategies", "kvr-p", "--table", "missing.json"), "--table"),
    ((*PLAN, "--strategies", "tp2+pp2+cp2+cp1"), "--strategies: got 'tp2+pp2+cp2+cp1'"),
    ((*PLAN, "--prefix-placement", "remote:fast"), "--prefix-placement: got 'remote:fast'"),
    ((*PLAN, "--prefix-placement", "sharded:5GB/s"), "--prefix-placement: got 'sharded:5GB/s'"),
    ((*PLAN, "--method", "magic"), "--method"),
    ((*PLAN, "--stride", "0"), "--stride"),
    ((*PLAN, "--stride", "4000"), "--stride"),
    ((*PLAN, "--seed", "-1"), "--seed"),
    ((*PLAN, "--trace", "missing/trace.json"), "--trace"),
    ((*PLAN, "--trace", "empty"), "--trace"),
    ((*PLAN, "--trace", ""), "--trace"),
    ((*PLAN, "--plot", "missing/gantt.png"), "--plot"),
    ((*PLAN, "--plot", "gantt.gif"), "--plot"),
    ((*PLAN, "--plot", "gantt"), "--plot"),
    (("simulate", "--gpus", "2", "--ctx", "512"), "--strategy"),
    (("simulate", "--strategy", "rank", "--gpus", "2", "--ctx", "512"), "--strategy"),
    (("simulate", "--strategy", "tsp,kvr-e", "--gpus", "2", "--ctx", "512"), "--strategy"),
    ((*SIMULATE, "--partition", "256,255"), "--partition"),
    ((*SIMULATE, "--partition", "512"), "--partition"),
    ((*SIMULATE, "--partition", "512,0"), "--partition"),
    ((*SIMULATE, "--partition", "500,a"), "--partition"),
    ((*SIMULATE, "--partition", "500,,12"), "--partition"),
    ((*SIMULATE, "--executor", "threads"), "--executor"),
    ((*SIMULATE, "--executor", "batch", "--trace", "trace.json"), "--executor"),
    (("profiles", "show"), "NAME|PATH"),
    (("profiles", "show", "nothing"), "nothing"),
    (("models", "show", "nothing"), "nothing"),
    (("clusters", "show", "nothing"), "nothing"),
    (("validate", "published", "--report", "missing/report.md"), "--report"),
]


@pytest.fixture(autouse=True)
def _among_files_that_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("truncated.json").write_text('{"model_type": "llama", "hidden_size": ')
    Path("list.json").write_text("[1, 2]")
    Path("binary.json").write_bytes(bytes(range(256)))
    profile = {"schema_version": 2, "name": "x", "gpu": "x", "description": "x", "not_covered": "x"}
    rates = '{"gemm": {"flops_per_s": NaN}, "attention": {"eager": {"flops_per_s": Infinity}}}'
    Path("profile_nan.json").write_text(json.dumps(profile)[:-1] + f', "kernels": {rates}, "provenance": {{}}}}')
    Path("profile_old.json").write_text(json.dumps(profile | {"schema_version": 1}))
    cluster = {"name": "x", "gpu": "a100-80gb", "num_gpus": 8, "topology": "switch"}
    link = {"name": "x", "bandwidth_bytes_per_s": float("nan"), "latency_s": 0}
    Path("cluster_nan.json").write_text(json.dumps(cluster | {"link": link}))


@pytest.mark.parametrize(("arguments", "named"), MISTAKES, ids=lambda value: " ".join(value)[:60])
def test_mistakes_take_one_line(arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvrsim: error: ")
    assert err.count("\n") == 1
    assert len(err) < 500
    assert named in err
    assert "accepted" in err


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # file modes do not stop root
    assert cli.main([*PLAN, "--trace", "trace.json"]) == 2
    assert "--trace: got 'trace.json'" in capsys.readouterr().err


def test_devices_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """A file is renamed into place, which would replace /dev/null itself."""
    assert cli.main([*PLAN, "--trace", "/dev/null"]) == 2
    assert "--trace" in capsys.readouterr().err
