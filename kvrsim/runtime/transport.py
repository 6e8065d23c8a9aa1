"""Transports: messages and collectives between ranks, over torch.distributed or an emulated link."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from kvrsim.choices import RankBackend
from kvrsim.errors import InputError
from kvrsim.runtime.faults import LinkError, meaning
from kvrsim.runtime.plan import RankSettings, RankSlot

Edge = tuple[int, int]  # source and destination rank

# A receive that waits for its sender is a kernel that occupies one multiprocessor per block. Without a limit NCCL uses
# up to 32 blocks, so that a quarter of an A100 or H100 is missing for the rank's layers.
# Collectives have the same limit, so that strategies with collectives and with messages share one network.
MAX_BLOCKS = 8
BLOCKS_VARIABLE = "NCCL_MAX_P2P_NCHANNELS"  # a user's own limit
_PACKAGES = ("kvrsim", "planner", "calibrate", "validate", "tests")  # packages whose data classes may be sent


class Pending(Protocol):
    """A message in flight."""

    def wait(self) -> None:
        """Return when the tensor has received the message, or may be overwritten after sending. Raises LinkError."""


class Transport(ABC):
    """Messages and collectives of one rank. Collectives are rings unless a transport has better ones."""

    name: str  # name, such as "gloo"
    rank: int
    size: int  # number of ranks
    device: torch.device = torch.device("cpu")  # device on which this rank computes
    slot = RankSlot(rank=0, store="")  # connections to the process that started the rank

    @cached_property
    def _scratch(self) -> dict[tuple[str, int, torch.Size, torch.dtype], Tensor]:
        """Scratch memory by purpose and shape."""
        return {}

    @abstractmethod
    def isend(self, tensor: Tensor, dst: int) -> Pending:
        """Start to send a contiguous tensor, which must not change until `wait` returns."""

    @abstractmethod
    def irecv(self, tensor: Tensor, src: int) -> Pending:
        """Start to receive into a contiguous tensor. The n-th message on an edge goes to its n-th posted receive."""

    def isend_next(self, tensor: Tensor) -> Pending:
        """Start to send to rank + 1."""
        return self.isend(tensor, (self.rank + 1) % self.size)

    def irecv_prev(self, tensor: Tensor) -> Pending:
        """Start to receive from rank - 1."""
        return self.irecv(tensor, (self.rank - 1) % self.size)

    def shift(self, leaving: Tensor, landing: Tensor) -> None:
        """Send `leaving` to rank + 1 and receive `landing` from rank - 1."""
        receive = self.irecv_prev(landing)
        send = self.isend_next(leaving)
        receive.wait()
        send.wait()

    def ring_all_gather(self, whole: Tensor, boundaries: Sequence[int]) -> None:
        """All-gather the rows of `whole`; this rank's rows are from boundaries[rank] to boundaries[rank + 1].

        In each of p - 1 steps, each rank sends on the rows that it has received last, its own rows first.
        """
        pieces = [whole[start:end] for start, end in pairwise(boundaries)]
        for step in range(self.size - 1):
            self.shift(pieces[self.rank - step], pieces[self.rank - step - 1])

    def ring_all_reduce(self, flat: Tensor) -> None:
        """Replace `flat`, [n], by its sum over ranks: reduce-scatter, then all-gather (Patarasuk and Yuan, 2009)."""
        scratch = self._scratch_rows("ring", flat, -(-len(flat) // self.size))
        boundaries = [len(flat) * piece // self.size for piece in range(self.size + 1)]
        parts = [flat[start:end] for start, end in pairwise(boundaries)]
        for step in range(self.size - 1):
            other = parts[(self.rank - 2 - step) % self.size]
            self.shift(parts[(self.rank - 1 - step) % self.size], scratch[: len(other)])
            other += scratch[: len(other)]
        self.ring_all_gather(flat, boundaries)

    def connect(self, edges: Sequence[Edge]) -> None:  # noqa: B027 - not all transports have edges
        """Set up edges in addition to those of the ring; every rank calls this with the same edges."""

    def all_gather(self, whole: Tensor, boundaries: Sequence[int]) -> None:
        """All-gather with the backend's collective if there is one, else as `ring_all_gather`."""
        self.ring_all_gather(whole, boundaries)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by its sum over ranks."""
        self.ring_all_reduce(tensor.view(-1))

    def _scratch_rows(self, purpose: str, like: Tensor, rows: int, device: torch.device | str | None = None) -> Tensor:
        """Return rows of scratch memory, by default on the device of `like`; they are allocated once per shape."""
        key = (purpose, rows, like.shape[1:], like.dtype)
        if key not in self._scratch:
            if device is None:
                device = like.device
            self._scratch[key] = torch.zeros(rows, *like.shape[1:], dtype=like.dtype, device=device)
        return self._scratch[key]

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, ordered by rank; values are data classes or JSON values."""
        return [value]

    def barrier(self) -> None:  # noqa: B027 - virtual ranks run one after another
        """Return when every rank has called this method."""


