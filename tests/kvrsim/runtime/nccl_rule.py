"""NCCL's blocking rules on top of gloo, for tests without a GPU; new processes import this file by its name.

The first use of a group blocks the host until all of its ranks have reached it, because NCCL then creates a
communicator. Unbatched operations of a group run one after another in the order of their calls.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from calibrate.measure.ranks import LinkRank
from kvrsim.runtime.ranks import LaunchedRank
from kvrsim.runtime.transport import LinkGroups
from tests.kvrsim.runtime.runtime_workers import Result, benched, exactness


class Work:
    """An operation in its group's queue."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def wait(self) -> None:
        self.future.result()


class NcclRule:
    """Replaces operations of torch.distributed by ones that follow NCCL's rules."""

    def __init__(self) -> None:
        self.queues: dict[Any, ThreadPoolExecutor] = {}
        self.isend, self.irecv, self.collective = dist.isend, dist.irecv, dist.all_gather_single

    def install(self) -> None:
        dist.isend = lambda tensor, dst, group: self._posted(group, lambda: self.isend(tensor, dst, group=group).wait())
        dist.irecv = lambda tensor, src, group: self._posted(group, lambda: self.irecv(tensor, src, group=group).wait())
        dist.all_gather_single = self._gather

    def _gather(self, whole: Any, piece: Any, group: Any) -> None:
        self._posted(group, lambda: self.collective(whole, piece, group=group)).wait()

    def _posted(self, group: Any, operation: Any) -> Work:
        if group not in self.queues:
            dist.barrier(group=group)
            self.queues[group] = ThreadPoolExecutor(1)
        return Work(self.queues[group].submit(_run, operation))


def _run(operation: Any) -> None:
    with torch.inference_mode():  # inference mode holds for a single thread
        operation()


def rule_rank(**settings: Any) -> LaunchedRank:
    """Make the runtime's rank with NCCL's rules."""
    NcclRule().install()
    return LaunchedRank(**settings)


def rule_link_rank(**settings: Any) -> LinkRank:
    """Make the link bench's rank with NCCL's rules."""
    NcclRule().install()
    return LinkRank(**settings)


def whole_runtime(transport: Any, models: list[tuple[str, str]]) -> list[Result]:
    """Run every strategy, then the bench; groups for links are created when a plan needs them."""
    results = exactness(transport, models)
    if transport.size == 2:
        assert len(benched(transport).timings) == 4
    return results


def receives_first(transport: Any) -> None:
    """Use the links of a circle for the first time; every rank first receives from the previous rank."""
    size, rank = transport.size, transport.rank
    links = groups_of(transport, [(one, (one + 1) % size) for one in range(size)])
    coming = links.irecv(((rank - 1) % size, rank), torch.zeros(1))
    links.isend((rank, (rank + 1) % size), torch.ones(1)).wait()
    coming.wait()


def groups_of(transport: Any, edges: list[tuple[int, int]]) -> LinkGroups:
    return LinkGroups(rank=transport.rank, backend="gloo", device="cpu", edges=edges, gathers=[], timeout_s=5.0)
