"""The measured machine: its GPU, link, versions, and what NVML says of the clock while something is timed.

GPUs are found by UUID: NVML counts all GPUs of the machine, CUDA those that CUDA_VISIBLE_DEVICES leaves, in an order of
its own. NVML is called through ctypes, which needs no package beyond the driver's library.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calibrate.data import Measurement, Provenance
from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec, LinkSpec, builtin_clusters, builtin_gpus, load_cluster, load_gpu, load_link
from kvrsim.io.schema import NonNegative
from kvrsim.runtime.geometry import DTYPES
from kvrsim.runtime.host import HostLoad, cpu_name
from kvrsim.runtime.host import versions as libraries

_LIBRARY = "libnvidia-ml.so.1"
_SM_CLOCK = 1  # NVML_CLOCK_SM
# nvmlClocksThrottleReasons, nvml.h. A large GPU runs whole prefills at its power cap: it is recorded, and the times
# count. The other reasons mean a fault of the machine: the times do not count.
POWER_CAP = "sw_power_cap"
_REASONS = {
    0x04: POWER_CAP,
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One GPU at one moment; None: NVML does not say."""

    sm_clock_hz: NonNegative | None
    power_w: NonNegative | None  # averaged by the driver, over 25 ms to 1 s
    power_limit_w: NonNegative | None  # that is enforced
    throttled: tuple[str, ...] = ()  # reasons that hold the clock down, in NVML's words


class Nvml:
    """The few functions of NVML that are needed; `library` is libnvidia-ml, or what behaves like it."""

    def __init__(self, library: Any) -> None:
        self._library = library
        if library.nvmlInit_v2() != 0:
            raise OSError("NVML does not start")

    def handle(self, uuid: str) -> ctypes.c_void_p | None:
        """The GPU of that UUID; None where NVML knows none."""
        found = ctypes.c_void_p()
        failed = self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(found))
        return None if failed else found

    def read(self, handle: ctypes.c_void_p) -> Reading:
        """Its state now."""
        clock_mhz = self._number("nvmlDeviceGetClockInfo", ctypes.c_uint(), handle, ctypes.c_uint(_SM_CLOCK))
        power_mw = self._number("nvmlDeviceGetPowerUsage", ctypes.c_uint(), handle)
        limit_mw = self._number("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint(), handle)
        bits = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong(), handle) or 0
        return Reading(
            sm_clock_hz=None if clock_mhz is None else clock_mhz * 1e6,
            power_w=None if power_mw is None else power_mw / 1e3,
            power_limit_w=None if limit_mw is None else limit_mw / 1e3,
            throttled=tuple(name for bit, name in _REASONS.items() if bits & bit),
        )

    def _number(self, function: str, room: Any, *arguments: Any) -> int | None:
        call = getattr(self._library, function, None)
        if call is None or call(*arguments, ctypes.byref(room)) != 0:
            return None
        return int(room.value)


class DeviceWatch:
    """The GPUs that are timed."""

    def __init__(self, nvml: Nvml | None, uuids: Iterable[str]) -> None:
        """`nvml` None: nothing is known of them."""
        self._nvml = nvml
        handles = [nvml.handle(_nvml_uuid(uuid)) for uuid in uuids] if nvml is not None else []
        self._handles = [handle for handle in handles if handle is not None]

    @classmethod
    def of_visible(cls, torch: Any, indices: Iterable[int]) -> DeviceWatch:
        """Those that CUDA counts so."""
        properties = (torch.cuda.get_device_properties(index) for index in indices)
        uuids = [str(found.uuid) for found in properties if getattr(found, "uuid", None) is not None]
        return cls(loaded_nvml(), uuids)

    def read(self) -> Reading | None:
        """The slowest clock, the most power and all reasons of the GPUs; None where NVML says nothing."""
        if self._nvml is None or not self._handles:
            return None
        readings = [self._nvml.read(handle) for handle in self._handles]
        return Reading(
            sm_clock_hz=min((one.sm_clock_hz for one in readings if one.sm_clock_hz is not None), default=None),
            power_w=max((one.power_w for one in readings if one.power_w is not None), default=None),
            power_limit_w=min((one.power_limit_w for one in readings if one.power_limit_w is not None), default=None),
            throttled=tuple(sorted({reason for one in readings for reason in one.throttled})),
        )


def _nvml_uuid(uuid: str) -> str:
    """CUDA leaves out the prefix that NVML wants."""
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


@functools.cache
def loaded_nvml() -> Nvml | None:
    """The driver's library; None where there is none."""
    try:
        return Nvml(ctypes.CDLL(_LIBRARY))
    except (OSError, AttributeError):
        return None


def faults_of(reading: Mapping[str, Any] | None) -> list[str]:
    """Throttle reasons for which a sample does not count: all but the power cap."""
    return [reason for reason in (reading or {}).get("throttled", ()) if reason != POWER_CAP]


