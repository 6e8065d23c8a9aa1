"""What a search says while it works: true counts, an estimate, one line where there is no terminal."""

from __future__ import annotations

import io
import re
import sys

import pytest

from kvrsim.cli import progress as shown
from kvrsim.cli.progress import EntryProgress, SearchProgress, WorkProgress


@pytest.fixture(autouse=True)
def _no_progress_lines() -> None:
    """Elsewhere there are none; these tests are about them."""


class Clock:
    """Seconds that pass only when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(shown.time, "monotonic", lambda: self.now_s)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_without_a_terminal_it_speaks_after_10_seconds_then_ever_more_rarely(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = SearchProgress()
    progress.stage("kvr-s", 1, 2)
    for second in range(100):
        clock.now_s = 100.0 + second
        progress(second, None, 1.0)
    lines = capsys.readouterr().err.splitlines()
    assert [re.findall(r"after (\d+) s", line)[0] for line in lines] == ["10", "20", "40", "80"]
    assert lines[0].startswith("kvrsim: kvr-s (1 of 2): 10 partitions simulated, best TTFT 1.00 s")


def test_it_names_the_most_that_there_will_be(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """And guesses no time: a search ends when it gains nothing more."""
    progress = SearchProgress()
    progress.stage("kvr-s", 1, 1)
    clock.now_s += 9  # of preparation
    progress(10, 200, float("inf"))
    clock.now_s += 16
    progress(50, 200, float("inf"))
    assert "kvr-s: 50 partitions simulated of at most 200, after 25 s" in capsys.readouterr().err


def test_the_bar_is_full_only_at_the_end(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine strategies: after the first, a ninth; a search of unknown length never fills it."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    with SearchProgress() as progress:
        clock.now_s += 5
        for number in range(1, 10):
            progress.stage("kvr-s", number, 9)
            for done in (1, 10, 1000):
                progress(done, None, 1.0)
                assert progress._bar is not None
                (task,) = progress._bar.tasks
                assert task.total == 9
                assert task.completed == number - 1


def test_the_bar_goes_on_within_a_strategy_and_never_back(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    seen = []
    with SearchProgress() as progress:
        clock.now_s += 5
        for number in (1, 2):
            progress.stage("kvr-s", number, 2)
            for done in (1, 50, 100):
                progress(done, 100, 1.0)
                assert progress._bar is not None
                seen.append(progress._bar.tasks[0].completed)
    assert seen == [0.01, 0.5, 1.0, 1.01, 1.5, 2.0]


def test_what_counts_itself_is_asked_when_it_is_drawn(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress, count = WorkProgress(), 0
    progress(lambda: f"{count} requests simulated")
    count = 7
    clock.now_s += 10
    progress._draw()
    assert "kvrsim: 7 requests simulated, after 10 s" in capsys.readouterr().err


def test_entries_have_an_estimate(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = EntryProgress("places")
    clock.now_s += 30
    progress(3, 9)
    assert "kvrsim: 3 of 9 places, about 60 s more, after 30 s" in capsys.readouterr().err


def test_short_work_says_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    search, entries, work = SearchProgress(), EntryProgress(), WorkProgress()
    clock.now_s += 9
    search(1, 2, 3.0)
    entries(1, 2)
    work("fleets")
    assert capsys.readouterr().err == ""


def test_work_that_says_nothing_for_long_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shown, "PATIENCE_S", 0.01)
    monkeypatch.setattr(shown, "FIRST_LINE_S", 0.001)
    said = ""
    with WorkProgress() as progress:
        progress._next_line_s = 1e9
        progress("fleets")
        progress._next_line_s = 0.0
        for _ in range(500):  # ten seconds at most
            said += capsys.readouterr().err
            if said:
                break
            shown.time.sleep(0.02)
    assert said.startswith("kvrsim: fleets, after")
