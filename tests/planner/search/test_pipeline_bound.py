"""The bound of pipelines is proven: no pieces and no layers of the stages are faster."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvrsim
from kvrsim.compile import for_strategy
from kvrsim.hardware import SlowGpu, UnevenCluster
from kvrsim.program import Array
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from planner.search.minimise import Evaluator
from planner.search.pipeline import search_pipeline
from planner.search.pipeline_bound import _Grid, _Layouts, _mix_s, _with_stage, pipeline_bound_s
from tests.building import Draws, any_placed, any_scenario, as_measured, draws, examples

SEARCHED = get_strategy("pp-s")
EXACT = 1 + 1e-9
H100 = {"model": "llama-3-8b", "cluster": "h100-nvlink"}
EAGER = {"model": "llama-7b", "profile": "a100-eager"}


def any_layers(rng: Draws, num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Random layers of the stages, at least one per stage."""
    ends = sorted(rng.sample(range(1, num_layers), num_stages - 1)) if num_stages > 1 else []
    return tuple(int(end) for end in np.diff([0, *ends, num_layers]))


def never_beaten(rng: Draws, scenario: Scenario) -> None:
    """Check that neither searched nor random pieces and stages are faster than the bound."""
    bound_s = pipeline_bound_s(scenario)
    tokens, kinds = scenario.request.new_tokens, len(scenario.share.layer_kind_index)
    found = search_pipeline(scenario, SEARCHED, stride=rng.choice([1, 16, 64]))
    assert found.ttft_s * EXACT >= bound_s
    for attempt in range(6):
        strategy = replace(SEARCHED, stage_layers=any_layers(rng, kinds, scenario.cluster.num_gpus))
        number = min(tokens, rng.choice([1, 2, 3, 5, 8, 13, 40]))
        ratio = rng.choice([1.0, 1.0, 0.7, 0.9, 1.2])
        shares = np.array([ratio**index * (1 if rng.random() < 0.8 else rng.random()) for index in range(number)])
        inner = np.round(np.cumsum(shares)[:-1] / shares.sum() * (tokens - number)).astype(int) + np.arange(1, number)
        pieces = tuple(int(piece) for piece in np.diff([0, *inner, tokens]))
        ttft_s = Evaluator(scenario, strategy).one(pieces) * EXACT
        assert ttft_s >= bound_s, (pieces, strategy.stage_layers)
        if attempt == 0:  # the bound for pieces of at least this length
            assert ttft_s >= pipeline_bound_s(scenario, min(pieces)), (pieces, strategy.stage_layers)


@given(rng=draws())
@examples(40)
def test_no_pipeline_is_faster(rng: Draws) -> None:
    """The bound holds on random machines, for models with several kinds of layers, engines and cached prefixes."""
    if rng.random() < 0.5:
        scenario, _ = any_placed(rng, SEARCHED)
    else:
        scenario = any_scenario(rng, num_gpus=(1, 4), layers=(4, 8), topologies=("switch", "chain", "bus"))
        scenario = for_strategy(as_measured(rng, scenario) if rng.random() < 0.5 else scenario, SEARCHED)
    if scenario.cluster.shares_bandwidth and scenario.request.new_tokens > 64:
        return  # a bus replays each pipeline event by event, which is slow
    never_beaten(rng, scenario)


@pytest.mark.parametrize("model", ["llama-3-8b", "deepseek-v3", "qwen3-next-80b-a3b", "llama-4-scout"])
@pytest.mark.parametrize("engine", ["none", "serving"])
def test_no_pipeline_of_published_models_is_faster(model: str, engine: str) -> None:
    """The models have latents, windows, chunks of attention, states, experts and dense first layers."""
    scenario, _ = kvrsim.make_scenario(ctx="8k", gpus=4, model=model, cluster="h100-nvlink", engine=engine)
    never_beaten(random.Random(model), scenario)


@given(
    stages=st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=6),
    pieces=st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=6),
)
@examples(300)
def test_the_recursion_over_stages(stages: list[float], pieces: list[float]) -> None:
    """Some path through the grid of stages and pieces has at least V of all work of the pieces."""
    longest = np.zeros((len(stages) + 1, len(pieces) + 1))
    for (row, stage), (column, piece) in product(enumerate(stages, start=1), enumerate(pieces, start=1)):
        longest[row, column] = max(longest[row - 1, column], longest[row, column - 1]) + stage * piece
    assert longest[-1, -1] * EXACT >= least_length(stages, len(pieces)) * sum(pieces)
    even = least_length([1.0] * len(stages), len(pieces))
    assert even == pytest.approx((len(stages) + len(pieces) - 1) / len(pieces))


