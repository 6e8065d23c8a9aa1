"""Which GPU and link measurements stand for, by the names of devices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from calibrate.measurement import Measurement
from calibrate.origin import Origin
from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec, LinkSpec, builtin_clusters, builtin_gpus, load_cluster, load_gpu, load_link

# Of a device that shares its name with the SXM board that is built in, but neither its clocks nor its power.
_OTHER_FORMS = {"pcie", "nvl", "mig"}
_MEMORY_TOLERANCE = 0.1  # drivers keep some of a datasheet's memory back, and count in other units


def gpu_of(rows: Sequence[Measurement], named: str | None, origins: Sequence[Mapping[str, Any]] = ()) -> GpuSpec:
    """The GPU `named`, or the one that the files say, or else the built-in one that the devices of gemm rows name.

    "NVIDIA A100-SXM4-80GB" is a100-80gb. Raises InputError where that leaves none or several.
    """
    if named is not None:
        return load_gpu(named)
    measured = Origin.of(origins).gpu
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
    measured = Origin.of(origins, "links").link
    if measured is not None:
        return measured
    clusters = [cluster for cluster in map(load_cluster, builtin_clusters()) if cluster.gpu.name == gpu.name]
    if not clusters:
        accepted = "a built-in link or a JSON file that describes it; or measured ones: `links`"
        raise InputError("link", f"nothing for {gpu.name}", accepted)
    return min(clusters, key=lambda cluster: cluster.topology == "bus").link
