"""The command line: options, JSON, and one line with exit code 2 for every mistake."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvrsim.cli import main as cli
from kvrsim.errors import EXIT_NOT_WRITTEN
from kvrsim.strategies import STRATEGIES
from tests.building.commands import answer

ROOT = Path(__file__).resolve().parents[3]
PLAN = ("plan", "--gpus", "2", "--ctx", "512")
SIMULATE = ("simulate", "--strategy", "kvr-e", "--gpus", "2", "--ctx", "512")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    plan = answer(capsys, "plan", "--gpus", "4", "--ctx", "4k")
    assert {"model", "profile", "num_gpus", "context_len", "best", "strategies", "bounds"} <= set(plan)
    assert (plan["model"], plan["num_gpus"], plan["context_len"]) == ("llama-7b", 4, 4096)
    assert {row["strategy"] for row in plan["strategies"]} >= {"tsp", "kvr-s", "zigzag", "tp", "pp", "tp2+kvr-s"}
    assert [row["ttft_s"] for row in plan["strategies"]] == sorted(row["ttft_s"] for row in plan["strategies"])
    for row in plan["strategies"]:
        keys = {"strategy", "partition", "ttft_s", "speedup_over_tsp", "exposed_comm_s", "peak_bytes", "fits"}
        assert keys <= set(row)
        assert sum(row["partition"]) == 4096
        assert len(row["peak_bytes"]) == (1 if row["strategy"] == "single" else 4)
        if row["strategy"] in STRATEGIES and "pp" not in row["strategy"]:
            assert len(row["partition"]) == (1 if row["strategy"] in ("single", "tp") else 4)
    best = plan["best"]
    assert {"strategy", "partition", "ttft_s", "ttft_low_s", "ttft_high_s"} <= set(best)
    assert best["ttft_low_s"] <= best["ttft_s"] <= best["ttft_high_s"]
    assert best["ttft_s"] <= 1.02 * min(row["ttft_s"] for row in plan["strategies"] if row["fits"])
    assert set(plan["bounds"]) >= {"ttft_star_s", "ttft_no_comm_s", "lower_bound_s", "gap"}
    assert plan["bounds"]["gap"] >= 0
    assert set(plan["search"]) >= {"method", "evaluations", "seconds"}
    assert all(isinstance(warning, str) for warning in plan["warnings"])


def test_simulate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(capsys, "simulate", "--strategy", "tsp", "--gpus", "2", "--ctx", "8k", "--partition", "5000,3192")
    assert {"strategy", "partition", "ttft_s", "per_rank", "warnings"} <= set(result)
    assert (result["strategy"], result["partition"]) == ("tsp", [5000, 3192])
    for rank in result["per_rank"]:
        assert {"compute_s", "wait_s", "sent_bytes", "peak_bytes"} <= set(rank)
        assert math.isclose(rank["compute_s"] + rank["wait_s"], result["ttft_s"], rel_tol=0.1)


def test_trace_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (PLAN, SIMULATE):
        assert cli.main([*arguments, "--trace", "trace.json", "--plot", "gantt.svg", "--json"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)
        assert err == "kvrsim: written: trace.json\nkvrsim: written: gantt.svg\n"
        assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert "<svg" in (tmp_path / "gantt.svg").read_text()
        assert sorted(os.listdir(tmp_path)) == ["gantt.svg", "trace.json"]


def test_validate_elsewhere_than_in_a_checkout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "validate", None)
    monkeypatch.delitem(sys.modules, "validate.published", raising=False)
    monkeypatch.delitem(sys.modules, "validate.published.compare", raising=False)
    assert cli.main(["validate", "published", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "checkout" in err


def test_validate_published_passes_on_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"source": "a paper", "case": "one", "reported_s": 2.0, "simulated_s": 1.0, "rel_error": -0.5}
    group = {"n": 1, "mape": 0.5, "median_ape": 0.5, "max_ape": 0.5}
    result = {"rows": [row | {"used_for_calibration": False}], "calibration": {"n": 0}, "held_out": group}
    result |= {"all": group, "ok": False}

    class Published:
        @staticmethod
        def run() -> dict[str, Any]:
            return result

    monkeypatch.setitem(sys.modules, "validate.published.compare", Published)
    assert cli.main(["validate", "published", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == result
    assert cli.main(["validate", "published"]) == 1
    assert "held out: n 1, mape 50.0%" in capsys.readouterr().out


def run_for_real(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "from kvrsim.cli.main import run; run()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)} | environment, capture_output=True, text=True, check=False
    )


def test_a_terminal_of_plain_ascii_gets_its_table() -> None:
    done = run_for_real(*PLAN, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a POSIX pipe")
def test_a_reader_that_has_gone_is_no_error() -> None:
    command = [sys.executable, "-c", "from kvrsim.cli.main import run; run()", "models", "show", "llama-7b"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (cli.EXIT_CLOSED_PIPE, "")


CLOSED_STREAMS = [
    ("--version >&-", 0),
    ("table build --gpus 2 --ctx 512:1k:512 --profile roofline --jobs 2 -o t.json >&- 2>&-", 0),
    ("plan --frobnicate 2>/dev/full", cli.EXIT_WRONG_USE),
    ("models list >/dev/full", EXIT_NOT_WRITTEN),
]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("words", "code"), CLOSED_STREAMS)
def test_closed_and_full_streams_change_no_exit_code_and_no_file(words: str, code: int, tmp_path: Path) -> None:
    """The next opened file gets the descriptor of a closed stream; printed text must not go into this file."""
    command = f"exec {sys.executable} -c 'from kvrsim.cli.main import run; run()' {words}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert ("standard output" in done.stderr) == (code == EXIT_NOT_WRITTEN)
    assert "bug in kvrsim" not in done.stderr
    if "t.json" in words:
        assert os.listdir(tmp_path) == ["t.json"]
        assert json.loads((tmp_path / "t.json").read_text())["entries"]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("oh\nno"), 70, "bug in kvrsim"),
        (OSError(28, "No space left on device"), 74, "No space left"),
    ],
)
def test_other_ends_take_one_line_too(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: object) -> None:
        raise error

    monkeypatch.setattr("kvrsim.model.load.builtin_models", fails)
    assert cli.main(["models", "list"]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


def test_an_interrupt_in_exec_ends_with_its_code(tmp_path: Path) -> None:
    """Python ends a module by SIGINT after an interrupt in text that a library executes, even if it is caught."""
    code = """from kvrsim.cli import main
main.app = lambda **_: exec("raise KeyboardInterrupt")
main.run()
"""
    (tmp_path / "interrupted.py").write_text(code)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == cli.EXIT_INTERRUPTED
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("command", "threads"), [("plan", "1"), ("engines", "1"), ("calibrate", "None")])
def test_commands_that_do_not_measure_start_no_threads_of_numpy(command: str, threads: str) -> None:
    code = "import os; from kvrsim.cli import main; main.main = lambda _: print(os.environ.get('OPENBLAS_NUM_THREADS'))"
    whole = [sys.executable, "-c", f"{code}; main.run()", command]
    done = subprocess.run(whole, env={"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True)
    assert done.stdout.strip() == threads, done.stderr
