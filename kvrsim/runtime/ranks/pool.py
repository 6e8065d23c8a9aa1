"""RankPool: processes that work together and may die, hang or be interrupted, commanded over pipes."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any

from kvrsim.errors import KvrsimError
from kvrsim.runtime.ranks.faults import Fault, FaultKind, RankError
from kvrsim.runtime.ranks.process import BEAT_S, Pipe, Signs, log_path, serve

Command = tuple[str, dict[str, Any]]  # a method of the worker, and its arguments
OnProgress = Callable[[int, int, str], object]  # steps done, steps in all, what they are

_PRELOADED = ["torch.distributed", "transformers.cache_utils", "transformers.modeling_utils"]
_GRACE_S = 2.0  # after the first rank that fails, until all have said what they can
_JOIN_S = 2.0
_SILENT_S = 30.0  # without a sign of life: the process is stopped, or the machine does not get to it
_ENDING = ("SIGTERM", "SIGHUP")  # signals that end a process, whose ranks and folder must go first


class RankPool:
    """`num_ranks` processes of this host, each with a worker that `make(seat=)` makes there.

    `make` is pickled by its name. The folder is theirs alone, and goes with them. A process ends by itself when its
    pipe closes, so none outlives this one, however it ends. They listen on the loopback interface only.
    """

    def __init__(self, num_ranks: int, make: Callable[..., Any], *, start_s: float) -> None:
        """Raises RankError where a rank fails, or is not ready in time."""
        self._restore = _end_in_order()
        self._folder = tempfile.mkdtemp(prefix="kvrsim-")
        self._pipes: dict[int, Pipe] = {}
        self._processes: dict[int, Any] = {}
        self.hosts: list[str] = []
        try:
            self._start(num_ranks, make)
            hosts = self._collect(range(num_ranks), start_s)
        except BaseException:
            self.close()
            raise
        self.hosts = [hosts[rank] for rank in range(num_ranks)]

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes, by rank."""
        return tuple(process.pid for process in self._processes.values())

    def ask(
        self, ranks: Collection[int], command: Command, timeout_s: float, on_progress: OnProgress | None = None
    ) -> dict[int, Any]:
        """What each of these ranks answers to a command; meanwhile what they report goes to `on_progress`.

        Raises RankError naming the rank that dies, fails or has not answered in time; the pool is closed then.
        """
        if not self._pipes:
            raise KvrsimError("the ranks have ended")
        content = pickle.dumps((*command, timeout_s))
        try:
            for rank in ranks:
                with contextlib.suppress(BrokenPipeError):  # collecting says why
                    self._pipes[rank].send_bytes(content)
            return self._collect(ranks, timeout_s, on_progress)
        except BaseException:  # an interrupt too: answers of this command must not be taken for the next one's
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes.values():
            pipe.close()
        self._pipes = {}
        late_s = time.monotonic() + _JOIN_S
        for process in self._processes.values():
            process.join(max(0.0, late_s - time.monotonic()))
            if process.is_alive():
                process.kill()  # also one that is stopped
                process.join(_JOIN_S)
        self._processes = {}
        shutil.rmtree(self._folder, ignore_errors=True)
        self._restore()

    def _start(self, num_ranks: int, make: Callable[..., Any]) -> None:
        context = _context()
        signs = Signs(layers=context.RawArray("i", [-1] * num_ranks), beats=context.RawArray("L", num_ranks))
        self._signs = signs
        resource_tracker.ensure_running()  # it would lift the block below
        with _signals_held():
            for rank in range(num_ranks):
                ours, theirs = context.Pipe()
                self._pipes[rank] = ours
                arguments = (theirs, make, rank, self._folder, signs)
                process = context.Process(target=serve, args=arguments, name=f"kvrsim rank {rank}", daemon=True)
                process.start()
                self._processes[rank] = process
                theirs.close()

    def _collect(
        self, ranks: Collection[int], timeout_s: float, on_progress: OnProgress | None = None
    ) -> dict[int, Any]:
        """One answer of each rank."""
        answers: dict[int, Any] = {}
        faults: list[Fault] = []
        end_s = time.monotonic() + timeout_s
        waiting, silence = {self._pipes[rank]: rank for rank in ranks}, _Silence(self._signs.beats)
        while waiting and (left_s := end_s - time.monotonic()) > 0:
            ready: list[Pipe] = connection.wait(list(waiting), timeout=min(left_s, BEAT_S))
            for pipe in ready:
                kind, answer = self._received(waiting[pipe], pipe)
                if kind == "progress":
                    if on_progress is not None:
                        on_progress(*answer)
                    continue
                rank = waiting.pop(pipe)
                if kind == "result":
                    answers[rank] = answer
                    continue
                faults += answer
                end_s = min(end_s, time.monotonic() + _GRACE_S)
            for rank in silence.look(waiting.values()):
                del waiting[self._pipes[rank]]
                faults.append(self._silent(rank, "stopped", f"no sign of life for {_SILENT_S:g} s"))
                end_s = min(end_s, time.monotonic() + _GRACE_S)
        waited = "no answer" if faults else f"no answer within {timeout_s:g} s"
        faults += [self._silent(rank, "silent", waited) for rank in waiting.values()]
        if faults:
            raise RankError(list(dict.fromkeys(faults)))
        return answers

    def _received(self, rank: int, pipe: Pipe) -> tuple[str, Any]:
        """ "result", "progress" or "faults", and what it is."""
        try:
            kind, answer = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(_GRACE_S)
            message = _ended(process.exitcode, _last_line(log_path(self._folder, rank)))
            return "faults", [Fault(rank=rank, kind="died", message=message, layer=self._layer(rank))]
        return kind, answer

    def _silent(self, rank: int, kind: FaultKind, message: str) -> Fault:
        if _is_stopped(self._processes[rank]):
            kind, message = "stopped", f"{message}; it is stopped"
        return Fault(rank=rank, kind=kind, message=message, layer=self._layer(rank))

    def _layer(self, rank: int) -> int | None:
        return self._signs.layers[rank] if self._signs.layers[rank] >= 0 else None


