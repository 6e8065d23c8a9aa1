"""CampaignJournal: samples as they are taken, so that a killed campaign goes on where it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calibrate.measure.device_watch import Reading
from kvrsim.io.journal import Journal
from kvrsim.io.json_text import JsonObject
from kvrsim.io.schema import fields_to_json, read

SUFFIX = ".journal"
_FORMAT = "kvrsim journal 1"

Seconds = Mapping[str, float]  # of one repetition, by what was timed


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One repetition of one point."""

    point: str
    seconds: Seconds
    busy_cores: float | None  # cores that other processes used meanwhile; None: not known
    device: Mapping[str, Any] | None = None  # the GPU's clock and power meanwhile, see DeviceWatch; None: not known


@dataclass(kw_only=True, slots=True)
class CampaignJournal:
    """A campaign's points and samples, each on the disk before the next is taken."""

    lines: Journal
    samples: list[Sample] = field(default_factory=list)
    points: tuple[str, ...] | None = None  # that the campaign has set out to measure; None: not decided yet
    finished: bool = False  # whether the campaign has come to its end
    resumed: int = 0  # samples that were there already

    @classmethod
    def open(cls, path: Path, about: Mapping[str, Any], argument: str) -> CampaignJournal:
        """A new journal, or the one that an interrupted campaign has left, without a line that was cut short.

        Raises InputError naming `argument` where the file holds something else, or other settings, or where another
        process is at work on it.
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
        """Keep a sample; when this returns, no kill takes it away."""
        self.samples.append(sample)
        line = {"point": sample.point, "s": dict(sample.seconds), "busy": sample.busy_cores}
        self.lines.append(line if sample.device is None else line | {"device": dict(sample.device)})

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

    def close(self) -> None:
        """Let others go on with what was measured."""
        self.lines.close()


def _decoded(line: JsonObject) -> Sample | tuple[str, ...] | None:
    """What a line holds: a sample, the points that were planned, or that the campaign has finished."""
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
