"""Journal: long work written down line by line, so that interrupted work resumes.

One JSON object a line. The first says what the work is about; what is about something else, or is no journal at all,
is refused and left as it was. Nothing is ever rewritten: a line that was cut short is cut off, and new ones follow.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kvrsim.errors import InputError, NotWrittenError
from kvrsim.io.files import sync_folder
from kvrsim.io.schema import JsonObject, parse_json

if sys.platform != "win32":
    import fcntl

# No link is followed, and a pipe without a reader does not hold up who opens it.
_FLAGS = os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_T = TypeVar("_T")


@dataclass(kw_only=True, slots=True)
class Journal:
    """A file of one JSON object a line, which one process at a time goes on with.

    `resume` creates or takes over the file and locks it; `append` on a journal that was not resumed, such as a copy
    that has been sent to another process, adds to a file that is there, and never creates one.
    """

    path: Path
    form: str  # name and version of what the lines hold
    about: Mapping[str, Any]  # settings and machine: results of others are of no use here
    work: str  # for people, such as "calibration"
    argument: str  # that messages name
    _handle: int | None = field(default=None, init=False, repr=False, compare=False)
    _size_without_results: int | None = field(default=None, init=False, repr=False, compare=False)  # bytes

    def resume(self, decode: Callable[[JsonObject], _T]) -> list[_T]:
        """What interrupted work has left, each line decoded, but for one that was cut short; then, the file is ours.

        Raises InputError where the file holds something else or is about something else, where `decode` raises it,
        where another process is at work on it, and where it is no regular file; the file is then left as it was.
        """
        self._open_locked()
        try:
            content = self._content()
            whole = content[: content.rfind(b"\n") + 1]
            if not whole and not _encoded({"format": self.form, "about": self.about}).startswith(content):
                raise self.foreign()
            lines = self._lines(whole) if whole else []
            results = [self._decoded(decode, line, number) for number, line in lines]
            os.ftruncate(self._opened, len(whole) if results else 0)
            if not results:
                self.append({"format": self.form, "about": self.about})
                sync_folder(self.path.parent)
            self._size_without_results = None if results else os.fstat(self._opened).st_size
        except BaseException:
            self.close()
            raise
        return results

    def append(self, line: Mapping[str, Any]) -> None:
        """When this returns, neither a kill nor a power cut takes the line away.

        Raises NotWrittenError where there is no room, or where the file that others should have created is not there.
        """
        try:
            handle = os.open(self.path, os.O_WRONLY | _FLAGS) if self._handle is None else self._handle
        except OSError as error:
            raise NotWrittenError(self.path, error) from None
        try:
            _write(handle, _encoded(line))
        except OSError as error:
            raise NotWrittenError(self.path, error) from None
        finally:
            if self._handle is None:
                os.close(handle)

    def close(self) -> None:
        """Let others go on with the file, which goes where it holds no results."""
        handle, self._handle = self._handle, None
        if handle is not None:
            if os.fstat(handle).st_size == self._size_without_results and _is_there(handle, self.path):
                self.path.unlink()
            _unlock(handle)
            os.close(handle)

    def remove(self) -> None:
        """What it held stands elsewhere now."""
        self.path.unlink(missing_ok=True)
        self.close()

    def foreign(self) -> InputError:
        """For a file that holds something else."""
        return InputError(
            self.argument, self.path, f"the journal of an interrupted {self.work}; remove it, or write to another file"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """The lock stays with the process that has it."""
        return _copied, (type(self), self.path, self.form, self.about, self.work, self.argument)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()

    @property
    def _opened(self) -> int:
        assert self._handle is not None
        return self._handle

    def _open_locked(self) -> None:
        """Open the file that stands there now: whoever held its lock before may have removed it meanwhile."""
        self.close()
        while self._handle is None:
            try:
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o666)
            except (OSError, ValueError) as error:
                raise self._not_usable(error) from None
            self._handle = handle
            try:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise self._not_usable(None)
                self._lock(handle)
                if not _is_there(handle, self.path):
                    self.close()
            except BaseException:
                self.close()
                raise

    def _not_usable(self, error: OSError | ValueError | None) -> InputError:
        if error is None or getattr(error, "errno", None) == errno.ELOOP:  # what stands there is a link
            accepted = "a regular file for the journal, or none yet"
        else:
            reason = error.strerror if isinstance(error, OSError) else "not a path"
            accepted = f"a file that can be written ({reason})"
        return InputError(self.argument, self.path, accepted)

    def _lock(self, handle: int) -> None:
        """Raise InputError where another process has the lock. Go on without one where the file system has none."""
        if sys.platform == "win32":
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            accepted = f"a file that no other {self.work} is writing: wait for it, or name another"
            raise InputError(self.argument, self.path, accepted) from None
        except OSError:
            return

    def _content(self) -> bytes:
        return os.pread(self._opened, os.fstat(self._opened).st_size, 0)

    def _lines(self, whole: bytes) -> list[tuple[int, dict[str, Any]]]:
        """Number and object of each line that holds results."""
        try:
            head, *lines = map(parse_json, whole.splitlines())
            known = head["about"] if head["format"] == self.form else None
        except (ValueError, KeyError, TypeError):
            raise self.foreign() from None
        if not isinstance(known, dict) or not all(isinstance(line, dict) for line in lines):
            raise self.foreign()
        about = json.loads(_encoded(self.about))
        if lines and known != about:
            keys = [key for key in sorted({*known, *about}) if known.get(key) != about.get(key)]
            differences = ", ".join(_difference(key, known.get(key), about.get(key)) for key in keys)
            advice = "finish that one first, remove the file, or write to another"
            raise InputError(self.argument, self.path, f"a {self.work} of the same {differences}; {advice}")
        return list(enumerate(lines, start=2))

    def _decoded(self, decode: Callable[[JsonObject], _T], line: dict[str, Any], number: int) -> _T:
        try:
            return decode(JsonObject(fields=line, where=f"{self.argument} {self.path}, line {number}"))
        except InputError as error:
            raise InputError(error.parameter, error.value, f"{error.accepted}; or remove the file") from None


def _copied(kind: type[Journal], path: Path, form: str, about: Mapping[str, Any], work: str, argument: str) -> Journal:
    return kind(path=path, form=form, about=about, work=work, argument=argument)


def _unlock(handle: int) -> None:
    """Also where a forked process has inherited the handle."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)


def _write(handle: int, line: bytes) -> None:
    """Write atomically: truncate on failure."""
    before = os.fstat(handle).st_size
    try:
        left = line
        while left:
            left = left[os.write(handle, left) :]
        os.fsync(handle)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, before)
        raise


def _is_there(handle: int, path: Path) -> bool:
    """Whether a path still means the file that was opened."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _encoded(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"


def _difference(key: str, known: Any, wanted: Any) -> str:
    """A key, with both values where they are short."""
    if isinstance(known, dict | list) or isinstance(wanted, dict | list):
        return key
    return f"{key} (there {json.dumps(known)[:40]}, here {json.dumps(wanted)[:40]})"
