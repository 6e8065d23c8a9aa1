"""Ranks: processes that work together, from their start to their end; time limits end a rank that hangs.

`launch` runs one function on all ranks, which it starts on this host, or which torchrun has started. `RankPool` has
processes that receive commands over pipes. Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection
from functools import partial
from multiprocessing import connection, forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from textwrap import shorten
from types import FrameType
from typing import Any

from kvrsim.errors import InputError, KvrsimError
from kvrsim.runtime import host
from kvrsim.runtime.faults import Fault, FaultKind, LinkError, RankError, faults_of, is_out_of_memory
from kvrsim.runtime.plan import OnProgress, RankSettings, RankSlot

Command = tuple[str, dict[str, Any]]  # name of a method of the worker, and its arguments
RankFunction = Callable[..., Any]  # function(transport, *arguments) -> data classes or JSON values
Pipe = Any  # multiprocessing.connection.Connection, whose type differs between systems

_PRELOADED = ["torch.distributed", "transformers.cache_utils", "transformers.modeling_utils"]
_LOCK = "kvrsim.lock"  # file that a process locks in its temporary folder
_GRACE_S = 2.0  # seconds after the first fault in which other ranks may report theirs
_LONGEST_WAIT_S = 86_400.0  # longest wait of one system call, which takes at most 24 days; the loop then waits again
_PARENT_DEATH_SIGNAL = 1  # option PR_SET_PDEATHSIG of prctl(2)
_JOIN_S = 2.0  # seconds in which a process may end by itself
_LATE_S = 10.0  # seconds after the time limit of a command at which its process is killed
_MAX_OUTPUT = 200  # characters of a rank's last output line in an error message


def launch(
    function: RankFunction, *arguments: Any, how: RankSettings, on_progress: OnProgress | None = None
) -> list[Any]:
    """Call `function(transport, *arguments)` on every rank; return the results by rank.

    The function is pickled by its name, the arguments by value. If torchrun has started this process, it is one of the
    ranks, and every rank returns all results. on_progress: called in this process with the reports of rank 0.
    Raises RankError naming rank and layer where a rank fails.
    """
    if host.started_by_torchrun():
        return _run_as_one_rank(function, arguments, how, on_progress)
    with contextlib.closing(RankPool(how.num_ranks, partial(LaunchedRank, how=how), start_s=how.deadline_s)) as pool:
        command = ("call", {"function": function, "arguments": arguments})
        answers = pool.ask(range(how.num_ranks), command, how.deadline_s, on_progress)
    return [answers[rank] for rank in range(how.num_ranks)]


class LaunchedRank:
    """A rank of this host that calls functions."""

    def __init__(self, *, slot: RankSlot, how: RankSettings) -> None:
        from kvrsim.runtime.transport import open_transport

        self.transport = open_transport(how, slot, slot.rank)
        _pin(how, slot.rank, how.num_ranks)

    def call(self, *, function: RankFunction, arguments: tuple[Any, ...]) -> Any:
        """Return the result of the function."""
        return function(self.transport, *arguments)


def _run_as_one_rank(
    function: RankFunction, arguments: tuple[Any, ...], how: RankSettings, on_progress: OnProgress | None
) -> list[Any]:
    """Run this process as the rank that torchrun has started; return the results of all ranks."""
    from kvrsim.runtime.transport import open_transport

    rank, size, local, num_local = map(_torchrun_variable, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if size != how.num_ranks:
        raise InputError("gpus", how.num_ranks, f"{size}, the number of processes that torchrun has started")
    reached: list[int] = []  # layers that the rank has reached
    slot = RankSlot(rank=rank, store="env://", note=reached.append, report=_of_rank_0(rank, on_progress))
    try:
        with contextlib.closing(open_transport(how, slot, local)) as transport:
            _pin(how, local, num_local)
            return transport.exchange(function(transport, *arguments))
    except (LinkError, MemoryError, RuntimeError) as error:
        if not isinstance(error, LinkError) and not is_out_of_memory(error):
            raise
        layer = None
        if reached:
            layer = reached[-1]
        raise RankError(faults_of(error, rank, layer)) from None


def _of_rank_0(rank: int, report: OnProgress | None) -> OnProgress:
    """Return the function that receives a rank's progress: `report` on rank 0; the progress of others is ignored."""
    if rank == 0 and report is not None:
        return report
    return lambda *_: None


def _torchrun_variable(name: str) -> int:
    text = os.environ.get(name, "nothing")
    if not text.isdecimal():
        raise InputError(name, text, "a whole number, as torchrun sets it")
    return int(text)


