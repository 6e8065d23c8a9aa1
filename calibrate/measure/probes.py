"""Probes: single measurements that show whether the times of a machine can be trusted; for `make gpu`.

Each returns plain JSON values. Times are device seconds on CUDA and seconds on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from calibrate.measure.device import DeviceWatch, device_name, versions
from calibrate.measure.forward import ComputeSetup, ForwardTimer, Point
from calibrate.measure.ranks import ALONE, PENDING, PendingRanks
from kvrsim.io.schema import to_json
from kvrsim.runtime.geometry import DTYPES
from kvrsim.runtime.marks import Clock, clock_of
from kvrsim.runtime.ranks import Launch, launch
from kvrsim.runtime.transport import Transport

_READ_EVERY_S = 0.05  # of clock and power
_RING_BYTES = 2**20


def environment() -> dict[str, Any]:
    """Versions, and each GPU that torch sees."""
    count = torch.cuda.device_count()
    device = "cuda" if count else "cpu"
    return {
        "device": device_name(device, 1),
        "num_gpus": count,
        "gpus": [_gpu(index) for index in range(count)],
        "versions": versions(device),
    }


def _gpu(index: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(index)
    reading = DeviceWatch.of_visible(torch, [index]).read()
    return {
        "name": found.name,
        "uuid": str(getattr(found, "uuid", "")),
        "num_sms": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "now": to_json(reading),
    }


def ring(num_ranks: int, device: str, timeout_s: float) -> dict[str, Any]:
    """Start the runtime's ranks, which use every edge once, and pass a message round the ring.

    Raises RankError, naming the rank, where that does not end in time.
    """
    began_s = time.monotonic()
    how = Launch(num_ranks=num_ranks, device=device, timeout_s=timeout_s, deadline_s=2 * timeout_s + 60.0)
    results = launch(_pass_round, how=how)
    return {
        "num_ranks": num_ranks,
        "transport": results[0]["transport"],
        "total_s": time.monotonic() - began_s,
        "message_s": max(result["message_s"] for result in results),
        "right": all(result["right"] for result in results),
    }


def _pass_round(transport: Transport) -> dict[str, Any]:
    device = getattr(transport, "device", torch.device("cpu"))
    own = torch.full((_RING_BYTES,), transport.rank, dtype=torch.uint8, device=device)
    came = torch.empty_like(own)
    transport.barrier()
    began_s = time.monotonic()
    coming = transport.irecv_prev(came)
    leaving = transport.isend_next(own)
    coming.wait()
    leaving.wait()
    right = bool((came == (transport.rank - 1) % transport.size).all().item())
    return {"transport": transport.name, "message_s": time.monotonic() - began_s, "right": right}


def products(
    device: str, dtype: str, durations_s: tuple[float, ...], shape: tuple[int, int, int]
) -> list[dict[str, Any]]:
    """One matrix product (rows, inner, columns), repeated for so long: its rate, and the clock and power of the GPU.

    A GPU that holds its clock has the same rate in all of them.
    """
    rows, inner, columns = shape
    clock = clock_of(device)
    watch = DeviceWatch.of_visible(torch, [torch.cuda.current_device()]) if device == "cuda" else DeviceWatch(None, ())
    left = torch.randn(rows, inner, device=device).to(DTYPES[dtype])
    right = torch.randn(inner, columns, device=device).to(DTYPES[dtype])
    for _ in range(3):
        torch.mm(left, right)
    return [_rate(clock, watch, lambda: torch.mm(left, right), 2.0 * rows * inner * columns, s) for s in durations_s]


def _rate(
    clock: Clock, watch: DeviceWatch, work: Callable[[], object], flops: float, duration_s: float
) -> dict[str, Any]:
    clock.wait()
    time.sleep(min(duration_s, 0.2))  # each begins on a device that idles
    clock.start()
    clock.mark("start")
    count, readings, began_s, read_s = 0, [], time.monotonic(), 0.0
    while time.monotonic() - began_s < duration_s:
        work()
        count += 1
        if time.monotonic() - read_s >= min(_READ_EVERY_S, duration_s / 4):
            reading, read_s = watch.read(), time.monotonic()
            readings += [] if reading is None else [to_json(reading)]
            clock.wait()  # so that what is asked for lasts as long as asked for
    clock.mark("end")
    marks = clock.finish()
    seconds = marks[-1].device_s - marks[0].device_s
    last = readings[-1] if readings else None
    return {"asked_s": duration_s, "seconds": seconds, "flops_per_s": count * flops / seconds, "at_the_end": last}


def kernel_names(setup: ComputeSetup, chunk: int, prefix: int) -> dict[str, list[str]]:
    """Of each attention kernel, the operators that attend and the device kernels that torch's profiler saw."""
    timer = ForwardTimer.build(setup)
    try:
        return {kernel: _profiled(timer, Point(kernel=kernel, chunk=chunk, prefix=prefix)) for kernel in setup.kernels}
    finally:
        timer.close()


def _profiled(timer: ForwardTimer, at: Point) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    timer.layer_s(at)
    activities = [ProfilerActivity.CPU]
    if timer.setup.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as found:
        timer.layer_s(at)
    names = {event.key for event in found.key_averages()}
    words = ("attention", "attn", "flash", "fmha", "softmax", "cudnn", "item", "repeat_interleave")
    return sorted(name for name in names if any(word in name.lower() for word in words))


def beside_receive(setup: ComputeSetup, chunks: tuple[int, ...], samples: int) -> list[dict[str, Any]]:
    """Of each chunk, a layer alone and during a pending receive: medians, and the share of the rate that is lost."""
    ranks = PendingRanks(setup)
    try:
        return [_lost(ranks, setup.kernels[0], chunk, samples) for chunk in chunks]
    finally:
        ranks.close()


def _lost(ranks: PendingRanks, kernel: str, chunk: int, samples: int) -> dict[str, Any]:
    taken = [ranks.sample(Point(kernel=kernel, chunk=chunk, prefix=0).key) for _ in range(samples)]
    alone_s, pending_s = (sorted(one[name] for one in taken)[samples // 2] for name in (ALONE, PENDING))
    return {"chunk": chunk, "alone_s": alone_s, "pending_s": pending_s, "lost": 1.0 - alone_s / pending_s}
