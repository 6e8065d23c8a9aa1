"""The printed bound is proven: no partition is faster, whichever TTFT the bound is computed from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.builder import make_scenario
from kvrsim.execution import place
from kvrsim.placement import PlacedScenario
from kvrsim.program import Array
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES, Strategy
from planner.search.bound import _Intervals, lower_bound_and_plans, lower_bound_s
from planner.search.minimise import Evaluator
from planner.search.search import search
from tests.building import (
    Draws,
    any_engine,
    any_scenario,
    as_measured,
    draws,
    examples,
    executed,
    scenario_in,
    scenarios,
    strategy_of,
)

KVR = STRATEGIES["kvr-s"]
H100 = {"model": "llama-3-8b", "cluster": "h100-nvlink"}
EAGER = {"profile": "a100-eager"}
BLOCKS = replace(STRATEGIES["kvr-b"], query_blocks=(1, 3, 8), refuses=None)
EXACT = 1 + 1e-9
SEEDS = st.integers(0, 2**32)  # seeds of random partitions
CASES = Path(__file__).parent / "cases"
REFUTED = (
    "last-message-holds-the-stream",  # a message counted both before the drain and in it
    "end-leaves-no-room",  # an end so late that the next rank has no room for a token
    "message-in-fill-and-received",  # a message counted as part of the fill and as received
    "hidden-latency",  # latency counted in addition to the work that hides it
    "later-start-saves-less",  # a later start saves less computing than it costs in receiving
)


def partitions(scenario: Scenario, seed: int, count: int) -> Array:
    """Partitions: even, one long chunk and single tokens, and random shares from nearly even to very uneven."""
    tokens, ranks = scenario.request.new_tokens, scenario.cluster.num_gpus
    rng = np.random.default_rng(seed)
    alpha = rng.choice([0.05, 0.3, 1.0, 5.0], size=count)
    shares = np.array([rng.dirichlet([each] * ranks) for each in alpha])
    random_rows = np.floor(shares * (tokens - ranks)) + 1
    random_rows[np.arange(count), rng.integers(ranks, size=count)] += tokens - random_rows.sum(axis=1)
    extremes = np.ones((ranks, ranks)) + np.eye(ranks) * (tokens - ranks)
    even = np.full((1, ranks), tokens // ranks) + (np.arange(ranks) < tokens % ranks)
    return np.concatenate([even, extremes, random_rows, in_whole_steps(scenario, random_rows)])


def in_whole_steps(scenario: Scenario, rows: Array) -> Array:
    """The nearest partitions of whole tiles of the matrix products; the last or the first rank gets the rest.

    One more token would need another tile.
    """
    gemm = scenario.profile.kernels.gemm if scenario.profile else None
    if gemm is None or not gemm.tiles:
        return rows[:0]
    step = max(1, gemm.step // scenario.request.batch)
    filled = np.maximum(1, np.round(rows / step) * step)
    found = []
    for rest in (-1, 0):
        cut = filled.copy()
        cut[:, rest] += scenario.request.new_tokens - filled.sum(axis=1)
        found.append(cut[(cut >= 1).all(axis=1)])
    return np.concatenate(found)


def assert_nothing_beats_the_bound(scenario: Scenario, seed: int, count: int, strategy: Strategy = KVR) -> None:
    """Test bounds from an ordinary and from a slow TTFT; a bound from the best TTFT is below it by construction."""
    cuts = partitions(scenario, seed, count)
    ttft_s = Evaluator(executed(scenario, strategy)).ttft_s(cuts)
    best_s, best = float(ttft_s.min()), cuts[ttft_s.argmin()]
    if scenario.cluster.topology != "bus":
        found = search(executed(scenario, strategy), stride=1)
        if found.ttft_s < best_s:
            best_s, best = found.ttft_s, np.array(found.partition.chunk_lens)
    for known_s in (float(ttft_s[0]), float(ttft_s.max())):
        bound_s = lower_bound_s(executed(scenario, strategy), max(known_s, best_s))
        assert 0 <= bound_s <= best_s * EXACT, f"{best.tolist()} takes {best_s:.6g} s, less than {bound_s:.6g} s"


@strategy_of
def anything(rng: Draws) -> Scenario:
    """A random scenario with two to twelve GPUs, fast or slow links, sometimes a bus."""
    options: dict[str, Any] = {"num_gpus": (2, 12) if rng.random() < 0.6 else (2, 5)}
    if rng.random() < 0.15:
        options |= {"topologies": ("bus",), "num_gpus": (2, 4)}
    if rng.random() < 0.5:
        options["decades"] = (5, 9)
    scenario = any_scenario(rng, **options)
    return replace(scenario, engine=any_engine(rng)) if scenario.profile and rng.random() < 0.3 else scenario


@given(scenario=anything(), seed=SEEDS)
@examples(25)
def test_anything(scenario: Scenario, seed: int) -> None:
    assert_nothing_beats_the_bound(scenario, seed, 15 if scenario.cluster.topology == "bus" else 300)


@pytest.mark.parametrize("case", REFUTED)
def test_what_refuted_an_earlier_bound(case: str) -> None:
    for seed in range(3):
        assert_nothing_beats_the_bound(scenario_in(CASES / case), seed, 300)


@pytest.mark.parametrize("sends", ["overlap", "rendezvous"])
@given(rng=draws(), seed=SEEDS)
@examples(25)
def test_slow_links_few_ranks(sends: str, rng: Draws, seed: int) -> None:
    """If a message takes longer than the work that it allows, a rank should get a single token."""
    scenario = any_scenario(rng, num_gpus=(2, 4), roofline=False, sends=sends, decades=(5, 9))
    assert_nothing_beats_the_bound(scenario, seed, 300)


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_moe", "mixed"])
@given(rng=draws(), seed=SEEDS)
@examples(8)
def test_every_kind_of_layer(kind: str, rng: Draws, seed: int) -> None:
    scenario = any_scenario(rng, num_gpus=(2, 6), kind=kind, layers=(1, 12))
    assert_nothing_beats_the_bound(scenario, seed, 200)


@given(rng=draws(), scenario=anything(), seed=SEEDS)
@examples(25)
def test_what_own_measurements_tell(rng: Draws, scenario: PlacedScenario, seed: int) -> None:
    """Scenarios with measured sizes, masked rectangles, and copies in place."""
    scenario = as_measured(rng, scenario)
    assert_nothing_beats_the_bound(scenario, seed, 15 if scenario.cluster.topology == "bus" else 300)


@given(rng=draws(), seed=SEEDS, measured=st.booleans())
@examples(8)
def test_query_blocks(rng: Draws, seed: int, measured: bool) -> None:
    """Each rank may have any number of query blocks."""
    scenario = any_scenario(rng, num_gpus=(2, 4))
    scenario = as_measured(rng, scenario) if measured else scenario
    assert_nothing_beats_the_bound(scenario, seed, 60, BLOCKS)


@given(scenario=scenarios(num_gpus=(1, 1)))
@examples(20)
def test_one_gpu(scenario: Scenario) -> None:
    only_s = search(executed(scenario, KVR)).ttft_s
    issued_s = scenario.host.layer_s * len(scenario.model.layers)
    assert issued_s <= lower_bound_s(executed(scenario, KVR), only_s) * EXACT <= only_s * EXACT**2


@pytest.mark.parametrize(
    ("gap", "steps", "options"),
    [
        (0.01710, 190, {"ctx": "64k", "gpus": 8} | H100),
        (0.00155, 144, {"ctx": "16k", "gpus": 4}),
        (0.00980, 144, {"ctx": "16k", "gpus": 4, "link_bandwidth": 1e8}),
        (0.01460, 144, {"ctx": "8k", "gpus": 4, "link_bandwidth": 1e7} | H100),
        (0.00035, 144, {"ctx": "1k", "gpus": 4, "link_latency": "1s"} | H100),
        (0.01300, 192, {"ctx": "8k", "gpus": 3} | H100 | {"model": "gemma-3-27b"}),
        (0.00018, 36, {"ctx": 300, "gpus": 8, "link_latency": "100us"}),
        (0.00220, 408, {"ctx": 64, "gpus": 2}),
        (0.00001, 36, {"ctx": 9, "gpus": 8}),
        (0.00001, 3, {"ctx": 8, "gpus": 8}),
        (0.00012, 420, {"ctx": "8k", "gpus": 2, "cached_prefix": "4k", "prefix_placement": "remote:100MB/s"}),
        (0.00790, 372, {"ctx": "1k", "gpus": 8, "link_bandwidth": 1e10}),
        (0.02700, 372, {"ctx": "1k", "gpus": 16, "profile": "a100-eager"}),
        (0.00210, 144, {"ctx": "64k", "gpus": 8, "profile": "a100-eager"}),
        (0.56253, 336, {"ctx": "64k", "gpus": 183, "profile": "a100-eager"}),
        (0.01635, 312, {"ctx": 200, "gpus": 4, "engine": "serving"}),
        (0.00230, 144, {"ctx": 200, "gpus": 3, "engine": "lmdeploy-0.1"}),
        (0.00020, 36, {"ctx": 12, "gpus": 3, "topology": "bus", "link_bandwidth": 1e5}),
        (0.01170, 132, {"ctx": "2k", "gpus": 2} | H100),
        (0.05900, 324, {"ctx": "8k", "gpus": 4, "link_bandwidth": 1e9, "cached_prefix": "1k"} | H100 | EAGER),
        (0.0186, 308, {"ctx": 300, "gpus": 4, "cluster": "h100-nvlink"}),
        (0.00209, 180, {"ctx": "4k", "gpus": 3, "topology": "bus", "link_bandwidth": 1e9}),
        (0.00379, 207, {"ctx": "4k", "gpus": 4, "engine": "serving"}),
        (0.28919, 230, {"ctx": "8k", "gpus": 4} | H100 | {"model": "qwen3-next-80b-a3b"}),
        (0.00025, 230, {"ctx": "8k", "gpus": 2, "link_latency": "1s", "profile": "a100-eager"}),
        (0.01600, 230, {"ctx": "8k", "gpus": 4, "link_latency": "10ms", "profile": "a100-eager"}),
    ],
)
def test_the_bound_is_close(gap: float, steps: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is near the TTFT after few steps: all links, hosts, loads.

    steps: targets, each counted once per interval.
    """
    improve, targets = _Intervals.improve, list[Array]()

    def counted(intervals: _Intervals) -> None:
        targets.append(intervals.goal)
        improve(intervals)

    monkeypatch.setattr(_Intervals, "improve", counted)
    scenario = place(make_scenario(**{"model": "llama-7b"} | options)[0], KVR).placed
    ttft_s = search(executed(scenario, KVR)).ttft_s
    targets.clear()
    bound_s = lower_bound_s(executed(scenario, KVR), ttft_s)
    assert 1.0 <= ttft_s / bound_s <= 1.0 + gap
    assert sum(map(len, targets)) <= steps


@pytest.mark.parametrize("cached", [0, 500])
def test_partitions_between_walls_have_all_tokens(cached: int) -> None:
    scenario = place(make_scenario(ctx=2000, gpus=4, model="llama-7b", cached_prefix=cached)[0], KVR).placed
    even = np.full(4, (2000 - cached) / 4)
    ttft_s = float(Evaluator(executed(scenario, KVR)).ttft_s(even[None])[0])
    _, plans = lower_bound_and_plans(executed(scenario, KVR), ttft_s, even)
    assert plans.sum(axis=1) == pytest.approx(2000 - cached)
    assert plans.shape == (4, 4)  # those of the four weakest intervals
    assert (plans >= 1).all()
