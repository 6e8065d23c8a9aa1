"""The measured machine: its datasheet, or its own description."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from calibrate.data import gpu_named

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
