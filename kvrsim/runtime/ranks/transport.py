"""Transport: what a rank says to its neighbours, in the words of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist

from kvrsim.choices import RankBackend
from kvrsim.runtime.ranks.faults import LinkError, meaning
from kvrsim.runtime.ranks.links import Edge, Links, chosen_backend, device_id
from kvrsim.runtime.ranks.rings import Pending, Ring, neighbour, ring_all_gather
from kvrsim.runtime.ranks.wire import MAX_BYTES, WireError, decoded, encoded

OnProgress = Callable[[int, int, str], object]  # steps done, steps in all, what they are


class Transport(Ring, Protocol):
    """All that a rank needs of the others.

    Messages on an edge arrive in the order in which they were posted. Tensors are contiguous, and stay alive
    and untouched until `wait` returns. The edges of the ring are there; others only after `connect`.
    """

    @property
    def name(self) -> str:
        """For people, such as "gloo"."""

    def connect(self, edges: Sequence[Edge]) -> None:
        """Make the edges that are not there yet: all ranks call it with the same ones."""

    def isend(self, tensor: Any, dst: int) -> Pending:
        """Send to another rank beside computation."""

    def irecv(self, tensor: Any, src: int) -> Pending:
        """Receive in place from another rank beside computation."""

    def all_gather(self, whole: Any, boundaries: Sequence[int]) -> None:
        """Fill `whole`, whose rows from boundaries[rank] to boundaries[rank + 1] are this rank's own."""

    def all_reduce(self, tensor: Any) -> None:
        """Replace a tensor by its sum over all ranks."""

    def exchange(self, value: Any, kind: Any = Any) -> list[Any]:
        """What each rank has handed in, by rank: small things that JSON can hold.

        `kind`: the annotation of the value, as wire.decoded takes it; without it, plain JSON values come back.
        """

    def barrier(self) -> None:
        """Return when every rank has come here."""

    def warmup(self) -> None:
        """Use every edge once: the first use of a link sets it up and blocks."""

    def note(self, layer: int) -> None:
        """Tell whoever watches this rank to which layer it has come."""

    def report(self, done: int, total: int, what: str) -> None:
        """Tell whoever started the ranks how far the work is; only the first rank is heard."""


class _Work:
    """A torch.distributed work with the tensor that it must keep alive."""

    def __init__(self, work: Any, tensor: Any, peer: int, what: str, after: Callable[[], object] | None) -> None:
        self.work, self.tensor, self.peer, self.what, self.after = work, tensor, peer, what, after

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise LinkError(self.peer, f"{self.what} rank {self.peer}: {meaning(error)}") from None
        if self.after is not None:
            self.after()