class LinkGroups:
    """Process groups of one rank: one per edge, one per all-gather.

    Every rank makes the same groups in the same order, as torch requires. Operations of one NCCL group run one after
    another, so a receive that is posted early would delay a send; therefore each edge has its own group. The default
    group exists already.
    """

    def __init__(
        self,
        *,
        rank: int,
        backend: str,
        device: torch.device | str,
        edges: Sequence[Edge],
        gathers: Sequence[Sequence[int]],
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.backend = backend
        self.device = device
        self._timeout = timedelta(seconds=timeout_s)
        if backend == "nccl":
            os.environ[BLOCKS_VARIABLE] = str(nccl_blocks())
        self._edges = {edge: self._group(edge, is_edge=True) for edge in edges}
        self._gathers = {tuple(ranks): self._group(ranks, is_edge=False) for ranks in gathers}

    def add(self, edges: Sequence[Edge]) -> None:
        """Make the groups of new edges and use each once; every rank calls this with the same edges."""
        for edge in edges:
            if edge not in self._edges:
                self._edges[edge] = self._group(edge, is_edge=True)
                self._use(edge)

    def isend(self, edge: Edge, tensor: Tensor) -> dist.Work:
        """Start to send along an edge from this rank."""
        return dist.isend(tensor, edge[1], group=self._edges[edge])

    def irecv(self, edge: Edge, tensor: Tensor) -> dist.Work:
        """Start to receive along an edge to this rank."""
        return dist.irecv(tensor, edge[0], group=self._edges[edge])

    def all_gather(self, ranks: Sequence[int], whole: Tensor, piece: Tensor) -> None:
        """Gather equal pieces with the backend's collective; `piece` may be this rank's part of `whole`."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(whole, piece, group=self._gathers[tuple(ranks)])

    def all_reduce(self, ranks: Sequence[int], tensor: Tensor) -> None:
        """Sum in place with the backend's collective."""
        dist.all_reduce(tensor, group=self._gathers[tuple(ranks)])

    def first_use(self) -> None:
        """Use every group once, one after another, in the same order on every rank; both ends use an edge together.

        NCCL makes a group's communicator at its first use, and blocks the host until all ranks of the group have called
        it. Ranks that begin with different edges would wait for each other in a circle.
        """
        for edge in self._edges:
            self._use(edge)
        for ranks in self._gathers:
            if self.rank in ranks:
                self.all_gather(ranks, self._token(len(ranks)), self._token(1))
                self._synchronize()

    def _use(self, edge: Edge) -> None:
        if self.rank not in edge:
            return
        if self.rank == edge[0]:
            work = self.isend(edge, self._token(1))
        else:
            work = self.irecv(edge, self._token(1))
        work.wait()
        self._synchronize()

    def _token(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.uint8, device=self.device)

    def _synchronize(self) -> None:
        if self.backend == "nccl":
            torch.cuda.synchronize()  # wait() only orders streams on the device

    def _group(self, ranks: Sequence[int], *, is_edge: bool) -> dist.ProcessGroup:
        """Make a group. An edge has few blocks, and a stream of high priority so that it does not wait for layers."""
        options = None
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options.is_high_priority_stream = is_edge
            options.config.max_ctas = nccl_blocks()
            options._timeout = self._timeout  # NCCL uses this time-out instead of the group's
        return dist.new_group(sorted(ranks), backend=self.backend, timeout=self._timeout, pg_options=options)


def nccl_blocks() -> int:
    """Return the most blocks that NCCL may use for a message or a collective."""
    text = os.environ.get(BLOCKS_VARIABLE, "")
    if text.isdecimal() and int(text) > 0:
        return int(text)
    return MAX_BLOCKS


def device_id(device: torch.device) -> str | None:
    """Return an identifier of a GPU that is unique over all hosts; None for a CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def choose_backend(devices: Sequence[str | None], backend: RankBackend | None) -> RankBackend:
    """Choose NCCL if each rank has its own GPU, else gloo. devices: `device_id` of each rank.

    Raises InputError if NCCL is requested and impossible.
    """
    distinct = None not in devices and len(set(devices)) == len(devices)
    if backend == "nccl" and not distinct:
        raise InputError("backend", "nccl", "gloo where ranks compute on a CPU or share a GPU")
    if backend is not None:
        return backend
    if distinct:
        return "nccl"
    return "gloo"


@dataclasses.dataclass(slots=True)
class _PendingMessage:
    """A torch.distributed work, the tensor that it must keep alive, and the target of a message in host memory."""

    work: dist.Work
    tensor: Tensor
    peer: int
    failure: str
    target: Tensor | None = None

    def wait(self) -> None:
        with _link_errors(self.peer, self.failure):
            self.work.wait()
        if self.target is not None:
            self.target.copy_(self.tensor)


class DistributedTransport(Transport):
    """Transport by gloo on CPUs, by NCCL on GPUs, and by gloo through host memory if several ranks share a GPU.

    Values other than K and V are sent by gloo. A single rank needs no network.
    """

    def __init__(self, how: RankSettings, slot: RankSlot, local: int) -> None:
        """`local` is the rank's number on its host.

        Raises LinkError if the other ranks are not reached, InputError for an impossible backend.
        """
        self.slot = slot
        self.rank = slot.rank
        self.size = how.num_ranks
        if how.device == "cuda":
            self.device = torch.device("cuda", local % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        torch.set_num_threads(how.threads)
        self._everyone = range(self.size)
        edges: list[Edge] = []
        gathers: list[range] = []
        if self.size > 1:
            edges = [(rank, (rank + 1) % self.size) for rank in self._everyone]
            gathers = [self._everyone]
            with _link_errors(None, "no connection to the other ranks"):
                timeout = timedelta(seconds=how.timeout_s)
                dist.init_process_group("gloo", slot.store, rank=self.rank, world_size=self.size, timeout=timeout)
        self.backend = choose_backend(self.exchange(device_id(self.device)), how.backend)
        self.staged = self.backend == "gloo" and self.device.type == "cuda"
        self.name: str = self.backend
        if self.backend == "nccl":
            self.name = f"nccl, at most {nccl_blocks()} blocks per message"
        if not how.peer_to_peer:
            self._send_through_host_memory()
        message_device: torch.device | str = self.device
        if self.staged:
            self.name = "gloo through host memory"
            message_device = "cpu"
        with _link_errors(None, "no connection to the other ranks"):
            self._links = LinkGroups(
                rank=self.rank,
                backend=self.backend,
                device=message_device,
                edges=edges,
                gathers=gathers,
                timeout_s=how.timeout_s,
            )

    def _send_through_host_memory(self) -> None:
        """Switch direct access between GPUs off; NCCL reads the variable when it makes a group."""
        if self.backend != "nccl":
            accepted = "ranks that have a GPU each, on one host: gloo sends through host memory anyway"
            raise InputError("host_memory", self.name, accepted)
        os.environ["NCCL_P2P_DISABLE"] = "1"
        self.name += ", through host memory"

    def connect(self, edges: Sequence[Edge]) -> None:
        with _link_errors(None, "the links between the ranks cannot be set up"):
            self._links.add(edges)

    def isend(self, tensor: Tensor, dst: int) -> Pending:
        if self.staged:
            tensor = tensor.to("cpu")
        with _link_errors(dst, f"nothing can be sent to rank {dst}"):
            work = self._links.isend((self.rank, dst), tensor)
        return _PendingMessage(work, tensor, dst, f"not taken by rank {dst}")

    def irecv(self, tensor: Tensor, src: int) -> Pending:
        landing = tensor
        target = None
        if self.staged:
            landing = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            target = tensor
        with _link_errors(src, f"nothing can be received from rank {src}"):
            work = self._links.irecv((src, self.rank), landing)
        return _PendingMessage(work, landing, src, f"nothing came from rank {src}", target)

    def all_gather(self, whole: Tensor, boundaries: Sequence[int]) -> None:
        """Gather with the backend's collective: in place if all pieces are equal, else padded to the longest one."""
        if self.size == 1:
            return
        rows = whole[boundaries[self.rank] : boundaries[self.rank + 1]]
        lengths = {end - start for start, end in pairwise(boundaries)}
        if len(lengths) == 1 and not self.staged:
            with _link_errors(None, "the all-gather did not end"):
                self._links.all_gather(self._everyone, whole[: boundaries[-1]], rows)
            return
        longest = max(lengths)
        device = None
        if self.staged:
            device = "cpu"
        gathered = self._scratch_rows("gathered", whole, self.size * longest, device)
        piece = self._scratch_rows("piece", whole, longest, device)
        piece[: len(rows)].copy_(rows)
        with _link_errors(None, "the all-gather did not end"):
            self._links.all_gather(self._everyone, gathered, piece)
        for rank, (start, end) in enumerate(pairwise(boundaries)):
            if rank != self.rank:
                whole[start:end].copy_(gathered[rank * longest : rank * longest + end - start])

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum with the backend's collective."""
        if self.size == 1:
            return
        here = tensor
        if self.staged:
            here = tensor.to("cpu")
        with _link_errors(None, "the all-reduce did not end"):
            self._links.all_reduce(self._everyone, here)
        if self.staged:
            tensor.copy_(here)

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Raises LinkError naming a rank that has sent unexpected data."""
        contents = [pickle.dumps(value)]
        if self.size > 1:
            contents = self._contents(contents[0])
        values = []
        for rank, content in enumerate(contents):
            try:
                values.append(_DataUnpickler(io.BytesIO(content)).load())
            except Exception as error:  # any error: the content is not from one of our ranks
                raise LinkError(rank, f"rank {rank} has sent something unexpected: {error}") from None
        return values

    def _contents(self, content: bytes) -> list[bytes]:
        """Return the bytes of all ranks; `content`: this rank's. Ranks send lengths first, then their bytes, padded."""
        with _link_errors(None, "the other ranks did not answer"):
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in self._everyone]
            dist.all_gather(lengths, torch.tensor([len(content)]))
            counts = [int(length) for length in lengths]
            padded = torch.zeros(max(counts), dtype=torch.uint8)
            padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            pieces = [torch.empty_like(padded) for _ in self._everyone]
            dist.all_gather(pieces, padded)
        return [piece[:count].numpy().tobytes() for piece, count in zip(pieces, counts, strict=True)]

    def barrier(self) -> None:
        """Return when every rank has called this method and this rank's device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.size > 1:
            with _link_errors(None, "the other ranks did not come to the barrier"):
                dist.barrier()

    def warmup(self) -> None:
        """Use every edge and the collective once, then a ring, because the first use of a link blocks to set it up."""
        if self.size > 1:
            with _link_errors(None, "the links between the ranks cannot be set up"):
                self._links.first_use()
            whole = torch.zeros(self.size, 1, device=self.device)
            self.ring_all_gather(whole, range(self.size + 1))
            self.all_gather(whole, range(self.size + 1))
        self.barrier()

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


class _DataUnpickler(pickle.Unpickler):
    """Reader of pickles of plain values and of data classes of these packages; pickles cannot run other code."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in _PACKAGES:
            cls = super().find_class(module, name)
            if isinstance(cls, type) and dataclasses.is_dataclass(cls):
                return cls
        raise pickle.UnpicklingError(f"{module}.{name} is no data class of {', '.join(_PACKAGES)}")


