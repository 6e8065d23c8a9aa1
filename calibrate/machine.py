"""Which GPU and link measurements stand for, by the names of devices."""

from __future__ import annotations

import re
from collections.abc import Sequence

from calibrate.measurement import Measurement
from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec, LinkSpec, builtin_clusters, builtin_gpus, load_cluster, load_gpu, load_link


def gpu_of(rows: Sequence[Measurement], named: str | None) -> GpuSpec:
    """The GPU `named`, or else the one built-in GPU whose name the devices of gemm rows have in theirs.

    "NVIDIA A100-SXM4-80GB" is a100-80gb. Raises InputError where that leaves none or several.
    """
    if named is not None:
        return load_gpu(named)
    devices = sorted({row.device for row in rows if row.operation in ("gemm", "attention")})
    found = {gpu for device in devices for gpu in builtin_gpus() if _parts(gpu) <= _parts(device)}
    if len(found) != 1:
        shown = ", ".join(devices) or "no gemm or attention rows"
        known = ", ".join(builtin_gpus())
        raise InputError("--gpu", f"nothing for {shown}", f"one of {known}, or a JSON file that describes the GPU")
    return load_gpu(found.pop())


def _parts(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def link_of(gpu: GpuSpec, named: str | None) -> LinkSpec:
    """The link `named`, or else the one of the built-in cluster of that GPU, of one without a bus if there are both."""
    if named is not None:
        return load_link(named)
    clusters = [cluster for cluster in map(load_cluster, builtin_clusters()) if cluster.gpu.name == gpu.name]
    if not clusters:
        raise InputError("--link", f"nothing for {gpu.name}", "a built-in link or a JSON file that describes it")
    return min(clusters, key=lambda cluster: cluster.topology == "bus").link
