"""Pool: workers for independent calls, from joblib: this process, local processes, or a Dask or Ray cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from types import TracebackType
from typing import Any, Self, TypeVar

from kvrsim.choices import POOL_BACKENDS
from kvrsim.errors import InputError
from kvrsim.version import __version__

_CONNECTION_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT = "20s"
_WATCH_EVERY_S = 1.0
_ROUND = 4  # calls a process in one batch for Ray, whose results come only when a batch is done
_LOKYS_THREAD = "ExecutorManagerThread"
_Result = TypeVar("_Result")


def _without_lokys(hook: Callable[[Any], Any], trouble: Any) -> None:
    """Suppress errors of loky's own thread about ended workers, so that an interrupted command prints one line."""
    if trouble.thread is None or trouble.thread.name != _LOKYS_THREAD:
        hook(trouble)


@dataclass(kw_only=True, slots=True)
class Pool:
    """Workers for independent calls; a context manager where it has more than this process.

    Entering raises InputError where the backend's package is missing or its cluster does not answer.
    """

    jobs: int = 1  # processes; ignored on an existing cluster
    backend: str = "loky"  # one of POOL_BACKENDS; "loky" is processes of this machine
    dask_address: str | None = None  # of a Dask scheduler; None: a new cluster on this machine
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)

    def __post_init__(self) -> None:
        if self.backend not in POOL_BACKENDS:
            raise InputError("backend", self.backend, f"one of {', '.join(POOL_BACKENDS)}")
        if self.dask_address is not None and self.backend != "dask":
            raise InputError("dask_address", self.dask_address, "nothing, unless `backend` is dask")

    @property
    def is_here(self) -> bool:
        """Whether all calls run in this process."""
        return self.backend == "loky" and self.jobs == 1

    def __enter__(self) -> Self:
        if self.backend == "dask":
            self._enter_dask()
        elif self.backend == "ray":
            self._enter_ray()
        elif not self.is_here:  # joblib ends its workers before it passes on an interrupt
            hook = threading.excepthook
            threading.excepthook = partial(_without_lokys, hook)
            self._open.callback(setattr, threading, "excepthook", hook)
            self._open.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=".* tasks which were still being processed", module="joblib")
            self._open.enter_context(_trackers_silent())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.backend == "loky" and not self.is_here:
            from joblib.externals.loky import get_reusable_executor

            self._open.pop_all()  # keep the filter: loky's thread may fail until this process ends
            # Without waiting, this process could end between a semaphore's removal and its deregistration.
            get_reusable_executor().shutdown(wait=True, kill_workers=True)
        self._open.close()

    def run(self, call: Callable[..., _Result], arguments: Sequence[tuple[Any, ...]]) -> Iterator[_Result]:
        """Results as they come, in any order."""
        if self.is_here or not arguments:
            yield from (call(*each) for each in arguments)
            return
        from joblib import Parallel, delayed, parallel_config

        calls = [delayed(_away)(call, each, os.getpid()) for each in arguments]
        watched = {"initializer": _begin, "initargs": (os.getpid(),)} if self.backend == "loky" else {}
        with parallel_config(backend=self.backend, **watched):
            if self.backend == "ray":  # whose joblib backend cannot return generators
                for first in range(0, len(calls), _ROUND * self.jobs):
                    yield from Parallel(n_jobs=self.jobs, batch_size=1)(calls[first : first + _ROUND * self.jobs])
                return
            jobs = self.jobs if self.dask_address is None else -1
            yield from Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1, pre_dispatch="all")(calls)

    def ordered(
        self,
        call: Callable[..., _Result],
        arguments: Sequence[tuple[Any, ...]],
        on_done: Callable[[int, int], None] | None = None,
    ) -> list[_Result]:
        """Results in the order of the arguments, whoever works; on_done: called with calls done and calls in all."""
        found: dict[int, _Result] = {}
        work = [(number, call, each) for number, each in enumerate(arguments)]
        for number, result in self.run(_numbered, work):
            found[number] = result
            if on_done is not None:
                on_done(len(found), len(work))
        return [found[number] for number in range(len(work))]

    def _enter_dask(self) -> None:
        try:
            from distributed import Client, LocalCluster
        except ImportError:
            raise _missing("dask", "kvrsim[cluster]") from None
        if self.dask_address is None:
            import logging  # costs the start of commands that have no cluster

            one_each = dict(threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL)
            with _interrupts_ignored():  # inherited by its processes
                cluster = self._open.enter_context(LocalCluster(n_workers=self.jobs, **one_each))
            self._open.enter_context(Client(cluster))
            return
        try:
            client = self._open.enter_context(Client(self.dask_address, timeout=_CONNECTION_TIMEOUT_S))
        except (OSError, ValueError, TypeError):
            accepted = "the address of a Dask scheduler that answers, such as tcp://host:8786"
            raise InputError("dask_address", self.dask_address, accepted) from None
        self._check(client)

    def _enter_ray(self) -> None:
        try:
            import ray
            from ray.util.joblib import register_ray
        except ImportError:
            raise _missing("ray", "kvrsim[cluster]") from None
        if not ray.is_initialized():
            _connect_ray(ray, self.jobs)
            self._open.callback(ray.shutdown)
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if self.jobs > cpus:
            self._open.close()
            raise InputError("jobs", self.jobs, f"at most the {cpus} CPUs of the Ray cluster")
        register_ray()

    def _check(self, client: Any) -> None:
        """Raise InputError where the cluster lacks this kvrsim: its calls would never return."""
        try:
            there = client.submit(_version, pure=False).result(timeout=_ANSWER_TIMEOUT)
        except Exception:  # any failure of a scheduler or worker
            there = None
        if there != __version__:
            self._open.close()
            accepted = f"a cluster whose scheduler and workers have kvrsim {__version__} and take work within"
            raise InputError("dask_address", self.dask_address, f"{accepted} {_ANSWER_TIMEOUT}") from None


