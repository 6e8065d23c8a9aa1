"""The measured machine: its GPU, link, versions, and its clock and power while something is timed."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from statistics import median
from typing import Any, Self

import torch

from calibrate.data import gpu_named
from kvrsim.hardware import GpuSpec
from kvrsim.runtime.geometry import DTYPES
from kvrsim.runtime.host import cpu_name
from kvrsim.runtime.host import versions as libraries

# nvidia-smi's names of the bits of nvmlClocksThrottleReasons in nvml.h. A large GPU runs whole prefills at its power
# cap; the other reasons mean a fault of the machine.
_REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
_EVERY_MS = 200  # milliseconds between readings


class DeviceLog:
    """Log of clock, power and throttle reasons of GPUs, written by nvidia-smi while the context is open.

    GPUs are named by UUID, because nvidia-smi counts all GPUs of the machine, and CUDA only those in
    CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, gpus: Sequence[int]) -> None:
        """gpus: CUDA's numbers; without GPUs nothing is logged."""
        self._gpus = gpus
        self._lines = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by __exit__
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        uuids = [f"GPU-{str(torch.cuda.get_device_properties(gpu).uuid).removeprefix('GPU-')}" for gpu in self._gpus]
        query = "--query-gpu=clocks.sm,power.draw,enforced.power.limit,clocks_throttle_reasons.active"
        if uuids and shutil.which("nvidia-smi"):
            command = ["nvidia-smi", query, "--format=csv,noheader,nounits", f"--id={','.join(uuids)}"]
            self._process = subprocess.Popen(
                [*command, f"--loop-ms={_EVERY_MS}"], stdout=self._lines, stderr=subprocess.DEVNULL
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._lines.close()

    def summary(self) -> dict[str, Any]:
        """Return smallest, median and largest clock (Hz) and power (W), and the share of each throttle reason."""
        self._lines.seek(0)
        return summary(self._lines.read().splitlines())


def summary(lines: Iterable[str]) -> dict[str, Any]:
    """Summarise nvidia-smi's lines of MHz, W, W and a hexadecimal number; incomplete lines do not count."""
    readings = [tuple(match.groups()) for line in lines if (match := _READING.fullmatch(line))]
    if not readings:
        return {}
    clocks_hz, powers_w, limits_w = (
        [float(one[column]) * unit for one in readings] for column, unit in enumerate((1e6, 1.0, 1.0))
    )
    active = [[name for bit, name in _REASONS.items() if int(one[3], 16) & bit] for one in readings]
    shares = {name: sum(name in one for one in active) / len(active) for name in _REASONS.values()}
    return {
        "readings": len(readings),
        "sm_clock_hz": [min(clocks_hz), median(clocks_hz), max(clocks_hz)],
        "power_w": [min(powers_w), median(powers_w), max(powers_w)],
        "power_limit_w": min(limits_w),
        "throttled": {name: round(share, 3) for name, share in shares.items() if share},
    }


_READING = re.compile(r"([\d.]+), ([\d.]+), ([\d.]+), 0x([0-9a-fA-F]+)")


# -- the machine and its software

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
