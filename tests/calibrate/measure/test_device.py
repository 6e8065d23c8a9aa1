"""DeviceWatch: the GPU that CUDA means, by its UUID; its clock, power and throttle reasons, on a stub of NVML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from calibrate.measure import device as device_watch
from calibrate.measure.device import DeviceWatch, Nvml, faults_of, gpu_named, summary
from kvrsim.io.schema import to_json


@dataclass
class StubNvml:
    """libnvidia-ml's functions over a table of GPUs."""

    gpus: Mapping[bytes, Mapping[str, int]]
    started: int = 0
    asked: list[bytes] = field(default_factory=list)

    def nvmlInit_v2(self) -> int:  # noqa: N802 - NVML's name
        self.started += 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802
        self.asked.append(uuid)
        if uuid not in self.gpus:
            return 6  # not found
        handle._obj.value = list(self.gpus).index(uuid) + 1
        return 0

    def _tell(self, handle: Any, key: str, room: Any) -> int:
        known = list(self.gpus.values())[handle.value - 1]
        if key not in known:
            return 3  # not supported
        room._obj.value = known[key]
        return 0

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: Any, room: Any) -> int:  # noqa: N802
        assert kind.value == 1, "the SM clock"
        return self._tell(handle, "mhz", room)

    def nvmlDeviceGetPowerUsage(self, handle: Any, room: Any) -> int:  # noqa: N802
        return self._tell(handle, "milliwatts", room)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, room: Any) -> int:  # noqa: N802
        return self._tell(handle, "limit", room)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, room: Any) -> int:  # noqa: N802
        return self._tell(handle, "reasons", room)


GPUS = {
    b"GPU-aa": {"mhz": 1980, "milliwatts": 120_000, "limit": 700_000, "reasons": 0x1},
    b"GPU-bb": {"mhz": 1410, "milliwatts": 695_000, "limit": 700_000, "reasons": 0x4},
    b"GPU-cc": {"mhz": 600, "milliwatts": 300_000, "limit": 700_000, "reasons": 0x40 | 0x8},
}


def test_the_gpu_is_the_one_that_cuda_shows_whatever_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES=1: CUDA's number 0 is NVML's number 1."""
    stub = StubNvml(GPUS)
    monkeypatch.setattr(device_watch, "loaded_nvml", lambda: Nvml(stub))
    torch = SimpleNamespace(cuda=SimpleNamespace(get_device_properties=lambda index: SimpleNamespace(uuid="bb")))
    reading = DeviceWatch.of_visible(torch, [0]).read()
    assert stub.asked == [b"GPU-bb"]
    assert reading is not None
    assert (reading.sm_clock_hz, reading.power_w, reading.power_limit_w) == (1.41e9, 695.0, 700.0)
    assert reading.throttled == ("sw_power_cap",)


def test_a_power_cap_is_throttling_but_no_fault_and_heat_is_both() -> None:
    nvml = Nvml(StubNvml(GPUS))
    capped, hot, idle = (DeviceWatch(nvml, [uuid]).read() for uuid in ("GPU-bb", "GPU-cc", "GPU-aa"))
    assert capped is not None
    assert hot is not None
    assert idle is not None
    assert faults_of(to_json(capped)) == []
    assert faults_of(to_json(hot)) == ["hw_slowdown", "hw_thermal_slowdown"]
    assert idle.throttled == (), "an idle GPU is not throttled"
    assert faults_of(None) == []


def test_a_campaigns_readings_are_summed_up() -> None:
    nvml = Nvml(StubNvml(GPUS))
    readings = [to_json(found) for uuid in ("aa", "bb", "bb", "bb") if (found := DeviceWatch(nvml, [uuid]).read())]
    found = summary(readings)
    assert found["sm_clock_hz"] == [1.41e9, 1.41e9, 1.98e9]
    assert found["throttled"] == {"sw_power_cap": 0.75}
    assert summary([]) == {}


# -- Which datasheet a device takes: that of its name, if its multiprocessors and memory agree.

GIB = 2**30


@pytest.mark.parametrize(
    ("device", "num_sms", "memory_gib", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 132, 79.2, "h100"),
        ("NVIDIA H100 PCIe", 114, 79.2, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, 9.8, None),
        ("NVIDIA A100-SXM4-80GB", 108, 79.3, "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", 108, 79.3, None),
    ],
)
def test_the_datasheet_is_taken_where_the_device_agrees(
    device: str, num_sms: int, memory_gib: float, expected: str | None
) -> None:
    found = gpu_named(device, num_sms=num_sms, memory_bytes=round(memory_gib * GIB))
    assert (None if found is None else found.name) == expected


def test_a_gpu_that_is_not_known_is_described_by_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from calibrate.measure import device as this_machine

    pcie = SimpleNamespace(multi_processor_count=114, total_memory=85 * 10**9, L2_cache_size=50 * 2**20)
    cuda = SimpleNamespace(
        get_device_name=lambda: "NVIDIA H100 PCIe", current_device=lambda: 3, get_device_properties=lambda index: pcie
    )
    monkeypatch.setattr(this_machine.torch, "cuda", cuda)
    monkeypatch.setattr(this_machine, "_copy_bytes_per_s", lambda device: 2e12)
    monkeypatch.setattr(this_machine, "_product_flops_per_s", lambda device, dtype: 6e14)
    spec = this_machine.spec_of("cuda", "fp16", 1)
    assert (spec.name, spec.num_sms, dict(spec.peak_flops)) == ("nvidia-h100-pcie", 114, {"fp16": 6e14})
