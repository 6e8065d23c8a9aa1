"""Estimate the kernel rates of an unmeasured GPU from a measured GPU of the same architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from kvrsim.hardware import GpuSpec
from kvrsim.kernels.profile import CalibrationProfile

_STEPS = ("block_s", "softmax_s", "tile_s", "chunk_s")  # seconds of one multiprocessor's arithmetic
_SLOTS = ("concurrent_tiles", "num_sms")


def profile_of_sibling(profile: CalibrationProfile, measured: GpuSpec, gpu: GpuSpec) -> CalibrationProfile:
    """The profile of `measured` with the rates of `gpu`, at the measured fraction of the datasheet.

    Rates of arithmetic scale with the peak of the tensor cores, and rates of bytes with the memory's bandwidth; tiles
    run on as many multiprocessors as the GPU has. Launches keep their seconds. Times of single products are dropped.
    """
    peaks = [dict(one.peak_flops)["fp16"] for one in (gpu, measured)]
    ratios = {
        "compute": peaks[0] / peaks[1],
        "memory": gpu.hbm_bytes_per_s / measured.hbm_bytes_per_s,
        "slots": gpu.num_sms / measured.num_sms,
    }
    return replace(profile, kernels=_scaled(profile.kernels, ratios))


def _scaled(value: Any, ratios: Mapping[str, float]) -> Any:
    if isinstance(value, Mapping):
        return {key: _scaled(one, ratios) for key, one in value.items()}
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changes: dict[str, Any] = {"measured": ()} if hasattr(value, "measured") else {}
    for one in fields(value):
        old, unit = getattr(value, one.name), one.metadata.get("unit", one.name)
        if old is None or one.name in changes or not one.init:
            continue
        if unit.endswith("flops_per_s"):
            changes[one.name] = old * ratios["compute"]
        elif unit.endswith("bytes_per_s"):
            changes[one.name] = old * ratios["memory"]
        elif one.name in _STEPS:
            changes[one.name] = old * ratios["slots"] / ratios["compute"]
        elif one.name in _SLOTS:
            changes[one.name] = max(1, round(old * ratios["slots"]))
        else:
            changes[one.name] = _scaled(old, ratios)
    return replace(value, **changes)
