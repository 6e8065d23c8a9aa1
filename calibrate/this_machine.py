"""What is calibrated: the device as a GpuSpec, and the versions of all that ran on it."""

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

from calibrate.machine import gpu_named
from kvrsim.hardware import GpuSpec
from kvrsim.runtime.agreement import versions as libraries
from kvrsim.runtime.geometry import DTYPES
from kvrsim.runtime.host import cpu_name

_REPEATS = 5
_COPY_BYTES = 2**27  # more than any cache
_PRODUCT = 2048  # rows and columns of the product that shows what a CPU computes


def device_name(device: str, threads: int) -> str:
    """As the maker calls it; of a CPU, with the threads that a rank has."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def spec_of(device: str, dtype: str, threads: int) -> GpuSpec:
    """The datasheet's where kvrsim has it and the device agrees with it; else what the device says and shows.

    A product and a copy show it.
    """
    name = device_name(device, threads)
    if device == "cuda":
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        known = gpu_named(name, num_sms=int(found.multi_processor_count), memory_bytes=int(found.total_memory))
        return known or _cuda_spec(name, dtype, found)
    return GpuSpec(
        name=_slug(name),
        memory_bytes=_memory_bytes() // max(1, (os.cpu_count() or 1) // threads),
        hbm_bytes_per_s=_copy_bytes_per_s("cpu"),
        peak_flops=((dtype, _product_flops_per_s("cpu", dtype)),),
        num_sms=threads,
        source=f"measured by kvrsim calibrate on {name}: the best of {_REPEATS} copies and products",
    )


def _cuda_spec(name: str, dtype: str, properties: Any) -> GpuSpec:
    return GpuSpec(
        name=_slug(name),
        memory_bytes=int(properties.total_memory),
        hbm_bytes_per_s=_copy_bytes_per_s("cuda"),
        peak_flops=((dtype, _product_flops_per_s("cuda", dtype)),),
        num_sms=int(properties.multi_processor_count),
        source=f"what {name} says of itself, and the best of {_REPEATS} copies and products by kvrsim calibrate",
    )


def origin(device: str, threads: int, command: str) -> dict[str, Any]:
    """Provenance of a measurement: versions, machine, command and date; no name of a host or person."""
    return {
        "date": date.today().isoformat(),
        "command": command,
        "device": device_name(device, threads),
        "threads": threads,
        "cores": os.cpu_count() or 1,
        "versions": versions(device),
    }


def versions(device: str) -> dict[str, str]:
    """Of all that had a say in how fast it was."""
    found = libraries() | {"system": f"{platform.system()} {platform.release()} {platform.machine()}"}
    return found | {"driver": _driver(), "NCCL": _nccl()} if device == "cuda" else found


def _copy_bytes_per_s(device: str) -> float:
    source = torch.ones(_COPY_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _best_s(lambda: target.copy_(source), device)


def _product_flops_per_s(device: str, dtype: str) -> float:
    size = _PRODUCT if device == "cpu" else 4 * _PRODUCT
    matrix = torch.ones(size, size, dtype=DTYPES[dtype], device=device)
    return 2.0 * size**3 / _best_s(lambda: matrix @ matrix, device)


def _best_s(work: Callable[[], object], device: str) -> float:
    """The shortest of a few."""
    seconds = []
    for _ in range(_REPEATS + 1):  # the first warms up
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
    except Exception:  # a build without NCCL raises what it likes
        return "none"
