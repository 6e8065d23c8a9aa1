"""Journal: samples as they are taken, so that a killed campaign goes on where it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvrsim.line_file import LineFile

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
    """A campaign's points and samples, each on the disk before the next is taken."""

    lines: LineFile
    samples: list[Sample] = field(default_factory=list)
    points: tuple[str, ...] | None = None  # that the campaign has set out to measure; None: not decided yet
    finished: bool = False  # whether the campaign has come to its end
    resumed: int = 0  # samples that were there already

    @classmethod
    def open(cls, path: Path, about: Mapping[str, Any], argument: str) -> Journal:
        """A new journal, or the one that an interrupted campaign has left, without a line that was cut short.

        Raises InputError naming `argument` where the file holds something else, or other settings.
        """
        lines = LineFile(path=path, form=_FORMAT, about=about, work="calibration", argument=argument)
        journal = cls(lines=lines)
        for line in lines.read():
            try:
                journal._take(line)
            except (KeyError, TypeError):
                raise lines.foreign() from None
        journal.resumed = len(journal.samples)
        return journal

    def add(self, sample: Sample) -> None:
        """Keep a sample; when this returns, no kill takes it away."""
        self.samples.append(sample)
        self.lines.append({"point": sample.point, "s": dict(sample.seconds), "busy": sample.busy_cores})

    def plan(self, points: Sequence[str]) -> None:
        """What is to be measured: a resumed campaign measures the same, whatever it would choose today."""
        self.points = tuple(points)
        self.lines.append({"points": list(points)})

    def finish(self) -> None:
        """The campaign has come to its end: what follows it may be done again without measuring anew."""
        self.finished = True
        self.lines.append({"finished": True})

    def of(self, point: str) -> list[Sample]:
        """The samples of one point."""
        return [sample for sample in self.samples if sample.point == point]

    def remove(self) -> None:
        """What was measured stands elsewhere now."""
        self.lines.remove()

    def _take(self, data: Mapping[str, Any]) -> None:
        if "points" in data:
            self.points = tuple(data["points"])
        elif "finished" in data:
            self.finished = True
        else:
            self.samples.append(Sample(point=data["point"], seconds=data["s"], busy_cores=data["busy"]))


def journal_path(output: str | Path) -> Path:
    """Beside the file that the campaign is for."""
    return Path(f"{output}{SUFFIX}")


def seconds_of(samples: Sequence[Sample]) -> dict[str, list[Seconds]]:
    """By point, what the fit's rows are made of."""
    found: dict[str, list[Seconds]] = {}
    for sample in samples:
        found.setdefault(sample.point, []).append(sample.seconds)
    return found
