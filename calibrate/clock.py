"""Clock: when the device passed each mark, and when the host issued it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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

    def finish(self) -> Sequence[Mark]:
        """Host and device time are the same."""
        first = self.marks[0][1] if self.marks else 0.0
        return [Mark(name=name, device_s=at - first, host_s=at - first) for name, at in self.marks]


@dataclass(slots=True)
class CudaClock:
    """CUDA events on the current stream; `cuda` is torch.cuda, or what behaves like it."""

    cuda: Any
    marks: list[tuple[str, Any, float]] = field(default_factory=list)

    @property
    def host_is_device(self) -> bool:
        """The host only issues."""
        return False

    def start(self, hold_s: float = 0.0) -> None:
        """Empty the device's queue, then keep it busy with a kernel that does nothing."""
        self.marks = []
        self.cuda.synchronize()
        if hold_s > 0:
            self.cuda._sleep(round(hold_s * _CYCLES_PER_S))

    def mark(self, name: str) -> None:
        """An event behind what was issued so far."""
        event = self.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((name, event, time.perf_counter()))

    def finish(self) -> Sequence[Mark]:
        """Events give milliseconds."""
        self.cuda.synchronize()
        if not self.marks:
            return []
        _, first, first_s = self.marks[0]
        return [
            Mark(name=name, device_s=first.elapsed_time(event) / 1e3, host_s=at - first_s)
            for name, event, at in self.marks
        ]
