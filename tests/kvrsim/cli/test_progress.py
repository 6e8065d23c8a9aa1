"""Progress: counts and an estimate; a bar on a terminal, otherwise a line from time to time."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from kvrsim.cli import progress as module
from kvrsim.cli.progress import Progress


@pytest.fixture(autouse=True)
def _no_progress_lines() -> None:
    """Keep progress lines on; the fixture of the same name in tests/conftest.py switches them off."""


class Clock:
    """A clock that advances only when a test sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_without_a_terminal_a_line_after_10_seconds_then_ever_more_rarely(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress()
    for second in range(100):
        clock.now_s = 100.0 + second
        progress(second, None, f"kvr-s: {second} partitions simulated")
    lines = capsys.readouterr().err.splitlines()
    assert [re.findall(r"after (\d+) s", line)[0] for line in lines] == ["10", "20", "40", "80"]
    assert lines[0] == "kvrsim: kvr-s: 10 partitions simulated, after 10 s"


def test_counts_have_an_estimate_of_the_same_work(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    progress(9, 9, "samples")
    clock.now_s += 10
    progress(0, 9, "entries")
    clock.now_s += 30
    progress(3, 9, "entries")
    assert "kvrsim: entries: 3 of 9, about 60 s more, after 40 s" in capsys.readouterr().err


def test_the_estimate_is_that_of_the_count_while_the_text_changes(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress()
    progress(0, 90, "layers: 0 samples, seconds")
    clock.now_s += 30
    progress(30, 90, "layers: 12 samples, seconds")
    assert "seconds: 30 of 90, about 60 s more, after 30 s" in capsys.readouterr().err


def test_short_work_prints_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    clock.now_s += 9
    progress(1, 2, "entries")
    assert capsys.readouterr().err == ""


def test_work_that_reports_nothing_is_not_silent(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    clock.now_s += 10
    progress(0, None, "")
    assert capsys.readouterr().err == "kvrsim: working, after 10 s\n"


COMMAND = """
import sys
from kvrsim.cli import main
from kvrsim.cli.progress import Progress

def app(**options):
    with Progress("work"):
        sys.stdin.readline()
        raise SystemExit(129)

main.app = app
main.run()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_closed_terminal_does_not_hide_the_signal() -> None:
    terminal, stderr = os.openpty()
    with subprocess.Popen([sys.executable, "-c", COMMAND], stdin=subprocess.PIPE, stderr=stderr) as process:
        os.close(stderr)
        assert b"work" in os.read(terminal, 1000)
        os.close(terminal)
        process.communicate(b"\n")
    assert process.returncode == 129
