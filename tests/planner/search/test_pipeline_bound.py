"""The bound of pipelines is proven: no pieces and no layers of the stages are faster."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
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
from planner.search.pipeline_bound import _Layouts, _mix_s, _Pieces, _with_stage, pipeline_bound_s
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
    tokens, kinds = scenario.request.new_tokens, len(scenario.share.layer_kind_index)
    stride = rng.choice([1, 16, 64])
    found = search_pipeline(scenario, SEARCHED, stride=stride)
    longer = rng.choice([1.001, 1.05, 1.5, 4.0])  # the bound never exceeds the TTFT that it is given
    bound_s = pipeline_bound_s(scenario, longer * found.ttft_s, stride=stride, least_piece=stride)
    assert found.ttft_s * EXACT >= bound_s
    for attempt in range(6):
        strategy = replace(SEARCHED, stage_layers=any_layers(rng, kinds, scenario.cluster.num_gpus))
        number = min(tokens, rng.choice([1, 2, 3, 5, 8, 13, 40]))
        ratio = rng.choice([1.0, 1.0, 0.7, 0.9, 1.2])
        shares = np.array([ratio**index * (1 if rng.random() < 0.8 else rng.random()) for index in range(number)])
        inner = np.round(np.cumsum(shares)[:-1] / shares.sum() * (tokens - number)).astype(int) + np.arange(1, number)
        pieces = tuple(int(piece) for piece in np.diff([0, *inner, tokens]))
        ttft_s = Evaluator(scenario, strategy).one(pieces) * EXACT
        if attempt < 3:  # the bounds for pieces of at least this length, and with these ends
            for step in {1, math.gcd(tokens, *np.cumsum(pieces)[:-1].tolist())}:
                bound_s = pipeline_bound_s(scenario, longer * ttft_s, stride=step, least_piece=min(pieces))
                assert ttft_s >= bound_s, (pieces, strategy.stage_layers, step, longer)


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
    numbers = len(pieces)
    widths = [[1] * numbers, [1] * (numbers % 2) + [2] * (numbers // 2), [numbers]]
    for own in widths:
        assert longest[-1, -1] * EXACT >= least_length(stages, own) * sum(pieces)
    assert least_length([1.0] * len(stages), widths[0]) == pytest.approx((len(stages) + numbers - 1) / numbers)


def least_length(stages: list[float], widths: list[int]) -> float:
    """V of the module's docstring, for stages of this work; widths: of the intervals of the number of pieces."""
    lengths = np.full((len(widths), 1), 1e-30)
    for own in reversed(stages):
        lengths = _with_stage(np.array([own]), lengths, np.array(widths))
    return float(lengths[-1, 0])


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


def layouts(num_layers: int, num_stages: int) -> list[list[int]]:
    """Number of layers of each stage, in all layouts."""
    cuts = combinations(range(1, num_layers), num_stages - 1)
    return [[after - first for first, after in pairwise((0, *cut, num_layers))] for cut in cuts]


@given(rng=draws(), overlaps=st.booleans())
@examples(100)
def test_the_least_of_all_layouts(rng: Draws, overlaps: bool) -> None:
    """The longest path is at least V, and V is the least over all layouts, with links and slow GPUs."""
    num_layers, num_stages, number = rng.randint(2, 6), rng.randint(1, 4), rng.randint(1, 6)
    num_stages = min(num_stages, num_layers)
    slow = [rng.choice([1.0, 1.6]) for _ in range(num_stages)]
    scenario = with_layers(case_of(ctx=64, gpus=num_stages, slow=slow, **(H100 if overlaps else EAGER)), num_layers)
    links = np.array([rng.uniform(0.1, 1.0) for _ in range(num_stages - 1)])
    message = rng.uniform(0.0, 2.0)  # time of a message with a link of 1; a layer takes 1
    parts = np.array([1.0, message]) / (num_layers + 2 * message)
    bounds = _Layouts(scenario, np.zeros(1), parts[:, None], np.array([num_layers, 2.0]), links)
    numbers, pieces = np.arange(1.0, number + 1), np.array([rng.uniform(0.1, 1.0) for _ in range(number)])
    pieces /= pieces.sum()
    least = bounds.least_s(np.ones(number), numbers, numbers, np.zeros(number), 1e9)[-1]
    sent = np.append(links, 0.0) * parts[1]
    lengths = []
    for layout in layouts(num_layers, num_stages):
        stages = parts[0] * np.array(slow) * layout
        lengths.append(longest_path(stages, sent, pieces, overlaps))
        assert lengths[-1] * EXACT >= least
    most = 1.2 * min(lengths)
    pruned = bounds.least_s(np.ones(number), numbers, numbers, np.zeros(number), most)[-1]
    assert pruned >= least * (1 - 1e-9)
    assert min(lengths) * EXACT >= min(pruned, most)
    if number == 1:
        assert least == pytest.approx(min(lengths))


