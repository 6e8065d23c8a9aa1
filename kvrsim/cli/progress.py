"""A progress bar on standard error, for searches that a person would wait for."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE_S = 0.5  # shorter searches show nothing


class SearchProgress:
    """Called by the search as it goes; draws only on a terminal, and only after a while."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, expected: int, best_ttft_s: float) -> None:
        """Partitions simulated, partitions expected in all, and the best TTFT so far in seconds."""
        if self._bar is None and (time.monotonic() - self._started_s < PATIENCE_S or not sys.stderr.isatty()):
            return
        from kvrsim.units import format_seconds

        bar = self._bar or self._start()
        assert self._task is not None
        best = f"best TTFT {format_seconds(best_ttft_s)}"
        bar.update(self._task, completed=done, total=max(done, expected), best=best)

    def _start(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[best]}"), TimeElapsedColumn())
        self._bar = Progress("searching", *columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", best="")
        self._bar.start()
        return self._bar


class EntryProgress(SearchProgress):
    """The same for a table: entries done, and entries in all."""

    def __call__(self, done: int, expected: int, best_ttft_s: float = 0.0) -> None:
        """Entries searched, and entries in all."""
        if not sys.stderr.isatty():
            return
        bar = self._bar or self._start()
        assert self._task is not None
        bar.update(self._task, completed=done, total=expected, best="entries")
