"""Run a function on several ranks of this host, or on those that torchrun has started; never hang."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvrsim.choices import RankBackend
from kvrsim.errors import InputError
from kvrsim.runtime.ranks.faults import LinkError, RankError, faults_of
from kvrsim.runtime.ranks.pinning import pinned
from kvrsim.runtime.ranks.pool import RankPool
from kvrsim.runtime.ranks.process import Seat
from kvrsim.runtime.ranks.transport import DistributedTransport, OnProgress
from kvrsim.runtime.ranks.wire import result_kind

RankFunction = Callable[..., Any]  # (transport, *arguments) -> a result that can be pickled, and that JSON can hold


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How ranks are started."""

    num_ranks: int
    device: str = "cpu"  # "cpu", or "cuda": each rank takes the GPU of its number, round and round
    backend: RankBackend | None = None  # None: NCCL where each rank has a GPU of its own, else gloo
    timeout_s: float = 60.0  # that a rank waits for a message, so longer than any rank computes between two
    deadline_s: float = 600.0  # for the start, and again for all that follows
    threads: int = 1  # of each rank's CPU computation
    pin: bool = False  # whether each rank computes on cores of its own, where there are enough

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise InputError("gpus", self.num_ranks, "at least 1 rank")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError("device", "cuda", "cpu: torch sees no GPU here")


def launch(function: RankFunction, *arguments: Any, how: Launch, on_progress: OnProgress | None = None) -> list[Any]:
    """Call `function(transport, *arguments)` on every rank; returns the results by rank.

    Function and arguments are pickled: the function by its name. Started by torchrun, this process is one rank
    of those, and every rank returns all results, which travel as JSON and are read by the function's annotation.
    on_progress: called here with what the first rank reports. Raises RankError naming rank and layer where one fails.
    """
    if started_by_torchrun():
        return _as_one_rank(function, arguments, how, on_progress)
    with closing(RankPool(how.num_ranks, partial(LaunchedRank, how=how), start_s=how.deadline_s)) as pool:
        command = ("call", {"function": function, "arguments": arguments})
        answers = pool.ask(range(how.num_ranks), command, how.deadline_s, on_progress)
    return [answers[rank] for rank in range(how.num_ranks)]


class LaunchedRank:
    """A rank of this host that calls functions."""

    def __init__(self, *, seat: Seat, how: Launch) -> None:
        self.seat, self.how = seat, how
        self.transport = _open(seat.rank, seat.rank, how, seat.store, seat.note, seat.report)
        self.transport.warmup()

    def call(self, *, function: RankFunction, arguments: tuple[Any, ...]) -> Any:
        """What the function returns."""
        with _cores(self.seat.rank, self.how.num_ranks, self.how):
            return function(self.transport, *arguments)


def _as_one_rank(
    function: RankFunction, arguments: tuple[Any, ...], how: Launch, on_progress: OnProgress | None
) -> list[Any]:
    """This process is one of torchrun's."""
    place = TorchrunPlace.of(os.environ)
    if place.size != how.num_ranks:
        raise InputError("gpus", how.num_ranks, f"{place.size}, the number of processes that torchrun has started")
    transport = None
    try:
        transport = _open(place.rank, place.local, how, "env://", None, on_progress)
        transport.warmup()
        with _cores(place.local, place.num_local, how):
            result = function(transport, *arguments)
        return transport.exchange(result, result_kind(function))
    except LinkError as error:
        raise RankError(faults_of(error, place.rank, None)) from None
    finally:
        if transport is not None:
            transport.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchrunPlace:
    """Which of torchrun's processes this one is."""

    rank: int
    size: int
    local: int  # rank among those of this host
    num_local: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> TorchrunPlace:
        """As torchrun tells it; InputError naming the variable that is missing or makes no sense."""
        size = _whole(environment, "WORLD_SIZE", 1, 2**20)
        rank = _whole(environment, "RANK", 0, size - 1)
        if size > 1:
            _whole(environment, "MASTER_PORT", 0, 2**16 - 1)
            if not environment.get("MASTER_ADDR"):
                raise InputError("MASTER_ADDR", "nothing", "the host of rank 0, as torchrun sets it")
        local = _whole(environment, "LOCAL_RANK", 0, size - 1, rank)
        return cls(rank=rank, size=size, local=local, num_local=_whole(environment, "LOCAL_WORLD_SIZE", 1, size, size))


def _whole(environment: Mapping[str, str], name: str, least: int, most: int, default: int | None = None) -> int:
    told = environment.get(name, "nothing" if default is None else str(default))
    if not told.isdecimal() or not least <= int(told) <= most:
        raise InputError(name, told, f"a whole number from {least} to {most}, as torchrun sets it")
    return int(told)


def _open(
    rank: int,
    local: int,
    how: Launch,
    init_method: str,
    watcher: Callable[[int], object] | None,
    on_progress: OnProgress | None,
) -> DistributedTransport:
    device = torch.device("cpu")
    if how.device == "cuda":
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.set_num_threads(how.threads)
    return DistributedTransport(
        rank=rank,
        size=how.num_ranks,
        init_method=init_method,
        device=device,
        timeout_s=how.timeout_s,
        backend=how.backend,
        watcher=watcher,
        on_progress=on_progress,
    )


def _cores(local: int, num_local: int, how: Launch) -> Any:
    return pinned(local, num_local, how.threads) if how.pin and how.device == "cpu" else nullcontext()


def started_by_torchrun() -> bool:
    """Whether this process is one rank of several that torchrun has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
