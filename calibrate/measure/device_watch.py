"""DeviceWatch: SM clock, power and throttle reasons of GPUs, read from NVML while something is timed.

GPUs are found by UUID: NVML counts all GPUs of the machine, CUDA those that CUDA_VISIBLE_DEVICES leaves, in an order of
its own. NVML is asked through ctypes, so that it needs no package beyond the driver's library.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvrsim.io.schema import NonNegative
from kvrsim.runtime.host import HostLoad

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