def least_length(stages: list[float], pieces: int) -> float:
    """V of the module's docstring, for stages of this work."""
    lengths = np.zeros((pieces + 1, 1))
    for own in reversed(stages):
        lengths = _with_stage(np.array([own]), lengths)
    return float(lengths[pieces - 1, 0])


@given(rng=draws())
@examples(60)
def test_mixing_takes_no_less_for_longer_and_later_pieces(rng: Draws) -> None:
    """So the shortest, first piece of a cell bounds the time of its other pieces; also where attention is local."""
    scenario = any_scenario(rng, kind=rng.choice([None, "mixed"]))
    scenario = as_measured(rng, scenario) if rng.random() < 0.5 else scenario
    lengths, starts = (np.sort([rng.randint(1, 5000) for _ in range(24)]).astype(float) - 1 for _ in range(2))
    for costs in scenario.layer_costs():
        seconds = _mix_s(costs, 1 + lengths[:, None], starts)
        for axis in (0, 1):
            assert (np.diff(seconds, axis=axis) >= -1e-9 * seconds.max()).all()


def layouts(num_layers: int, num_stages: int) -> list[list[range]]:
    """The layers of each stage, in all layouts."""
    cuts = combinations(range(1, num_layers), num_stages - 1)
    return [[range(*ends) for ends in pairwise((0, *cut, num_layers))] for cut in cuts]


@given(rng=draws(), overlaps=st.booleans(), has_links=st.booleans())
@examples(200)
def test_the_least_of_all_layouts(rng: Draws, overlaps: bool, has_links: bool) -> None:
    """The bound is the least over all layouts, one by one: of paths, and with one or two stages also of hosts."""
    num_layers, num_stages, exact = rng.randint(2, 6), rng.randint(1, 4), rng.randint(1, 6)
    num_stages = min(num_stages, num_layers)
    weights = np.array([rng.uniform(0.1, 1.0) for _ in range(num_layers)])
    slowness = tuple(rng.choice([1.0, 1.6]) for _ in range(num_stages))
    shares = np.array([rng.choice([0.0, rng.uniform(0.1, 3.0)]) for _ in range(num_stages - 1)]) if has_links else None
    hosts_s = rng.uniform(0.1, 2.0) if num_stages < 3 and rng.random() < 0.7 else 0.0
    until = np.append(0.0, np.cumsum(weights))
    bounds = _Layouts(weights, until, hosts_s, slowness, overlaps, exact)
    assert bounds.total == pytest.approx(weights.sum())
    numbers = np.arange(1.0, exact + 3)  # the last two are not exact
    pieces_s, before_s = rng.uniform(0.5, 2.0) * numbers, np.full(len(numbers), rng.choice([0.0, 0.3]))
    want_s = np.full(len(numbers), np.inf)
    for layout in layouts(num_layers, num_stages):
        each, hosts = list[float](), list[float]()
        for stage, own in enumerate(layout):
            link = 0.0 if shares is None or stage == num_stages - 1 else float(shares[stage])
            weight = float(weights[own].sum())
            each.append(slowness[stage] * weight + (0.0 if overlaps else link))
            each.extend([link] if overlaps and link else [])
            hosts.append(weight * hosts_s)
        behind = [0.0] if num_stages == 1 else [least_length(each[-1:], 1), 0.0]
        for index, (number, seconds, early_s) in enumerate(zip(numbers, pieces_s, before_s, strict=True)):
            if number > exact:
                path_s = max(each) * seconds
            else:
                path_s = least_length(each, int(number)) * seconds
                after = [least_length(each[1:], int(number)) * seconds, 0.0] if num_stages == 2 else behind
                issued_s = (max(number * own, own + later) for own, later in zip(hosts, after, strict=False))
                path_s = max(path_s, *(one - early_s for one in issued_s)) if hosts_s else path_s
            want_s[index] = min(want_s[index], path_s)
    least_s = bounds.least_s(pieces_s, numbers, before_s, shares)
    assert (least_s <= want_s * EXACT).all()
    # From three stages on, the least V of later stages come from several layouts.
    assert (least_s >= want_s * (0.95 if num_stages > 2 else 1 - 1e-9)).all()


PIECES = np.array([1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 256.0])


def made_of(base_s: float, token_s: float, pair_s: float) -> Callable[[Array, Array], Array]:
    """Seconds of pieces by length and start; for a given number of pieces, all cuts take equally long."""
    return lambda length, start: np.asarray(base_s + token_s * length + pair_s * length * (start + length / 2))


