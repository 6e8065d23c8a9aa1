"""SearchJournal: measured prefills as they come, so that a search that was killed goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvrsim.errors import InputError

SUFFIX = ".search"
_FORMAT = "kvrsim search 1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One measured prefill."""

    level: int  # of the search
    chunks: tuple[int, ...]  # tokens a rank
    ttft_s: float
    spent_s: float  # of the search's time, all that went with it


@dataclass(kw_only=True, slots=True)
class SearchJournal:
    """A file of one JSON object a line: what is searched, then samples, each on the disk before the next is taken."""

    path: Path
    about: Mapping[str, Any]  # samples of another model, machine or setting are of no use here
    samples: list[Sample] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, about: Mapping[str, Any], argument: str = "--output") -> SearchJournal:
        """A new journal, or the one that a killed search has left, without a line that was cut short.

        Raises InputError naming `argument` where the file holds something else, or another search.
        """
        journal = cls(path=path, about=json.loads(json.dumps(about)))
        try:
            content = path.read_bytes() if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            if whole:
                journal._read(whole, argument)
                os.truncate(path, len(whole))
            elif content and not b'{"format": "kvrsim search'.startswith(content[:25]):
                raise journal._foreign(argument)
            else:
                path.write_bytes(b"")
                journal._append({"format": _FORMAT, "about": journal.about})
        except OSError as error:
            raise InputError(argument, path, f"a file that can be written ({error.strerror})") from None
        return journal

    @property
    def spent_s(self) -> float:
        """Of the search's time, so far."""
        return sum(sample.spent_s for sample in self.samples)

    def add(self, sample: Sample) -> None:
        """Keep a sample; when this returns, no kill takes it away."""
        self.samples.append(sample)
        fields = {"level": sample.level, "chunks": list(sample.chunks)}
        self._append(fields | {"ttft_s": sample.ttft_s, "spent_s": sample.spent_s})

    def remove(self) -> None:
        """What was found stands elsewhere now."""
        self.path.unlink(missing_ok=True)

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self, content: bytes, argument: str) -> None:
        try:
            head, *lines = map(json.loads, content.splitlines())
            known = head["about"] if head["format"] == _FORMAT else None
            self.samples = [Sample(**(line | {"chunks": tuple(line["chunks"])})) for line in lines]
        except (ValueError, KeyError, TypeError):
            raise self._foreign(argument) from None
        if known is None:
            raise self._foreign(argument)
        other = sorted(key for key in {*known, *self.about} if known.get(key) != self.about.get(key))
        if other:
            said = f"a search of the same {', '.join(other)} as {self.path.name} is of; remove it, or write elsewhere"
            raise InputError(argument, self.path, said)

    def _foreign(self, argument: str) -> InputError:
        return InputError(argument, self.path, "the journal of an interrupted search; remove it")
