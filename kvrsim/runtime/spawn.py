"""Run a function on several ranks of this host, or on those that torchrun has started; never hang."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import torch

from kvrsim.errors import InputError, KvrsimError
from kvrsim.runtime.faults import Fault, LinkError, RankError, is_out_of_memory
from kvrsim.runtime.transport import Backend, DistributedTransport, OnProgress

RankFunction = Callable[..., Any]  # (transport, *arguments) -> a result that can be pickled

_PRELOADED = ["torch.distributed", "transformers.cache_utils", "transformers.modeling_utils"]
_GRACE_S = 2.0  # after the first rank has failed, until all have said what they can


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How ranks are started."""

    num_ranks: int
    device: str = "cpu"  # "cpu", or "cuda": each rank takes the GPU of its number, round and round
    backend: Backend | None = None  # None: NCCL where each rank has a GPU of its own, else gloo
    timeout_s: float = 60.0  # that a rank waits for a message, so longer than any rank computes between two
    deadline_s: float = 600.0  # for all of it
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
    of those, and every rank returns all results. on_progress: called here with what the first rank reports.
    Raises RankError naming rank and layer where one fails.
    """
    if started_by_torchrun():
        return _as_one_rank(function, arguments, how, on_progress)
    with tempfile.TemporaryDirectory(prefix="kvrsim-") as folder:
        return _Ranks(function, arguments, how, f"file://{folder}/store", on_progress).results()


def _as_one_rank(
    function: RankFunction, arguments: tuple[Any, ...], how: Launch, on_progress: OnProgress | None
) -> list[Any]:
    """This process is one of torchrun's."""
    size = int(os.environ["WORLD_SIZE"])
    if size != how.num_ranks:
        raise InputError("gpus", how.num_ranks, f"{size}, the number of processes that torchrun has started")
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    transport = None
    try:
        transport = _open(rank, local, how, "env://", None, on_progress)
        transport.warmup()
        with _pinned(local, int(os.environ.get("LOCAL_WORLD_SIZE", size)), how):
            return transport.exchange(function(transport, *arguments))
    except LinkError as error:
        raise RankError(_faults(error, rank, None)) from None
    finally:
        if transport is not None:
            transport.close()


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


