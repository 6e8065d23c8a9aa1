"""LinkRank: what one rank does while links are timed.

Times are of the monotonic clock, which all processes of a Linux machine share: a message takes from the moment when its
sender calls send until its receiver has it, the receive having been posted before, as the runtime does. Half a round
trip would hide which of two directions is slow, and would count the receiver's turning round.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from calibrate.link_points import RING, Flow, counts_to

START_S = 120.0  # in which all ranks must have imported torch and met
_WARM_BYTES = 2**20
_NOTICE = 0.8  # of the timeout, after which a rank gives up by itself, so that the one that hangs is known


class LinkRank:
    """Buffers, one process group an edge and one a count of ranks; all of them used once before it is ready.

    Edges have a direction and a group each, as the operations of one group may run one after another. Ranks meet over a
    gloo group, on the host. `torch`: the module, or what behaves like it.
    """

    def __init__(
        self,
        *,
        rank: int,
        folder: str,
        num_ranks: int,
        backend: str,
        device: str,
        num_threads: int,
        max_bytes: int,
        timeout_s: float,
        torch: Any = None,
    ) -> None:
        self.torch = torch or import_module("torch")
        self.dist: Any = self.torch.distributed
        self.rank, self.num_ranks, self.backend = rank, num_ranks, backend
        self.torch.set_num_threads(num_threads)
        self.device = self._device(device)
        store, patience = f"file://{Path(folder).absolute()}/store", timedelta(seconds=START_S)
        self.dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=patience)
        timeout = timedelta(seconds=_NOTICE * timeout_s)
        self.meeting = self.dist.new_group(list(range(num_ranks)), backend="gloo", timeout=timeout)
        edges = [(src, dst) for src in range(num_ranks) for dst in range(num_ranks) if src != dst]
        self.edges = {edge: self._group(edge, timeout) for edge in edges}
        self.gathers = {count: self._group(range(count), timeout) for count in counts_to(num_ranks)}
        self.token = self.torch.zeros(1, dtype=self.torch.uint8)
        self.outgoing, self.incoming = self._buffer(max_bytes), self._buffer(max_bytes)
        self._warm_up(min(max_bytes, _WARM_BYTES))

    def _device(self, kind: str) -> str:
        """The rank's own GPU, or the processor."""
        if kind != "cuda":
            return kind
        found = self.torch.cuda.device_count()
        if found < self.num_ranks:
            raise RuntimeError(f"{self.num_ranks} ranks need as many GPUs, found {found}")
        self.torch.cuda.set_device(self.rank)
        return f"cuda:{self.rank}"

    def _group(self, ranks: Sequence[int], timeout: timedelta) -> Any:
        return self.dist.new_group(sorted(ranks), backend=self.backend, timeout=timeout)

    def _buffer(self, nbytes: int) -> Any:
        """Filled with the rank's number, so that its pages are there, and what arrives says where it is from."""
        return self.torch.full((nbytes,), self.rank, dtype=self.torch.uint8, device=self.device)

    def _warm_up(self, nbytes: int) -> None:
        """Connections and communicators are made at first use; what arrives is checked this once."""
        for src, dst in self.edges:
            if self.rank in (src, dst):
                self.exchange(flows=[(src, dst)], nbytes=nbytes, repeats=1)
            if self.rank == dst and int(self.incoming[nbytes - 1]) != src:
                raise RuntimeError(f"what rank {src} sent has not arrived")
        for count in self.gathers:
            if self.rank < count:
                for kernel in (self.backend, self.backend + RING):
                    self.gather(kernel=kernel, num_ranks=count, nbytes=nbytes // count * count, repeats=1)
                    self._check_gathered(count, nbytes // count)

    def _check_gathered(self, count: int, piece: int) -> None:
        pieces = [int(self.incoming[piece * index]) for index in range(count)]
        if pieces != list(range(count)):
            raise RuntimeError(f"an all-gather of {count} ranks has brought {pieces}")

    def exchange(self, *, flows: Sequence[Flow], nbytes: int, repeats: int) -> list[tuple[float, float | None]]:
        """Send and receive along the flows that this rank has a part in, at most one of each kind.

        For each repeat when it began, and when what it receives, if anything, was there.
        """
        ranks = sorted({rank for flow in flows for rank in flow})
        to = next((flow for flow in flows if flow[0] == self.rank), None)
        come = next((flow for flow in flows if flow[1] == self.rank), None)
        times = []
        for _ in range(repeats):
            receive = self._receive(come, self.incoming[:nbytes]) if come else None
            self._meet(ranks)
            began_s = time.monotonic()
            send = self._send(to, self.outgoing[:nbytes]) if to else None
            arrived_s = self._finish(receive) if receive else None
            if send:
                self._finish(send)
            times.append((began_s, arrived_s))
        return times

    def gather(self, *, kernel: str, num_ranks: int, nbytes: int, repeats: int) -> list[float]:
        """All-gathers one after another: when each had ended here, the first one, which waits for all, included."""
        piece = nbytes // num_ranks
        run = self._ring if kernel.endswith(RING) else self._collective
        self._meet(range(num_ranks))
        ends_s = []
        for _ in range(repeats + 1):
            run(num_ranks, piece)
            ends_s.append(self._synchronised_s())
        return ends_s

    def _collective(self, num_ranks: int, piece: int) -> None:
        """What the backend has; all_gather_single is the name from torch 2.13 on."""
        gather = getattr(self.dist, "all_gather_single", None) or self.dist.all_gather_into_tensor
        gather(self.incoming[: piece * num_ranks], self.outgoing[:piece], group=self.gathers[num_ranks])

    def _ring(self, num_ranks: int, piece: int) -> None:
        """p - 1 steps: each rank hands on what came last."""
        after, before = (self.rank + 1) % num_ranks, (self.rank - 1) % num_ranks
        places = [(self.rank - step) % num_ranks for step in range(num_ranks)]
        pieces = [self.incoming[piece * place : piece * (place + 1)] for place in places]
        pieces[0].copy_(self.outgoing[:piece])
        for own, new in pairwise(pieces):
            receive = self._receive((before, self.rank), new)
            send = self._send((self.rank, after), own)
            receive.wait()
            send.wait()

    def _send(self, flow: Flow, buffer: Any) -> Any:
        return self.dist.isend(buffer, flow[1], group=self.edges[flow])

    def _receive(self, flow: Flow, buffer: Any) -> Any:
        return self.dist.irecv(buffer, flow[0], group=self.edges[flow])

    def _finish(self, work: Any) -> float:
        """When it is done, on the device too."""
        work.wait()
        return self._synchronised_s()

    def _synchronised_s(self) -> float:
        if self.device != "cpu":
            self.torch.cuda.synchronize()  # wait() has only put the device's streams in order
        return time.monotonic()

    def _meet(self, ranks: Sequence[int]) -> None:
        """Go on when all of them are here: they tell the first, which lets them go."""
        first, *others = ranks
        if self.rank == first:
            for other in others:
                self.dist.recv(self.token, other, group=self.meeting)
            for other in others:
                self.dist.send(self.token, other, group=self.meeting)
        else:
            self.dist.send(self.token, first, group=self.meeting)
            self.dist.recv(self.token, first, group=self.meeting)
