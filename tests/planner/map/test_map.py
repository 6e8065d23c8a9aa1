"""Maps: winners are fastest, break-even lengths lie between simulated lengths, and the command prints both."""

from __future__ import annotations

import json
from typing import Any

import pytest

import kvrsim
from kvrsim.cli import main as cli
from kvrsim.results.question import Question
from kvrsim.units import parse_lengths
from planner.map.map import MapPoint, StrategyMap, make_map

ARGUMENTS = ("map", "--ctx", "1k:8k:x2", "--gpus", "2,4", "--link-bandwidths", "300GB/s,1GB/s")


def map_of(ttft_s: dict[str, list[float]], fits: dict[str, bool] | None = None) -> StrategyMap:
    """A map of one bandwidth, two GPUs and contexts of 1k, 2k, 4k, ..."""
    points = [
        MapPoint(
            context_len=1024 << index,
            link_bandwidth_bytes_per_s=1e9,
            num_gpus=2,
            strategy=name,
            ttft_s=one,
            ttft_low_s=0.9 * one,
            ttft_high_s=1.1 * one,
            peak_bytes=len(name),
            fits=(fits or {}).get(name, True),
        )
        for name, times in ttft_s.items()
        for index, one in enumerate(times)
    ]
    scenario, _ = kvrsim.make_scenario(ctx="1k", gpus=2)
    return StrategyMap(question=Question.of(scenario), points=tuple(points), warnings=())


@pytest.fixture(scope="module")
def found() -> StrategyMap:
    scenario, _ = kvrsim.make_scenario(ctx="8k", gpus=4)
    names = ("tsp", "kvr-s", "ring", "tp", "tp2+zigzag")
    lengths, bandwidths = parse_lengths("1k:8k:x2", "--ctx"), (1e9, 3e11)
    return make_map(scenario, lengths=lengths, gpu_counts=(1, 2, 4), bandwidths=bandwidths, strategies=names)


def test_nothing_beats_a_winner(found: StrategyMap) -> None:
    for winner in found.winners():
        place = winner.context_len, winner.link_bandwidth_bytes_per_s
        if winner.pays:
            others = found.at(*place, winner.num_gpus)
            assert winner.ttft_s == min(point.ttft_s for point in others.values() if point.fits)
            assert winner.speedup_over_single > 1
        else:
            assert winner.strategy == "single"
            assert winner.num_gpus == 1


def test_points_are_what_simulate_says(found: StrategyMap) -> None:
    for point in found.at(4096, 1e9, 4).values():
        if point.strategy != "kvr-s":
            simulation = kvrsim.simulate(strategy=point.strategy, ctx=4096, gpus=4, link_bandwidth="1GB/s")
            assert point.ttft_s == pytest.approx(simulation.ttft_s, rel=1e-12)
            assert point.fits == simulation.fits


def test_more_bandwidth_never_hurts(found: StrategyMap) -> None:
    for context_len in found.lengths:
        ttft_s = [min(p.ttft_s for p in found.at(context_len, one, 4).values()) for one in found.bandwidths]
        assert ttft_s == sorted(ttft_s, reverse=True)


def test_break_even_lies_where_the_lines_cross() -> None:
    (even,) = map_of({"single": [1.0, 2.0, 4.0], "tsp": [2.0, 4.0, 2.0]}).break_evens()
    assert (even.strategy, even.over, even.known) == ("tsp", "single", "interpolated")
    assert even.context_len == round(2048 * 2**0.5)  # gains of -log 2 and log 2, so the middle


@pytest.mark.parametrize(
    ("tsp", "context_len", "known"),
    [([0.5, 1.0, 3.0], 1024, "at or below the first length"), ([0.5, 1.0, 4.5], None, "beyond the last length")],
)
def test_break_even_at_the_ends(tsp: list[float], context_len: int | None, known: str) -> None:
    even, *_ = map_of({"single": [1.0, 2.0, 4.0], "tsp": tsp}).break_evens()
    assert (even.context_len, even.known) == (context_len, known)


def test_strategies_that_give_way_to_each_other() -> None:
    even = list(map_of({"single": [9.0, 9.0], "a": [1.0, 4.0], "b": [2.0, 2.0]}).break_evens())
    assert [(one.strategy, one.over) for one in even] == [("a", "single"), ("b", "single"), ("b", "a")]
    assert even[2].context_len == round(1024 * 2**0.5)


