"""Journals: nothing measured is lost, nothing torn is read, nothing foreign is taken or overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calibrate.journal import Journal, Sample, journal_path, seconds_of
from kvrsim.errors import InputError

ABOUT = {"model": {"hidden_size": 64}, "threads": 1}
SAMPLES = [Sample(point=f"p{index % 3}", seconds={"layer": 0.1 * index + 0.1}, busy_cores=None) for index in range(7)]


def written(path: Path, samples: list[Sample]) -> bytes:
    journal = Journal.open(path, ABOUT, "--output")
    journal.plan(["p0", "p1", "p2"])
    for sample in samples:
        journal.add(sample)
    return path.read_bytes()


def test_a_journal_reads_back_what_was_added(tmp_path: Path) -> None:
    path = journal_path(tmp_path / "x.csv")
    assert path.name == "x.csv.journal"
    written(path, SAMPLES)
    journal = Journal.open(path, ABOUT, "--output")
    assert journal.samples == SAMPLES
    assert (journal.points, journal.resumed, journal.finished) == (("p0", "p1", "p2"), 7, False)
    assert [sample.seconds["layer"] for sample in journal.of("p0")] == pytest.approx([0.1, 0.4, 0.7])
    assert set(seconds_of(journal.samples)) == {"p0", "p1", "p2"}
    journal.finish()
    assert Journal.open(path, ABOUT, "--output").finished


@given(cut=st.integers(min_value=0, max_value=2000))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_a_kill_at_any_byte_loses_at_most_the_sample_being_written(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "j"
    path.unlink(missing_ok=True)
    content = written(path, SAMPLES)
    kept = content[: min(cut, len(content))]
    path.write_bytes(kept)
    journal = Journal.open(path, ABOUT, "--output")
    whole = max(0, kept.count(b"\n") - 2)  # lines after the header and the plan
    assert journal.samples == SAMPLES[:whole]
    journal.add(SAMPLES[0])
    assert Journal.open(path, ABOUT, "--output").samples == [*SAMPLES[:whole], SAMPLES[0]]


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "j"
    before = written(path, SAMPLES)
    with pytest.raises(InputError, match=r"output.*same threads"):
        Journal.open(path, ABOUT | {"threads": 2}, "--output")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        b"precious notes\n",
        b"precious notes without an end",
        b'{"format": "kvrsim journal 1"}\n',
        b"[]\n",
        json.dumps({"format": "kvrsim journal 1", "about": ABOUT}).encode() + b'\n{"point": 3}\n',
    ],
)
def test_what_is_not_a_journal_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "j"
    path.write_bytes(content)
    with pytest.raises(InputError, match="output"):
        Journal.open(path, ABOUT, "--output")
    assert path.read_bytes() == content


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="output"):
        Journal.open(tmp_path / "missing" / "j", ABOUT, "--output")
