"""The Gantt chart: every kind of picture, the same bytes each time, and nothing half-written."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvrsim
from kvrsim.cli import main as cli
from kvrsim.plots import gantt
from kvrsim.plots.gantt import write_gantt
from kvrsim.plots.lanes import (
    MAX_DETAILED_RANKS,
    busy_shares,
    is_pipeline,
    is_solid,
    legend_entries,
    number_layers,
)
from kvrsim.results.timeline import Span, Timeline
from kvrsim.strategies import STRATEGIES

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


@pytest.mark.parametrize("strategy", [*(name for name in STRATEGIES if name != "kvr-p"), "tp2+kvr-s", "tp2+pp"])
@pytest.mark.parametrize("gpus", [1, 4])
def test_every_strategy_can_be_drawn(strategy: str, gpus: int, tmp_path: Path) -> None:
    if gpus == 1 and "tp2" in strategy:
        pytest.skip("a group needs two GPUs")
    write_gantt(timeline_of(strategy, gpus, model="llama-3-8b"), tmp_path / "gantt.PNG", title=strategy)
    assert (tmp_path / "gantt.PNG").stat().st_size > 10_000


def test_a_pipeline_has_close_ups_of_pieces(tmp_path: Path) -> None:
    """Eight or more numbers of layers, each on one rank alone: a close-up of two of them holds nothing of the last."""
    result = kvrsim.simulate(strategy="pp", ctx=4096, gpus=8, model="llama-3-8b", timeline=True, partition=[256] * 16)
    assert result.timeline is not None
    assert is_pipeline(result.timeline)
    windows = gantt._windows(result.timeline)
    assert [window.name for window in windows] == ["fills", "midway"]
    for window in windows:
        on = {span.rank for span in result.timeline.spans if window.start_s <= span.start_s <= window.end_s}
        assert on == set(range(8))
    write_gantt(result.timeline, tmp_path / "pp.png", title="pp")


# What the messages of each strategy carry.
CARRIES: dict[str, set[str]] = {
    **{"single": set(), "tsp": {"KV"}, "kvr-e": {"KV"}, "kvr-direct": {"KV"}, "zigzag": {"KV"}, "ring": {"KV"}},
    **{"striped": {"KV"}, "ulysses": {"heads"}, "pp": {"activations"}, "tp": set(), "tp2+kvr-e": {"KV"}},
}


@pytest.mark.parametrize("strategy", CARRIES)
def test_operations_are_drawn_as_what_they_are(strategy: str) -> None:
    timeline = timeline_of(strategy, gpus=4, model="llama-3-8b")
    assert {span.op for span in timeline.spans if span.kind == "transfer"} == CARRIES[strategy]
    assert {"qkv", "attention", "output+mlp"} <= {span.op for span in timeline.spans if span.kind == "compute"}
    assert "other" not in {span.op for span in timeline.spans}
    collectives = [span for span in timeline.spans if span.op == "collective"]
    assert bool(collectives) == strategy.startswith("tp")
    assert all(is_solid(span) for span in collectives)
    assert timeline.gpus_per_rank == {"tp": 4, "tp2+kvr-e": 2}.get(strategy, 1)
    entries = legend_entries(timeline.spans)
    colours = [colour for colour in entries.values() if colour is not None]
    assert len(set(colours)) == len(colours), "two things in one colour"
    assert ("all-reduce in a rank" in entries) == bool(collectives)
    assert ("KV on the link" in entries) == ("KV" in CARRIES[strategy])
    for span in timeline.spans:
        first_word = span.name.partition(" ")[0]
        if span.kind == "transfer" or first_word in ("KV", "activations", "heads"):
            assert first_word == span.op


def test_a_layer_is_numbered_once() -> None:
    from matplotlib.figure import Figure

    timeline = timeline_of("ring", gpus=8, model="llama-3-8b")
    axes = Figure(figsize=(13, 4)).add_subplot()
    number_layers(axes, timeline.spans, 0.0, timeline.end_s / 20)
    placed = [(text.get_text(), round(text.get_position()[1])) for text in axes.texts]
    assert placed
    assert len(set(placed)) == len(placed), "a number twice in one lane"


@given(seed=st.integers(0, 2**32 - 1), ranks=st.integers(1, 70))
def test_shares_of_computing_add_up(seed: int, ranks: int) -> None:
    """However thin the bars are: nothing is lost between two pixels."""
    rng = np.random.default_rng(seed)
    spans = []
    for rank in range(ranks):
        times = np.sort(rng.random(2 * rng.integers(1, 40)))
        for start_s, end_s in zip(times[::2], times[1::2], strict=True):
            at = (float(start_s), float(end_s))
            span = Span(rank=rank, kind="compute", op="attention", name="x", layer=0, start_s=at[0], end_s=at[1])
            spans.append(span)
    timeline = Timeline(strategy="x", num_ranks=ranks, spans=tuple(spans))
    bins = int(rng.integers(1, 300))
    shares = busy_shares(timeline, bins)
    assert shares.shape == (ranks, bins)
    assert ((shares >= 0) & (shares <= 1)).all()
    computed = [timeline.computed_s(rank) for rank in range(ranks)]
    assert shares.sum(axis=1) * timeline.end_s / bins == pytest.approx(computed, rel=1e-9, abs=1e-9)


def test_requests_behind_each_other_are_all_in_the_timeline(tmp_path: Path) -> None:
    options: dict[str, Any] = dict(strategy="kvr-e", ctx=512, gpus=4, timeline=True)
    alone = kvrsim.simulate(**options).timeline
    result = kvrsim.simulate(**options, requests=5)
    assert alone is not None
    assert result.timeline is not None
    assert result.stream is not None
    assert result.timeline.first_tokens_s == pytest.approx(result.stream.ttft_s)
    moved = [sum(span.kind == "transfer" for span in one.spans) for one in (alone, result.timeline)]
    assert moved[1] == 5 * moved[0]
    write_gantt(result.timeline, tmp_path / "five.png", title="five")


def test_of_many_requests_the_first_are_shown_and_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("planner.simulate.MOST_SPANS", 5000)
    titles = []
    monkeypatch.setattr("kvrsim.plots.gantt.draw_head", lambda *arguments: titles.append(arguments[2]))
    asked = ["simulate", "--strategy", "kvr-e", "--ctx", "512", "--gpus", "4", "--requests", "50", "--plot"]
    assert cli.main([*asked, str(tmp_path / "x.png")]) == 0
    assert re.search(r"the first \d+ of 50 requests", titles[0])


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
    span = Span(rank=0, kind="compute", op="other", name="unheard of", layer=0, start_s=0.0, end_s=1e-9)
    write_gantt(Timeline(strategy="x", num_ranks=1, spans=(span,)), tmp_path / "tiny.png", title="tiny")
    assert (tmp_path / "tiny.png").exists()


@pytest.mark.parametrize("name", ["gantt.gif", "gantt", "png", "missing/gantt.png"])
def test_mistakes_name_the_argument(name: str, timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(kvrsim.InputError) as caught:
        write_gantt(timeline, tmp_path / name, title="x")
    assert caught.value.parameter == "plot"
    assert list(tmp_path.iterdir()) == []
