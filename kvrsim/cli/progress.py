"""Progress on standard error: a line that is rewritten on a terminal; elsewhere a plain line now and then."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

import typer

from kvrsim.units import format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from calibrate.measure.campaign import Estimate, Policy
    from calibrate.measure.campaign import Progress as Measured

PATIENCE_S = 0.5  # shorter searches show nothing on a terminal
Text = str | Callable[[], str]
_SHOWN_DROPPED = 3  # of the points that do not fit into the time budget
FIRST_LINE_S = 10.0  # until the first line where there is no terminal; the next come after twice as long each


class Shown:
    """One line that is rewritten on a terminal; elsewhere a plain line at 10 s, 20 s, 40 s, ...

    Inside `with`, a thread keeps to these times, so that work which says nothing for long is named as well.
    """

    def __init__(self, *, patience_s: float | None = None) -> None:
        """patience_s: until it is drawn on a terminal; None: PATIENCE_S."""
        self._started_s = time.monotonic()
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._next_line_s = FIRST_LINE_S
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last: tuple[Text, float | None, float | None] | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._keep_time, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._bar is not None:
            self._bar.stop()

    @property
    def elapsed_s(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._started_s

    def show(self, text: Text, done: float | None = None, total: float | None = None) -> None:
        """What is being worked on, or what says so when it is drawn; with a total, how much of it is done."""
        with self._lock:
            self._last = text, done, total
            self._draw()

    def _keep_time(self) -> None:
        wait_s = PATIENCE_S
        while not self._ended.wait(wait_s):
            with self._lock:
                self._draw()
                wait_s = 1.0

    def _draw(self) -> None:
        """The last text, if it is time for it."""
        if self._last is None:
            return
        text, done, total = self._last
        if not isinstance(text, str):
            text = text()
        if sys.stderr.isatty():
            if self._bar is None and self.elapsed_s < self._patience_s:
                return
            bar = self._bar or self._start(text)
            assert self._task is not None
            bar.update(self._task, description=text, completed=done or 0, total=total)
        elif self.elapsed_s >= self._next_line_s:
            while self._next_line_s <= self.elapsed_s:
                self._next_line_s = 2 * max(self._next_line_s, 1.0)
            print(f"kvrsim: {text}, after {self.elapsed_s:.0f} s", file=sys.stderr, flush=True)

    def _start(self, text: str) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
        from rich.text import Text as Words

        shown = self

        class Clock(ProgressColumn):
            """Rich's own begins with the bar, and stands still once it is full."""

            def render(self, task: Task) -> Words:
                return Words(f"{int(shown.elapsed_s // 60)}:{int(shown.elapsed_s % 60):02d}", style="progress.elapsed")

        columns = (SpinnerColumn("line"), TextColumn("{task.description}", markup=False), BarColumn(), Clock())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(text, total=None)
        self._bar.start()
        return self._bar


class SearchProgress(Shown):
    """Called by a search as it goes: how many partitions it has simulated, and the most that it will.

    The bar is of the strategies, and of the partitions of the one that is searched, where their largest number is
    known. There is no estimate: a search ends when it gains nothing more, mostly long before the largest number.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stage = ("", 1, 1)

    def stage(self, name: str, number: int, of: int) -> None:
        """A strategy begins: its number, from 1, and how many there are."""
        self._stage = name, number, of
        self.show(self._named(), number - 1, of if of > 1 else None)

    def __call__(self, done: int, most: int | None, best_ttft_s: float) -> None:
        """Partitions simulated, the most that there will be (None: unknown), and the best TTFT so far in seconds."""
        text = f"{self._named()}: {done} partitions simulated"
        if most is not None:
            text += f" of at most {most}"
        if math.isfinite(best_ttft_s):
            text += f", best TTFT {format_seconds(best_ttft_s)}"
        _, number, of = self._stage
        if most is None:
            self.show(text, *((number - 1, of) if of > 1 else (None, None)))
        else:
            self.show(text, number - 1 + done / most, of)

    def _named(self) -> str:
        name, number, of = self._stage
        return f"{name} ({number} of {of})" if of > 1 else name or "searching"


class PartProgress(Shown):
    """How many parts of one kind are done, one kind of part after another; each kind has its own estimate."""

    def __init__(self, *, patience_s: float | None = None) -> None:
        super().__init__(patience_s=patience_s)
        self._what, self._since_s = "", 0.0

    def __call__(self, done: int, expected: int, what: str) -> None:
        """Parts done, parts in all, and what they are."""
        if what != self._what:
            self._what, self._since_s = what, self.elapsed_s
        text = f"{done} of {expected} {what}"
        if 0 < done < expected:
            text += f", about {(self.elapsed_s - self._since_s) / done * (expected - done):.0f} s more"
        self.show(text, done, expected)


class EntryProgress(Shown):
    """How many are done of how many: entries of a table, or points of a map."""

    def __init__(self, what: str = "entries") -> None:
        super().__init__()
        self._what = what

    def __call__(self, done: int, expected: int) -> None:
        """Entries searched, and entries in all."""
        text = f"{done} of {expected} {self._what}"
        if 0 < done < expected:
            text += f", about {self.elapsed_s / done * (expected - done):.0f} s more"
        self.show(text, done, expected)


class WorkProgress(Shown):
    """What is being worked on, in words; where there is nothing to count."""

    def __call__(self, text: Text) -> None:
        """What begins now, or what says how far it is."""
        self.show(text)


class RankProgress(PartProgress):
    """Steps that the first rank reports."""

    def __init__(self) -> None:
        super().__init__(patience_s=0.0)  # ranks take seconds to start

    def __enter__(self) -> Self:
        self.show("planning and starting ranks")
        return self


class CampaignProgress(Shown):
    """A bar of the time that measuring has used."""

    def __init__(self, title: str) -> None:
        super().__init__(patience_s=0.0)
        self._title = title

    def __enter__(self) -> Self:
        self.show(f"{self._title}: preparing")
        return self  # without a thread, which would compute beside what is timed

    def __call__(self, progress: Measured) -> None:
        """Seconds used of the time budget, and what has been measured."""
        counts = f"{progress.samples} samples, {progress.steady} of {progress.points} steady; {progress.point}"
        late = " (time is up; the rest has too few samples)" if progress.done_s >= progress.budget_s else ""
        self.show(f"{self._title}: {counts}{late}", progress.done_s, progress.budget_s)


def tell_estimate(title: str, found: Estimate, policy: Policy, resumed: int) -> None:
    """What will be measured and how long it takes."""
    span = f"{_minutes(min(found.least_s, policy.budget_s))} to {_minutes(policy.budget_s)}"
    resuming = f", resuming from {resumed} samples" if resumed else ""
    typer.echo(f"{title}: {len(found.points)} points, {span}{resuming}", err=True)
    if found.dropped:
        shown = ", ".join(found.dropped[:_SHOWN_DROPPED])
        more = f" and {len(found.dropped) - _SHOWN_DROPPED} more" if len(found.dropped) > _SHOWN_DROPPED else ""
        typer.echo(f"{title}: dropped because of the time budget (--minutes): {shown}{more}", err=True)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
