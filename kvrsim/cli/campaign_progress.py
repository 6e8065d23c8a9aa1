"""How far a campaign is, on standard error."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

import typer

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from calibrate.measure.campaign import Estimate, Policy, Progress

_SHOWN_SKIPPED = 3


class CampaignProgress:
    """A bar of the time used, drawn on a terminal only."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        """Draw."""
        if not sys.stderr.isatty():
            return
        bar = self._bar or self._start()
        assert self._task is not None
        what = f"{progress.samples} samples, {progress.steady} of {progress.points} steady; {progress.point}"
        bar.update(self._task, completed=progress.done_s, total=progress.budget_s, what=what)

    def _start(self) -> Bar:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[what]}"))
        self._bar = Progress(TextColumn(self.title), *columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", what="")
        self._bar.start()
        return self._bar


def tell_estimate(title: str, found: Estimate, policy: Policy, resumed: int) -> None:
    """What will be measured and how long it takes."""
    span = f"{_minutes(min(found.least_s, policy.budget_s))} to {_minutes(policy.budget_s)}"
    goes_on = f", going on from {resumed} samples" if resumed else ""
    typer.echo(f"{title}: {len(found.points)} points, {span}{goes_on}", err=True)
    if found.left_away:
        shown = ", ".join(found.left_away[:_SHOWN_SKIPPED])
        more = f" and {len(found.left_away) - _SHOWN_SKIPPED} more" if len(found.left_away) > _SHOWN_SKIPPED else ""
        typer.echo(f"{title}: left away for want of time (--minutes): {shown}{more}", err=True)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
