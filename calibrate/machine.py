"""Which GPU and link measurements stand for, by the names of devices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from calibrate.measurement import Measurement
from calibrate.origin import Origin
from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec, LinkSpec, builtin_clusters, builtin_gpus, load_cluster, load_gpu, load_link


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
    found = {gpu for device in devices for gpu in builtin_gpus() if _parts(gpu) <= _parts(device)}
    if len(found) != 1:
        shown = ", ".join(devices) or "no gemm or attention rows"
        known = ", ".join(builtin_gpus())
        raise InputError("gpu", f"nothing for {shown}", f"one of {known}, or a JSON file that describes the GPU")
    return load_gpu(found.pop())


def gpu_named(device: str) -> GpuSpec | None:
    """The built-in GPU whose name a device has in its own; None where there is none, or are several."""
    found = [gpu for gpu in builtin_gpus() if _parts(gpu) <= _parts(device)]
    return load_gpu(found[0]) if len(found) == 1 else None


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
