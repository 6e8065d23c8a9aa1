"""What else a machine does is noticed, by measures that suit its size."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvrsim.runtime import host
from kvrsim.runtime.host import is_busy
from kvrsim.runtime.plan import RunPlan, Timing
from kvrsim.scenario import Partition
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
