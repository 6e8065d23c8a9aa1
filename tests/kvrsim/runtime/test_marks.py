"""Marks: in order, the device's time apart from the host's, and the timeline that they give."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvrsim.runtime.marks import Clock, CudaClock, Mark, RankTrace, mark_empty, timeline_of, without_marks


def test_cpu_marks_are_moments_of_one_clock() -> None:
    clock = Clock()
    clock.start()
    clock.mark("a")
    time.sleep(0.01)
    clock.mark("b")
    first, second = clock.finish()
    assert (first.name, second.name) == ("a", "b")
    assert first.device_s == first.host_s == 0.0
    assert second.device_s == second.host_s >= 0.01
    assert clock.host_is_device


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
    """A pending receive on another stream would never let the whole device end."""

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
    found = without_marks(clock.finish())
    assert [mark.name for mark in found] == ["a", "b", "c"]
    first, second, third = (mark.device_s for mark in found)
    assert second - first == pytest.approx(1e-4)
    assert third - second == pytest.approx(0.0, abs=1e-12)


def test_marks_become_spans() -> None:
    def marks(*moments: Any) -> tuple[Mark, ...]:
        first_s = moments[0][2]
        return tuple(
            Mark(name=name, layer=layer, device_s=at_s - first_s, host_s=0.0, **dict(message))
            for name, layer, at_s, *message in moments
        )

    first = RankTrace(
        rank=0,
        start_s=10.0,
        marks=marks(
            ("start", None, 10.0), ("layer", 0, 11.0), ("update", 0, 12.0),
            ("send", 0, 13.0, ("peer", 1), ("nbytes", 64.0)), ("updated", 0, 13.5),
            ("output", 0, 14.0), ("layer_end", 0, 15.0), ("token", None, 15.0),
        ),
    )  # fmt: skip
    second = RankTrace(
        rank=1,
        start_s=10.5,
        marks=marks(
            ("start", None, 10.5), ("layer", 0, 11.0), ("update", 0, 12.0), ("wait", 0, 12.5),
            ("received", 0, 14.0, ("peer", 0)),
            ("updated", 0, 14.0), ("output", 0, 16.0), ("layer_end", 0, 17.0), ("token", None, 18.0),
        ),
        emits_token=True,
    )  # fmt: skip
    timeline = timeline_of("kvr", [first, second])
    found = {(span.rank, span.name): (span.layer, span.kind, span.start_s, span.end_s) for span in timeline.spans}
    assert found == {
        (0, "embedding"): (None, "compute", 0.0, 1.0),
        (0, "qkv"): (0, "compute", 1.0, 2.0),
        (0, "append"): (0, "compute", 2.0, 3.0),
        (0, "send to rank 1"): (0, "wait", 3.0, 3.5),
        (0, "KV 0→1"): (0, "transfer", 3.0, 4.0),
        (0, "attention"): (0, "compute", 3.5, 4.0),
        (0, "output+mlp"): (0, "compute", 4.0, 5.0),
        (1, "embedding"): (None, "compute", 0.5, 1.0),
        (1, "qkv"): (0, "compute", 1.0, 2.0),
        (1, "append"): (0, "compute", 2.0, 2.5),
        (1, "KV from rank 0"): (0, "wait", 2.5, 4.0),
        (1, "attention"): (0, "compute", 4.0, 6.0),
        (1, "output+mlp"): (0, "compute", 6.0, 7.0),
        (1, "head"): (None, "compute", 7.0, 8.0),
    }
