"""`make gpu`: each step apart and in its time, a report after each, and a failed step stops nothing; here on a CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from calibrate.measure import probes
from validate.gpu import __main__ as command
from validate.gpu import steps as checks
from validate.gpu.__main__ import cell
from validate.gpu.steps import STEPS, Finding, Scope, Step, finding_of

pytestmark = pytest.mark.slow

NAMES = [step.name for step in STEPS]


def scope_in(folder: Path, num_gpus: int = 0, **options: Any) -> Scope:
    return Scope(folder=str(folder), num_gpus=num_gpus, **options)


def step_named(name: str) -> Step:
    return next(step for step in STEPS if step.name == name)


def test_a_quick_run_on_a_cpu_ends_well_and_says_that_there_was_no_gpu(tmp_path: Path) -> None:
    """The subprocesses as `make gpu` starts them; the other steps are in docs/how-to/gpu.md's report."""
    assert command.main(["--quick", "--steps", "environment,clock", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["ok"], report["failed"]) == (True, [])
    assert [step["name"] for step in report["steps"]] == ["environment", "clock"]
    assert all(step["status"] == "passed" and step["must_show"] and step["otherwise"] for step in report["steps"])
    page = (tmp_path / "report.md").read_text()
    if report["num_gpus"] == 0:
        assert "No GPU was available" in page
        assert "No GPU is available" in page
    assert "## A product for 20 ms and for 2 s" in page


def _fake(name: str, timeout_s: float = 300.0) -> Step:
    return Step(
        name=name,
        title=name,
        must_show="x",
        otherwise="y",
        run=lambda scope: finding_of([], [], {}),
        timeout_s=timeout_s,
    )


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("import time; time.sleep(600)", "timed out", "not ended within 2 s"),
        ("import os, sys; print('last words', file=sys.stderr, flush=True); os._exit(9)", "failed", "last words"),
        ('print(\'{"status": "passed", "lines": ["fine"], "facts": {}}\')', "passed", "fine"),
    ],
)
def test_a_step_that_hangs_or_dies_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, status: str, said: str
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!{command.sys.executable}\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(command.sys, "executable", str(script))
    began_s = time.monotonic()
    finding = command.run_apart(_fake("one", timeout_s=2.0 if status == "timed out" else 300.0), scope_in(tmp_path))
    assert finding.status == status
    assert said in " ".join(finding.lines)
    assert time.monotonic() - began_s < 300


