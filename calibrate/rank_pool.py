"""RankPool: processes that work together and may die, hang or be interrupted, commanded over pipes."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from multiprocessing import connection, get_context, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

from kvrsim.errors import KvrsimError

Command = tuple[str, dict[str, Any]]  # a method of the worker, and its arguments
Pipe = Any  # connection.Connection, whose type differs between systems

_GRACE_S = 1.0  # after the first rank that fails, until all have said what they can
_JOIN_S = 2.0


class RankPool:
    """`num_ranks` processes, each with a worker that `make(rank=, folder=)` makes there.

    `make` is pickled by its name. The folder is theirs alone, and goes with them. A process ends by itself when its
    pipe closes, so none outlives this one, however it ends.
    """

    def __init__(self, num_ranks: int, make: Callable[..., Any], *, start_s: float) -> None:
        self._folder = tempfile.mkdtemp(prefix="kvrsim-")
        self._pipes: dict[int, Pipe] = {}
        self._processes: list[Any] = []
        self.hosts: list[str] = []
        try:
            self._spawn(num_ranks, make)
            hosts = self._collect(range(num_ranks), "starting", start_s)
        except BaseException:
            self.close()
            raise
        self.hosts = [hosts[rank] for rank in range(num_ranks)]

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes, by rank."""
        return tuple(process.pid for process in self._processes)

    def ask(self, ranks: Collection[int], command: Command, timeout_s: float) -> dict[int, Any]:
        """What each of these ranks answers to a command.

        Raises KvrsimError naming the rank that dies, fails or has not answered in time; the pool is closed then.
        """
        if not self._pipes:
            raise KvrsimError("the ranks have ended")
        try:
            for rank in ranks:
                with contextlib.suppress(BrokenPipeError):  # collecting says why
                    self._pipes[rank].send(command)
            return self._collect(ranks, command[0], timeout_s)
        except BaseException:  # an interrupt too: answers of this command must not be taken for the next one's
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes.values():
            pipe.close()
        self._pipes = {}
        deadline = time.monotonic() + _JOIN_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()  # also one that is stopped
                process.join(_JOIN_S)
        self._processes = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self, num_ranks: int, make: Callable[..., Any]) -> None:
        context = get_context("spawn")
        resource_tracker.ensure_running()  # it would lift the block below
        with _interrupts_held():
            for rank in range(num_ranks):
                ours, theirs = context.Pipe()
                self._pipes[rank] = ours
                arguments = (theirs, make, rank, self._folder)
                process = context.Process(target=serve, args=arguments, name=f"kvrsim rank {rank}", daemon=True)
                process.start()
                self._processes.append(process)
                theirs.close()

    def _collect(self, ranks: Collection[int], doing: str, timeout_s: float) -> dict[int, Any]:
        """One answer of each rank."""
        answers: dict[int, Any] = {}
        failed: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        waiting = {self._pipes[rank]: rank for rank in ranks}
        while waiting:
            ready: list[Pipe] = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    good, answer = pipe.recv()
                except (EOFError, OSError):
                    good, answer = False, self._death(rank)
                (answers if good else failed)[rank] = answer
            if failed:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            if not ready and waiting:
                self._give_up(failed, sorted(waiting.values()), doing, timeout_s)
        if failed:
            self._give_up(failed, [], doing, timeout_s)
        return answers

    def _death(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(_GRACE_S)
        said = _last_line(_log_path(self._folder, rank))
        return f"{_ENDED} (exit code {process.exitcode}){f', after saying: {said}' if said else ''}"

    def _give_up(self, failed: Mapping[int, str], silent: list[int], doing: str, timeout_s: float) -> NoReturn:
        """Who is to blame first: the dead, then the silent, then those who only noticed."""
        dead = [rank for rank, why in failed.items() if why.startswith(_ENDED)]
        stuck = [f"rank {rank} has not answered within {timeout_s:g} s" for rank in silent]
        others = [rank for rank in failed if rank not in dead]
        parts = [f"rank {rank} {failed[rank]}" for rank in dead]
        parts += [] if dead else stuck
        parts += [] if parts else [f"rank {rank} has failed: {failed[rank]}" for rank in others]
        raise KvrsimError(f"{doing.replace('_', ' ')}: {'; '.join(parts)}")


_ENDED = "has ended"


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes that start meanwhile never see Ctrl-C, which is this one's to handle; here it comes afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(pipe: Pipe, make: Callable[..., Any], rank: int, folder: str) -> None:
    """A rank's process: do what comes over the pipe until it closes."""
    _log_to(_log_path(folder, rank))
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, commands, folder), daemon=True).start()
    try:
        worker = make(rank=rank, folder=folder)
        pipe.send((True, socket.gethostname()))
        while True:
            method, arguments = commands.get()
            pipe.send((True, getattr(worker, method)(**arguments)))
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send((False, f"{type(error).__name__}: {_one_line(str(error))}"))
    sys.stderr.flush()
    threading.Event().wait()  # until the pipe closes: whoever asked is to read the answer first


def _listen(pipe: Pipe, commands: queue.SimpleQueue[Command], folder: str) -> None:
    """Hand on commands; when nobody is left to command, end at once, whatever the rank waits for."""
    try:
        while True:
            commands.put(pipe.recv())
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)  # a parent that was killed cannot
        os._exit(0)


def _log_path(folder: str, rank: int) -> Path:
    return Path(folder, f"rank{rank}.log")


def _log_to(path: Path) -> None:
    """Everything that the rank says, libraries included: it is not the user's."""
    with path.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((_one_line(line) for line in reversed(lines) if line.strip()), "")


def _one_line(text: str, most: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."
