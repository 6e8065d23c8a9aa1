"""Marks: their order, time of the device and of the host, and the resulting timeline."""

from __future__ import annotations

from typing import Any

import pytest

from kvrsim.runtime.marks import CudaClock, mark_empty, without_marks


def test_cuda_marks_tell_device_from_host(fake_cuda: Any) -> None:
    cuda = fake_cuda
    clock = CudaClock(cuda)
    clock.start(hold_s=0.002)
    assert cuda.slept_cycles == [4_000_000]
    clock.mark("a")
    cuda.compute(1000.0)
    clock.mark("b")
    first, second = clock.finish()
    assert (first.device_s, second.device_s) == (0.0, pytest.approx(1000.0))
    assert second.host_s < 300, "the host issues and does not wait"
    assert not clock.host_is_device


def test_the_clock_waits_for_its_own_stream_alone(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the whole device would never end while another stream has a pending receive."""

    class Stream:
        def synchronize(self) -> None:
            fake_cuda.synchronized = True

    def forever() -> None:
        raise AssertionError("waits for every stream of the device")

    monkeypatch.setattr(fake_cuda, "current_stream", Stream)
    monkeypatch.setattr(fake_cuda, "synchronize", forever)
    clock = CudaClock(fake_cuda)
    clock.start()
    clock.mark("a")
    clock.wait()
    assert [mark.name for mark in clock.finish()] == ["a"]


def test_what_marks_take_is_taken_away_from_what_lies_between_them(fake_cuda: Any) -> None:
    fake_cuda.event_s = 2e-6
    clock = CudaClock(fake_cuda)
    clock.start()
    mark_empty(clock)
    clock.mark("a")
    fake_cuda.compute(1e-4)
    clock.mark("b")
    clock.mark("c")
    result = without_marks(clock.finish())
    assert [mark.name for mark in result] == ["a", "b", "c"]
    first, second, third = (mark.device_s for mark in result)
    assert second - first == pytest.approx(1e-4)
    assert third - second == pytest.approx(0.0, abs=1e-12)
