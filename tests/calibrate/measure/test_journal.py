"""A campaign's journal: its points and samples read back, and what no campaign has written is refused."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from calibrate.measure.campaign import CampaignJournal, Sample, journal_path
from kvrsim.errors import InputError

ABOUT = {"model": {"hidden_size": 64}, "threads": 1}
SAMPLES = [Sample(point=f"p{index % 3}", seconds={"layer": 0.1 * index + 0.1}, busy_cores=None) for index in range(7)]


def test_a_journal_reads_back_what_was_added(tmp_path: Path) -> None:
    path = journal_path(tmp_path / "x.csv")
    assert path.name == "x.csv.journal"
    with closing(CampaignJournal.open(path, ABOUT, "output")) as journal:
        journal.plan(["p0", "p1", "p2"])
        for sample in SAMPLES:
            journal.add(sample)
    with closing(CampaignJournal.open(path, ABOUT, "output")) as journal:
        assert journal.samples == SAMPLES
        assert (journal.points, journal.resumed, journal.finished) == (("p0", "p1", "p2"), 7, False)
        assert [sample.seconds["layer"] for sample in journal.of("p0")] == pytest.approx([0.1, 0.4, 0.7])
        journal.finish()
    assert CampaignJournal.open(path, ABOUT, "output").finished


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("s", {"point": "p"}),
        ("point", {"point": 3, "s": {"layer": 0.1}}),
        ("layer", {"point": "p", "s": {"layer": "fast"}}),
        ("layer", {"point": "p", "s": {"layer": -1}}),
        ("busy", {"point": "p", "s": {"layer": 0.1}, "busy": []}),
        ("points", {"points": [1]}),
        ("points", {"points": "p"}),
    ],
)
def test_what_no_campaign_has_written_is_named(tmp_path: Path, key: str, line: dict[str, Any]) -> None:
    path = tmp_path / "j"
    content = "".join(json.dumps(one) + "\n" for one in ({"format": "kvrsim journal 1", "about": ABOUT}, line))
    path.write_text(content)
    with pytest.raises(InputError, match=rf"output .*, line 2: .*{key}.*remove the file"):
        CampaignJournal.open(path, ABOUT, "output")
    assert path.read_text() == content
