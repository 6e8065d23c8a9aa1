"""LineFile: long work written down line by line, so that what was interrupted goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrsim.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class LineFile:
    """A file of one JSON object a line: first what the work is about, then its results as they come."""

    path: Path
    form: str  # name and version of what the lines hold
    about: Mapping[str, Any]  # settings and machine: results of others are of no use here
    work: str  # for people, such as "calibration"
    argument: str  # that messages name

    def read(self) -> list[Any]:
        """The lines after the first of what interrupted work has left, but for one that was cut short; or none.

        Afterwards the file is there and holds just these. Raises InputError where it held something else, which is
        left as it was, or is about something else.
        """
        try:
            content = self.path.read_bytes() if self.path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            lines = self._lines(whole) if whole else []
            if whole:
                os.truncate(self.path, len(whole))
            elif not self._head().startswith(content[:20]):
                raise self.foreign()
            else:
                self.path.write_bytes(b"")
                self._write(self._head())
        except OSError as error:
            raise InputError(self.argument, self.path, f"a file that can be written ({error.strerror})") from None
        return lines

    def append(self, line: Mapping[str, Any]) -> None:
        """When this returns, no kill takes it away."""
        self._write(_encoded(line))

    def remove(self) -> None:
        """What it held stands elsewhere now."""
        self.path.unlink(missing_ok=True)

    def foreign(self) -> InputError:
        """For a file that holds something else."""
        return InputError(self.argument, self.path, f"the journal of an interrupted {self.work}; remove it")

    def _head(self) -> bytes:
        return _encoded({"format": self.form, "about": self.about})

    def _lines(self, content: bytes) -> list[Any]:
        try:
            head, *lines = map(json.loads, content.splitlines())
            known = head["about"] if head["format"] == self.form else None
        except (ValueError, KeyError, TypeError):
            raise self.foreign() from None
        if not isinstance(known, dict):
            raise self.foreign()
        about = json.loads(_encoded(self.about))
        other = sorted(key for key in {*known, *about} if known.get(key) != about.get(key))
        if other:
            accepted = f"a {self.work} of the same {', '.join(other)}; remove it, or write to another file"
            raise InputError(self.argument, self.path, accepted)
        return lines

    def _write(self, line: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def _encoded(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"