def test_ties_are_with_the_fastest_that_is_as_feasible() -> None:
    times = {"single": [3.0], "tsp": [1.02], "tp": [1.0], "ring": [1.01], "ulysses": [1.1]}
    (winner,) = map_of(times, fits={"ring": False}).winners()
    assert (winner.strategy, winner.ties) == ("tp", ("tsp",))
    (best,) = map_of(times, fits={"ring": False}).best()
    assert best == winner


def test_what_does_not_fit_does_not_win() -> None:
    (winner,) = map_of({"single": [1.0], "tsp": [5.0]}, fits={"single": False}).winners()
    assert (winner.strategy, winner.speedup_over_single) == ("tsp", 0.2)
    nothing = map_of({"single": [9.0], "tsp": [5.0]}, fits={"single": False, "tsp": False})
    assert (list(nothing.winners()), list(nothing.best())) == ([], [])
    assert [point.strategy for point in nothing.nearest()] == ["tsp"]


def test_a_place_without_a_token_for_every_gpu_costs_only_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["map", "--ctx", "4,8", "--gpus", "2,8", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    places = {(point["context_len"], point["num_gpus"]) for point in content["points"]}
    assert places == {(4, 2), (8, 2), (8, 8)}
    assert [note for note in content["warnings"] if note.startswith("not on the map: 4 tokens on 8 GPUs")]
    assert cli.main(["map", "--ctx", "4,8", "--gpus", "2,8"]) == 0
    assert "not on the map: 4 tokens on 8 GPUs" in " ".join(capsys.readouterr().out.split())


def test_one_gpu_wins_where_the_gain_cannot_be_told() -> None:
    for tsp, pays in ((0.985, False), (0.97, True)):
        (winner,) = map_of({"single": [1.0], "tsp": [tsp]}).winners()
        assert winner.pays is pays


def test_a_map_has_an_answer_where_only_pipelines_fit() -> None:
    result = kvrsim.map_strategies(model="llama-3.1-70b", cluster="2x8xh100", ctx="1M", gpus=16)
    (best,) = result.best()
    assert best.strategy == "pp"
    assert {point.strategy.rpartition("+")[2] for point in result.points if point.fits} == {"pp"}


def test_a_break_even_is_of_strategies_that_fit() -> None:
    """On one GPU of 80 GiB, a model of 70 billion parameters never fits, nor do chunks of KV-Runahead."""
    question: dict[str, Any] = {"model": "llama-3.1-70b", "cluster": "8xh100", "ctx": "8k,32k", "gpus": "8"}
    result = kvrsim.map_strategies(**question)
    fits = {point.strategy: point.fits for point in result.points if point.context_len == 8192}
    assert not fits["single"]
    assert not fits["kvr-s"]
    for row in result.break_evens():
        assert fits[row.strategy]
        assert fits[row.over]
    result = kvrsim.map_strategies(model="llama-7b", cluster="a100-nvlink", ctx="4k,8k,32k", gpus="2")
    longest = max(point.context_len for point in result.points if point.strategy == "single" and point.fits)
    assert longest < 32768
    assert {row.up_to for row in result.break_evens() if row.over == "single"} == {longest}


@pytest.mark.slow
def test_a_map_agrees_with_a_plan_of_its_strategies() -> None:
    """Hybrids are on the map by default, so that its best is not slower than that of a plan of the same strategies."""
    question: dict[str, Any] = {"model": "llama-3.1-70b", "cluster": "2x8xh100", "ctx": "32k", "gpus": 16}
    result = kvrsim.map_strategies(**question)
    assert {"tp2+kvr-s", "tp8+pp"} <= set(result.strategies)
    plan = kvrsim.plan(**question, strategies=result.strategies)
    (best,) = result.best()
    assert best.ttft_s <= 1.01 * plan.best.ttft_s
    everything = kvrsim.map_strategies(**question, strategies="all")
    assert set(result.strategies) <= set(everything.strategies)


def test_a_best_strategy_that_the_engine_does_not_launch_is_said() -> None:
    question: dict[str, Any] = {"model": "llama-3.1-8b", "cluster": "8xh100", "ctx": "32k", "gpus": 8}
    for strategies, is_said in (("tp2+kvr-s", True), ("tp", False)):
        result = kvrsim.map_strategies(**question, strategies=strategies, engine="vllm")
        (best,) = result.best()
        assert best.strategy == strategies
        assert bool([text for text in result.warnings if f"vllm does not launch {strategies}" in text]) == is_said