def _numbered(number: int, call: Callable[..., _Result], arguments: tuple[Any, ...]) -> tuple[int, _Result]:
    return number, call(*arguments)


def _version() -> str:
    return __version__


@contextlib.contextmanager
def _trackers_silent() -> Iterator[None]:
    """loky's tracker is a process of its own; after an interrupt it would warn of semaphores that are gone already."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (before, "ignore:resource_tracker:UserWarning")))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _connect_ray(ray: Any, jobs: int) -> None:
    """Connect to the cluster of RAY_ADDRESS, or one that runs here, or start one of `jobs` CPUs here."""
    address = os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is not None and not _listens(address):  # Ray itself would try for minutes
        raise InputError("RAY_ADDRESS", address, "the address of a Ray cluster that answers, such as host:6379")
    try:
        ray.init(address=address or "auto", **quiet)
    except ConnectionError:
        ray.init(address="local", num_cpus=jobs, include_dashboard=False, **quiet)


def _listens(address: str) -> bool:
    """Whether something accepts connections at host:port; True for the names that Ray resolves."""
    host, colon, port = address.rpartition("://")[2].partition(":")
    if not colon:
        return address in ("auto", "local")
    import socket  # only where there is a cluster

    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECTION_TIMEOUT_S):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def _missing(backend: str, package: str) -> InputError:
    return InputError("backend", backend, f"loky, or {backend} after pip install '{package}'")


def _begin(parent: int) -> None:
    """Initialise a local worker: ignore Ctrl-C and end with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with(parent)


def _away(call: Callable[..., _Result], arguments: tuple[Any, ...], parent: int) -> _Result:
    """Run a call in a worker; Ctrl-C reaches all processes of a terminal, and only the first one handles it.

    Only local workers, among them those of a local Dask cluster, are children of `parent`.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() == parent:
        _end_with(parent)
    return call(*arguments)


@cache
def _end_with(parent: int) -> None:
    """End this worker when its parent is gone: nothing else would notify it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
