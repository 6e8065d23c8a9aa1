"""Campaigns measure every point in turn until each median is precise or the time is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from calibrate.data import Measurement, Provenance, read_measurements, read_origin
from calibrate.measure import campaign as module
from calibrate.measure.campaign import Campaign, Outcome, Seconds, SkippedPoint, measure, within_budget
from kvrsim.runtime import gpu_state


@dataclass
class FakeBench:
    """A bench whose points are named by their time in milliseconds."""

    names: Sequence[str] = ("1", "2", "5")
    spread: float = 0.0
    broken: str | None = None
    calls: list[str] = field(default_factory=list)
    closed: bool = False

    def points(self) -> Sequence[str]:
        return list(self.names)

    def expected_s(self, point: str) -> float:
        return float(point) / 1e3

    def sample(self, point: str) -> Seconds:
        if point == self.broken:
            raise SkippedPoint("does not fit")
        self.calls.append(point)
        return {"layer": float(point) / 1e3 * (1 + self.spread * (-1) ** len(self.calls))}

    def rows(self, samples: Mapping[str, Sequence[Seconds]]) -> list[Measurement]:
        common: dict[str, Any] = dict(operation="layer", kernel="sdpa", device="x", dtype="fp32", prefix=0, source="x")
        medians = {point: sorted(one["layer"] for one in taken)[len(taken) // 2] for point, taken in samples.items()}
        return [Measurement(chunk=int(point), median_s=median, **common) for point, median in medians.items()]

    def close(self) -> None:
        self.closed = True


def run(bench: FakeBench, folder: Path, budget_s: float = 2.0) -> Outcome:
    about = {"command": "y", "date": str(len(bench.calls))}
    given: dict[str, Any] = dict(title="x", origin=lambda rows: {"n": len(rows)}, output=folder / "x.csv")
    campaign = Campaign(build=lambda: bench, about=about, **given)
    outcome = measure(campaign, budget_s)
    campaign.journal().remove()
    return outcome


def test_an_interrupted_campaign_resumes(tmp_path: Path) -> None:
    bench, sample, calls = FakeBench(), FakeBench.sample, 5

    def interrupt(point: str) -> Seconds:
        if len(bench.calls) == calls:
            raise KeyboardInterrupt
        return sample(bench, point)

    bench.sample = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run(bench, tmp_path)
    assert len((tmp_path / "x.csv.journal").read_text().splitlines()) == 1 + calls
    calls = 100
    outcome = run(bench, tmp_path)
    assert bench.calls == ["1", "2", "5"] * 3
    assert (outcome.samples, outcome.notes[-1]) == (9, "resumed from 5 samples of an interrupted run")
    assert not (tmp_path / "x.csv.journal").exists()


def test_steady_points_are_measured_three_times_and_written(tmp_path: Path) -> None:
    bench = FakeBench()
    outcome = run(bench, tmp_path)
    assert bench.calls == ["1", "2", "5"] * 3
    assert [row.chunk for row in outcome.rows] == [1, 2, 5]
    assert read_measurements(tmp_path / "x.csv") == outcome.rows
    assert read_origin(tmp_path / "x.csv") == {"command": "y", "date": "0", "n": 3}
    assert bench.closed


def test_points_with_imprecise_medians_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "monotonic", lambda: 0.0)  # the budget never ends, also on a busy machine
    bench = FakeBench(spread=0.5)
    run(bench, tmp_path)
    assert all(3 < bench.calls.count(point) <= 25 for point in bench.names)


def test_points_beyond_the_budget_are_skipped_and_named(tmp_path: Path) -> None:
    bench = FakeBench(names=("1", "400", "20"))
    assert within_budget(bench, 0.5) == ["1", "20"]
    outcome = run(bench, tmp_path, 0.5)
    assert set(outcome.skipped) == {"400"}
    assert "400" not in bench.calls


def test_a_point_that_cannot_be_measured_is_skipped_with_its_reason(tmp_path: Path) -> None:
    outcome = run(FakeBench(broken="2"), tmp_path)
    assert outcome.skipped == {"2": "does not fit"}
    assert [row.chunk for row in outcome.rows] == [1, 5]


def test_a_busy_machine_and_a_hot_gpu_are_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "busy_note", lambda: ("busy",))
    state = {"sm_clock_hz": [1.4e9] * 3, "unreadable": ["power"], "throttled": {"sw_thermal_slowdown": 1.0}}
    monkeypatch.setattr(gpu_state, "summary", lambda lines, fields: state)
    monkeypatch.setattr(module.GpuLog, "notes", lambda self: ("hot",))
    outcome = run(FakeBench(), tmp_path)
    assert outcome.notes == ("busy", "hot")
    origin = read_origin(tmp_path / "x.csv")
    assert origin is not None
    assert origin["device_state"] == outcome.device == state
    assert "1400000000" in Provenance.of([origin]).provenance()["measured: device_state"]
