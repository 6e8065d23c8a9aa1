"""SearchJournal: measured prefills as they come, so that a search that was killed goes on where it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvrsim.line_file import LineFile

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
    """What is searched, then samples, each on the disk before the next is taken."""

    path: Path
    about: Mapping[str, Any]  # samples of another model, machine or setting are of no use here
    samples: list[Sample] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, about: Mapping[str, Any], argument: str = "output") -> SearchJournal:
        """A new journal, or the one that a killed search has left, without a line that was cut short.

        Raises InputError naming `argument` where the file holds something else, or another search.
        """
        journal = cls(path=path, about=about)
        lines = journal._lines(argument)
        try:
            journal.samples = [Sample(**(line | {"chunks": tuple(line["chunks"])})) for line in lines.read()]
        except (KeyError, TypeError):
            raise lines.foreign() from None
        return journal

    @property
    def spent_s(self) -> float:
        """Of the search's time, so far."""
        return sum(sample.spent_s for sample in self.samples)

    def add(self, sample: Sample) -> None:
        """Keep a sample; when this returns, no kill takes it away."""
        self.samples.append(sample)
        self._lines().append(asdict(sample))

    def remove(self) -> None:
        """What was found stands elsewhere now."""
        self._lines().remove()

    def _lines(self, argument: str = "output") -> LineFile:
        return LineFile(path=self.path, form=_FORMAT, about=self.about, work="search", argument=argument)