def test_what_a_step_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a step that hangs must not disturb those that come after."""
    script, pid_file = tmp_path / "python", tmp_path / "pid"
    script.write_text(f"#!/bin/sh\nsleep 3000 &\necho $! > {pid_file}\nwait\n")
    script.chmod(0o755)
    monkeypatch.setattr(command.sys, "executable", str(script))
    finding = command.run_apart(_fake("one", timeout_s=1.0), scope_in(tmp_path))
    assert finding.status == "timed out"
    pid = int(pid_file.read_text())
    deadline_s = time.monotonic() + 300
    while time.monotonic() < deadline_s and _is_alive(pid):
        time.sleep(0.05)
    assert not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_failed_step_is_reported_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = {
        "environment": Finding(status="failed", lines=["broken | <b>"]),
        "clock": finding_of(["fine"], [], {"a": 1}),
    }
    monkeypatch.setattr(command, "run_apart", lambda step, scope: findings[step.name])
    assert command.main(["--steps", "environment,clock", "--output", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["ok"], report["failed"]) == (False, ["environment"])
    page = (tmp_path / "report.md").read_text()
    assert "What to do: `nvidia-smi -pm 1`" in page
    assert "- broken \\| &lt;b>" in page
    assert "- fine" in page


def test_a_step_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--steps", "clock,nothing", "--output", str(tmp_path)])
    assert ended.value.code == 2
    assert "--steps: got 'nothing', accepted: some of environment" in capsys.readouterr().err


def test_the_page_says_what_each_step_must_show() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "gpu.md").read_text()
    rows = {line.split(" | ")[0]: line for line in page.splitlines() if line.startswith("| `")}
    for step in STEPS:
        (row,) = [row for names, row in rows.items() if f"`{step.name}`" in names]
        assert row.endswith(f" | {cell(step.must_show)} | {cell(step.otherwise)} |")


def test_steps_that_need_more_gpus_than_there_are_say_so(tmp_path: Path) -> None:
    one, four = scope_in(tmp_path, 1), scope_in(tmp_path, 4)
    for name in ("transport", "pending", "links"):
        assert step_named(name).applies(one) == "one GPU is here: messages need two"
        assert step_named(name).applies(four) is None
    assert step_named("confirm-8").applies(four) == "4 GPUs are here"
    assert step_named("confirm-4").applies(four) is None
    assert step_named("confirm-2").applies(scope_in(tmp_path)) is None
    assert step_named("confirm-4").applies(scope_in(tmp_path)) is not None


def test_what_nvidia_smi_prints_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        "--query-gpu": "0, NVIDIA H100, Disabled, P0, 1980, 1980, 70.0 W, 350.00 W, 700.00 W\n",
        "--query-compute-apps": "GPU-aa, 4711, 500 MiB\n",
    }
    monkeypatch.setattr(checks, "_smi", lambda *words: told.get(words[0].partition("=")[0], "GPU0 X"))
    monkeypatch.setattr(probes, "environment", lambda: {"device": "H100", "num_gpus": 1, "gpus": [], "versions": {}})
    finding = checks.environment(scope_in(tmp_path, 1))
    assert finding.status == "failed"
    assert list(finding.lines[:3]) == [
        "GPU 0: persistence mode is off",
        "GPU 0: its power limit is 350.00 W, by default 700.00 W",
        "other processes use the GPUs",
    ]


def test_on_a_gpu_what_a_step_must_show_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = scope_in(tmp_path, 2)
    lost = [{"chunk": 512, "alone_s": 1e-3, "pending_s": 1.4e-3, "lost": 0.286}]
    monkeypatch.setattr(probes, "beside_receive", lambda *_: lost)
    monkeypatch.setattr(checks, "_setup", lambda *_: None)
    assert checks.pending(two).status == "failed"
    assert checks.pending(scope_in(tmp_path)).status == "passed", "a CPU shows nothing of it"
    state = {"sm_clock_hz": 1.2e9, "power_w": 699.0, "throttled": ["sw_power_cap"]}
    rates = [{"seconds": 0.02, "flops_per_s": 8e14, "at_the_end": None}, {"seconds": 2.0, "at_the_end": state}]
    for ratio, status in ((0.87, "passed"), (0.5, "failed")):
        monkeypatch.setattr(probes, "products", lambda *_, r=ratio: [rates[0], rates[1] | {"flops_per_s": 8e14 * r}])
        finding = checks.clock(two)
        assert finding.status == status
        assert "at 1200 MHz, 699 W, limited by sw_power_cap" in " ".join(finding.lines)
    ring = {"num_ranks": 2, "transport": "gloo through host memory", "total_s": 5.0, "message_s": 1e-3, "right": True}
    monkeypatch.setattr(probes, "ring", lambda *_: ring)
    assert checks.transport(two).lines[0] == "2 ranks are not linked by NCCL"
    monkeypatch.setattr(probes, "kernel_names", lambda *_: {"flash": ["pytorch_flash::flash_fwd_kernel"]})
    assert checks.kernels(two).status == "passed"
    monkeypatch.setattr(probes, "kernel_names", lambda *_: {"flash": ["fmha_cutlassF_f16", "aten::item"]})
    assert len([line for line in checks.kernels(two).lines if line.startswith("flash, alone: ")]) >= 2


def test_the_profiler_tells_flash_from_eager_attention(tmp_path: Path) -> None:
    setup = checks._setup(scope_in(tmp_path), "128")
    found = probes.kernel_names(setup, 64, 64)
    assert any("flash" in name for name in found["flash"])
    assert not any("flash" in name for name in found["eager"])
    assert any("softmax" in name for name in found["eager"])


def test_a_cpu_that_is_too_busy_to_be_calibrated_is_no_failure_and_anything_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> dict[str, Any]:
        raise RuntimeError(said)

    monkeypatch.setattr(checks, "kvrsim", refused)
    said = "gemm rows with a median spread of 28%, accepted: repeatable measurements: at most 25% of their medians"
    finding = checks.calibrate(scope_in(tmp_path))
    assert (finding.status, "28%" in finding.lines[0]) == ("skipped", True)
    with pytest.raises(RuntimeError, match="28%"):
        checks.calibrate(scope_in(tmp_path, 2))
    said = "kvrsim calibrate ended with 70: a bug"
    with pytest.raises(RuntimeError, match="a bug"):
        checks.calibrate(scope_in(tmp_path))
    assert checks.confirm(scope_in(tmp_path), 1).status == "skipped", "there is no profile"


@pytest.mark.parametrize(
    ("rel_error", "ok", "status"), [(0.05, True, "passed"), (0.2, True, "failed"), (0.0, False, "failed")]
)
def test_a_prediction_that_is_far_off_fails_on_a_gpu_and_is_only_shown_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rel_error: float, ok: bool, status: str
) -> None:
    one = {"strategy": "kvr-s", "partition": [9, 7], "predicted_ttft_s": 1.0, "measured_ttft_s": 1.0}
    answer = {"candidates": [one | {"rel_error": rel_error}], "regret": 0.0, "max_logit_error": 0.0, "ok": ok}
    monkeypatch.setattr(checks, "kvrsim", lambda *_, **__: answer)
    (tmp_path / "mine.json").write_text("{}")
    assert checks.confirm(scope_in(tmp_path, 2), 2).status == status
    on_cpu = checks.confirm(scope_in(tmp_path), 2)
    assert on_cpu.status == "passed"
    assert on_cpu.lines[-1].startswith("Not judged")


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    from validate.gpu.steps import kvrsim

    with pytest.raises(RuntimeError, match=r"kvrsim plan ended with 2: .*ctx"):
        kvrsim("plan", "--ctx", "nothing")
