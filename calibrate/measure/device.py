"""The measured machine: its GPU, its software, and the origin of a measurement."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch

from calibrate.data import gpu_named
from kvrsim.hardware import GpuSpec
from kvrsim.runtime.geometry import DTYPES
from kvrsim.runtime.host import cpu_name
from kvrsim.runtime.host import versions as libraries

_REPEATS = 5
_COPY_BYTES = 2**27  # bytes of the copy: more than any cache
_PRODUCT = 2048  # rows and columns of the product that measures a CPU's FLOP/s


def device_name(device: str, threads: int) -> str:
    """The maker's name of the device; for a CPU, with the number of threads per rank."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def spec_of(device: str, dtype: str, threads: int) -> GpuSpec:
    """The built-in GPU if the device agrees with its datasheet, or else a GPU with the device's properties and two
    measured rates, of a product and of a copy.
    """
    name = device_name(device, threads)
    memory_bytes = _memory_bytes() // max(1, (os.cpu_count() or 1) // threads)
    num_sms = threads
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        memory_bytes = int(properties.total_memory)
        num_sms = int(properties.multi_processor_count)
        gpu = gpu_named(name, num_sms=num_sms, memory_bytes=memory_bytes)
        if gpu is not None:
            return gpu
    return GpuSpec(
        name=_slug(name),
        memory_bytes=memory_bytes,
        hbm_bytes_per_s=_copy_bytes_per_s(device),
        peak_flops={dtype: _product_flops_per_s(device, dtype)},
        num_sms=num_sms,
        source=f"properties of {name}, and the best of {_REPEATS} copies and products by kvrsim calibrate",
    )


def origin(device: str, threads: int, command: str) -> dict[str, Any]:
    """Provenance of a measurement: versions, machine, command and date, without names of hosts or persons."""
    return {
        "date": date.today().isoformat(),
        "command": command,
        "device": device_name(device, threads),
        "threads": threads,
        "cores": os.cpu_count() or 1,
        "versions": versions(device),
    }


def versions(device: str) -> dict[str, str]:
    """Versions of all software that affects the measured times."""
    programs = libraries() | {"system": f"{platform.system()} {platform.release()} {platform.machine()}"}
    return programs | {"driver": _driver(), "NCCL": _nccl()} if device == "cuda" else programs


def _copy_bytes_per_s(device: str) -> float:
    source = torch.ones(_COPY_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _best_s(lambda: target.copy_(source), device)


def _product_flops_per_s(device: str, dtype: str) -> float:
    size = _PRODUCT if device == "cpu" else 4 * _PRODUCT
    matrix = torch.ones(size, size, dtype=DTYPES[dtype], device=device)
    return 2.0 * size**3 / _best_s(lambda: matrix @ matrix, device)


def _best_s(work: Callable[[], object], device: str) -> float:
    """Seconds of the fastest of a few runs."""
    seconds = []
    for _ in range(_REPEATS + 1):  # the first run warms up
        started_s = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_s)
    return min(seconds[1:])


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "device"


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "not known"
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "not known"
    return done.stdout.strip() or "not known"


def _nccl() -> str:
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version())
    except Exception:  # a build without NCCL may raise any error
        return "none"
