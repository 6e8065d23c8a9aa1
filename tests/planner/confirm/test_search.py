"""The search on the machine: what it decides, and that a killed one goes on where it was."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.model.load import load_model
from kvrsim.scenario import Partition, Scenario
from planner.confirm.hardware import Hardware
from planner.confirm.search import Chunks, HardwareSearch, Sample, SearchTask, read_sample, search_journal
from tests.planner.confirm.confirm_setup import arguments, folder_with, made_up_profile, said

ROOT = Path(__file__).parents[3]


def scenario_of(num_gpus: int, ctx: int = 4096) -> Scenario:
    return make_scenario(ctx=ctx, gpus=num_gpus, model=load_model("llama-7b"), profile=made_up_profile())[0]


class Bowl:
    """A machine whose TTFT grows with the distance from a partition that it likes."""

    def __init__(self, liked: Chunks, *, each_s: float = 1.0, killed_after: int | None = None) -> None:
        self.liked, self.each_s, self.killed_after, self.asked = liked, each_s, killed_after, list[Sample]()
        self.drift = itertools.count()

    def sample(self, stage: int, chunks: Chunks) -> Sample:
        if len(self.asked) == self.killed_after:
            raise KeyboardInterrupt
        away = sum(abs(one - other) for one, other in zip(chunks, self.liked, strict=True))
        self.asked.append(Sample(stage=stage, chunks=chunks, ttft_s=1 + away / sum(chunks), spent_s=self.each_s))
        return self.asked[-1]


def task_of(scenario: Scenario, seed: Chunks, tmp_path: Path, **changes: object) -> SearchTask:
    task = SearchTask(
        scenario=scenario,
        hardware=Hardware(config="llama-7b", repeats=2),
        seed=Partition(chunk_lens=seed),
        budget_s=1e9,
        known=(),
        journal=search_journal(tmp_path / "journal", {}),
    )
    return replace(task, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("seed", "liked"), [((2048, 2048), (2300, 1796)), ((1024,) * 4, (1100, 1050, 1000, 946))])
def test_it_ends_near_what_the_machine_likes(seed: Chunks, liked: Chunks, tmp_path: Path) -> None:
    found = HardwareSearch()
    found.run(task_of(scenario_of(len(seed)), seed, tmp_path), Bowl(liked).sample)
    assert found.times_s(found.best) < found.times_s(found.seed)
    assert all(sum(sample.chunks) == 4096 and min(sample.chunks) >= 1 for sample in found.samples)
    stride = 4096 / len(seed) / 64
    if len(seed) == 2:
        assert abs(found.best[0] - liked[0]) <= 2 * stride
    assert found.ended == "the finest stride is done"


def test_the_time_bounds_it(tmp_path: Path) -> None:
    found, machine = HardwareSearch(), Bowl((2300, 1796), each_s=10.0)
    found.run(task_of(scenario_of(2), (2048, 2048), tmp_path, budget_s=60.0), machine.sample)
    assert "the time is up" in found.ended
    assert len(machine.asked) <= 6 + 2 * 2  # and the plan's against the best
    assert len(found.times_s(found.seed)) == 2


@pytest.mark.parametrize("killed_after", [1, 7, 20])
def test_a_killed_search_comes_to_the_same_end(killed_after: int, tmp_path: Path) -> None:
    scenario, seed, liked = scenario_of(2), (2048, 2048), (2300, 1796)
    whole = HardwareSearch()
    whole.run(task_of(scenario, seed, tmp_path), Bowl(liked).sample)
    first = Bowl(liked, killed_after=killed_after)
    with pytest.raises(KeyboardInterrupt):
        HardwareSearch().run(task_of(scenario, seed, tmp_path), first.sample)
    rest, second = HardwareSearch(), Bowl(liked)
    rest.run(task_of(scenario, seed, tmp_path, known=tuple(first.asked)), second.sample)
    assert rest.samples == whole.samples
    assert len(first.asked) + len(second.asked) == len(whole.samples)


SAMPLE = Sample(stage=0, chunks=(3, 1), ttft_s=0.5, spent_s=0.7)


def keep(path: Path, about: dict[str, object], sample: Sample) -> list[Sample]:
    """Add a sample to a journal; what it held before."""
    with closing(search_journal(path, about)) as journal:
        found = journal.resume(read_sample)
        journal.append(asdict(sample))
    return found


def test_a_journal_keeps_what_is_whole(tmp_path: Path) -> None:
    path, about = tmp_path / "t.json.search", {"context": 4}
    keep(path, about, SAMPLE)
    with path.open("a") as file:
        file.write('{"stage": 0, "chu')
    assert keep(path, about, replace(SAMPLE, stage=-1)) == [SAMPLE]
    last = search_journal(path, about)
    assert last.resume(read_sample) == [SAMPLE, replace(SAMPLE, stage=-1)]
    last.remove()
    assert not path.exists()


@pytest.mark.parametrize("wrong", [{"chunks": ["3", 1]}, {"ttft_s": None}])
def test_what_no_search_has_written_is_named(wrong: dict[str, object], tmp_path: Path) -> None:
    path, about = tmp_path / "t.json.search", {"context": 4}
    keep(path, about, SAMPLE)
    content = path.read_text() + json.dumps(asdict(SAMPLE) | wrong) + "\n"
    path.write_text(content)
    with pytest.raises(InputError, match=rf"output .*, line 3: {next(iter(wrong))}.*: .*remove the file"):
        search_journal(path, about).resume(read_sample)
    assert path.read_text() == content


@pytest.mark.slow
def test_a_search_that_is_killed_goes_on_and_writes_a_table(tmp_path: Path) -> None:
    folder, table = folder_with(tmp_path), tmp_path / "table.json"
    journal = tmp_path / "table.json.search"
    words = [
        *arguments(folder, "confirm", "--search", "-o", str(table), "--minutes", "0.15", "--json"),
        "--repeats",
        "2",
    ]
    command = [sys.executable, "-m", "kvrsim.cli.main", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **quiet)  # type: ignore[call-overload]
    try:
        wait_until_s = time.monotonic() + 300
        while not journal.exists() or len(journal.read_text().splitlines()) < 5:
            assert time.monotonic() < wait_until_s
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    time.sleep(0.2)
    with journal.open("a") as file:
        file.write('{"stage": 0, "chunks": [5')
    code, found, errors = said(words)
    assert code == 0, errors
    assert found["resumed"] >= 3
    assert f"going on from {found['resumed']} prefills" in errors
    assert not journal.exists()
    code, looked_up, _ = said(["table", "lookup", str(table), "--gpus", "2", "--ctx", "96", "--json"])
    assert (code, looked_up["source"], looked_up["partition"]) == (0, "exact", found["partition"])
    assert json.loads(table.read_text())["_measured"]["measured_ttft_s"] == found["measured_ttft_s"]