@given(rng=draws())
@examples(60)
def test_potentials_bound_all_pieces(rng: Draws) -> None:
    """For any number of pieces up to the number of tokens, and for intervals of numbers."""
    tokens = rng.choice([1, 2, 7, rng.randint(8, 3000)])
    grid, base_s = _Grid.of(tokens), rng.choice([0.0, 1.0, 100.0])
    token_s, pair_s = (rng.choice([0.0, 1.0]) if base_s else 1.0), rng.choice([0.0, 0.001, 0.1])
    seconds = made_of(base_s, token_s, pair_s)
    numbers = PIECES[tokens >= PIECES]
    potentials = grid.potentials(seconds(grid.lengths[:, None], grid.starts))
    least_s = potentials.least_s(numbers, numbers).max(axis=0)
    want_s = numbers * base_s + token_s * tokens + pair_s * tokens**2 / 2
    assert (least_s <= want_s * EXACT).all()
    assert (potentials.least_s(numbers, numbers + 5).max(axis=0) <= least_s * EXACT).all()


@pytest.mark.parametrize(
    ("gap", "tokens", "seconds"),
    [
        (0.016417, 7, (1.0, 1.0, 0.1)),
        (0.004316, 300, (100.0, 1.0, 0.0)),
        (0.029404, 1000, (0.0, 1.0, 0.001)),
        (0.123147, 1000, (100.0, 0.0, 0.1)),
        (0.027760, 4096, (100.0, 1.0, 0.001)),
        (0.037042, 4096, (1000.0, 1.0, 0.01)),
        (0.090126, 20000, (1.0, 1.0, 0.1)),
    ],
)
def test_potentials_are_close(gap: float, tokens: int, seconds: tuple[float, float, float]) -> None:
    """The mean gap over the numbers of pieces."""
    grid, numbers = _Grid.of(tokens), PIECES[tokens >= PIECES]
    potentials = grid.potentials(made_of(*seconds)(grid.lengths[:, None], grid.starts))
    want_s = numbers * seconds[0] + seconds[1] * tokens + seconds[2] * tokens**2 / 2
    assert 0 <= (want_s / potentials.least_s(numbers, numbers).max(axis=0) - 1).mean() <= gap


def case_of(slow_gpu: int | None = None, step_s: float = 0.0, **options: Any) -> Scenario:
    """A scenario for pipelines; slow_gpu: rank of a GPU that is 1.6 times slower; step_s: of the engine."""
    scenario, _ = kvrsim.make_scenario(**options)
    if slow_gpu is not None:
        slow = UnevenCluster.of(scenario.cluster, [SlowGpu(rank=slow_gpu, factor=1.6)], [])
        scenario = replace(scenario, cluster=slow)
    if step_s:
        scenario = scenario.with_host(replace(scenario.host, step_s=step_s, prepare_s=step_s))
    return for_strategy(scenario, SEARCHED)


@pytest.mark.parametrize(
    ("gap", "options"),
    [
        (0.00543, {"ctx": "1k", "gpus": 2} | H100),
        (0.01133, {"ctx": "1k", "gpus": 8} | H100),
        (0.03588, {"ctx": "64k", "gpus": 4} | H100),
        (0.03723, {"ctx": "64k", "gpus": 8} | H100),
        (0.00023, {"ctx": 7, "gpus": 3} | H100),
        (0.00029, {"ctx": "2k", "gpus": 1} | H100),
        (0.02654, {"ctx": "8k", "gpus": 3, "cached_prefix": "4k"} | H100),
        (0.03113, {"ctx": "4k", "gpus": 4, "link_bandwidth": 1e8} | H100),
        (0.02003, {"ctx": "4k", "gpus": 4, "link_latency": "1ms"} | H100),
        (0.03671, {"ctx": "4k", "gpus": 4, "slow_gpu": 1} | H100),
        (0.07879, {"ctx": "4k", "gpus": 4, "model": "llama-7b", "engine": "serving"}),
        (0.08885, {"ctx": "8k", "gpus": 4} | EAGER),
        (0.18412, {"ctx": "8k", "gpus": 4, "link_bandwidth": 1e8, "slow_gpu": 2} | EAGER),
        (0.02496, {"ctx": "8k", "gpus": 4, "link_bandwidth": 1e7} | EAGER),
        (0.05254, {"ctx": "8k", "gpus": 4} | H100 | {"model": "gemma-3-27b"}),
        (1.06964, {"ctx": "8k", "gpus": 4} | H100 | {"model": "deepseek-v3"}),
        (0.42755, {"ctx": "8k", "gpus": 6} | H100 | {"model": "qwen3-next-80b-a3b"}),
        (0.02644, {"ctx": "8k", "gpus": 4, "step_s": 5e-3} | H100),
        (0.06781, {"ctx": "8k", "gpus": 4, "step_s": 5e-3, "slow_gpu": 0} | EAGER),
        (0.46737, {"ctx": 300, "gpus": 4, "link_bandwidth": 1e8} | H100),
        (0.07176, {"ctx": 300, "gpus": 3, "link_bandwidth": 1e9, "slow_gpu": 0} | EAGER),
        (0.06168, {"ctx": "8k", "gpus": 4, "slow_gpu": 2} | H100 | {"model": "gemma-3-27b"}),
        (0.00555, {"ctx": 200, "gpus": 4, "engine": "vllm-2023"} | H100),
    ],
)
def test_the_bound_is_close(gap: float, options: dict[str, Any]) -> None:
    """The bound is near the search's result: one or many pieces, slow links, hosts, a slow GPU, several kinds."""
    scenario = case_of(**options)
    assert 1.0 <= search_pipeline(scenario, SEARCHED).ttft_s / pipeline_bound_s(scenario) <= 1.0 + gap