def _pin(how: RankSettings, local: int, num_local: int) -> None:
    """Keep this thread on the cores of its rank: otherwise ranks may share a core while other processes run.

    The threads that carry messages have already started and may run on any core. With too few cores for all ranks of
    the host, no thread is pinned.
    """
    cores = host.available_cores()
    if how.device == "cpu" and len(cores) >= num_local * how.threads:
        os.sched_setaffinity(0, cores[local * how.threads : (local + 1) * how.threads])


class RankPool:
    """`num_ranks` processes of this host; each has a worker that `make(slot=)` creates in the process.

    `make` is pickled by its name. The temporary folder is removed with the processes. A process ends by itself when its
    pipe closes, so it does not outlive this process, however this process ends. The processes listen only on the
    loopback interface.
    """

    def __init__(self, num_ranks: int, make: Callable[..., Any], *, start_s: float) -> None:
        """Start the ranks. Raises RankError if a rank fails, or is not ready in time."""
        if sys.platform == "win32":
            raise KvrsimError("ranks run on Linux and macOS only")
        self._handled = _unwind_on_ending_signals()
        self._folder = tempfile.mkdtemp(prefix="kvrsim-", dir=_own_folder())
        self._pipes: dict[int, Pipe] = {}
        self._processes: dict[int, BaseProcess] = {}
        try:
            context = _context()
            # Layers that the ranks have reached, -1 before the first. There is no lock, because a rank that dies must
            # not block others.
            self._layers = context.RawArray("i", [-1] * num_ranks)
            for rank in range(num_ranks):
                self._pipes[rank], theirs = context.Pipe()
                arguments = (theirs, make, rank, self._folder, self._layers)
                process = context.Process(target=_serve, args=arguments, name=f"kvrsim rank {rank}", daemon=True)
                process.start()
                self._processes[rank] = process
                theirs.close()
            self._collect(range(num_ranks), start_s)
        except BaseException as error:
            self._abort(error)
            raise

    def ask(
        self, ranks: Collection[int], command: Command, timeout_s: float, on_progress: OnProgress | None = None
    ) -> dict[int, Any]:
        """Return each rank's answer to a command; reports of progress go to `on_progress`.

        Raises RankError naming each rank that died, failed or did not answer in time; then the pool is closed.
        """
        if not self._pipes:
            raise KvrsimError("the ranks have ended")
        content = pickle.dumps((*command, timeout_s))
        try:
            for rank in ranks:
                with contextlib.suppress(BrokenPipeError):  # the answer will contain the error
                    self._pipes[rank].send_bytes(content)
            return self._collect(ranks, timeout_s, on_progress)
        except BaseException as error:  # includes interrupts: a late answer must not be used for the next command
            self._abort(error)
            raise

    def close(self, wait_s: float = _JOIN_S) -> None:
        """End the processes; those that are still running after `wait_s` are killed."""
        for pipe in self._pipes.values():
            pipe.close()
        self._pipes = {}
        end_s = time.monotonic() + wait_s
        for process in self._processes.values():
            process.join(max(0.0, end_s - time.monotonic()))
            if process.is_alive():
                process.kill()  # kill also ends a stopped process
                process.join(_JOIN_S)
        self._processes = {}
        shutil.rmtree(self._folder, ignore_errors=True)
        if threading.current_thread() is threading.main_thread():
            for number in self._handled:
                signal.signal(number, signal.SIG_DFL)

    def _abort(self, error: BaseException) -> None:
        """Close the pool after an error.

        After an interrupt, also kill the server that forks processes, which takes seconds to load or unload torch; the
        next pool starts a new one.
        """
        self.close(wait_s=0.0)
        pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
        if pid is not None and not isinstance(error, RankError):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _collect(
        self, ranks: Collection[int], timeout_s: float, on_progress: OnProgress | None = None
    ) -> dict[int, Any]:
        """Wait for one answer of each rank."""
        answers: dict[int, Any] = {}
        faults: list[Fault] = []
        waiting = {self._pipes[rank]: rank for rank in ranks}
        end_s = time.monotonic() + timeout_s
        while waiting and (left_s := end_s - time.monotonic()) > 0:
            for pipe in connection.wait(list(waiting), timeout=min(left_s, _LONGEST_WAIT_S)):
                kind, answer = self._receive(waiting[pipe], pipe)
                if kind != "progress":
                    rank = waiting.pop(pipe)
                if kind == "result":
                    answers[rank] = answer
                elif kind == "faults":
                    faults += answer
                elif on_progress is not None:
                    on_progress(*answer)
            if faults:
                end_s = min(end_s, time.monotonic() + _GRACE_S)
        late = f"no answer within {timeout_s:g} s"
        if faults:
            late = "no answer"
        faults += [self._fault(rank, "silent", late) for rank in waiting.values()]
        if faults:
            raise RankError(list(dict.fromkeys(faults)))
        return answers

    def _receive(self, rank: int, pipe: Pipe) -> tuple[str, Any]:
        """Return the kind of a rank's message ("result", "progress" or "faults") and its value."""
        try:
            message: tuple[str, Any] = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(_GRACE_S)
            message = "faults", [self._fault(rank, "died", _death(process.exitcode, _log_path(self._folder, rank)))]
        return message

    def _fault(self, rank: int, kind: FaultKind, message: str) -> Fault:
        return Fault(rank=rank, kind=kind, message=message, layer=_layer_of(self._layers, rank))


