"""`make gpu`: a report after each step, and the next step runs after a failure; tested on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from validate import gpu, report
from validate.gpu import Finding, Machine
from validate.report import CommandError


def machine(folder: Path, num_gpus: int = 0) -> Machine:
    return Machine(folder=folder, num_gpus=num_gpus, quick=True)


@pytest.mark.slow
def test_a_quick_run_on_a_cpu_writes_a_report(tmp_path: Path) -> None:
    """The test uses the commands of `make gpu`."""
    assert gpu.main(["--quick", "--steps", "environment,long-context", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "report.md").read_text()
    assert "No GPU was available" in page
    assert all(f"| {step} | passed |" in page for step in ("environment", "long-context"))


def test_a_failed_step_is_reported_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(machine: Machine) -> Finding:
        raise CommandError("broken | <b>")

    def works(machine: Machine) -> Finding:
        return Finding(lines=["fine"])

    monkeypatch.setattr(gpu, "STEPS", {"breaks": breaks, "works": works})
    assert gpu.main(["--output", str(tmp_path / "new")]) == 1
    page = (tmp_path / "new" / "report.md").read_text()
    assert "CommandError: broken | <b>" in page
    assert "| works | passed |" in page


def test_a_step_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--steps", "links,nothing", "--output", str(tmp_path)])
    assert ended.value.code == 2
    assert "--steps: got 'nothing', accepted: some of environment" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import time; time.sleep(600)", "has not ended within 1 s"),
        ("import os, sys; print('last words', file=sys.stderr, flush=True); os._exit(9)", "ended with 9: last words"),
        ("print('no object')", "printed no JSON"),
    ],
)
def test_a_command_that_hangs_dies_or_prints_no_json_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!{report.sys.executable}\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(report.sys, "executable", str(script))
    with pytest.raises(CommandError, match=message):
        report.kvrsim("plan", timeout_s=1.0 if "sleep" in body else 300.0)


def test_nvidia_smi_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = {
        "--query-gpu": ["0, NVIDIA H100, Disabled, P0, 1980, 70.0 W, 350.00 W, 700.00 W"],
        "--query-compute-apps": ["GPU-aa, 4711, 500 MiB"],
    }
    monkeypatch.setattr(gpu, "_smi", lambda *words: output.get(words[0].partition("=")[0], ["GPU0 X"]))
    assert list(gpu.environment(machine(tmp_path, 1)).faults) == [
        "other processes use the GPUs",
        "GPU 0: persistence mode is off",
        "GPU 0: its power limit is 350.00 W, by default 700.00 W",
    ]


def test_a_cpu_that_is_not_steady_is_no_failure_and_anything_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> dict[str, Any]:
        raise CommandError(message)

    monkeypatch.setattr(gpu, "kvrsim", refused)
    message = "gemm rows with a median spread of 28%, accepted: repeatable measurements: at most 25% of their medians"
    assert gpu.calibrate(machine(tmp_path)).status == "skipped"
    with pytest.raises(CommandError, match="28%"):
        gpu.calibrate(machine(tmp_path, 2))
    assert gpu.confirm(machine(tmp_path)).status == "skipped", "there is no profile"
    assert gpu.links(machine(tmp_path, 1)).status == "skipped", "there is no second GPU"


@pytest.mark.parametrize(("rel_error", "ok", "faults"), [(0.05, True, 0), (0.2, True, 2), (0.0, False, 2)])
def test_a_prediction_that_is_far_off_fails_on_a_gpu_and_is_only_shown_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rel_error: float, ok: bool, faults: int
) -> None:
    one = {"strategy": "kvr-s", "rel_error": rel_error}
    answer = {"candidates": [one], "regret": 0.0, "ok": ok, "reasons": [] if ok else ["regret"]}
    monkeypatch.setattr(gpu, "kvrsim", lambda *_, **__: answer)
    (tmp_path / "mine.json").write_text("{}")
    assert len(gpu.confirm(machine(tmp_path, 2)).faults) == faults, "on one GPU and on two"
    assert gpu.confirm(machine(tmp_path)).status == "passed"