def longest_path(stages: Array, sent: Array, pieces: Array, overlaps: bool) -> float:
    """The longest path; each message is another stage, or occupies both stages of its link at the same time."""
    free, there = np.zeros(2 * len(stages) + 2), 0.0
    for piece in pieces:
        there = 0.0
        for stage, seconds in enumerate(stages):
            there = free[2 * stage] = max(there, free[2 * stage]) + seconds * piece
            after = 2 * stage + (1 if overlaps else 2)  # the link, or the next stage
            if stage < len(stages) - 1:
                there = free[after] = max(there, free[after]) + sent[stage] * piece
                free[2 * stage] = free[2 * stage] if overlaps else there
    return float(there)


@given(rng=draws())
@examples(100)
def test_shares_hold_for_all_pieces(rng: Draws) -> None:
    """Whatever the times of the parts of a piece are; with two parts, some piece has the least share."""
    kinds, cells = rng.randint(1, 3), rng.randint(1, 5)
    scenario = with_layers(case_of(ctx=64, gpus=1, **H100), 1)
    times = np.array([[rng.uniform(0.1, 1.0) for _ in range(cells)] for _ in range(kinds + 1)])
    weights = np.array([float(rng.randint(1, 4)) for _ in range(kinds + 1)])
    bounds = _Layouts(scenario, np.zeros(kinds), times / (weights @ times), weights, np.zeros(0))
    numbers = np.array([[float(rng.randint(0, 5))] for _ in range(kinds + 1)])
    shares = (numbers * times).sum(axis=0) / (weights @ times)
    assert bounds.share(numbers)[0] <= shares.min() + 1e-9
    assert bounds.share(weights[:, None])[0] == pytest.approx(1.0)
    if kinds == 1:
        assert bounds.share(numbers)[0] == pytest.approx(shares.min())


