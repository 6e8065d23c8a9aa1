"""What else a machine does is noticed, by measures that suit its size."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from kvrsim.runtime import host
from kvrsim.runtime.measure import Timing
from kvrsim.runtime.plan import RunPlan
from kvrsim.scenario import Partition
from planner.confirm.hardware import is_busy
from planner.confirm.run import busy_notes

PLAN = RunPlan(strategy="single", partition=Partition(chunk_lens=(8,)))


def test_a_host_is_busy_from_a_quarter_of_a_core_or_a_sixteenth_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert is_busy(1.0, 0.26)
    assert not is_busy(1.0, 0.24)
    assert not is_busy(1.0, None)
    assert not is_busy(0.1, 2.0)  # too short for the system's account
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    assert not is_busy(1.0, 0.26)
    assert not is_busy(1.0, 7.9)
    assert is_busy(1.0, 8.1)


def test_a_run_says_that_the_machine_was_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    busy = Timing(plan=PLAN, ttft_s=(1.0, 2.0, 2.0), other_cores=(0.0, 0.6, 1.0))
    assert busy_notes(busy) == (
        "other processes used the machine in 2 of 3 prefills (0.8 cores); TTFT may be too long",
    )
    assert busy_notes(Timing(plan=PLAN, ttft_s=(1.0, 1.0), other_cores=(0.0, None))) == ()


def nvidia_smi(folder: Path, says: str, code: int = 0) -> str:
    """A program that answers as nvidia-smi does, and keeps its arguments."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\necho \"$@\" > {folder}/asked\nprintf '{says}'\nexit {code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_other_processes_on_the_gpus_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    rows = f"99999999, /usr/bin/python3, 4096 MiB\\n{os.getpid()}, kvrsim, 10 MiB\\nNo running processes found\\n"
    tool = nvidia_smi(tmp_path, rows)
    assert host.others_on_gpus(tool) == ("python3 (pid 99999999, 4096 MiB)",)
    assert "--id=2,3" in (tmp_path / "asked").read_text()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert host.others_on_gpus(tool) == ("python3 (pid 99999999, 4096 MiB)",)
    assert "--id" not in (tmp_path / "asked").read_text()


def test_no_answer_is_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.others_on_gpus(nvidia_smi(tmp_path, "1, x, 1 MiB", code=9)) == ()
    assert host.others_on_gpus(str(tmp_path / "none")) == ()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert host.others_on_gpus() == ()


def test_ranks_of_the_same_torchrun_are_not_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sibling = os.posix_spawn("/bin/sleep", ["sleep", "600"], {})  # another process of this one's parent, as it seems
    try:
        tool = nvidia_smi(tmp_path, f"{sibling}, python3, 1 MiB\\n")
        monkeypatch.delenv("RANK", raising=False)
        assert len(host.others_on_gpus(tool)) == 1
        monkeypatch.setattr(os, "getppid", os.getpid)
        monkeypatch.setenv("RANK", "0")
        assert host.others_on_gpus(tool) == ()
    finally:
        os.kill(sibling, 9)
        os.waitpid(sibling, 0)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system does not tell")
def test_own_work_is_not_others_work() -> None:
    load = host.HostLoad()
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + 0.5:
        pass
    asleep = load.other_cores(time.process_time())
    assert asleep is not None
    assert 0 <= asleep < (os.cpu_count() or 1)
    begun_s, others = time.monotonic(), host.HostLoad()
    others.other_cores(0.0)
    while time.monotonic() < begun_s + 0.5:
        pass
    busy = others.other_cores(0.0)  # as if this process were another
    assert busy is not None
    assert busy > 0.5
