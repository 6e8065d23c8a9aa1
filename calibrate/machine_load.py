"""What else the machine does while something is timed: other processes, a clock that is held down."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kvrsim.runtime.load import HostLoad

_QUERY = "clocks_throttle_reasons.hw_slowdown,clocks_throttle_reasons.sw_thermal_slowdown,utilization.gpu"


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


def gpu_trouble(nvidia_smi: str | None = None) -> str | None:
    """Why the first GPU's times are not its own just now, in a few words; None: nothing to be seen, or no GPU."""
    tool = nvidia_smi or shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    fields = [field.strip() for field in done.stdout.strip().split(",")]
    if done.returncode != 0 or len(fields) != 3:
        return None
    slowed = [name for name, field in zip(("power brake or heat", "heat"), fields, strict=False) if field == "Active"]
    return f"the GPU's clock is held down by {slowed[0]}" if slowed else None
