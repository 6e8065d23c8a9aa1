"""Sidecar: processes beside the ranks that send messages between a random pair of neighbours, as in the paper.

In section 5 of the paper, another program sends in both directions between a random pair of adjacent GPUs while
prefills are timed. Here each GPU, or each rank of a CPU, has a second process with links of its own.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import Self

import numpy as np

from kvrsim.errors import InputError
from kvrsim.runtime.faults import RankError
from kvrsim.runtime.plan import RankSettings, RankSlot
from kvrsim.runtime.ranks import RankPool
from kvrsim.units import format_bytes

_MOST_REPEATS = 1000  # messages of a pair without a break
_DWELL_S = 0.01  # seconds for which a pair has the traffic, as in the simulator's side traffic


class Sidecar:
    """Traffic beside the ranks while the context is open."""

    def __init__(self, how: RankSettings, nbytes: int, seed: int) -> None:
        """how: settings of the ranks; nbytes: bytes of a message; seed: of the pairs.

        Raises InputError for a single rank, or where links are emulated.
        """
        if how.num_ranks < 2:
            raise InputError("side_traffic", format_bytes(nbytes), "at least 2 ranks: traffic joins two")
        if how.link is not None:
            raise InputError("side_traffic", format_bytes(nbytes), "real links: traffic does not slow emulated ones")
        self._how = replace(how, threads=1)
        self._nbytes = nbytes
        self._pairs = np.random.default_rng(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send_on, daemon=True)
        self._pool: RankPool | None = None
        self._fault: RankError | None = None  # why the traffic ended before the context
        self._seconds = 0.0  # time with traffic
        self.messages = 0  # messages in each direction

    def __enter__(self) -> Self:
        make = partial(SidecarRank, how=self._how, nbytes=self._nbytes)
        self._pool = RankPool(self._how.num_ranks, make, start_s=self._how.deadline_s)
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """End the traffic. Raises RankError if it has failed meanwhile, unless the context ends with an error."""
        assert self._pool is not None
        self._stop.set()
        self._thread.join()
        self._pool.close()
        if self._fault is not None and kind is None:
            raise self._fault

    def conditions(self) -> dict[str, str]:
        """Return the traffic in words, as a condition of a measurement."""
        rate = self.messages * self._nbytes / max(self._seconds, 1e-9)
        pair = "in both directions between a random pair of neighbours"
        return {"side traffic": f"messages of {format_bytes(self._nbytes)} {pair}, {rate / 1e9:.2g} GB/s each way"}

    def _send_on(self) -> None:
        """Let one pair after the other exchange messages for about _DWELL_S, until the context ends."""
        assert self._pool is not None
        repeats = 1
        while not self._stop.is_set():
            first = int(self._pairs.integers(self._how.num_ranks - 1))
            began_s = time.monotonic()
            command = ("exchange", {"first": first, "repeats": repeats})
            try:
                self._pool.ask((first, first + 1), command, self._how.timeout_s)
            except RankError as error:
                self._fault = error
                return
            took_s = time.monotonic() - began_s
            self._seconds += took_s
            self.messages += repeats
            repeats = min(max(1, round(repeats * _DWELL_S / took_s)), _MOST_REPEATS)


class SidecarRank:
    """One process of a Sidecar."""

    def __init__(self, *, slot: RankSlot, how: RankSettings, nbytes: int) -> None:
        import torch

        from kvrsim.runtime.transport import open_transport

        self.transport = open_transport(how, slot, slot.rank)
        self.transport.connect([(rank + 1, rank) for rank in range(how.num_ranks - 1)])
        self.outgoing = torch.zeros(nbytes, dtype=torch.uint8, device=self.transport.device)
        self.incoming = torch.zeros(nbytes, dtype=torch.uint8, device=self.transport.device)

    def exchange(self, *, first: int, repeats: int) -> None:
        """Send and receive messages between the ranks `first` and `first` + 1."""
        import torch

        peer = first if self.transport.rank != first else first + 1
        for _ in range(repeats):
            receive = self.transport.irecv(self.incoming, peer)
            send = self.transport.isend(self.outgoing, peer)
            receive.wait()
            send.wait()
        if self.transport.device.type == "cuda":
            torch.cuda.synchronize()  # wait() only orders streams on the device
