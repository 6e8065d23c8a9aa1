"""Clock: when the device passed each mark, and when the host issued it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

# What a device is kept busy with before a forward, so that the host is ahead of it: in cycles a second, more than any
# GPU's clock, so that the hold is at least as long as asked for on none but the fastest.
_CYCLES_PER_S = 2.0e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """One moment of a forward pass."""

    name: str
    device_s: float  # when the device had done all that was issued before, since the first mark
    host_s: float  # when the host issued it, since the first mark


class Clock(Protocol):
    """Marks of one forward pass at a time."""

    @property
    def host_is_device(self) -> bool:
        """Whether the host computes itself, so that the two times are one."""

    def start(self, hold_s: float = 0.0) -> None:
        """Begin anew; keep the device busy for `hold_s` first, so that it does not wait for the host."""

    def mark(self, name: str) -> None:
        """Note the moment."""

    def wait(self) -> None:
        """Return when the device has done all that was issued."""

    def finish(self) -> Sequence[Mark]:
        """Wait for the device; all marks since start, in order."""


@dataclass(slots=True)
class CpuClock:
    """The monotonic clock."""

    marks: list[tuple[str, float]] = field(default_factory=list)

    @property
    def host_is_device(self) -> bool:
        """It is."""
        return True

    def start(self, hold_s: float = 0.0) -> None:
        """A CPU waits for no host."""
        self.marks = []

    def mark(self, name: str) -> None:
        """Now."""
        self.marks.append((name, time.perf_counter()))

    def wait(self) -> None:
        """A CPU has done what was issued."""

    def finish(self) -> Sequence[Mark]:
        """Host and device time are the same."""
        first = self.marks[0][1] if self.marks else 0.0
        return [Mark(name=name, device_s=at - first, host_s=at - first) for name, at in self.marks]


@dataclass(slots=True)
class CudaClock:
    """CUDA events on the current stream; `cuda` is torch.cuda, or what behaves like it.

    It waits for that stream alone: a receive that is pending on another one would never let the device end.
    """

    cuda: Any
    marks: list[tuple[str, Any, float]] = field(default_factory=list)

    @property
    def host_is_device(self) -> bool:
        """The host only issues."""
        return False

    def start(self, hold_s: float = 0.0) -> None:
        """Empty the device's queue, then keep it busy with a kernel that does nothing."""
        self.marks = []
        self.wait()
        if hold_s > 0:
            self.cuda._sleep(round(hold_s * _CYCLES_PER_S))

    def mark(self, name: str) -> None:
        """An event behind what was issued so far."""
        event = self.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((name, event, time.perf_counter()))

    def wait(self) -> None:
        """Wait for the current stream."""
        self.cuda.current_stream().synchronize()

    def finish(self) -> Sequence[Mark]:
        """Events give milliseconds."""
        self.wait()
        if not self.marks:
            return []
        _, first, first_s = self.marks[0]
        return [
            Mark(name=name, device_s=first.elapsed_time(event) / 1e3, host_s=at - first_s)
            for name, event, at in self.marks
        ]


_BRACKETS = 8  # empty ones before a forward


def mark_empty(clock: Clock) -> None:
    """Marks with nothing between them, which show what a mark takes on the device."""
    for _ in range(_BRACKETS + 1):
        clock.mark("empty")


def without_marks(marks: Sequence[Mark]) -> list[Mark]:
    """The marks after the empty ones, each as if no mark before it had taken any time on the device.

    Host times are left as they are: the runtime marks its layers too.
    """
    empty, rest = marks[: _BRACKETS + 1], marks[_BRACKETS + 1 :]
    gaps = [after.device_s - before.device_s for before, after in pairwise(empty)]
    one_s = float(np.median(gaps)) if gaps else 0.0
    found: list[Mark] = []
    for passed, mark in enumerate(rest):
        device_s = mark.device_s - passed * one_s
        found.append(replace(mark, device_s=max(device_s, found[-1].device_s) if found else device_s))
    return found
