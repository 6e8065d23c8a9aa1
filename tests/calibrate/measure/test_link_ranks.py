"""Ranks with GPUs, made up: what they receive is there when they have been synchronised."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from calibrate.measure.links import LinkBench
from calibrate.measure.ranks import LinkRank
from kvrsim.runtime.ranks import Command, RankSlot

SMALL = 2**16
SYNCHRONISE_S = 0.003
WAIT_S = 3.0  # for each other


class Tensor(np.ndarray[Any, Any]):
    """As far as the ranks know tensors."""

    def copy_(self, other: Any) -> None:
        self[...] = other

    def zero_(self) -> None:
        self[...] = 0


class Work:
    """What isend and irecv give."""

    def __init__(self, finish: Any) -> None:
        self.finish = finish

    def wait(self) -> None:
        self.finish()


class Wires:
    """What all ranks share."""

    def __init__(self, num_ranks: int, gpus: int) -> None:
        self.num_ranks, self.gpus = num_ranks, gpus
        self.queues: dict[Any, queue.Queue[Any]] = {}
        self.lock = threading.Lock()

    def way(self, *key: Any) -> queue.Queue[Any]:
        with self.lock:
            return self.queues.setdefault(key, queue.Queue())


class Torch:
    """torch, torch.distributed and torch.cuda of one rank."""

    uint8, float32 = np.uint8, np.float32

    def __init__(self, wires: Wires, rank: int) -> None:
        self.wires, self.rank, self.pending = wires, rank, False
        self.distributed = self.cuda = self
        self.set_device_to: int | None = None
        self.devices: set[str] = set()
        self.backends: dict[Any, timedelta] = {}
        self.options: list[Any] = []  # of the groups of the edges
        self.ProcessGroupNCCL = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))

    def set_num_threads(self, count: int) -> None:
        assert count == 1

    def zeros(self, count: int, dtype: Any) -> Tensor:
        return np.zeros(count, dtype).view(Tensor)

    def full(self, shape: tuple[int], value: int, dtype: Any, device: str) -> Tensor:
        self.devices.add(device)
        return np.full(shape, value, dtype).view(Tensor)

    def empty(self, count: int, dtype: Any, device: str) -> Tensor:
        return np.zeros(count, dtype).view(Tensor)

    def device_count(self) -> int:
        return self.wires.gpus

    def set_device(self, device: int) -> None:
        self.set_device_to = device

    def synchronize(self) -> None:
        if self.pending:
            time.sleep(SYNCHRONISE_S)
        self.pending = False

    def init_process_group(self, backend: str, *, timeout: timedelta, **settings: Any) -> None:
        assert (backend, settings["world_size"]) == ("gloo", self.wires.num_ranks)
        assert timeout > timedelta(seconds=60)  # others may take long to import torch

    def new_group(self, ranks: list[int], backend: str, timeout: timedelta, pg_options: Any = None) -> Any:
        self.backends[*ranks, backend] = timeout
        if pg_options is not None:
            self.options.append(pg_options)
        return (*ranks, backend)

    def isend(self, tensor: Tensor, dst: int, group: Any) -> Work:
        self.wires.way(group, self.rank, dst).put(tensor.copy())
        return Work(lambda: None)

    def irecv(self, tensor: Tensor, src: int, group: Any) -> Work:
        def finish() -> None:
            self.pending = True
            tensor.copy_(self.wires.way(group, src, self.rank).get(timeout=WAIT_S))

        return Work(finish)

    def send(self, tensor: Tensor, dst: int, group: Any) -> None:
        self.wires.way("host", group, self.rank, dst).put(tensor.copy())

    def recv(self, tensor: Tensor, src: int, group: Any) -> None:
        tensor.copy_(self.wires.way("host", group, src, self.rank).get(timeout=WAIT_S))

    def all_gather_into_tensor(self, output: Tensor, piece: Tensor, group: Any) -> None:
        ranks = group[:-1]
        for rank in ranks:
            self.wires.way(group, "all", self.rank, rank).put(piece.copy())
        pieces = [self.wires.way(group, "all", rank, self.rank).get(timeout=WAIT_S) for rank in ranks]
        self.pending = True
        output.copy_(np.concatenate(pieces))

    def all_reduce(self, tensor: Tensor, group: Any) -> None:
        pieces = np.empty((len(group) - 1, *tensor.shape), tensor.dtype)
        self.all_gather_into_tensor(pieces.reshape(-1).view(Tensor), tensor, group)
        tensor.copy_(pieces.sum(axis=0))


class Threads:
    """Ranks in threads of this process, instead of a pool."""

    def __init__(self, num_ranks: int, gpus: int, hosts: list[str]) -> None:
        self.hosts, self.num_ranks = hosts, num_ranks
        wires = Wires(num_ranks, gpus)
        self.torches = [Torch(wires, rank) for rank in range(num_ranks)]
        self.threads = ThreadPoolExecutor(num_ranks)
        made = [self.threads.submit(self._make, rank) for rank in range(num_ranks)]
        for failure in (future.exception() for future in made):
            if isinstance(failure, RuntimeError):  # others may only have waited in vain
                raise failure
        self.ranks = [future.result() for future in made]

    def _make(self, rank: int) -> LinkRank:
        return LinkRank(
            slot=RankSlot(rank=rank, store="unused"),
            num_ranks=self.num_ranks,
            backend="nccl",
            device="cuda",
            num_threads=1,
            max_bytes=SMALL,
            timeout_s=10.0,
            torch=self.torches[rank],
        )

    def ask(self, ranks: Collection[int], command: Command, timeout_s: float) -> dict[int, Any]:
        method, arguments = command
        futures = {rank: self.threads.submit(getattr(self.ranks[rank], method), **arguments) for rank in ranks}
        return {rank: future.result(timeout_s) for rank, future in futures.items()}


def test_gpus_are_timed_until_they_have_what_they_receive() -> None:
    ranks = Threads(4, gpus=4, hosts=["a", "a", "b", "b"])
    bench = LinkBench(num_ranks=4, device_name="made", backend="nccl", device="cuda", max_bytes=SMALL, timeout_s=10.0)
    bench._pool = ranks  # type: ignore[assignment]
    points = [point for point in bench.points() if point.endswith(f":{SMALL}")]
    bench._last_s = dict.fromkeys(points, SYNCHRONISE_S)  # few repeats
    rows = bench.rows({point: [bench.sample(point)] for point in points})
    assert {row.kernel for row in rows} == {"nccl", "nccl_p2p_ring"}
    assert all(SYNCHRONISE_S <= row.median_s < 1.0 for row in rows)
    nodes = {(row.src, row.dst): row.nodes for row in rows if row.src is not None}
    assert (nodes[0, 1], nodes[1, 2], nodes[2, 3], nodes[0, 3]) == (1, 2, 1, 2)
    assert {row.ranks: row.nodes for row in rows if row.operation == "all_gather"} == {2: 1, 4: 2}
    assert {row.kernel for row in rows if row.operation == "all_reduce"} == {"nccl", "nccl_p2p_ring"}
    for rank, torch in enumerate(ranks.torches):
        assert (torch.set_device_to, torch.devices) == (rank, {f"cuda:{rank}"})
        assert {group for group in torch.backends if group[-1] == "gloo"} == {(0, 1, 2, 3, "gloo")}
        assert set(torch.backends.values()) == {timedelta(seconds=8)}
        assert len(torch.options) == 4 * 3  # an edge each
        assert all(one.is_high_priority_stream and 0 < one.config.max_ctas <= 8 for one in torch.options)


def test_what_arrives_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Torch, "irecv", lambda self, tensor, src, group: Work(lambda: None))
    with pytest.raises(RuntimeError, match="what rank 0 sent has not arrived"):
        Threads(2, gpus=2, hosts=["a", "a"])


def test_too_few_gpus_are_said() -> None:
    with pytest.raises(RuntimeError, match="4 ranks need as many GPUs, found 3"):
        Threads(4, gpus=3, hosts=["a"] * 4)
