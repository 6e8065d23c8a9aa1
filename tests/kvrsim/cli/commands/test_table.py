"""`kvrsim table` and `--table` of plan and simulate: JSON, text, mistakes, and files after a kill or Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvrsim.cli import main as cli
from kvrsim.execution import Execution
from planner import processes
from planner.table import build
from planner.table.build import Draft, draft_of
from tests.building.commands import answer, refusal, run

ROOT = Path(__file__).resolve().parents[4]
BUILD = ("table", "build", "--gpus", "2", "--ctx", "512:1536:512", "--profile", "roofline", "--jobs", "1")
LONG = ("table", "build", "--gpus", "4", "--ctx", "1k:8k:256", "-o", "table.json")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def table(capsys: pytest.CaptureFixture[str]) -> str:
    """The file of a small table."""
    assert cli.main([*BUILD, "-o", "table.json"]) == 0
    capsys.readouterr()
    return "table.json"


def test_build(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, *BUILD, "-o", "table.json", "--json")
    answer_json = json.loads(out)
    assert (answer_json["output"], answer_json["entries"]) == ("table.json", 3)
    assert "roofline" in err
    content = json.loads(Path("table.json").read_text())
    assert content["schema_version"] == 1
    assert {"model", "profile", "cluster", "attention", "dtype"} <= set(content["setting"])
    assert content["kvrsim_version"]
    keys = {"num_gpus", "context_len", "fractions", "partition", "ttft_s", "ttft_low_s", "ttft_high_s"}
    for entry in content["entries"]:
        assert keys | {"speedup_over_tsp", "speedup_over_even", "gap"} <= set(entry)
        assert sum(entry["partition"]) == entry["context_len"]
    assert [entry["context_len"] for entry in content["entries"]] == [512, 1024, 1536]


def test_lookup(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    for ctx, source in (("1k", "exact"), ("700", "interpolated"), ("100", "extrapolated"), ("1m", "extrapolated")):
        out, err = run(capsys, "table", "lookup", table, "--gpus", "2", "--ctx", ctx, "--json")
        content = json.loads(out)
        assert content["source"] == source
        assert (content["num_gpus"], sum(content["partition"])) == (2, content["context_len"])
        assert sum(content["fractions"]) == pytest.approx(1)
        assert bool(content["warnings"]) == (source == "extrapolated") == ("note" in err)


def test_simulate_and_plan(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--gpus", "2", "--ctx", "700", "--profile", "roofline", "--table", table)
    entry = answer(capsys, "table", "lookup", table, "--gpus", "2", "--ctx", "700")
    result = answer(capsys, "simulate", "--strategy", "kvr-p", *arguments)
    assert (result["strategy"], result["partition"]) == ("kvr-p", entry["partition"])
    plan = answer(capsys, "plan", "--strategies", "kvr-s,kvr-p", *arguments)
    assert [row["strategy"] for row in plan["strategies"]] == ["kvr-s", "kvr-p"]
    assert plan["strategies"][1]["partition"] == entry["partition"]
    assert not any("kvr-p" in warning for warning in plan["warnings"])
    other = ("--gpus", "2", "--ctx", "100", "--model", "llama-13b", "--table", table)
    plan = answer(capsys, "plan", "--strategies", "kvr-p", *other)
    notes = [warning for warning in plan["warnings"] if "kvr-p" in warning]
    assert "model llama-7b, not llama-13b" in notes[0]
    assert "profile roofline, not a100-eager" in notes[0]
    assert "extrapolated" in notes[1]
    result = answer(capsys, "simulate", "--strategy", "kvr-p", "--gpus", "2", "--ctx", "512", "--partition", "300,212")
    assert result["partition"] == [300, 212]


MISTAKES = [
    ((*BUILD, "-o", "missing/table.json"), "--output"),
    ((*BUILD, "-o", "t.json", "--dask-address", "tcp://127.0.0.1:1"), "--dask-address"),
    ((*BUILD, "-o", "t.json", "--gpus", "1024"), "--gpus"),
    (("table", "lookup", "none.json", "--gpus", "2", "--ctx", "1k"), "TABLE"),
    (("table", "lookup", "other.json", "--gpus", "2", "--ctx", "1k"), "format"),
    (("table", "lookup", "table.json", "--gpus", "3", "--ctx", "1k"), "--gpus"),
    (("table", "show", "cut.json"), "cut.json"),
    (("simulate", "--strategy", "kvr-p", "--gpus", "2", "--ctx", "1k", "--table", "cut.json"), "--table"),
]


@pytest.mark.parametrize(("arguments", "named"), MISTAKES, ids=lambda value: " ".join(value)[:60])
def test_mistakes_take_one_line(
    arguments: tuple[str, ...], named: str, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("folder").mkdir()
    Path("other.json").write_text('{"a": 1}')
    Path("cut.json").write_text(Path(table).read_text()[:500])
    assert named in refusal(capsys, *arguments)


@pytest.mark.parametrize("backend", ["dask", "ray"])
def test_a_backend_that_is_not_installed(
    backend: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.util.joblib", None)
    line = refusal(capsys, *BUILD, "-o", "table.json", "--pool", backend)
    assert f"--pool: got '{backend}'" in line
    assert "pip install" in line


def test_a_time_budget_writes_complete_entries_and_resumes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(capsys, *BUILD, "-o", "whole.json")
    now = time.time()

    def slow(execution: Execution) -> Draft:
        nonlocal now
        now += 50
        return draft_of(execution)

    words = [*BUILD, "-o", "table.json", "--time-budget", "100s"]
    with monkeypatch.context() as patch:
        patch.setattr(build, "draft_of", slow)
        patch.setattr(processes.time, "time", lambda: now)
        content = answer(capsys, *words)
    assert (content["entries"], content["left_out"]) == (2, 1)
    assert Path("table.json.partial").exists()
    assert answer(capsys, *words)["left_out"] == 0
    assert Path("table.json").read_bytes() == Path("whole.json").read_bytes()
    assert not Path("table.json.partial").exists()


def test_interrupted_work_resumes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main([*BUILD, "-o", "whole.json"]) == 0
    drafts = []

    def interrupted(execution: Execution) -> Draft:
        if len(drafts) == 2:
            raise KeyboardInterrupt
        drafts.append(draft_of(execution))
        return drafts[-1]

    words = [*BUILD, "-o", "table.json"]
    with monkeypatch.context() as patch:
        patch.setattr(build, "draft_of", interrupted)
        assert cli.main(words) == 130
    line = "kvrsim: interrupted: table.json.partial keeps what was done; the same command resumes\n"
    assert capsys.readouterr().err.endswith(line)
    assert not Path("table.json").exists()
    assert cli.main([*words, "--batch", "2"]) == 2
    assert "accepted: the journal of the same work" in capsys.readouterr().err
    assert cli.main(words) == 0
    assert "table.json.partial: 2 entries searched before" in capsys.readouterr().err
    assert Path("table.json").read_bytes() == Path("whole.json").read_bytes()
    assert not Path("table.json.partial").exists()


# A background job of a shell, and every process that it starts, ignores SIGINT by default.
START = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import kvrsim.cli.main as m; m.run()"


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start a command in a new process group."""
    command = [sys.executable, "-c", START, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for_the_end_of_its_group(group: int) -> None:
    """Wait until the workers in this process group have ended; their parent has already ended."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.killpg(group, 0)
            time.sleep(0.1)


def children(pid: int) -> list[str]:
    """Command lines of the children of a process."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [Path(f"/proc/{child}/cmdline").read_text() for child in pids if Path(f"/proc/{child}").exists()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's account of processes")
@pytest.mark.parametrize(("number", "after_s"), [(signal.SIGKILL, 0.0), (signal.SIGTERM, 0.4), (signal.SIGINT, 0.4)])
def test_workers_that_are_starting_end_with_their_parent(number: int, after_s: float) -> None:
    """Workers watch their parent from their start, before their first call."""
    process = start(*LONG, "--jobs", "2")
    while not any("loky" in line and "tracker" not in line for line in children(process.pid)):
        assert process.poll() is None
        time.sleep(0.005)
    time.sleep(after_s)
    process.send_signal(number)
    _, err = process.communicate()  # until no process has its standard output open
    wait_for_the_end_of_its_group(process.pid)
    assert not Path("table.json").exists()
    if number == signal.SIGINT:
        kept = "table.json.partial keeps what was done; the same command resumes"
        none = "nothing is kept; the same command begins anew"
        says = kept if Path("table.json.partial").exists() else none
        assert (process.returncode, err) == (130, f"kvrsim: interrupted: {says}\n")
