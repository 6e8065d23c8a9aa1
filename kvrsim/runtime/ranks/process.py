"""The process of a rank: a worker that takes commands from a pipe, and ends when the other end of the pipe closes."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import queue
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrsim.runtime.ranks.faults import faults_of
from kvrsim.runtime.ranks.pinning import bind_to_loopback

BEAT_S = 1.0  # between two signs of life
_LATE_S = 10.0  # after its time, a command that nobody has ended ends the process

Pipe = Any  # multiprocessing.connection.Connection, whose type differs between systems
Shared = Any  # an array in memory that the pool and its ranks share, one place a rank


def _nobody(*_: object) -> None:
    """Of a rank that is not watched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """What a worker knows of its place."""

    rank: int
    folder: str  # of the pool's own, which goes with it
    note: Callable[[int], object] = _nobody  # tells to which layer the rank has come
    report: Callable[[int, int, str], object] = _nobody  # tells the pool: steps done, steps in all, what they are

    @property
    def store(self) -> str:
        """Where the ranks of a pool find each other, as torch.distributed takes it."""
        return f"file://{Path(self.folder).absolute()}/store"


@dataclass(frozen=True, kw_only=True, slots=True)
class Signs:
    """What a pool sees of its ranks without asking. No lock: one that dies must not hold back the others."""

    layers: Shared  # to which each rank has come; -1: none yet
    beats: Shared  # counts up as long as the process runs at all


def serve(pipe: Pipe, make: Callable[..., Any], rank: int, folder: str, signs: Signs) -> None:
    """Do what comes over the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's to handle
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGHUP})
    log = _log_to(log_path(folder, rank))
    commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, commands, folder), daemon=True).start()
    threading.Thread(target=_beat, args=(signs.beats, rank), daemon=True).start()
    bind_to_loopback()

    def note(layer: int) -> None:
        signs.layers[rank] = layer

    def report(*progress: object) -> None:
        _send(pipe, "progress", progress)

    try:
        worker = make(seat=Seat(rank=rank, folder=folder, note=note, report=report))
        _send(pipe, "result", socket.gethostname())
        while True:
            method, arguments, timeout_s = pickle.loads(commands.get())
            # Without the interpreter's lock, which a library that hangs may hold.
            faulthandler.dump_traceback_later(timeout_s + _LATE_S, exit=True, file=log)
            _send(pipe, "result", getattr(worker, method)(**arguments))
            faulthandler.cancel_dump_traceback_later()
    except BaseException as error:  # whatever it is, the pool must hear of it
        traceback.print_exc()
        layer = signs.layers[rank] if signs.layers[rank] >= 0 else None
        with contextlib.suppress(OSError):
            _send(pipe, "faults", faults_of(error, rank, layer))
    sys.stderr.flush()
    threading.Event().wait()  # until the pipe closes: the pool is to read the answer first


def log_path(folder: str, rank: int) -> Path:
    """What the rank has said, libraries included: it is not the user's."""
    return Path(folder, f"rank{rank}.log")


def _send(pipe: Pipe, kind: str, value: Any) -> None:
    pipe.send_bytes(pickle.dumps((kind, value)))


def _listen(pipe: Pipe, commands: queue.SimpleQueue[bytes], folder: str) -> None:
    """Hand on commands; when nobody is left to command, end at once, whatever the rank is doing."""
    try:
        while True:
            commands.put(pipe.recv_bytes())
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)  # a parent that was killed cannot
        os._exit(0)


def _beat(beats: Shared, rank: int) -> None:
    while True:
        beats[rank] += 1
        time.sleep(BEAT_S)


def _log_to(path: Path) -> Any:
    log = path.open("ab", buffering=0)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    return log