def summary(readings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of a campaign's readings: clock and power as [least, median, most], and the share with each throttle reason.

    Empty where nothing was read. Clocks in Hz, power in W.
    """
    if not readings:
        return {}
    found: dict[str, Any] = {"readings": len(readings)}
    for key in ("sm_clock_hz", "power_w"):
        values = [float(one[key]) for one in readings if one.get(key) is not None]
        if values:
            found[key] = [min(values), float(np.median(values)), max(values)]
    limits = [float(one["power_limit_w"]) for one in readings if one.get("power_limit_w") is not None]
    if limits:
        found["power_limit_w"] = min(limits)
    reasons = sorted({reason for one in readings for reason in one.get("throttled", ())})
    shares = {name: sum(name in one.get("throttled", ()) for one in readings) / len(readings) for name in reasons}
    return found | {"throttled": {name: round(share, 3) for name, share in shares.items()}}


class CpuLoad:
    """Cores that other processes use: the kernel's CPU accounting, minus the processes that measure."""

    def __init__(self, own_pids: Sequence[int] = (), stat: str | Path = "/proc/stat") -> None:
        """From now on; `own_pids`: processes that measure, besides this one."""
        self._own_pids = own_pids
        self._own_before_s = self._own_s()
        self._host = HostLoad(stat)

    def other_cores(self) -> float | None:
        """Cores that other processes, and other guests of the host, used since the start; None: not known."""
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


# -- which GPU and link the machine has, and its software

# Of a device that shares its name with the SXM board that is built in, but neither its clocks nor its power.
_OTHER_FORMS = {"pcie", "nvl", "mig"}
_MEMORY_TOLERANCE = 0.1  # drivers keep some of a datasheet's memory back, and count in other units


def gpu_of(rows: Sequence[Measurement], named: str | None, origins: Sequence[Mapping[str, Any]] = ()) -> GpuSpec:
    """The GPU `named`, or the one that the files say, or else the built-in one that the devices of gemm rows name.

    "NVIDIA A100-SXM4-80GB" is a100-80gb. Raises InputError where that leaves none or several.
    """
    if named is not None:
        return load_gpu(named)
    measured = Provenance.of(origins).gpu
    if measured is not None:
        return measured
    devices = sorted({row.device for row in rows if row.operation in ("gemm", "attention")})
    found = {gpu for device in devices for gpu in builtin_gpus() if _is_named(gpu, device)}
    if len(found) != 1:
        shown = ", ".join(devices) or "no gemm or attention rows"
        known = ", ".join(builtin_gpus())
        raise InputError("gpu", f"nothing for {shown}", f"one of {known}, or a JSON file that describes the GPU")
    return load_gpu(found.pop())


def gpu_named(device: str, *, num_sms: int | None = None, memory_bytes: int | None = None) -> GpuSpec | None:
    """The built-in GPU whose name a device has in its own; None where there is none, or are several.

    `num_sms`, `memory_bytes`: what the device says of itself, where it is at hand; a GPU of another form with the same
    name, such as the H100 PCIe of 114 SMs, or a slice of one, is none that is built in.
    """
    known = [load_gpu(gpu) for gpu in builtin_gpus() if _is_named(gpu, device)]
    found = [gpu for gpu in known if _agrees(gpu, num_sms, memory_bytes)]
    return found[0] if len(found) == 1 else None


def _agrees(gpu: GpuSpec, num_sms: int | None, memory_bytes: int | None) -> bool:
    """As far as it is known: SMs decide how many waves a kernel takes, and are the same or not."""
    if num_sms is not None and num_sms != gpu.num_sms:
        return False
    return memory_bytes is None or abs(memory_bytes / gpu.memory_bytes - 1) <= _MEMORY_TOLERANCE


def _is_named(gpu: str, device: str) -> bool:
    return _parts(gpu) <= _parts(device) and not (_OTHER_FORMS & _parts(device)) - _parts(gpu)


def _parts(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def link_of(gpu: GpuSpec, named: str | None, origins: Sequence[Mapping[str, Any]] = ()) -> LinkSpec:
    """The link `named`, or the one that the files say, or else that of the built-in cluster of that GPU.

    Of one without a bus if there are both. Raises InputError where there is none.
    """
    if named is not None:
        return load_link(named)
    measured = Provenance.of(origins, "links").link
    if measured is not None:
        return measured
    clusters = [cluster for cluster in map(load_cluster, builtin_clusters()) if cluster.gpu.name == gpu.name]
    if not clusters:
        accepted = "a built-in link or a JSON file that describes it; or measured ones: `links`"
        raise InputError("link", f"nothing for {gpu.name}", accepted)
    return min(clusters, key=lambda cluster: cluster.topology == "bus").link


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
    """Of all software that affects the measured times."""
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