@contextmanager
def _pinned(local: int, num_local: int, how: Launch) -> Iterator[None]:
    """Meanwhile this thread computes on cores of its rank: else, beside others' work, ranks may share one.

    Threads that carry messages have been started before, and go where there is room.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not how.pin or how.device != "cpu" or len(cores) < num_local * how.threads:
        yield
        return
    os.sched_setaffinity(0, cores[local * how.threads : (local + 1) * how.threads])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _rank_main(pipe: Any, reached: Any, rank: int, call: bytes, how: Launch, init_method: str) -> None:
    """A started process: one rank, from its first word to its last."""

    def come_to(layer: int) -> None:
        reached[rank] = layer

    def tell(done: int, total: int, what: str) -> None:
        pipe.send_bytes(pickle.dumps(("progress", (done, total, what))))

    transport = None
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - as long as the process lives
    # A rank that hangs must end also where nobody is left to end it.
    faulthandler.dump_traceback_later(how.deadline_s + 5 * _GRACE_S, exit=True, file=nowhere)
    try:
        function, arguments = pickle.loads(call)
        transport = _open(rank, rank, how, init_method, come_to, tell)
        transport.warmup()
        with _pinned(rank, how.num_ranks, how):
            answer: tuple[str, Any] = ("result", function(transport, *arguments))
        pipe.send_bytes(pickle.dumps(answer))
    except BaseException as error:  # whatever it is, whoever started this rank must hear of it
        layer = reached[rank] if reached[rank] >= 0 else None
        pipe.send_bytes(pickle.dumps(("faults", _faults(error, rank, layer))))
    pipe.close()
    if transport is not None:
        transport.close()


def _faults(error: BaseException, rank: int, layer: int | None) -> list[Fault]:
    if isinstance(error, RankError):
        return list(error.faults)
    if isinstance(error, LinkError):
        return [Fault(rank=rank, kind="link", message=error.reason, layer=layer, peer=error.peer)]
    if is_out_of_memory(error):
        return [Fault(rank=rank, kind="memory", message="out of memory", layer=layer)]
    if isinstance(error, KvrsimError):
        return [Fault(rank=rank, kind="input", message=str(error))]
    where = traceback.extract_tb(error.__traceback__)[-1]
    message = f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}, line {where.lineno})"
    return [Fault(rank=rank, kind="error", message=message, layer=layer)]


class _Ranks:
    """The started processes, until each has answered or the time is over."""

    def __init__(
        self,
        function: RankFunction,
        arguments: tuple[Any, ...],
        how: Launch,
        init_method: str,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.how, self.answers, self.faults, self.on_progress = how, dict[int, Any](), list[Fault](), on_progress
        context = _context()
        # Without a lock: each rank writes its own place, and one that dies must not hold back the others.
        self.reached = context.RawArray("i", [-1] * how.num_ranks)
        self.pipes: dict[int, Any] = {}
        self.processes: list[Any] = []
        call = pickle.dumps((function, arguments))
        for rank in range(how.num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            settings = (theirs, self.reached, rank, call, how, init_method)
            process = context.Process(target=_rank_main, args=settings, daemon=True)
            self.processes.append(process)
            self.pipes[rank] = ours
            process.start()
            theirs.close()

    def results(self) -> list[Any]:
        """What each rank has returned; raises RankError where one has not."""
        try:
            self._collect()
        finally:
            self._end()
        if self.faults:
            raise RankError(list(dict.fromkeys(self.faults)))
        return [self.answers[rank] for rank in range(self.how.num_ranks)]

    def _collect(self) -> None:
        end_s = time.monotonic() + self.how.deadline_s
        open_ranks = dict(self.pipes)
        while open_ranks and time.monotonic() < end_s:
            for pipe in connection.wait(list(open_ranks.values()), timeout=end_s - time.monotonic()):
                rank = next(number for number, one in open_ranks.items() if one is pipe)
                answered = self._take_answer(rank, pipe)
                if answered is None:
                    continue
                del open_ranks[rank]
                if not answered:
                    end_s = min(end_s, time.monotonic() + _GRACE_S)
        for rank in open_ranks:
            waited = "no answer" if self.faults else f"no answer within {self.how.deadline_s:g} s"
            self.faults.append(Fault(rank=rank, kind="silent", message=waited, layer=self._layer(rank)))

    def _take_answer(self, rank: int, pipe: Any) -> bool | None:
        """Whether the rank has come to a result; else its faults are noted. None: it only reports progress."""
        try:
            kind, answer = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            self.processes[rank].join(_GRACE_S)
            message = _ended(self.processes[rank].exitcode)
            self.faults.append(Fault(rank=rank, kind="died", message=message, layer=self._layer(rank)))
            return False
        if kind == "progress":
            if self.on_progress is not None:
                self.on_progress(*answer)
            return None
        if kind == "result":
            self.answers[rank] = answer
            return True
        self.faults += answer
        return False

    def _layer(self, rank: int) -> int | None:
        return self.reached[rank] if self.reached[rank] >= 0 else None

    def _end(self) -> None:
        """Let processes that have answered leave, end the others."""
        late_s = time.monotonic() + _GRACE_S
        for rank, process in enumerate(self.processes):
            process.join(max(0.0, late_s - time.monotonic()) if rank in self.answers and not self.faults else 0.0)
            if process.is_alive():
                process.kill()
            process.join()
            self.pipes[rank].close()


def _ended(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"ended without an answer (exit code {exitcode})"


def _context() -> Any:
    """Processes forked from one that has loaded torch and run nothing, where the system can; else new ones."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def started_by_torchrun() -> bool:
    """Whether this process is one rank of several that torchrun has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
