"""LinkRank: one rank of a link benchmark; PendingRanks: a layer timed during a receive that waits for its message.

Times are those of the monotonic clock, which all processes of a Linux machine share. A message lasts from the moment at
which the sender's device comes to it until the receiver's device has the data; the receive is posted before, as in the
runtime. As there, the host runs ahead of a GPU, so that the host's calls are not part of the time: they are measured
alone (`LinkRank.issue`). Half a round trip would not show which direction is slow, and would include the receiver's
time to answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain, permutations
from typing import Any

import torch
import torch.distributed as dist

from calibrate.data import RING
from calibrate.measure.campaign import SkippedPoint
from calibrate.measure.forward import ComputeSetup, ForwardTimer, Point
from kvrsim.errors import InputError
from kvrsim.runtime.marks import clock_of
from kvrsim.runtime.plan import RankSettings, RankSlot
from kvrsim.runtime.ranks import RankPool
from kvrsim.runtime.transport import LinkGroups, Transport, open_transport
from kvrsim.scenario import dtype_bytes

Flow = tuple[int, int]  # source and destination rank


def counts_to(num_ranks: int) -> list[int]:
    """Powers of two from 2 that are below `num_ranks`, and `num_ranks`."""
    powers = [2**power for power in range(1, num_ranks.bit_length()) if 2**power < num_ranks]
    return [*powers, num_ranks]


START_S = 120.0  # seconds until all ranks must have imported torch and synchronised
_WARM_BYTES = 2**20
HOLD_S = 2e-3  # seconds for which a GPU is kept busy before a transfer: the host issues 28 messages meanwhile
_NOTICE = 0.8  # a waiting rank raises its own error after this share of the timeout, so that it is not taken as hanging


MAX_BYTES = 2**26  # bytes of K and V of one layer of 4096 hidden elements in half precision, for 4096 tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSetup:
    """Settings of a link benchmark. Raises InputError for a size of messages that is not accepted."""

    num_ranks: int
    device: str = "cpu"  # or cuda
    num_threads: int = 1  # threads of each rank
    max_bytes: int = MAX_BYTES  # maximum bytes of a message
    timeout_s: float = 60.0  # a rank that does not answer within this time counts as failed

    def __post_init__(self) -> None:
        if not 2**10 <= self.max_bytes <= 2**34:
            raise InputError("max_bytes", self.max_bytes, "1 KiB to 16 GiB")

    @property
    def backend(self) -> str:
        """The library that sends messages: NCCL between GPUs, gloo between CPUs."""
        return "nccl" if self.device == "cuda" else "gloo"


class LinkRank:
    """One rank of a link benchmark, with buffers, links to all other ranks, and groups for all-gathers.

    All links are used once before the rank is ready. Ranks synchronise over a gloo group, on the host.
    """

    def __init__(self, *, slot: RankSlot, setup: LinkSetup) -> None:
        num_ranks = setup.num_ranks
        backend = setup.backend
        self.rank = slot.rank
        self.num_ranks = num_ranks
        self.backend = backend
        torch.set_num_threads(setup.num_threads)
        self.device = self._device(setup.device)
        self.clock = clock_of(setup.device)
        patience = timedelta(seconds=START_S)
        dist.init_process_group("gloo", init_method=slot.store, rank=self.rank, world_size=num_ranks, timeout=patience)
        notice_s = _NOTICE * setup.timeout_s
        everyone = list(range(num_ranks))
        self.meeting = dist.new_group(everyone, backend="gloo", timeout=timedelta(seconds=notice_s))
        edges = list(permutations(everyone, 2))
        self.links = LinkGroups(
            rank=self.rank,
            backend=backend,
            device=self.device,
            edges=edges,
            gathers=[range(count) for count in counts_to(num_ranks)],
            timeout_s=notice_s,
        )
        self.token = torch.zeros(1, dtype=torch.uint8)
        self.outgoing, self.incoming = self._buffer(setup.max_bytes), self._buffer(setup.max_bytes)
        self._warm_up(edges, min(setup.max_bytes, _WARM_BYTES))

    def _device(self, kind: str) -> str:
        """The rank's own GPU, or the CPU."""
        if kind != "cuda":
            return kind
        count = torch.cuda.device_count()
        if count < self.num_ranks:
            raise RuntimeError(f"{self.num_ranks} ranks need as many GPUs, found {count}")
        torch.cuda.set_device(self.rank)
        return f"cuda:{self.rank}"

    def _buffer(self, nbytes: int) -> Any:
        """Make a buffer and fill it with the rank's number, so that its pages are allocated."""
        return torch.full((nbytes,), self.rank, dtype=torch.uint8, device=self.device)

    def _warm_up(self, edges: Sequence[Flow], nbytes: int) -> None:
        """Use every link for the first time, in order; then send a message over each, and run each all-gather."""
        self.links.first_use()
        for src, dst in edges:
            if self.rank in (src, dst):
                self.exchange(flows=[(src, dst)], nbytes=nbytes, repeats=1)
        for count in counts_to(self.num_ranks):
            if self.rank < count:
                for kernel in (self.backend, self.backend + RING):
                    self.gather(kernel=kernel, num_ranks=count, nbytes=nbytes // count * count, repeats=1)

    def exchange(self, *, flows: Sequence[Flow], nbytes: int, repeats: int) -> list[tuple[float, float | None]]:
        """Send and receive along this rank's flows: at most one send and one receive.

        Returns, for each repeat, the moment at which this rank's device comes to its message, and the arrival of the
        message that this rank receives, or None.
        """
        ranks = sorted(set(chain.from_iterable(flows)))
        to = None
        come = None
        for src, dst in flows:
            if src == self.rank:
                to = (src, dst)
            if dst == self.rank:
                come = (src, dst)
        times = []
        for _ in range(repeats):
            self._start()
            receive = None
            send = None
            if come is not None:
                receive = self.links.irecv(come, self.incoming[:nbytes])
            self._meet(ranks)
            if to is not None:
                self.clock.hold(HOLD_S)
            self.clock.mark("send")
            if to is not None:
                send = self.links.isend(to, self.outgoing[:nbytes])
            if receive is not None:
                receive.wait()
                self.clock.mark("received")
            if send is not None:
                send.wait()
            moments_s = self._moments_s()
            times.append((moments_s["send"], moments_s.get("received")))
        return times

    def issue(self, *, flow: Flow, nbytes: int, repeats: int) -> list[float]:
        """Seconds of this rank's call that starts a send or a receive along the flow, without the transfer."""
        took_s = []
        for _ in range(repeats):
            if self.rank == flow[0]:
                self._meet(flow)
            began_s = time.monotonic()
            if self.rank == flow[0]:
                work = self.links.isend(flow, self.outgoing[:nbytes])
            else:
                work = self.links.irecv(flow, self.incoming[:nbytes])
            took_s.append(time.monotonic() - began_s)
            if self.rank == flow[1]:
                self._meet(flow)
            work.wait()
            if self.device != "cpu":
                torch.cuda.synchronize()  # wait() only orders the device's streams
        return took_s

    def gather(self, *, kernel: str, num_ranks: int, nbytes: int, repeats: int) -> list[tuple[float, float]]:
        """Begin and end of each of several all-gathers on this rank; see `_spans_s`."""
        piece = nbytes // num_ranks
        run = self._ring if kernel.endswith(RING) else self._collective
        return self._spans_s(lambda: run(num_ranks, piece), num_ranks, repeats)

    def reduce(self, *, kernel: str, num_ranks: int, nbytes: int, repeats: int) -> list[tuple[float, float]]:
        """Begin and end of each of several all-reduces of zeros in fp32; see `_spans_s`."""
        ranks = range(num_ranks)
        flat = self.incoming[:nbytes].view(torch.float32)
        flat.zero_()
        ring = _FirstRanks(rank=self.rank, size=num_ranks, links=self.links)
        if kernel.endswith(RING):
            return self._spans_s(lambda: ring.ring_all_reduce(flat), num_ranks, repeats)
        return self._spans_s(lambda: self.links.all_reduce(ranks, flat), num_ranks, repeats)

    def _spans_s(self, run: Callable[[], object], num_ranks: int, repeats: int) -> list[tuple[float, float]]:
        """Begin and end of each of several collectives on this rank.

        On a CPU they follow one another without a meeting in between, because ranks leave a meeting at different times:
        one begins where the last one has ended, the first one waits for all ranks and does not count. A GPU comes to
        each when its host has issued it.
        """
        spans_s = []
        if self.clock.host_is_device:
            self._meet(range(num_ranks))
            run()
            ended_s = time.monotonic()
            for _ in range(repeats):
                began_s = ended_s
                run()
                ended_s = time.monotonic()
                spans_s.append((began_s, ended_s))
            return spans_s
        for _ in range(repeats):
            self._start()
            self._meet(range(num_ranks))
            self.clock.hold(HOLD_S)
            self.clock.mark("begin")
            run()
            self.clock.mark("end")
            moments_s = self._moments_s()
            spans_s.append((moments_s["begin"], moments_s["end"]))
        return spans_s

    def _start(self) -> None:
        """Start the clock: its first mark joins the device's time to that of all processes."""
        self.clock.start()
        self.clock.mark("start")

    def _moments_s(self) -> dict[str, float]:
        """Wait for the device; return the moments of the marks on the clock of all processes."""
        return {mark.name: self.clock.start_s + mark.device_s for mark in self.clock.finish()}

    def _collective(self, num_ranks: int, piece: int) -> None:
        """Run the backend's own all-gather in place, as the runtime does for equal pieces."""
        whole = self.incoming[: piece * num_ranks]
        self.links.all_gather(range(num_ranks), whole, whole[piece * self.rank : piece * (self.rank + 1)])

    def _ring(self, num_ranks: int, piece: int) -> None:
        """Run the runtime's ring all-gather over the first ranks."""
        whole = self.incoming[: piece * num_ranks]
        ring = _FirstRanks(rank=self.rank, size=num_ranks, links=self.links)
        ring.ring_all_gather(whole, range(0, piece * num_ranks + 1, piece))

    def _meet(self, ranks: Sequence[int]) -> None:
        """Wait until all these ranks have called it: the others notify the first rank, which releases them."""
        first, *others = ranks
        if self.rank == first:
            for other in others:
                dist.recv(self.token, other, group=self.meeting)
            for other in others:
                dist.send(self.token, other, group=self.meeting)
        else:
            dist.send(self.token, first, group=self.meeting)
            dist.recv(self.token, first, group=self.meeting)


class _FirstRanks(Transport):
    """Transport between the first ranks, which form a ring."""

    def __init__(self, rank: int, size: int, links: LinkGroups) -> None:
        self.rank = rank
        self.size = size
        self.links = links

    def isend(self, tensor: Any, dst: int) -> Any:
        return self.links.isend((self.rank, dst), tensor)

    def irecv(self, tensor: Any, src: int) -> Any:
        return self.links.irecv((src, self.rank), tensor)


ALONE = "layer_alone"
PENDING = "layer_pending"
_MOST_BYTES = 2**28  # maximum bytes of the message: a longer one would not occupy more of the GPU
_TIMEOUT_S = 60.0


class PendingRanks:
    """Two processes that time a layer alone and during a pending receive: one computes and receives, one sends.

    A pending NCCL receive is a kernel: it occupies multiprocessors while it waits for its sender. A rank of a
    KV-Runahead chain has a pending receive during nearly all its computation. The receive is posted through the
    runtime's own transport, and so has the same NCCL settings (streams, number of blocks). A send is not timed: its
    receiver posts the receive a layer ahead, so that a send waits only where its receiver is more than a layer behind,
    and such a sender does not decide the TTFT.

    Raises RankError, naming the rank, if a process ends or does not answer.
    """

    def __init__(self, setup: ComputeSetup) -> None:
        self._pool = RankPool(2, partial(PendingRank, setup=setup), start_s=START_S + _TIMEOUT_S)

    def sample(self, at: Point) -> Mapping[str, float]:
        """Device seconds of one layer of a point: alone, then during a pending receive.

        Raises SkippedPoint if the point does not fit into memory; the ranks go on.
        """
        alone_s = _seconds_of(self._layer(at))
        self._pool.ask([0], ("post", {}), _TIMEOUT_S)
        answer = self._layer(at)
        self._pool.ask([0, 1], ("complete", {}), _TIMEOUT_S)
        return {ALONE: alone_s, PENDING: _seconds_of(answer)}

    def _layer(self, at: Point) -> float | str:
        answer: float | str = self._pool.ask([0], ("layer", {"at": at}), _TIMEOUT_S)[0]
        return answer

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


def _seconds_of(answer: float | str) -> float:
    """The seconds that a rank answers; raise SkippedPoint if it answers why it cannot measure the point."""
    if isinstance(answer, str):
        raise SkippedPoint(answer)
    return answer


class PendingRank:
    """One rank of PendingRanks."""

    def __init__(self, *, slot: RankSlot, setup: ComputeSetup) -> None:
        how = RankSettings(num_ranks=2, device=setup.device, timeout_s=START_S + _TIMEOUT_S, threads=setup.threads)
        self.rank = slot.rank
        self.transport = open_transport(how, slot, slot.rank)
        nbytes = setup.model.layer_cache_bytes(setup.max_context, dtype_bytes(setup.dtype))
        self.message = torch.zeros(min(nbytes, _MOST_BYTES), dtype=torch.uint8, device=self.transport.device)
        self.timer = ForwardTimer.build(setup) if self.rank == 0 else None
        self._receive: Any = None

    def layer(self, *, at: Point) -> float | str:
        """Device seconds of a layer, at the clock of a long prefill; why it cannot be timed if memory runs out.

        A reason is an answer, not an error, which would end the ranks.
        """
        assert self.timer is not None
        try:
            # Allocate memory and load kernels before the receive: during it, the device cannot be synchronised.
            self.timer.layer_s(at)
            return self.timer.layer_s(at, heat=not self.timer.clock.host_is_device)
        except SkippedPoint as reason:
            if self._receive is None:
                self.timer.release()
            return str(reason)

    def post(self) -> None:
        """Post the receive."""
        self._receive = self.transport.irecv_prev(self.message)

    def complete(self) -> None:
        """Send the message or wait for its arrival."""
        if self.rank == 1:
            self.transport.isend_next(self.message).wait()
        else:
            assert self.timer is not None
            self._receive.wait()
            self._receive = None
            self.timer.release()  # the process that times the other points needs this GPU's memory