@contextmanager
def _link_errors(peer: int | None, what: str) -> Iterator[None]:
    """Convert errors of torch.distributed to a LinkError."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # ValueError: a variable of torchrun is missing
        raise LinkError(peer, f"{what}: {meaning(error)}") from None


class _StampedMessage:
    """A message and the stamp that is sent before it: the earliest time at which the receiver may see the message."""

    def __init__(self, stamp: Tensor | None, *messages: Pending) -> None:
        """Take the messages in their order; stamp: None on the sender's side."""
        self.stamp = stamp
        self.messages = messages

    def wait(self) -> None:
        for message in self.messages:
            message.wait()
        if self.stamp is not None:
            time.sleep(max(0.0, self.stamp.item() - time.monotonic()))


class EmulatedTransport(DistributedTransport):
    """A transport whose messages take as long as on a given link.

    The arrival time is sent before each message, and the receiver sleeps until this time. Clocks are compared across
    processes, so all ranks run on one host. All-gathers and all-reduces are rings.
    """

    def __init__(self, how: RankSettings, slot: RankSlot, local: int) -> None:
        """Connect as DistributedTransport. Raises InputError with NCCL, or where ranks run on several hosts."""
        super().__init__(how, slot, local)
        assert how.link is not None
        link = how.link
        self.link = link
        self._free_s = 0.0  # time.monotonic() from which this rank's link is free
        if self.backend == "nccl":
            raise InputError("backend", "nccl", "gloo under an emulated link: the host waits for messages")
        hosts = set(self.exchange(platform.node()))
        if len(hosts) > 1:
            raise InputError("link_bandwidth", f"ranks on {len(hosts)} hosts", "ranks of one host, which share a clock")
        self.name = f"emulated {link.bandwidth_bytes_per_s * 8e-9:g} Gbit/s, {link.latency_s * 1e6:g} us"

    def isend(self, tensor: Tensor, dst: int) -> Pending:
        """Send the arrival time, then the message. A rank's messages leave one after another."""
        self._free_s = max(self._free_s, time.monotonic()) + tensor.nbytes / self.link.bandwidth_bytes_per_s
        stamp = torch.tensor([self._free_s + self.link.latency_s], dtype=torch.float64)
        return _StampedMessage(None, super().isend(stamp, dst), super().isend(tensor, dst))

    def irecv(self, tensor: Tensor, src: int) -> Pending:
        stamp = torch.empty(1, dtype=torch.float64)
        return _StampedMessage(stamp, super().irecv(stamp, src), super().irecv(tensor, src))

    all_gather = Transport.all_gather
    all_reduce = Transport.all_reduce


def open_transport(how: RankSettings, slot: RankSlot, local: int) -> DistributedTransport:
    """Connect the `local`-th rank of this host to the others, and use each link once."""
    if how.link is None:
        transport = DistributedTransport(how, slot, local)
    else:
        transport = EmulatedTransport(how, slot, local)
    transport.warmup()
    return transport
