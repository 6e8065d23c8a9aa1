"""Prompts behind each other, measured by `kvrsim run --requests` beside the simulator's."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrsim.results.stream import Arrivals, Prompts
from kvrsim.runtime.prompts.run import RankPrompts
from planner.confirm.prompts import _stream
from tests.planner.confirm.confirm_setup import arguments, folder_with, said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with(tmp_path_factory.mktemp("prompts"))


@pytest.mark.slow
def test_run_measures_prompts_beside_the_simulators(folder: Path) -> None:
    words = ("--strategy", "kvr-e", "--requests", "3", "--every", "1ms", "--check", "--repeats", "2", "--json")
    code, found, errors = said(arguments(folder, "run", *words))
    assert code == 0, errors
    assert found["max_logit_error"] <= 1e-4 * found["largest_logit"]
    for stream in (found["measured"], found["predicted"]):
        assert stream["arrivals_s"] == [0, 0.001, 0.002]
        assert len(stream["ttft_s"]) == 3
        assert stream["throughput_per_s"] > 0
    assert len(found["throughputs_per_s"]) == 2
    ratio = found["predicted"]["throughput_per_s"] / found["measured"]["throughput_per_s"]
    assert found["throughput_error"] == pytest.approx(ratio - 1)


@pytest.mark.parametrize(
    ("more", "named", "accepted"),
    [
        (("--requests", "2k,4k"), "--requests", "a number: run takes equal prompts"),
        (("--requests", "3", "--generate", "4"), "--generate", "nothing with --requests"),
        (("--every", "1s"), "--every", "with --requests N"),
        (("--requests", "3", "--strategy", "tsp"), "--requests", "single, kvr-e, kvr-s, kvr-p"),
    ],
)
def test_what_makes_no_sense_takes_one_line(more: tuple[str, ...], named: str, accepted: str, folder: Path) -> None:
    code, text, errors = said(arguments(folder, "run", "--strategy", "kvr-e", *more))
    assert (code, text) == (2, "")
    assert len(errors.splitlines()) == 1
    assert named in errors
    assert accepted in errors


def test_a_repetition_in_the_simulators_terms() -> None:
    first = RankPrompts(begin_s=(0.0, 2.0), end_s=(2.0, 4.0), waited_s=0.0, tokens=())
    last = RankPrompts(begin_s=(0.0, 3.0), end_s=(3.0, 5.0), waited_s=1.0, tokens=((1,), (2,)))
    found = _stream((first, last), Prompts.alike(Arrivals(count=2, every_s=1.0), 0, 96, 0))
    assert found.ttft_s == (3.0, 4.0)
    assert found.queue_s == (0.0, 1.0)
    assert found.throughput_per_s == 2 / 5
    assert found.busy_s == (2.0, 2.0)
    assert found.utilisation == (0.8, 0.8)
