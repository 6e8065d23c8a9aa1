"""This host: its devices, its software versions, its free memory, and whether other processes use it."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from kvrsim.choices import DEVICES
from kvrsim.errors import InputError
from kvrsim.version import __version__

# Cores that other processes may use without disturbing a measurement: part of a core, or a share of a large host.
_BUSY_CORES = 0.25
_BUSY_SHARE = 1 / 16
_SAMPLE_S = 0.3  # the CPU accounting of the system is too coarse for a shorter sample


def started_by_torchrun() -> bool:
    """Whether this process is one rank of several that torchrun has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def available_cores() -> list[int]:
    """Return the cores that this process may use; empty if the system does not report them."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))


def num_gpus() -> int:
    """Return the number of GPUs that torch sees on this host."""
    import torch

    return int(torch.cuda.device_count())


def devices(device: str, threads: int) -> int:
    """Return the number of ranks that can compute at once: one per GPU, or one per `threads` cores."""
    if device == "cuda":
        return num_gpus()
    return max(1, (len(available_cores()) or os.cpu_count() or 1) // threads)


def chosen_device(device: str) -> str:
    """Resolve a device; "auto" is cuda if available. Raises InputError if the device is unknown or absent."""
    if device not in DEVICES:
        raise InputError("device", device, ", ".join(DEVICES))
    has_gpu = num_gpus() > 0
    if device == "cuda" and not has_gpu:
        raise InputError("device", device, "cpu: torch sees no GPU here")
    if device != "auto":
        return device
    if has_gpu:
        return "cuda"
    return "cpu"


def cpu_name() -> str:
    """Return the product name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    name = ""
    for line in lines:
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return name or platform.processor() or platform.machine() or "CPU"


def device_name(device: str) -> str:
    """Return the name of this machine's GPU, or of its CPU."""
    if device == "cuda":
        import torch

        return str(torch.cuda.get_device_name())
    return f"CPU ({cpu_name()})"


def versions() -> dict[str, str]:
    """Return the versions of software that affects measured times and messages."""
    import torch
    import transformers

    return {
        "kvrsim": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "CUDA": str(torch.version.cuda or "none"),
    }


def busy_note() -> tuple[str, ...]:
    """Return a note if other processes keep cores of this host busy before a measurement; else ()."""
    if started_by_torchrun():  # other ranks are starting and keep cores busy
        return ()
    first_s = _busy_s()
    time.sleep(_SAMPLE_S)
    cores = (_busy_s() - first_s) / _SAMPLE_S
    if cores <= max(_BUSY_CORES, _BUSY_SHARE * (os.cpu_count() or 1)):
        return ()
    return (f"other processes use {cores:.1f} cores of this machine: times may be too long",)


def _busy_s() -> float:
    """Return the processor time of all processes, in seconds; 0 if the system does not report it."""
    try:
        with open("/proc/stat", encoding="utf-8") as file:
            user, nice, system, _, _, _, _, steal, *_ = map(int, file.readline().split()[1:])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")  # steal: time of the host's other guests


def free_memory() -> float:
    """Return the bytes of this host's memory that a new process can use without swapping."""
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("MemAvailable"):
                    kib = line.split()[1]
                    return 1024.0 * float(kib)
    except OSError:
        pass
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
