"""Links: the process groups of one rank, one for each edge and one for each all-gather, and their first use."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from kvrsim.choices import RankBackend
from kvrsim.errors import InputError

Edge = tuple[int, int]  # from a rank to another

# A receive that waits for its sender is a kernel that holds one multiprocessor for each of its blocks. Without a limit
# NCCL takes up to 32 of them, a quarter of an A100 or H100, from the layers that the rank computes meanwhile.
MAX_BLOCKS = 8


class Links:
    """Every rank makes the same groups in the same order, as torch demands.

    Operations of one NCCL group run one after another, so that a receive posted ahead would hold back a send: each edge
    has a group of its own. `torch`: the module, or what behaves like it. The default group is there already.
    """

    def __init__(
        self,
        *,
        rank: int,
        backend: str,
        device: Any,
        edges: Sequence[Edge],
        gathers: Sequence[Sequence[int]],
        timeout_s: float,
        torch: Any,
    ) -> None:
        self.rank, self.backend, self.device, self.torch = rank, backend, device, torch
        self.dist: Any = torch.distributed
        self._timeout = timedelta(seconds=timeout_s)
        if backend == "nccl":
            os.environ.setdefault("NCCL_MAX_P2P_NCHANNELS", str(MAX_BLOCKS))
        self._edges = {edge: self._group(edge, is_edge=True) for edge in edges}
        self._gathers = {tuple(ranks): self._group(ranks, is_edge=False) for ranks in gathers}

    def add(self, edges: Sequence[Edge]) -> None:
        """Make the groups of edges that have none, each used once; every rank calls this with the same edges."""
        for edge in edges:
            if edge not in self._edges:
                self._edges[edge] = self._group(edge, is_edge=True)
                self._use(edge)

    def isend(self, edge: Edge, tensor: Any) -> Any:
        """Begin to send along an edge that begins at this rank; the work, whose tensor must stay alive."""
        return self.dist.isend(tensor, edge[1], group=self._edges[edge])

    def irecv(self, edge: Edge, tensor: Any) -> Any:
        """Begin to receive along an edge that ends at this rank."""
        return self.dist.irecv(tensor, edge[0], group=self._edges[edge])

    def all_gather(self, ranks: Sequence[int], whole: Any, piece: Any) -> None:
        """The backend's collective: every rank's piece, one after another, to all of them."""
        # The name from torch 2.13 on, and the one before.
        gather = getattr(self.dist, "all_gather_single", None) or self.dist.all_gather_into_tensor
        gather(whole, piece, group=self._gathers[tuple(ranks)])

    def all_reduce(self, ranks: Sequence[int], tensor: Any) -> None:
        """The backend's collective: the sum over all of them, in place."""
        self.dist.all_reduce(tensor, group=self._gathers[tuple(ranks)])

    def first_use(self) -> None:
        """Use every group once, one after another, both ends of an edge together, in the same order on every rank.

        NCCL makes a group's communicator at its first use, and holds up the host until all its ranks have come. Ranks
        that begin with different edges would wait for each other in a circle.
        """
        for edge in self._edges:
            self._use(edge)
        for ranks in self._gathers:
            if self.rank in ranks:
                self.all_gather(ranks, self._token(len(ranks)), self._token(1))
                self._synchronize()

    def _use(self, edge: Edge) -> None:
        if self.rank in edge:
            token = self._token(1)
            (self.isend if self.rank == edge[0] else self.irecv)(edge, token).wait()
            self._synchronize()

    def _token(self, count: int) -> Any:
        return self.torch.full((count,), 0, dtype=self.torch.uint8, device=self.device)

    def _synchronize(self) -> None:
        if self.backend == "nccl":
            self.torch.cuda.synchronize()  # wait() has only put the device's streams in order

    def _group(self, ranks: Sequence[int], *, is_edge: bool) -> Any:
        options = self._edge_options() if is_edge and self.backend == "nccl" else None
        more = {} if options is None else {"pg_options": options}
        return self.dist.new_group(sorted(ranks), backend=self.backend, timeout=self._timeout, **more)

    def _edge_options(self) -> Any:
        """Few blocks, and a stream before the layers' own: a message that is ready must not wait for their end."""
        options = self.dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True
        options.config.max_ctas = MAX_BLOCKS
        options._timeout = self._timeout  # what torch takes for NCCL instead of the group's
        return options


def device_id(torch: Any, device: Any) -> str | None:
    """What tells a GPU from all others, on any host; None for a CPU."""
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # which older versions of torch do not tell
    return str(uuid) if uuid is not None else f"{platform.node()} {device.index}"


def chosen_backend(devices: Sequence[str | None], wanted: RankBackend | None) -> RankBackend:
    """NCCL where each rank has a GPU of its own, else gloo; `devices`: what `device_id` has found, by rank.

    Raises InputError where NCCL is wanted and cannot be.
    """
    shared = sorted(number for number, count in Counter(devices).items() if number is not None and count > 1)
    if wanted == "nccl" and None in devices:
        raise InputError("backend", "nccl", "gloo on a CPU")
    if wanted == "nccl" and shared:
        ranks = [str(rank) for rank, number in enumerate(devices) if number == shared[0]]
        raise InputError("backend", "nccl", f"gloo where ranks share a GPU, as ranks {', '.join(ranks)} do")
    return wanted or ("gloo" if shared or None in devices else "nccl")
