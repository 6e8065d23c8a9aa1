"""The measured machine: its clock and power as nvidia-smi logs them, and its datasheet."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from pathlib import Path

from calibrate.data import gpu_named
from calibrate.measure import device
from calibrate.measure.device import DeviceLog, summary


def test_readings_are_summarised_and_broken_lines_do_not_count() -> None:
    lines = ["1980, 120.5, 700.00, 0x0000000000000001", *["1410, 695.0, 700.00, 0x0000000000000004"] * 3]
    result = summary([*lines, "1410, [N/A], 700.00, 0x0", "14"])
    assert result["readings"] == 4
    assert result["sm_clock_hz"] == [1.41e9, 1.41e9, 1.98e9]
    assert result["power_w"] == [120.5, 695.0, 695.0]
    assert result["throttled"] == {"sw_power_cap": 0.75}, "an idle GPU is not throttled"
    assert summary(["600, 300.0, 700.00, 0x48"])["throttled"] == {"hw_slowdown": 1.0, "hw_thermal_slowdown": 1.0}
    assert summary([]) == {}


def test_the_log_is_of_the_gpu_that_cuda_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With CUDA_VISIBLE_DEVICES=1, CUDA's device 0 is device 1 of nvidia-smi, so nvidia-smi gets the UUID."""
    script = tmp_path / "nvidia-smi"
    script.write_text(f'#!/bin/sh\necho "1410, 695.0, 700.00, 0x4"\necho $* > {tmp_path}/words\nexec sleep 60\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    cuda = SimpleNamespace(get_device_properties=lambda index: SimpleNamespace(uuid="bb"))
    monkeypatch.setattr(device.torch, "cuda", cuda)
    with DeviceLog([0]) as log:
        while not (tmp_path / "words").exists():
            pass
        assert log.summary()["throttled"] == {"sw_power_cap": 1.0}
    assert "--id=GPU-bb" in (tmp_path / "words").read_text()
    with DeviceLog([]) as log:
        assert log.summary() == {}


# -- A device gets the datasheet with its name if the multiprocessors and the memory agree, too.

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
    result = gpu_named(device, num_sms=num_sms, memory_bytes=round(memory_gib * GIB))
    assert (None if result is None else result.name) == expected


def test_a_gpu_that_is_not_known_is_described_by_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
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
