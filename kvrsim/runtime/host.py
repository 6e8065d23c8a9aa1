"""This host: its devices, its software versions, and the load that other processes put on it."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from kvrsim.choices import DEVICES
from kvrsim.errors import InputError
from kvrsim.runtime.ranks import available_cores
from kvrsim.version import __version__

# Cores that other processes may keep busy without disturbing a measurement: a part of one, or a share of a large host.
_BUSY_CORES, _BUSY_SHARE = 0.25, 1 / 16
_LEAST_ACCOUNTED_S = 0.2  # of a sample; for shorter ones the system's CPU accounting is too coarse


def num_gpus() -> int:
    """Return the number of GPUs that torch sees here."""
    import torch

    return int(torch.cuda.device_count())


def devices(device: str, threads: int) -> int:
    """Return how many ranks can compute at once: GPUs, or cores over threads."""
    if device == "cuda":
        return num_gpus()
    return max(1, (len(available_cores()) or os.cpu_count() or 1) // threads)


def chosen_device(device: str) -> str:
    """Resolve a device, "auto" to cuda where there is one; raise InputError where it is unknown or absent."""
    if device not in DEVICES:
        raise InputError("device", device, ", ".join(DEVICES))
    there = num_gpus() > 0
    if device == "cuda" and not there:
        raise InputError("device", device, "cpu: torch sees no GPU here")
    return ("cuda" if there else "cpu") if device == "auto" else device


def cpu_name() -> str:
    """Return the name of the CPU by its maker."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.processor() or platform.machine() or "CPU"


def device_name(device: str) -> str:
    """Return the name of this machine's GPU, or of its CPU."""
    if device == "cuda":
        import torch

        return str(torch.cuda.get_device_name())
    return f"CPU ({cpu_name()})"


def versions() -> dict[str, str]:
    """Return the versions that measured times and messages depend on."""
    import torch
    import transformers

    return {
        "kvrsim": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "CUDA": str(torch.version.cuda or "none"),
    }


def busy_cores() -> float:
    """Return the cores above which the load of other processes on this host disturbs a measurement."""
    return max(_BUSY_CORES, _BUSY_SHARE * (os.cpu_count() or 1))


def is_busy(sample_s: float, other_cores: float | None) -> bool:
    """Whether other processes used this machine during a sample; False where CPU accounting cannot tell."""
    return other_cores is not None and sample_s >= _LEAST_ACCOUNTED_S and other_cores > busy_cores()


def free_memory() -> float:
    """Return the bytes of this host's memory that a new process can use without swapping."""
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            kib = next(line.split()[1] for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return 1024.0 * float(kib)


class HostLoad:
    """Counts, on Linux, the cores that processes other than the ranks keep busy between two readings."""

    def __init__(self, stat: str | Path = "/proc/stat") -> None:
        """stat: the kernel's account, see proc_stat(5); where it is absent, the load is unknown."""
        self._stat = stat
        self._before = self._reading(0.0)

    def other_cores(self, own_cpu_s: float) -> float | None:
        """Return the cores busy with others' work since the last call; None where the system does not tell.

        own_cpu_s: processor time that all ranks of this host have used since they started.
        """
        before, now = self._before, self._reading(own_cpu_s)
        self._before = now
        if before is None or now is None or now[0] <= before[0]:
            return None
        return max(0.0, (now[1] - before[1]) / (now[0] - before[0]))

    def _reading(self, own_cpu_s: float) -> tuple[float, float] | None:
        """Return the clock and the processor time of others, in seconds."""
        try:
            with open(self._stat, encoding="utf-8") as file:
                user, nice, system, _, _, _, _, steal, *_ = map(int, file.readline().split()[1:])
        except (OSError, ValueError):
            return None
        # Without interrupts, which may be one's own messages'; steal is what other guests of the host took.
        busy_s = (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy_s - own_cpu_s
