"""What else the host does: work that a measured time would wrongly be charged with."""

from __future__ import annotations

import os
import time
from pathlib import Path


class HostLoad:
    """Counts, on Linux, the cores that processes other than the ranks keep busy between two readings."""

    def __init__(self, stat: str | Path = "/proc/stat") -> None:
        """`stat`: the kernel's account, see proc_stat(5); where there is none, the load is not known."""
        self._stat = stat
        self._before = self._reading(0.0)

    def other_cores(self, own_cpu_s: float) -> float | None:
        """Cores busy with others' work since the last call; None where the system does not tell.

        own_cpu_s: processor time that all ranks of this host have used since they began.
        """
        before, now = self._before, self._reading(own_cpu_s)
        self._before = now
        if before is None or now is None or now[0] <= before[0]:
            return None
        return max(0.0, (now[1] - before[1]) / (now[0] - before[0]))

    def _reading(self, own_cpu_s: float) -> tuple[float, float] | None:
        """The clock, and the processor time of others, in seconds."""
        try:
            with open(self._stat, encoding="utf-8") as file:
                user, nice, system, _, _, _, _, steal, *_ = map(int, file.readline().split()[1:])
        except (OSError, ValueError):
            return None
        # Without interrupts, which may be one's own messages'; steal is what other guests of the host took.
        busy_s = (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy_s - own_cpu_s
