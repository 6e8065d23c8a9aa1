"""CpuLoad: what other processes do while something is timed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvrsim.runtime.load import HostLoad


class CpuLoad:
    """Cores that others use, by the kernel's account of all time less that of the processes that measure."""

    def __init__(self, own_pids: Sequence[int] = (), stat: str | Path = "/proc/stat") -> None:
        """From now on; `own_pids`: processes that measure, besides this one."""
        self._own_pids = own_pids
        self._own_before_s = self._own_s()
        self._host = HostLoad(stat)

    def other_cores(self) -> float | None:
        """Cores that other processes, and other guests of the same host, have used meanwhile; None: not known."""
        return self._host.other_cores(self._own_s() - self._own_before_s)

    def _own_s(self) -> float:
        times = os.times()
        own_s = times.user + times.system + times.children_user + times.children_system
        return own_s + sum(_process_s(pid) for pid in self._own_pids)


def _process_s(pid: int) -> float:
    """CPU seconds of another process; fields 14 and 15 of proc_pid_stat(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
