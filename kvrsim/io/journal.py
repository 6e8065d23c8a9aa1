"""Journal: results of long work, one JSON line each, so that interrupted work resumes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from kvrsim.errors import InputError

if sys.platform != "win32":
    import fcntl

kept: list[Path] = []  # journals of work that was interrupted in this process
_FLAGS = os.O_RDWR | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class Journal:
    """A file of results: the first line describes the work, each other line is a result.

    Enter it to lock the file for this process, and to read the results of interrupted work. Leave it to release the
    lock. A file without results is removed then. Raises InputError naming `output` where the file is that of other
    work, is not a journal, cannot be written, or is in use; the file is then left as it was.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.results: list[Any] = []
        self._about = _line(about)
        self._handle = -1

    def __enter__(self) -> Journal:
        kept.clear()
        try:
            self._handle = os.open(self.path, _FLAGS | os.O_CREAT, 0o666)
            if sys.platform != "win32":
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            content = self.path.read_bytes()
        except (OSError, ValueError) as error:
            os.close(self._handle) if self._handle >= 0 else None
            reason = error.strerror if isinstance(error, OSError) else "not a path"
            raise InputError("output", self.path, f"a file that can be written, by one process ({reason})") from None
        head, _, tail = content.partition(b"\n")
        whole = tail[: tail.rfind(b"\n") + 1]  # a line that was cut short is left out
        try:
            if content and head + b"\n" != self._about:
                raise ValueError
            self.results = [json.loads(line) for line in whole.splitlines()]
        except ValueError:
            os.close(self._handle)
            accepted = "the journal of the same work by this version; remove it, or write to another file"
            raise InputError("output", self.path, accepted) from None
        os.ftruncate(self._handle, len(self._about) + len(whole) if content else 0)
        if not content:
            os.write(self._handle, self._about)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.path.exists() and os.fstat(self._handle).st_size <= len(self._about):
            self.path.unlink()
        elif kind is not None and self.path.exists():
            kept.append(self.path)
        os.close(self._handle)

    def append(self, result: object) -> None:
        """Write a result; when this returns, neither a kill nor a power cut can lose it."""
        self.results.append(result)
        append(self.path, result)

    def remove(self) -> None:
        """Remove the file, after its results were saved elsewhere."""
        self.path.unlink(missing_ok=True)


def append(path: Path, result: object) -> None:
    """Add a result to a journal that another process has opened; raises OSError if the disk is full."""
    handle = os.open(path, _FLAGS)
    try:
        os.write(handle, _line(result))
        os.fsync(handle)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(handle)


def read_results(path: Path) -> list[Any]:
    """Read the results of a journal without a lock; none where there is no file."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return [json.loads(line) for line in lines[1:-1]]


def _line(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode() + b"\n"
