"""Pool: workers for independent calls, through joblib: this process, local processes, or a Dask or Ray cluster."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import Any, Self, TypeVar

from kvrsim.choices import POOL_BACKENDS
from kvrsim.errors import InputError
from kvrsim.progress import OnProgress
from kvrsim.version import __version__

_TIMEOUT_S = 20.0  # seconds to wait for the answer of a Dask scheduler that the user names
_TIMEOUT_HERE_S = 600.0  # for one on this machine, whose processes start slowly if it is busy
_ROUND = 4  # calls per process in one batch for Ray, which returns results only after the whole batch
_Result = TypeVar("_Result")


@dataclass(kw_only=True, slots=True)
class Pool:
    """Workers for independent calls; use it as a context manager if it has other processes.

    Entering the context raises InputError if the backend's package is missing or its cluster does not answer.
    """

    jobs: int = 1  # number of processes; ignored on an existing cluster
    backend: str = "loky"  # one of POOL_BACKENDS; "loky" means processes of this machine
    dask_address: str | None = None  # address of a Dask scheduler; None: a new cluster on this machine
    time_budget_s: float = math.inf  # seconds after which no further calls begin, if `run` may leave calls out
    _begin_s: float = field(default_factory=time.time, repr=False)  # start of the time budget
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)

    def __post_init__(self) -> None:
        if self.backend not in POOL_BACKENDS:
            raise InputError("pool", self.backend, f"one of {', '.join(POOL_BACKENDS)}")
        if self.dask_address is not None and self.backend != "dask":
            raise InputError("dask_address", self.dask_address, "nothing, unless `pool` is dask")

    def is_late(self, share: float = 1.0) -> bool:
        """Whether this share of the time budget is over."""
        return time.time() >= self._begin_s + share * self.time_budget_s

    @property
    def is_here(self) -> bool:
        """Whether all calls run in this process."""
        return self.backend == "loky" and self.jobs == 1

    def __enter__(self) -> Self:
        try:
            if self.backend == "dask":
                self._enter_dask()
            elif self.backend == "ray":
                self._enter_ray()
            elif not self.is_here:
                _silence_loky(self._open)
        except ImportError:
            accepted = f"loky, or {self.backend} after pip install 'kvrsim[cluster]'"
            raise InputError("pool", self.backend, accepted) from None
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.backend == "loky" and not self.is_here:
            from joblib.externals.loky import get_reusable_executor

            self._open.pop_all()  # no cleanup: loky's thread may print errors until this process ends
            # Wait, because this process could otherwise end between a semaphore's removal and its deregistration.
            get_reusable_executor().shutdown(wait=True, kill_workers=True)
        self._open.close()

    def run_in_order(
        self,
        call: Callable[..., _Result],
        arguments: Sequence[tuple[Any, ...]],
        what: str = "calls",
        on_progress: OnProgress | None = None,
    ) -> list[_Result]:
        """Results in the order of the arguments. what: name of the work in progress reports.

        Calls run in random order, so that finished and remaining calls take equally long on average.
        """
        order = random.Random(0).sample(range(len(arguments)), len(arguments))
        results = dict[int, _Result]()
        for index, result in zip(order, self.run(call, [arguments[index] for index in order]), strict=True):
            results[index] = result
            if on_progress is not None:
                on_progress(len(results), len(arguments), what)
        return [results[index] for index in sorted(results)]

    def run(
        self, call: Callable[..., _Result], arguments: Sequence[tuple[Any, ...]], *, share: float = math.inf
    ) -> Iterator[_Result]:
        """Yield results in the order of the arguments, as soon as each is complete.

        share: share of the time budget after which no further call begins; then the last results are absent.
        """
        last_s = self._begin_s + share * self.time_budget_s
        for results in self._results(call, arguments, last_s):
            if not results:
                return
            yield from results

    def _results(
        self, call: Callable[..., _Result], arguments: Sequence[tuple[Any, ...]], last_s: float
    ) -> Iterator[tuple[_Result, ...]]:
        """Yield the result of each call; an empty tuple for calls that would begin after `last_s`."""
        if self.is_here or not arguments:
            yield from (_until(last_s, call, *each) for each in arguments)
            return
        from joblib import Parallel, delayed, parallel_config

        calls = [delayed(_until)(last_s, call, *each) for each in arguments]
        options = {"initializer": _begin_worker, "initargs": (os.getpid(),)} if self.backend == "loky" else {}
        with parallel_config(backend=self.backend, **options):
            if self.backend == "ray":  # joblib's Ray backend cannot return generators
                for first in range(0, len(calls), _ROUND * self.jobs):
                    yield from Parallel(n_jobs=self.jobs, batch_size=1)(calls[first : first + _ROUND * self.jobs])
                return
            jobs = self.jobs if self.dask_address is None else -1
            yield from Parallel(n_jobs=jobs, return_as="generator", batch_size=1, pre_dispatch="all")(calls)

    def _enter_dask(self) -> None:
        from distributed import Client, LocalCluster

        address: Any = self.dask_address
        timeout_s = _TIMEOUT_S
        if address is None:
            timeout_s = _TIMEOUT_HERE_S
            options = {"threads_per_worker": 1, "dashboard_address": None, "silence_logs": "CRITICAL"}
            address = self._open.enter_context(LocalCluster(n_workers=self.jobs, **options))
        try:
            client = self._open.enter_context(Client(address, timeout=timeout_s))
            version = client.submit(_version, pure=False).result(timeout=timeout_s)
        except Exception:  # the scheduler or a worker failed
            version = None
        if version != __version__:  # calls to a cluster without this version of kvrsim never return
            accepted = f"a Dask scheduler that answers, such as tcp://host:8786, with kvrsim {__version__}"
            raise InputError("dask_address", self.dask_address, accepted)

    def _enter_ray(self) -> None:
        import ray
        from ray.util.joblib import register_ray

        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None and threading.current_thread() is threading.main_thread():
            self._open.callback(signal.signal, signal.SIGTERM, handler)  # ray.init replaces it
        try:  # the cluster of RAY_ADDRESS, one on this machine, or a new one
            ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR")
        except ConnectionError:
            accepted = "the address of a Ray cluster that answers, such as host:6379"
            raise InputError("RAY_ADDRESS", os.environ.get("RAY_ADDRESS"), accepted) from None
        self._open.callback(ray.shutdown)
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if self.jobs > cpus:
            raise InputError("jobs", self.jobs, f"at most the {cpus} CPUs of the Ray cluster")
        register_ray()


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _until(last_s: float, call: Callable[..., _Result], *arguments: object) -> tuple[_Result, ...]:
    """The result of a call; empty if it is too late to begin."""
    return () if time.time() >= last_s else (call(*arguments),)


def _silence_loky(stack: contextlib.ExitStack) -> None:
    """Suppress what joblib and loky print after an interrupt, so that the command prints one line."""
    hook = threading.excepthook

    def without_loky(trouble: threading.ExceptHookArgs) -> None:
        if trouble.thread is None or trouble.thread.name != "ExecutorManagerThread":
            hook(trouble)

    threading.excepthook = without_loky
    stack.callback(setattr, threading, "excepthook", hook)
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", message=".* tasks which were still being processed", module="joblib")
    # loky's resource tracker is a process; it warns about semaphores that are already removed.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")


def _version() -> str:
    return __version__


@cache
def _begin_worker(parent: int) -> None:
    """Ignore Ctrl-C, which the parent process handles, and exit when the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
