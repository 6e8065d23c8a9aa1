"""CampaignJournal: every sample is written at once, so that a killed campaign resumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calibrate.measure.device_watch import Reading
from kvrsim.io.journal import Journal
from kvrsim.io.schema import JsonObject, fields_to_json, read

SUFFIX = ".journal"
_FORMAT = "kvrsim journal 1"

Seconds = Mapping[str, float]  # of one repetition, by what was timed


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One repetition of one point."""

    point: str
    seconds: Seconds
    busy_cores: float | None  # cores that other processes used; None: not known
    device: Mapping[str, Any] | None = None  # clock and power of the GPU, see DeviceWatch; None: not known


@dataclass(kw_only=True, slots=True)
class CampaignJournal:
    """Points and samples of a campaign; each sample is on disk before the next is taken."""

    lines: Journal
    samples: list[Sample] = field(default_factory=list)
    points: tuple[str, ...] | None = None  # of the campaign; None: not decided yet
    finished: bool = False  # whether the campaign is complete
    resumed: int = 0  # samples of an earlier run

    @classmethod
    def open(cls, path: Path, about: Mapping[str, Any], argument: str) -> CampaignJournal:
        """A new journal, or that of an interrupted campaign, without an incomplete last line.

        Raises InputError naming `argument` where the file holds something else or other settings, or another
        process uses it.
        """
        journal = cls(lines=Journal(path=path, form=_FORMAT, about=about, work="calibration", argument=argument))
        for found in journal.lines.resume(_decoded):
            if isinstance(found, Sample):
                journal.samples.append(found)
            elif found is None:
                journal.finished = True
            else:
                journal.points = found
        journal.resumed = len(journal.samples)
        return journal

    def add(self, sample: Sample) -> None:
        """Write a sample; it is on disk when this returns."""
        self.samples.append(sample)
        line = {"point": sample.point, "s": dict(sample.seconds), "busy": sample.busy_cores}
        self.lines.append(line if sample.device is None else line | {"device": dict(sample.device)})

    def plan(self, points: Sequence[str]) -> None:
        """Write the points: a resumed campaign measures the same ones."""
        self.points = tuple(points)
        self.lines.append({"points": list(points)})

    def finish(self) -> None:
        """Mark the campaign as complete: the fit can be repeated without measuring again."""
        self.finished = True
        self.lines.append({"finished": True})

    def of(self, point: str) -> list[Sample]:
        """The samples of one point."""
        return [sample for sample in self.samples if sample.point == point]

    def remove(self) -> None:
        """Delete the file, once its content is in the CSV."""
        self.lines.remove()

    def close(self) -> None:
        """Close the file; another process may resume."""
        self.lines.close()


def _decoded(line: JsonObject) -> Sample | tuple[str, ...] | None:
    """Content of a line: a sample, the planned points, or None for the end of the campaign."""
    if line.has("points"):
        points = line.sequence("points")
        if not all(isinstance(point, str) for point in points):
            raise line.error("points", "an array of texts")
        return tuple(map(str, points))
    if line.has("finished"):
        return None
    seconds = line.child("s")
    return Sample(
        point=line.text("point"),
        seconds={name: seconds.number(name, allow_zero=True) for name in seconds.fields},
        busy_cores=line.number("busy", allow_zero=True) if line.has("busy") else None,
        device=fields_to_json(read(Reading, line.child("device"))) if line.has("device") else None,
    )


def journal_path(output: str | Path) -> Path:
    """Beside the file that the campaign is for."""
    return Path(f"{output}{SUFFIX}")


def seconds_of(samples: Sequence[Sample]) -> dict[str, list[Seconds]]:
    """By point, what the fit's rows are made of."""
    found: dict[str, list[Seconds]] = {}
    for sample in samples:
        found.setdefault(sample.point, []).append(sample.seconds)
    return found
