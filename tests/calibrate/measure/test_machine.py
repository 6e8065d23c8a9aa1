"""Which datasheet a device takes: that of its name, if its multiprocessors and memory agree."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from calibrate.data import Measurement
from calibrate.measure.device import gpu_named, gpu_of
from kvrsim.errors import InputError
from kvrsim.hardware import load_gpu

GIB = 2**30


@pytest.mark.parametrize(
    ("device", "num_sms", "memory_gib", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 132, 79.2, "h100"),
        ("NVIDIA H100 PCIe", 114, 79.2, None),  # 756 TFLOP/s, not 989
        ("NVIDIA H100 80GB HBM3", 114, 79.2, None),
        ("NVIDIA H100 NVL", 132, 93.6, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, 9.8, None),
        ("NVIDIA H200", 132, 139.8, "h200"),
        ("NVIDIA A100-SXM4-80GB", 108, 79.3, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 108, 39.5, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 108, 79.3, None),  # as many SMs, 300 W instead of 400
        ("NVIDIA L40S", 142, 44.4, "l40s"),
    ],
)
def test_the_datasheet_is_taken_where_the_device_agrees(
    device: str, num_sms: int, memory_gib: float, expected: str | None
) -> None:
    found = gpu_named(device, num_sms=num_sms, memory_bytes=round(memory_gib * GIB))
    assert (None if found is None else found.name) == expected


def test_every_gpu_that_is_built_in_agrees_with_itself() -> None:
    for name in ("a100-40gb", "a100-80gb", "h100", "h200", "l40s"):
        gpu = load_gpu(name)
        assert gpu_named(f"NVIDIA {name}", num_sms=gpu.num_sms, memory_bytes=gpu.memory_bytes) == gpu


def test_rows_of_another_form_of_a_gpu_need_its_name() -> None:
    row = Measurement(
        operation="gemm",
        kernel="x",
        device="NVIDIA H100 PCIe",
        dtype="fp16",
        tokens=1,
        in_features=1,
        out_features=1,
        median_s=1.0,
        source="x",
    )
    with pytest.raises(InputError, match="NVIDIA H100 PCIe"):
        gpu_of([row], None)
    assert gpu_of([row], "h100").name == "h100"


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
