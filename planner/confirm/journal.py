"""SearchJournal: measured prefills as they come, so that a search that was killed goes on where it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvrsim.io.journal import Journal
from kvrsim.io.json_text import JsonObject

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
    """What is searched, then samples, each on the disk before the next is taken.

    One that was not opened, such as a copy in another process, adds to a file that is there and never creates one.
    """

    path: Path
    about: Mapping[str, Any]  # samples of another model, machine or setting are of no use here
    samples: list[Sample] = field(default_factory=list)
    argument: str = "output"
    _lines: Journal = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._lines = Journal(path=self.path, form=_FORMAT, about=self.about, work="search", argument=self.argument)

    @classmethod
    def open(cls, path: Path, about: Mapping[str, Any], argument: str = "output") -> SearchJournal:
        """A new journal, or the one that a killed search has left, without a line that was cut short.

        Raises InputError naming `argument` where the file holds something else, or another search, or where another
        process is at work on it.
        """
        journal = cls(path=path, about=about, argument=argument)
        journal.samples = journal._lines.resume(_decoded)
        return journal

    @property
    def spent_s(self) -> float:
        """Of the search's time, so far."""
        return sum(sample.spent_s for sample in self.samples)

    def add(self, sample: Sample) -> None:
        """Keep a sample; when this returns, no kill takes it away. NotWrittenError where the disk is full."""
        self.samples.append(sample)
        self._lines.append(asdict(sample))

    def remove(self) -> None:
        """What was found stands elsewhere now."""
        self._lines.remove()

    def close(self) -> None:
        """Let others go on with what was measured."""
        self._lines.close()


def _decoded(line: JsonObject) -> Sample:
    return Sample(
        level=line.integer("level", minimum=-1),
        chunks=tuple(line.integers("chunks")),
        ttft_s=line.number("ttft_s"),
        spent_s=line.number("spent_s", allow_zero=True),
    )