class DistributedTransport:
    """Gloo on the CPU, NCCL on CUDA, gloo through host memory where several ranks share a GPU.

    What is not K and V goes through gloo. One rank alone needs neither, nor any network.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        init_method: str,
        device: torch.device,
        timeout_s: float,
        backend: RankBackend | None = None,
        watcher: Callable[[int], object] | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Raises LinkError where the other ranks are not found, InputError for a backend that cannot be."""
        self.rank, self.size, self.device = rank, size, device
        self.watcher, self.on_progress = watcher, on_progress
        self._scratch: dict[Any, Any] = {}
        everyone = range(size)
        if size > 1:
            with _linked(None, "no connection to the other ranks"):
                timeout = timedelta(seconds=timeout_s)
                dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size, timeout=timeout)
        self.backend = chosen_backend(self.exchange(device_id(torch, device)), backend)
        self.staged = self.backend == "gloo" and device.type == "cuda"
        self.name: str = "gloo through host memory" if self.staged else self.backend
        with _linked(None, "no connection to the other ranks"):
            self._links = Links(
                rank=rank,
                backend=self.backend,
                device="cpu" if self.staged else device,
                edges=[(one, (one + 1) % size) for one in everyone] if size > 1 else [],
                gathers=[everyone] if size > 1 else [],
                timeout_s=timeout_s,
                torch=torch,
            )

    def isend_next(self, tensor: Any) -> Pending:
        """Send to rank + 1; the tensor is kept alive by what is returned."""
        return self.isend(tensor, neighbour(self, 1))

    def irecv_prev(self, tensor: Any) -> Pending:
        """Receive from rank - 1, in place."""
        return self.irecv(tensor, neighbour(self, -1))

    def connect(self, edges: Sequence[Edge]) -> None:
        """Make a process group for each edge without one, and use it once."""
        with _linked(None, "the links between the ranks cannot be set up"):
            self._links.add(edges)

    def isend(self, tensor: Any, dst: int) -> Pending:
        """Send to a rank; the tensor is kept alive by what is returned."""
        tensor = tensor.to("cpu") if self.staged else tensor
        with _linked(dst, f"nothing can be sent to rank {dst}"):
            work = self._links.isend((self.rank, dst), tensor)
        return _Work(work, tensor, dst, "not taken by", None)

    def irecv(self, tensor: Any, src: int) -> Pending:
        """Receive from a rank, in place."""
        landing = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda) if self.staged else tensor
        with _linked(src, f"nothing can be received from rank {src}"):
            work = self._links.irecv((src, self.rank), landing)
        after = (lambda: tensor.copy_(landing)) if self.staged else None
        return _Work(work, landing, src, "nothing came from", after)

    def all_gather(self, whole: Any, boundaries: Sequence[int]) -> None:
        """The backend's collective, on pieces padded to the longest where they differ."""
        if self.size == 1:
            return
        own = whole[boundaries[self.rank] : boundaries[self.rank + 1]]
        longest = max(end - start for start, end in pairwise(boundaries))
        gathered = self._room("gathered", whole, self.size * longest)
        piece = self._room("piece", whole, longest)
        piece[: len(own)].copy_(own)
        with _linked(None, "the all-gather did not end"):
            self._links.all_gather(range(self.size), gathered, piece)
        for rank, (start, end) in enumerate(pairwise(boundaries)):
            if rank != self.rank:
                whole[start:end].copy_(gathered[rank * longest : rank * longest + end - start])

    def all_reduce(self, tensor: Any) -> None:
        """The backend's collective."""
        if self.size == 1:
            return
        here = tensor.to("cpu") if self.staged else tensor
        with _linked(None, "the all-reduce did not end"):
            self._links.all_reduce(range(self.size), here)
        if self.staged:
            tensor.copy_(here)

    def exchange(self, value: Any, kind: Any = Any) -> list[Any]:
        """What each rank has handed in, by rank. Raises LinkError naming the rank that sends something else."""
        own = encoded(value)
        pieces = [own] if self.size == 1 else self._pieces(own)
        found = []
        for rank, piece in enumerate(pieces):
            try:
                found.append(decoded(piece, kind))
            except WireError as error:
                raise LinkError(rank, f"rank {rank} has sent something else than was expected: {error}") from None
        return found

    def _pieces(self, own: bytes) -> list[bytes]:
        """Every rank's bytes: first how many, then themselves."""
        with _linked(None, "the other ranks did not answer"):
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(own)]))
            counts = [int(length) for length in lengths]
            if (
                wrong := next((rank for rank, count in enumerate(counts) if not 0 < count <= MAX_BYTES), None)
            ) is not None:
                raise LinkError(wrong, f"rank {wrong} announces {counts[wrong]} bytes")
            padded = torch.zeros(max(counts), dtype=torch.uint8)
            padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
            pieces = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(pieces, padded)
        return [piece[:count].numpy().tobytes() for piece, count in zip(pieces, counts, strict=True)]

    def barrier(self) -> None:
        """Return when every rank, and its device, has come here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.size > 1:
            with _linked(None, "the other ranks did not come to the barrier"):
                dist.barrier()

    def warmup(self) -> None:
        """The first use of every edge and of the collective, then a round over all of them."""
        if self.size > 1:
            with _linked(None, "the links between the ranks cannot be set up"):
                self._links.first_use()
            whole = torch.zeros(self.size, 1, device=self.device)
            ring_all_gather(self, whole, range(self.size + 1))
            self.all_gather(whole, range(self.size + 1))
        self.barrier()

    def note(self, layer: int) -> None:
        """Tell the watcher, where there is one."""
        if self.watcher is not None:
            self.watcher(layer)

    def report(self, done: int, total: int, what: str) -> None:
        """Tell whoever started the ranks, where somebody listens."""
        if self.rank == 0 and self.on_progress is not None:
            self.on_progress(done, total, what)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _room(self, purpose: str, like: Any, rows: int) -> Any:
        """Scratch of so many rows, made once; where the backend can reach it."""
        key = (purpose, rows, like.shape[1:], like.dtype)
        if key not in self._scratch:
            place = "cpu" if self.staged else like.device
            self._scratch[key] = torch.zeros(rows, *like.shape[1:], dtype=like.dtype, device=place)
        return self._scratch[key]


@contextmanager
def _linked(peer: int | None, what: str) -> Iterator[None]:
    """Turn what torch.distributed raises into a LinkError."""
    try:
        yield
    except RuntimeError as error:
        raise LinkError(peer, f"{what}: {meaning(error)}") from None
