"""The bound of pipelines is proven: no pieces and no layers of the stages are faster."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvrsim
from kvrsim.compile import for_strategy
from kvrsim.hardware import SlowGpu, UnevenCluster
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from planner.search.minimise import Evaluator
from planner.search.pipeline import search_pipeline
from planner.search.pipeline_bound import _mix_s, _with_stage, pipeline_bound_s
from tests.building import Draws, any_placed, any_scenario, as_measured, draws, examples

SEARCHED = get_strategy("pp-s")
EXACT = 1 + 1e-9


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


def test_the_bound_is_close() -> None:
    """The bound is within 4.5 % of the search's result, for a long prompt on eight GPUs."""
    scenario, _ = kvrsim.make_scenario(ctx="64k", gpus=8, model="llama-3-8b", cluster="h100-nvlink")
    found = search_pipeline(scenario, SEARCHED)
    assert 1.0 <= found.ttft_s / pipeline_bound_s(scenario) <= 1.045


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
