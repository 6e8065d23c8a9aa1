"""Campaigns: every point in turn, until steady or out of time; interrupted at will; refusing a busy machine."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from calibrate.data import Measurement, Provenance, read_measurements, read_origin
from calibrate.measure import campaign as campaign_module
from calibrate.measure.campaign import (
    BusyError,
    Campaign,
    CampaignJournal,
    Policy,
    Sample,
    Seconds,
    Skipped,
    estimate,
    journal_path,
    measure,
    run_campaign,
)
from calibrate.measure.device import CpuLoad
from kvrsim.errors import InputError

QUIET = Policy(budget_s=2.0, even_if_busy=True)


@dataclass
class FakeBench:
    """Points that take what their name says, in milliseconds."""

    names: Sequence[str] = ("1", "2", "5")
    spread: float = 0.0
    broken: str | None = None
    sleeps: bool = False
    calls: list[str] = field(default_factory=list)
    closed: bool = False
    device: Mapping[str, Any] | None = None  # what the GPU did

    def points(self) -> Sequence[str]:
        return list(self.names)

    def expected_s(self, point: str) -> float:
        return float(point) / 1e3

    def sample(self, point: str) -> Seconds:
        if point == self.broken:
            raise Skipped("does not fit")
        self.calls.append(point)
        if self.sleeps:
            time.sleep(0.005)
        wobble = self.spread * (-1) ** len(self.calls)
        return {"layer": float(point) / 1e3 * (1 + wobble)}

    def rows(self, samples: Mapping[str, Sequence[Seconds]]) -> list[Measurement]:
        return [
            Measurement(
                operation="layer",
                kernel="sdpa",
                device="fake",
                dtype="fp32",
                chunk=int(point),
                prefix=0,
                median_s=sorted(one["layer"] for one in taken)[len(taken) // 2],
                source="fake",
            )
            for point, taken in samples.items()
        ]

    def conditions(self) -> Mapping[str, Any] | None:
        return self.device

    def pids(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        self.closed = True


def journal_in(folder: Path) -> CampaignJournal:
    return CampaignJournal.open(journal_path(folder / "x.csv"), {"a": 1}, "--output")


def test_steady_points_are_measured_until_their_medians_are_known_and_no_longer(tmp_path: Path) -> None:
    bench = FakeBench()
    outcome = run_campaign(bench, journal_in(tmp_path), QUIET)
    assert [row.chunk for row in outcome.rows] == [1, 2, 5]
    assert all(3 <= bench.calls.count(point) <= 6 for point in bench.names)
    assert not outcome.skipped


def test_what_does_not_fit_into_the_budget_is_dropped_and_said(tmp_path: Path) -> None:
    bench = FakeBench(names=("1", "400", "20"))
    found = estimate(bench, Policy(budget_s=0.5))
    assert (found.points, found.dropped) == (("1", "20"), ("400",))
    assert found.least_s == pytest.approx(0.084)
    outcome = run_campaign(bench, journal_in(tmp_path), Policy(budget_s=0.5, even_if_busy=True))
    assert set(outcome.skipped) == {"400"}
    assert "400" not in bench.calls


def test_a_point_that_cannot_be_measured_is_skipped_with_its_reason(tmp_path: Path) -> None:
    outcome = run_campaign(FakeBench(broken="2"), journal_in(tmp_path), QUIET)
    assert outcome.skipped == {"2": "does not fit"}
    assert [row.chunk for row in outcome.rows] == [1, 5]


def test_a_finished_campaign_is_not_measured_anew(tmp_path: Path) -> None:
    first = run_campaign(FakeBench(), journal_in(tmp_path), QUIET)
    again = FakeBench()
    second = run_campaign(again, journal_in(tmp_path), QUIET)
    assert again.calls == []
    assert second.rows == first.rows


def test_a_busy_machine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuLoad, "other_cores", lambda self: 3.5)
    monkeypatch.setattr(campaign_module, "_LONG_ENOUGH_S", 0.0)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    with pytest.raises(BusyError, match=r"other processes used 3\.5 cores in 8 of 8"):
        run_campaign(FakeBench(("1", "2", "5", "6", "7")), journal_in(tmp_path), Policy(budget_s=1e6))  # soon
    outcome = run_campaign(FakeBench(), journal_in(tmp_path), QUIET)
    assert outcome.busy == outcome.samples > 0


def test_samples_of_a_gpu_that_heat_slows_do_not_count(tmp_path: Path) -> None:
    hot = {"sm_clock_hz": 9e8, "power_w": 300.0, "power_limit_w": 700.0, "throttled": ["sw_thermal_slowdown"]}
    assert Sample(point="1", seconds={}, busy_cores=0.0, device=hot).is_busy
    with pytest.raises(BusyError, match=r"clock is limited .*sw_thermal_slowdown"):
        run_campaign(FakeBench(device=hot), journal_in(tmp_path), Policy(budget_s=0.5))


def test_a_power_cap_counts_as_throttling_is_recorded_and_does_not_stop_a_campaign(tmp_path: Path) -> None:
    capped = {"sm_clock_hz": 1.4e9, "power_w": 690.0, "power_limit_w": 700.0, "throttled": ["sw_power_cap"]}
    campaign = Campaign(
        build=lambda: FakeBench(device=capped),
        about={"fake": True},
        origin=lambda rows: {"date": "today"},
        output=tmp_path / "x.csv",
    )
    measured = measure(campaign, QUIET)
    measured.journal.close()
    outcome = measured.outcome
    assert outcome.device["throttled"] == {"sw_power_cap": 1.0}
    origin = read_origin(tmp_path / "x.csv")
    assert origin is not None
    assert origin["device_state"]["sm_clock_hz"] == [1.4e9, 1.4e9, 1.4e9]
    assert origin["device_state"]["power_limit_w"] == 700.0
    assert "1400000000" in Provenance.of([origin]).provenance()["measured: device_state"]
    resumed = CampaignJournal.open(journal_path(tmp_path / "x.csv"), {"fake": True}, "--output")
    assert all(sample.device == capped for sample in resumed.samples), "a resumed campaign knows it too"


def _campaign(folder: Path) -> Campaign:
    names = tuple(str(index) for index in range(1, 40))
    return Campaign(
        build=lambda: FakeBench(names=names, sleeps=True),
        about={"fake": True},
        origin=lambda rows: {"rows": len(rows)},
        output=folder / "x.csv",
    )


def _run(folder: Path) -> None:
    measure(_campaign(folder), Policy(budget_s=20.0, even_if_busy=True)).journal.remove()


def test_killed_at_ten_random_moments_it_ends_with_the_same_grid(tmp_path: Path) -> None:
    """kill -9, again and again; every start goes on where the last one was killed."""
    context = multiprocessing.get_context("fork")
    chance = random.Random(7)
    seen = 0
    for _ in range(10):
        process = context.Process(target=_run, args=(tmp_path,))
        process.start()
        time.sleep(chance.uniform(0.02, 0.12))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(300)
        path = journal_path(tmp_path / "x.csv")
        if path.exists():
            journal = CampaignJournal.open(path, {"fake": True}, "--output")
            assert len(journal.samples) >= seen, "what was measured is lost"
            seen = len(journal.samples)
            journal.close()
    assert seen > 0, "no process has come to measure before it was killed"
    _run(tmp_path)
    rows = read_measurements(tmp_path / "x.csv")
    assert [row.chunk for row in rows] == list(range(1, 40))
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]


# -- A campaign's journal: its points and samples read back, and what no campaign has written is refused.

ABOUT = {"model": {"hidden_size": 64}, "threads": 1}


@pytest.mark.parametrize(
    ("key", "line"), [("s", {"point": "p"}), ("layer", {"point": "p", "s": {"layer": -1}}), ("points", {"points": [1]})]
)
def test_what_no_campaign_has_written_is_named(tmp_path: Path, key: str, line: dict[str, Any]) -> None:
    path = tmp_path / "j"
    content = "".join(json.dumps(one) + "\n" for one in ({"format": "kvrsim journal 1", "about": ABOUT}, line))
    path.write_text(content)
    with pytest.raises(InputError, match=rf"output .*, line 2: .*{key}.*remove the file"):
        CampaignJournal.open(path, ABOUT, "output")
    assert path.read_text() == content
