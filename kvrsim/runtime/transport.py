"""Transport: what a rank says to its neighbours, in the words of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from kvrsim.errors import InputError
from kvrsim.runtime.faults import LinkError

Backend = Literal["gloo", "nccl"]
OnProgress = Callable[[int, int, str], object]  # steps done, steps in all, what they are


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Return when the tensor holds the message, or may be used again; raises LinkError."""


class Transport(Protocol):
    """A rank's links to the rank before and the rank after it, the last one's being the first.

    Messages on an edge arrive in the order in which they were posted. Tensors are contiguous, and stay alive
    and untouched until `wait` returns.
    """

    rank: int
    size: int
    name: str  # for people, such as "gloo"

    def isend_next(self, tensor: Any) -> Pending:
        """Send to rank + 1 beside computation."""

    def irecv_prev(self, tensor: Any) -> Pending:
        """Receive in place from rank - 1 beside computation."""

    def all_gather(self, whole: Any, boundaries: Sequence[int]) -> None:
        """Fill `whole`, whose rows from boundaries[rank] to boundaries[rank + 1] are this rank's own."""

    def exchange(self, value: Any) -> list[Any]:
        """What each rank has handed in, by rank: small things that can be pickled."""

    def barrier(self) -> None:
        """Return when every rank has come here."""

    def warmup(self) -> None:
        """Use every edge once: the first use of a link sets it up and blocks."""

    def note(self, layer: int) -> None:
        """Tell whoever watches this rank to which layer it has come."""

    def report(self, done: int, total: int, what: str) -> None:
        """Tell whoever started the ranks how far the work is; only the first rank is heard."""


def ring_all_gather(transport: Transport, whole: Any, boundaries: Sequence[int]) -> None:
    """An all-gather of p - 1 steps between neighbours: each passes on the piece that it received last.

    Unlike gloo's own collective it takes pieces of any size, and uses both directions of a link.
    """
    piece = transport.rank
    for _ in range(transport.size - 1):
        before = (piece - 1) % transport.size
        coming = transport.irecv_prev(whole[boundaries[before] : boundaries[before + 1]])
        leaving = transport.isend_next(whole[boundaries[piece] : boundaries[piece + 1]])
        coming.wait()
        leaving.wait()
        piece = before


def neighbour(transport: Transport, step: int) -> int:
    """The rank after (1) or before (-1) this one on the ring."""
    return (transport.rank + step) % transport.size


class _Work:
    """A torch.distributed work with the tensor that it must keep alive."""

    def __init__(self, work: Any, tensor: Any, peer: int, what: str, after: Callable[[], object] | None) -> None:
        self.work, self.tensor, self.peer, self.what, self.after = work, tensor, peer, what, after

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise LinkError(self.peer, f"{self.what} rank {self.peer}: {_first_line(error)}") from None
        if self.after is not None:
            self.after()


class DistributedTransport:
    """Gloo on the CPU, NCCL on CUDA, gloo through host memory where several ranks share a GPU.

    Each edge has a process group of its own: operations of one NCCL group run one after another, so that a
    receive posted ahead would hold back a send. What is not K and V goes through gloo.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        init_method: str,
        device: torch.device,
        timeout_s: float,
        backend: Backend | None = None,
        watcher: Callable[[int], object] | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.watcher, self.on_progress = watcher, on_progress
        self.backend: Backend = backend or default_backend(device, size)
        if self.backend == "nccl" and device.type != "cuda":
            raise InputError("backend", "nccl", "gloo on a CPU")
        self.staged = self.backend == "gloo" and device.type == "cuda"
        self.name: str = "gloo through host memory" if self.staged else self.backend
        timeout = timedelta(seconds=timeout_s)
        self._scratch: dict[Any, Any] = {}
        with _linked(None, "no connection to the other ranks"):
            dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size, timeout=timeout)
            # Every rank makes every group, in the same order, as torch demands.
            self._edges = [
                dist.new_group([one, (one + 1) % size], timeout=timeout, backend=self.backend)
                for one in range(size if size > 1 else 0)
            ]
            self._all = dist.new_group(timeout=timeout, backend=self.backend)

    def isend_next(self, tensor: Any) -> Pending:
        """Send to rank + 1; the tensor is kept alive by what is returned."""
        peer = neighbour(self, 1)
        tensor = tensor.to("cpu") if self.staged else tensor
        with _linked(peer, f"nothing can be sent to rank {peer}"):
            work = dist.isend(tensor, peer, group=self._edges[self.rank])
        return _Work(work, tensor, peer, "not taken by", None)

    def irecv_prev(self, tensor: Any) -> Pending:
        """Receive from rank - 1, in place."""
        peer = neighbour(self, -1)
        landing = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda) if self.staged else tensor
        with _linked(peer, f"nothing can be received from rank {peer}"):
            work = dist.irecv(landing, peer, group=self._edges[peer])
        after = (lambda: tensor.copy_(landing)) if self.staged else None
        return _Work(work, landing, peer, "nothing came from", after)

    def all_gather(self, whole: Any, boundaries: Sequence[int]) -> None:
        """The backend's collective, on pieces padded to the longest where they differ."""
        own = whole[boundaries[self.rank] : boundaries[self.rank + 1]]
        longest = max(end - start for start, end in pairwise(boundaries))
        gathered = self._room("gathered", whole, self.size * longest)
        piece = self._room("piece", whole, longest)
        piece[: len(own)].copy_(own)
        with _linked(None, "the all-gather did not end"):
            dist.all_gather_single(gathered, piece, group=self._all)
        for rank, (start, end) in enumerate(pairwise(boundaries)):
            if rank != self.rank:
                whole[start:end].copy_(gathered[rank * longest : rank * longest + end - start])

    def exchange(self, value: Any) -> list[Any]:
        """What each rank has handed in, by rank."""
        found: list[Any] = [None] * self.size
        with _linked(None, "the other ranks did not answer"):
            dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        """Return when every rank, and its device, has come here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with _linked(None, "the other ranks did not come to the barrier"):
            dist.barrier()

    def warmup(self) -> None:
        """One small message over every edge, and one collective."""
        if self.size > 1:
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


def default_backend(device: torch.device, size: int) -> Backend:
    """NCCL where each rank has a GPU of its own, else gloo."""
    return "nccl" if device.type == "cuda" and torch.cuda.device_count() >= size else "gloo"


class _linked:  # noqa: N801 - reads as a statement
    """Turn what torch.distributed raises into a LinkError."""

    def __init__(self, peer: int | None, what: str) -> None:
        self.peer, self.what = peer, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, LinkError):
            raise LinkError(self.peer, f"{self.what}: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    """The message without C++ places and stack."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.split("] ", 1)[-1].strip().rstrip(".")
