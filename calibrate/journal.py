"""Journal: samples as they are taken, so that a killed campaign goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvrsim.errors import InputError

SUFFIX = ".journal"
_FORMAT = "kvrsim journal 1"

Seconds = Mapping[str, float]  # of one repetition, by what was timed


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One repetition of one point."""

    point: str
    seconds: Seconds
    busy_cores: float | None  # cores that other processes used meanwhile; None: not known


@dataclass(kw_only=True, slots=True)
class Journal:
    """A file of lines of JSON: what is measured, then one sample a line, each on the disk before the next is taken."""

    path: Path
    about: Mapping[str, Any]  # settings and machine: samples of others are of no use here
    samples: list[Sample] = field(default_factory=list)
    points: tuple[str, ...] | None = None  # that the campaign has set out to measure; None: not decided yet
    finished: bool = False  # whether the campaign has come to its end
    resumed: int = 0  # samples that were there already

    @classmethod
    def open(cls, path: Path, about: Mapping[str, Any], argument: str) -> Journal:
        """A new journal, or the one that an interrupted campaign has left, without a line that was cut short.

        Raises InputError naming `argument` where the file holds something else, or other settings.
        """
        journal = cls(path=path, about=_plain(about))
        try:
            kept = journal._read(argument) if path.exists() else None
            if kept is None:
                path.write_bytes(b"")
                journal._append({"format": _FORMAT, "about": journal.about})
            else:
                os.truncate(path, kept)
        except OSError as error:
            raise InputError(argument, path, f"a file that can be written ({error.strerror})") from None
        journal.resumed = len(journal.samples)
        return journal

    def add(self, sample: Sample) -> None:
        """Keep a sample; when this returns, no kill takes it away."""
        self.samples.append(sample)
        self._append({"point": sample.point, "s": dict(sample.seconds), "busy": sample.busy_cores})

    def plan(self, points: Sequence[str]) -> None:
        """What is to be measured: a resumed campaign measures the same, whatever it would choose today."""
        self.points = tuple(points)
        self._append({"points": list(points)})

    def finish(self) -> None:
        """The campaign has come to its end: what follows it may be done again without measuring anew."""
        self.finished = True
        self._append({"finished": True})

    def of(self, point: str) -> list[Sample]:
        """The samples of one point."""
        return [sample for sample in self.samples if sample.point == point]

    def remove(self) -> None:
        """What was measured stands elsewhere now."""
        self.path.unlink(missing_ok=True)

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self, argument: str) -> int | None:
        """Take what is whole; returns the bytes of it, None where not even the first line is."""
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if not lines:
            if content and not f'{{"format": "{_FORMAT}'.encode().startswith(content[:20]):
                raise self._foreign(argument)
            return None
        self._check_header(lines[0], argument)
        for line in lines[1:]:
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                raise self._foreign(argument) from None
        return len(whole)

    def _take(self, data: Mapping[str, Any]) -> None:
        if "points" in data:
            self.points = tuple(data["points"])
        elif "finished" in data:
            self.finished = True
        else:
            self.samples.append(Sample(point=data["point"], seconds=data["s"], busy_cores=data["busy"]))

    def _check_header(self, line: bytes, argument: str) -> None:
        try:
            header = json.loads(line)
            about = header["about"] if header["format"] == _FORMAT else None
        except (ValueError, KeyError, TypeError):
            raise self._foreign(argument) from None
        if about is None:
            raise self._foreign(argument)
        other = sorted(key for key in {*about, *self.about} if about.get(key) != self.about.get(key))
        if other:
            said = f"a journal of the same {', '.join(other)}; remove it, or write to another file"
            raise InputError(argument, self.path, said)

    def _foreign(self, argument: str) -> InputError:
        return InputError(argument, self.path, "the journal of an interrupted calibration; remove it")


def journal_path(output: str | Path) -> Path:
    """Beside the file that the campaign is for."""
    return Path(f"{output}{SUFFIX}")


def _plain(about: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON reads it back."""
    plain: dict[str, Any] = json.loads(json.dumps(about))
    return plain


def seconds_of(samples: Sequence[Sample]) -> dict[str, list[Seconds]]:
    """By point, what the fit's rows are made of."""
    found: dict[str, list[Seconds]] = {}
    for sample in samples:
        found.setdefault(sample.point, []).append(sample.seconds)
    return found