@pytest.mark.parametrize("profile", ["a100-eager", "a100-flash"])
def test_longer_pieces_have_a_higher_bound(profile: str) -> None:
    """With only one piece, the bound is the time of the best layout of the stages."""
    scenario, _ = kvrsim.make_scenario(ctx=1000, gpus=4, model="llama-7b", profile=profile, link_bandwidth=1e9)
    scenario = for_strategy(scenario, SEARCHED)
    bounds_s = [pipeline_bound_s(scenario, least) for least in (1, 10, 100, 300, 501, 1000, 2000)]
    assert bounds_s == sorted(bounds_s)
    assert bounds_s[0] < bounds_s[4] == bounds_s[5] == bounds_s[6]
    whole_s = min(
        Evaluator(scenario, replace(SEARCHED, stage_layers=layout)).one((1000,))
        for layout in ((8, 8, 8, 8), (7, 8, 8, 9), (1, 1, 1, 29))
    )
    assert 1.0 <= whole_s / bounds_s[4] <= 1.013


def test_long_pieces_of_eager_attention_are_not_faster_than_the_bound() -> None:
    """Masked scores make long pieces slow, so several pieces take less time than the whole prompt."""
    scenario, _ = kvrsim.make_scenario(ctx=54214, gpus=1, model="llama-7b", profile="a100-eager")
    model = replace(scenario.model, layers=scenario.model.layers[:1], num_hidden_layers=1)
    scenario = for_strategy(replace(scenario, model=model), SEARCHED)
    found = search_pipeline(scenario, SEARCHED)
    assert 1.0 <= found.ttft_s / pipeline_bound_s(scenario) <= 1.15


def test_the_bound_is_close_where_messages_hold_the_stages() -> None:
    """Each message holds both stages of its link while it is sent, a slow GPU too."""
    scenario, _ = kvrsim.make_scenario(ctx="8k", gpus=4, model="llama-7b", profile="a100-eager", link_bandwidth=1e7)
    slow = UnevenCluster.of(scenario.cluster, [SlowGpu(rank=1, factor=1.6)], [])
    scenario = for_strategy(replace(scenario, cluster=slow), SEARCHED)
    assert not scenario.sends_overlap
    assert 1.0 <= search_pipeline(scenario, SEARCHED).ttft_s / pipeline_bound_s(scenario) <= 1.03


def test_links_of_several_kinds_bound_a_pipeline() -> None:
    """With a slow network, the bound exceeds the time of the bytes and is within 5 % of the search's result."""
    scenario, _ = kvrsim.make_scenario(ctx="8k", model="llama-3-8b", cluster="h100-2x8-ndr400", gpus=16, engine="none")
    placed = for_strategy(scenario, SEARCHED)
    assert placed.cluster.network is not None
    slow = replace(placed.cluster, network=replace(placed.cluster.network, bandwidth_bytes_per_s=1e7))
    placed = replace(placed, cluster=slow)
    bound_s, sent_s = pipeline_bound_s(placed), 8192 * 4096 * 2 / 1e7
    assert sent_s < bound_s <= search_pipeline(placed, SEARCHED, stride=512).ttft_s <= 1.05 * bound_s


@pytest.mark.parametrize("slow", [{"step_s": 10.0, "prepare_s": 1e-3}, {"layer_s": 1.0}, {"latency_s": 10.0}])
def test_the_bound_is_reached_where_one_part_takes_all_the_time(slow: dict[str, float]) -> None:
    """The part is the engine's step, the launch of layers, or the latency of links."""
    scenario, _ = kvrsim.make_scenario(ctx="1k", gpus=4, model="llama-3-8b", cluster="h100-nvlink", engine="none")
    if "latency_s" in slow:
        scenario = replace(scenario, cluster=scenario.cluster.with_link(**slow))
    else:
        scenario = scenario.with_host(replace(scenario.host, **slow))
    placed = for_strategy(scenario, SEARCHED)
    assert 1.0 <= search_pipeline(placed, SEARCHED).ttft_s / pipeline_bound_s(placed) <= 1.005