class _Silence:
    """For how long the ranks have given no sign of life, as far as this process has run to see it."""

    def __init__(self, beats: Any) -> None:
        self.beats, self.seen, self.silent_s = beats, list(beats), [0.0] * len(beats)
        self.looked_s = time.monotonic()

    def look(self, ranks: Collection[int]) -> list[int]:
        """Those of these ranks that have been silent for too long."""
        now_s = time.monotonic()
        # If this process was stopped itself, the ranks may have been stopped with it.
        passed_s, self.looked_s = min(2 * BEAT_S, now_s - self.looked_s), now_s
        for rank, beats in enumerate(self.beats):
            self.silent_s[rank] = self.silent_s[rank] + passed_s if beats == self.seen[rank] else 0.0
            self.seen[rank] = beats
        return [rank for rank in ranks if self.silent_s[rank] > _SILENT_S]


def _end_in_order() -> Callable[[], object]:
    """From now on a signal that ends this process unwinds it, so that ranks and folders go; returns how to undo that.

    Signals that somebody handles or ignores stay theirs, and only the main thread may change this.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    known = [getattr(signal, name) for name in _ENDING if hasattr(signal, name)]
    ours = [number for number in known if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _leave)

    def restore() -> None:
        if threading.current_thread() is threading.main_thread():
            for number in ours:
                if signal.getsignal(number) is _leave:
                    signal.signal(number, signal.SIG_DFL)

    return restore


def _leave(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)  # what a shell says of a process that the signal has ended


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """What would end this process waits: between a process's start and its entry here nobody would end it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    held = {signal.SIGINT, *(getattr(signal, name) for name in _ENDING)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _context() -> Any:
    """Processes forked from one that has loaded torch and run nothing, where the system can; else new ones."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _ended(exitcode: int | None, said: str) -> str:
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"ended without an answer (exit code {exitcode}){f', after saying: {said}' if said else ''}"


def _is_stopped(process: Any) -> bool:
    """As by SIGSTOP or a debugger, where the system tells."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False


def _last_line(path: Path, most: int = 200) -> str:
    try:
        lines = path.read_text("utf-8", "replace").split("\n")
    except OSError:
        return ""
    line = next((" ".join(line.split()) for line in reversed(lines) if line.strip()), "")
    return line if len(line) <= most else line[: most - 3] + "..."
