"""This host: its devices, its software versions, and the load that other processes put on it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

import torch

from kvrsim.choices import DEVICES
from kvrsim.errors import InputError
from kvrsim.runtime.ranks import available_cores
from kvrsim.version import __version__

# Cores that other processes may keep busy without disturbing a measurement: a part of one, or a share of a large host.
_BUSY_CORES, _BUSY_SHARE = 0.25, 1 / 16


def num_gpus() -> int:
    """Return the number of GPUs that torch sees here."""
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


def versions() -> dict[str, str]:
    """Return the versions that measured times and messages depend on."""
    import transformers  # slow to import, and only its version is needed

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


def others_on_gpus(nvidia_smi: str | None = None) -> tuple[str, ...]:
    """Return the processes on this machine's GPUs, such as "python (pid 7, 4096 MiB)"; () without nvidia-smi.

    Call it before the ranks start: other processes of the same torchrun are left out. Of several GPUs, those that
    CUDA_VISIBLE_DEVICES names.
    """
    tool = nvidia_smi or shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible:
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()]
    processes = [row for row in rows if len(row) == 3 and row[0].isdigit()] if done.returncode == 0 else []
    others = [(name, pid, used) for pid, name, used in processes if not _is_own(int(pid))]
    return tuple(f"{os.path.basename(name)} (pid {pid}, {used})" for name, pid, used in others)


def _is_own(pid: int) -> bool:
    """Whether a process is this one, or was started by the same torchrun."""
    if pid == os.getpid():
        return True
    try:
        parent = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1]
    except (OSError, IndexError):
        return False
    return "RANK" in os.environ and parent == str(os.getppid())


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
