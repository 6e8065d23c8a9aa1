"""Progress on standard error: a line that is rewritten on a terminal; elsewhere plain lines at growing intervals."""

from __future__ import annotations

import os
import sys
import threading
import time
from shutil import get_terminal_size
from types import TracebackType
from typing import Self

_CLEAR = "\r\x1b[K"  # go to the beginning of the line and erase it
PATIENCE_S = 0.5  # seconds; shorter work prints nothing on a terminal
FIRST_LINE_S = 10.0  # seconds until the first line without a terminal; the time doubles with each line


class Progress:
    """A line that is rewritten on a terminal; elsewhere a line at 10 s, 20 s, 40 s, ...

    The work calls this object with the part that is done, the total (None: unknown) and a text. Inside `with`, a thread
    prints the line, also while the work reports nothing.
    """

    def __init__(self, text: str = "", *, is_timed: bool = False) -> None:
        """text: shown at once; without a text, the first line waits for PATIENCE_S.

        is_timed: start no thread, because a thread would disturb a measurement.
        """
        self._started_s = time.monotonic()
        self._patience_s = 0.0 if text else PATIENCE_S
        self._next_line_s = FIRST_LINE_S
        self._is_shown = False
        self._state: tuple[float, float | None, str] = (0, None, text)
        self._since_s = 0.0  # time at which the counted work started
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = None if is_timed else threading.Thread(target=self._keep_time, daemon=True)

    def __enter__(self) -> Self:
        self(*self._state)
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._is_shown:
            write_error(_CLEAR)

    @property
    def elapsed_s(self) -> float:
        """Seconds since this object was made."""
        return time.monotonic() - self._started_s

    def __call__(self, done: float, total: float | None, text: str) -> None:
        """Show the work that is done, its total (None: unknown), and a text."""
        with self._lock:
            last_done, last_total, last_text = self._state
            if text != last_text and (total != last_total or done < last_done):
                self._since_s = self.elapsed_s
            self._state = done, total, text
            self._draw()

    def _keep_time(self) -> None:
        wait_s = PATIENCE_S
        while not self._ended.wait(wait_s):
            with self._lock:
                self._draw()
                wait_s = 1.0

    def _line(self) -> str:
        """The text, the part that is done, and the remaining time at the same pace."""
        done, total, text = self._state
        if total is None:
            return text or "working"
        line = f"{text}: {done:.0f} of {total:.0f}"
        if 0 < done < total:
            line += f", about {(self.elapsed_s - self._since_s) / done * (total - done):.0f} s more"
        return line

    def _draw(self) -> None:
        if sys.stderr.isatty():
            if self.elapsed_s >= self._patience_s:
                line = self._line()[: get_terminal_size().columns - 1]
                write_error(f"{_CLEAR}{line}")
                self._is_shown = True
        elif self.elapsed_s >= self._next_line_s:
            while self._next_line_s <= self.elapsed_s:
                self._next_line_s = 2 * max(self._next_line_s, 1.0)
            write_error(f"kvrsim: {self._line()}, after {self.elapsed_s:.0f} s\n")


def write_error(text: str) -> None:
    """Write to standard error. A closed terminal or a full disk does not end the work, and the exit code stays."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the flush at exit needs an open file