def _serve(pipe: Pipe, make: Callable[..., Any], rank: int, folder: str, layers: ctypes.Array[ctypes.c_int]) -> None:
    """Run a rank's process: execute commands from the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool handles Ctrl-C
    if sys.platform == "linux":  # a stopped rank must continue, and so end, when the server and the pool end
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGCONT)
        if (alive := getattr(forkserver._forkserver, "_forkserver_alive_fd", None)) is not None:
            os.close(alive)  # if open, it would keep the server running
    if not os.path.exists(folder):  # the pool was interrupted before this process began
        os._exit(0)
    log = _log_path(folder, rank).open("ab", buffering=0)  # output of libraries is hidden from the user
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, commands, folder), daemon=True).start()
    _bind_to_loopback()

    def send(kind: str, value: object) -> None:
        pipe.send_bytes(pickle.dumps((kind, value)))

    try:
        slot = RankSlot(
            rank=rank,
            store=f"file://{Path(folder).absolute()}/store",
            note=partial(layers.__setitem__, rank),
            report=_of_rank_0(rank, lambda *progress: send("progress", progress)),
        )
        worker = make(slot=slot)
        send("result", None)
        while True:
            method, arguments, timeout_s = pickle.loads(commands.get())
            # A thread could not stop this rank, because a library that hangs may hold the interpreter's lock.
            faulthandler.dump_traceback_later(timeout_s + _LATE_S, exit=True, file=log)
            send("result", getattr(worker, method)(**arguments))
            faulthandler.cancel_dump_traceback_later()
    except BaseException as error:  # the pool must receive any error
        traceback.print_exc()
        with contextlib.suppress(OSError):
            send("faults", faults_of(error, rank, _layer_of(layers, rank)))
    sys.stderr.flush()
    threading.Event().wait()  # wait until the pipe closes: the pool reads the answer first


def _listen(pipe: Pipe, commands: queue.SimpleQueue[bytes], folder: str) -> None:
    """Queue commands; when the pipe closes, end the process at once, even during a command."""
    try:
        while True:
            commands.put(pipe.recv_bytes())
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)  # a killed parent process cannot remove it
        os._exit(0)


def _bind_to_loopback() -> None:
    """Make gloo and NCCL listen only on the loopback interface; overrides the environment."""
    loopback = "lo0"
    if sys.platform == "linux":
        loopback = "lo"
    os.environ |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback)


def _unwind_on_ending_signals() -> list[int]:
    """Let SIGTERM and SIGHUP raise SystemExit, so that the ranks end and their folder is removed.

    Return those of the two signals that had no other handler; none outside the main thread, where no handler can be
    set.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    handled: list[int] = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _exit_by_signal)
            handled.append(number)
    return handled


def _exit_by_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # exit code of shells for a process that a signal ended


def _context() -> ForkServerContext:
    """Return the context that forks processes from a server with torch loaded.

    Ctrl-C is blocked while the server starts: the server and all ranks inherit this, and only the pool handles Ctrl-C.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    resource_tracker.ensure_running()  # if it started later, it would remove the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _own_folder() -> Path:
    """Return the temporary folder that multiprocessing removes with this process.

    Remove the folders of killed processes, whose locks are free.
    """
    import fcntl

    folder = Path(util.get_temp_dir())
    if not (folder / _LOCK).exists():
        fcntl.flock(os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)  # locked until this process ends
    for lock in folder.parent.glob(f"pymp-*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    return folder


def _layer_of(layers: ctypes.Array[ctypes.c_int], rank: int) -> int | None:
    layer: int = layers[rank]
    if layer < 0:
        return None
    return layer


def _log_path(folder: str, rank: int) -> Path:
    return Path(folder, f"rank{rank}.log")


def _death(exitcode: int | None, log: Path) -> str:
    """Describe the end of a process by the signal that killed it, or by the last line of its log."""
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    end = f"ended without an answer (exit code {exitcode})"
    lines: list[str] = []
    if log.exists():
        lines = log.read_text("utf-8", "replace").strip().splitlines()
    if lines:
        end += f", after saying: {shorten(lines[-1], _MAX_OUTPUT, placeholder='...')}"
    return end