@given(rng=draws(), stride=st.sampled_from([1, 16, 64]))
@examples(60)
def test_sums_bound_all_pieces(rng: Draws, stride: int) -> None:
    """For some lengths of pieces, with few and many places where pieces may end, and pieces of all lengths or some."""
    tokens = rng.choice([1, 7, 65, rng.randint(66, 3000), rng.randint(20_000, 30_000)])
    base_s, token_s, pair_s = rng.choice([0.0, 1.0, 100.0]), 1.0, rng.choice([0.0, 0.001, 0.1])
    number = min(tokens // stride, rng.choice([1, 2, 3, 8, 30]))
    if not number:
        return
    ends = sorted(rng.sample(range(1, tokens // stride), number - 1)) if number > 1 else []
    lengths = np.diff([0, *(stride * np.array(ends)), tokens]).astype(float)
    starts = np.cumsum(lengths) - lengths
    pieces = _Pieces.of(tokens, stride, rng.choice([1, int(lengths.min())]))
    assert pieces.longest.max() >= lengths.max()
    least_s = base_s + token_s * pieces.shortest + pair_s * pieces.shortest * stride * pieces.columns[pieces.column]
    want_s = (base_s + token_s * lengths + pair_s * lengths * starts).sum()
    sums, count = pieces.sums(least_s), np.array([float(number)])
    assert sums.least_s(count, count)[0] <= want_s * EXACT
    assert sums.least_s(count, count + 5)[0] <= sums.least_s(count, count)[0] * EXACT
    if number == 1 and pieces.is_exact:
        usable = pieces.where(pieces.shortest == tokens)
        assert usable.sums(least_s[pieces.shortest == tokens]).least_s(count, count)[0] == pytest.approx(want_s)
    assert pieces.least_from(pieces.shortest, np.array([1.0]))[0] <= lengths.min()


def with_layers(scenario: Scenario, count: int) -> Scenario:
    """The scenario with the first layers of its model."""
    return replace(
        scenario, model=replace(scenario.model, layers=scenario.model.layers[:count], num_hidden_layers=count)
    )


def case_of(slow: Sequence[float] = (), slow_gpu: int | None = None, step_s: float = 0.0, **options: Any) -> Scenario:
    """A scenario for pipelines; slow: factor of each GPU; slow_gpu: a GPU of factor 1.6; step_s: of the engine."""
    scenario, _ = kvrsim.make_scenario(**options)
    factors = dict(enumerate(slow)) if slow_gpu is None else {slow_gpu: 1.6}
    gpus = [SlowGpu(rank=rank, factor=factor) for rank, factor in factors.items() if factor > 1]
    if gpus:
        scenario = replace(scenario, cluster=UnevenCluster.of(scenario.cluster, gpus, []))
    if step_s:
        scenario = scenario.with_host(replace(scenario.host, step_s=step_s, prepare_s=step_s))
    return for_strategy(scenario, SEARCHED)


@pytest.mark.parametrize(
    ("gap", "options"),
    [
        (0.00439, {"ctx": "1k", "gpus": 2} | H100),
        (0.00943, {"ctx": "1k", "gpus": 8} | H100),
        (0.03724, {"ctx": "64k", "gpus": 4} | H100),
        (0.03434, {"ctx": "64k", "gpus": 8} | H100),
        (0.00023, {"ctx": 7, "gpus": 3} | H100),
        (0.00029, {"ctx": "2k", "gpus": 1} | H100),
        (0.01828, {"ctx": "8k", "gpus": 3, "cached_prefix": "4k"} | H100),
        (0.00136, {"ctx": "4k", "gpus": 4, "link_bandwidth": 1e8} | H100),
        (0.01625, {"ctx": "4k", "gpus": 4, "link_latency": "1ms"} | H100),
        (0.03262, {"ctx": "4k", "gpus": 4, "slow_gpu": 1} | H100),
        (0.05000, {"ctx": "4k", "gpus": 4, "model": "llama-7b", "engine": "serving"}),
        (0.05677, {"ctx": "8k", "gpus": 4} | EAGER),
        (0.18187, {"ctx": "8k", "gpus": 4, "link_bandwidth": 1e8, "slow_gpu": 2} | EAGER),
        (0.02483, {"ctx": "8k", "gpus": 4, "link_bandwidth": 1e7} | EAGER),
        (0.09353, {"ctx": "8k", "gpus": 2, "link_bandwidth": 1e8, "slow_gpu": 0} | EAGER),
        (0.24987, {"ctx": "4k", "gpus": 3, "link_bandwidth": 3e8, "slow_gpu": 0} | EAGER),
        (0.02271, {"ctx": "8k", "gpus": 4} | H100 | {"model": "gemma-3-27b"}),
        (0.03513, {"ctx": "8k", "gpus": 4} | H100 | {"model": "deepseek-v3"}),
        (0.03624, {"ctx": "8k", "gpus": 6} | H100 | {"model": "qwen3-next-80b-a3b"}),
        (0.01281, {"ctx": "8k", "gpus": 4, "step_s": 5e-3} | H100),
        (0.03716, {"ctx": "8k", "gpus": 4, "step_s": 5e-3, "slow_gpu": 0} | EAGER),
        (0.15144, {"ctx": 300, "gpus": 4, "link_bandwidth": 1e8} | H100),
        (0.06804, {"ctx": 300, "gpus": 3, "link_bandwidth": 1e9, "slow_gpu": 0} | EAGER),
        (0.03053, {"ctx": "8k", "gpus": 4, "slow_gpu": 2} | H100 | {"model": "gemma-3-27b"}),
        (0.00506, {"ctx": 200, "gpus": 4, "engine": "vllm-2023"} | H100),
    ],
)
def test_the_bound_is_close(gap: float, options: dict[str, Any]) -> None:
    """The bound is near the search's result: one or many pieces, slow links, hosts, a slow GPU, several kinds."""
    scenario = case_of(**options)
    best_s = search_pipeline(scenario, SEARCHED).ttft_s
    assert 1.0 <= best_s / pipeline_bound_s(scenario, best_s) <= 1.0 + gap


@pytest.mark.parametrize("profile", ["a100-eager", "a100-flash"])
def test_longer_pieces_have_a_higher_bound(profile: str) -> None:
    """With only one piece, the bound is the time of the best layout of the stages."""
    scenario = case_of(ctx=1000, gpus=4, model="llama-7b", profile=profile, link_bandwidth=1e9)
    bounds_s = [
        pipeline_bound_s(scenario, 9.0, stride=1, least_piece=least) for least in (1, 100, 300, 501, 1000, 2000)
    ]
    assert all(longer >= one * (1 - 1e-9) for one, longer in pairwise(bounds_s))
    assert bounds_s[0] < bounds_s[3] == pytest.approx(bounds_s[4]) == pytest.approx(bounds_s[5])
    whole_s = min(
        Evaluator(scenario, replace(SEARCHED, stage_layers=layout)).one((1000,))
        for layout in ((8, 8, 8, 8), (7, 8, 8, 9), (1, 1, 1, 29))
    )
    assert 1.0 <= whole_s / bounds_s[3] <= 1.014
    assert pipeline_bound_s(scenario, 0.9 * bounds_s[0]) == 0.9 * bounds_s[0]


def test_long_pieces_of_eager_attention_are_not_faster_than_the_bound() -> None:
    """Masked scores make long pieces slow, so several pieces take less time than the whole prompt."""
    scenario, _ = kvrsim.make_scenario(ctx=54214, gpus=1, model="llama-7b", profile="a100-eager")
    model = replace(scenario.model, layers=scenario.model.layers[:1], num_hidden_layers=1)
    scenario = for_strategy(replace(scenario, model=model), SEARCHED)
    found = search_pipeline(scenario, SEARCHED)
    assert 1.0 <= found.ttft_s / pipeline_bound_s(scenario, found.ttft_s) <= 1.15


def test_the_bound_is_close_where_messages_hold_the_stages() -> None:
    """Each message holds both stages of its link while it is sent, a slow GPU too."""
    scenario, _ = kvrsim.make_scenario(ctx="8k", gpus=4, model="llama-7b", profile="a100-eager", link_bandwidth=1e7)
    slow = UnevenCluster.of(scenario.cluster, [SlowGpu(rank=1, factor=1.6)], [])
    scenario = for_strategy(replace(scenario, cluster=slow), SEARCHED)
    assert not scenario.sends_overlap
    best_s = search_pipeline(scenario, SEARCHED).ttft_s
    assert 1.0 <= best_s / pipeline_bound_s(scenario, best_s) <= 1.03


def test_links_of_several_kinds_bound_a_pipeline() -> None:
    """With a slow network, the bound exceeds the time of the bytes and is within 5 % of the search's result."""
    scenario, _ = kvrsim.make_scenario(ctx="8k", model="llama-3-8b", cluster="h100-2x8-ndr400", gpus=16, engine="none")
    placed = for_strategy(scenario, SEARCHED)
    assert placed.cluster.network is not None
    slow = replace(placed.cluster, network=replace(placed.cluster.network, bandwidth_bytes_per_s=1e7))
    placed = replace(placed, cluster=slow)
    best_s, sent_s = search_pipeline(placed, SEARCHED, stride=512).ttft_s, 8192 * 4096 * 2 / 1e7
    assert sent_s < pipeline_bound_s(placed, best_s) <= best_s <= 1.05 * pipeline_bound_s(placed, best_s)


@pytest.mark.parametrize("slow", [{"step_s": 10.0, "prepare_s": 1e-3}, {"layer_s": 1.0}, {"latency_s": 10.0}])
def test_the_bound_is_reached_where_one_part_takes_all_the_time(slow: dict[str, float]) -> None:
    """The part is the engine's step, the launch of layers, or the latency of links."""
    scenario, _ = kvrsim.make_scenario(ctx="1k", gpus=4, model="llama-3-8b", cluster="h100-nvlink", engine="none")
    if "latency_s" in slow:
        scenario = replace(scenario, cluster=scenario.cluster.with_link(**slow))
    else:
        scenario = scenario.with_host(replace(scenario.host, **slow))
    placed = for_strategy(scenario, SEARCHED)
    best_s = search_pipeline(placed, SEARCHED).ttft_s
    assert 1.0 <= best_s / pipeline_bound_s(placed, best_s) <= 1.005
