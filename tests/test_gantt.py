"""The Gantt chart: every kind of picture, the same bytes each time, and nothing half-written."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import kvrsim
from kvrsim.gantt import MAX_DETAILED_RANKS, write_gantt
from kvrsim.timeline import Span, Timeline

MAGIC = {".png": b"\x89PNG\r\n", ".svg": b"<?xml", ".pdf": b"%PDF"}


def timeline_of(strategy: str, gpus: int = 2, **options: str) -> Timeline:
    result = kvrsim.simulate(strategy=strategy, ctx=64 * gpus, gpus=gpus, timeline=True, **options)  # type: ignore[arg-type]
    assert result.timeline is not None
    return result.timeline


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return timeline_of("kvr-e", gpus=8)


@pytest.mark.parametrize("suffix", MAGIC)
def test_same_timeline_same_bytes(suffix: str, timeline: Timeline, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}{suffix}" for name in ("first", "second")]
    for path in paths:
        write_gantt(timeline, path, title="$kvr_e", subtitle="50 % · a_b^c")
    first, second = (path.read_bytes() for path in paths)
    assert first.startswith(MAGIC[suffix])
    assert first == second


@pytest.mark.parametrize("strategy", ["single", "tsp", "kvr-e"])
def test_every_strategy_can_be_drawn(strategy: str, tmp_path: Path) -> None:
    write_gantt(timeline_of(strategy), str(tmp_path / "gantt.PNG"), title=strategy)
    assert (tmp_path / "gantt.PNG").stat().st_size > 10_000


def test_slow_links_and_a_bus(tmp_path: Path) -> None:
    write_gantt(timeline_of("kvr-e", 4, link_bandwidth="10MB/s", topology="bus"), tmp_path / "a.png", title="bus")


def test_many_ranks_are_drawn_in_less_detail(tmp_path: Path) -> None:
    many = timeline_of("kvr-e", MAX_DETAILED_RANKS + 1)
    write_gantt(many, tmp_path / "many.svg", title="many")
    few = timeline_of("kvr-e", MAX_DETAILED_RANKS)
    write_gantt(few, tmp_path / "few.svg", title="few")
    assert (tmp_path / "many.svg").stat().st_size < (tmp_path / "few.svg").stat().st_size


def test_it_is_fast(timeline: Timeline, tmp_path: Path) -> None:
    write_gantt(timeline, tmp_path / "warm.png", title="imports matplotlib")
    start_s = time.process_time()
    write_gantt(timeline, tmp_path / "gantt.png", title="8 ranks, 32 layers")
    assert time.process_time() - start_s < 3  # about 0.5 s on an idle machine


def test_a_tiny_timeline(tmp_path: Path) -> None:
    span = Span(rank=0, kind="compute", name="unheard of", layer=0, start_s=0.0, end_s=1e-9)
    write_gantt(Timeline(strategy="x", num_ranks=1, spans=(span,)), tmp_path / "tiny.png", title="tiny")
    assert (tmp_path / "tiny.png").exists()


@pytest.mark.parametrize("name", ["gantt.gif", "gantt", "png", "missing/gantt.png"])
def test_mistakes_name_the_argument(name: str, timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(kvrsim.InputError) as caught:
        write_gantt(timeline, tmp_path / name, title="x")
    assert caught.value.parameter == "plot"
    assert list(tmp_path.iterdir()) == []
