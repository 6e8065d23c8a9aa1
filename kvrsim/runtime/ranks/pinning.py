"""Cores of a rank's own, and no other interface than this host's."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def available_cores() -> list[int]:
    """Cores that this process may run on; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@contextmanager
def pinned(local: int, num_local: int, threads: int) -> Iterator[None]:
    """Meanwhile this thread computes on cores of its rank: else, beside others' work, ranks may share one.

    Threads that carry messages have been started before, and run where there is room. Where there are fewer cores
    than `num_local` ranks of `threads` threads need, nothing is pinned.
    """
    cores = available_cores()
    if len(cores) < num_local * threads:
        yield
        return
    os.sched_setaffinity(0, cores[local * threads : (local + 1) * threads])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def bind_to_loopback() -> None:
    """From now on gloo and NCCL listen on the loopback interface alone, wherever the host's name points.

    For ranks that all run on this host. Overrides what the environment says: nobody else has to reach them.
    """
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        os.environ |= dict.fromkeys(_INTERFACES, loopback)
