"""Searched pipelines: close to the best, never slower than even pieces, multiples of the stride, not too short."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import kvrsim
from kvrsim.execution import Execution, place
from kvrsim.hardware import SlowGpu, SlowLink, UnevenCluster
from kvrsim.memory import memory_of
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import get_strategy
from planner.candidates import partition_of
from planner.search.minimise import Evaluator
from planner.search.pipeline import search_even_pieces, search_pipeline, with_step_time
from tests.building import executed

SEARCHED = get_strategy("pp-s")
STEPPING = "tensorrt-llm-0.5"  # a step of this engine costs 1.5 ms, with an uncertainty of more than a factor of two


def placed(**asked: object) -> Scenario:
    """A scenario prepared for the pipeline; eight H100 by default."""
    about = {"ctx": "32k", "gpus": 8, "model": "llama-3-8b", "cluster": "h100-nvlink"} | asked
    return place(kvrsim.make_scenario(**about)[0], SEARCHED).placed  # type: ignore[arg-type]


def with_layers(scenario: Scenario, count: int) -> Scenario:
    """The scenario with only the first `count` layers of the model."""
    return replace(
        scenario, model=replace(scenario.model, layers=scenario.model.layers[:count], num_hidden_layers=count)
    )


def best_of_all(scenario: Scenario, stride: int) -> float:
    """TTFT of the best pieces that are multiples of the stride, for all layers of the stages."""
    tokens, layers = scenario.request.new_tokens, len(scenario.share.layer_kind_index)
    cuts, best_s = list(range(stride, tokens, stride)), float("inf")
    for held in itertools.combinations(range(1, layers), scenario.cluster.num_gpus - 1):
        strategy = replace(SEARCHED, stage_layers=tuple(int(one) for one in np.diff([0, *held, layers])))
        for number in range(len(cuts) + 1):
            rows = np.array(list(itertools.combinations(cuts, number)), dtype=float).reshape(
                math.comb(len(cuts), number), number
            )
            ends = np.pad(rows, ((0, 0), (1, 1)), constant_values=((0, 0), (0, tokens)))
            best_s = min(best_s, float(Evaluator(executed(scenario, strategy)).ttft_s(np.diff(ends, axis=1)).min()))
    return best_s


@pytest.mark.parametrize("model", ["llama-3-8b", "mistral-7b", "deepseek-v3"])
@pytest.mark.parametrize(("gpus", "layers", "ctx", "engine"), [(2, 5, 8192, "none"), (3, 6, 65536, "serving")])
def test_within_two_percent_of_the_best(model: str, gpus: int, layers: int, ctx: int, engine: str) -> None:
    """The best is taken over all pieces of eighths of the context and all stages of a few layers."""
    scenario = with_layers(placed(model=model, gpus=gpus, ctx=ctx, engine=engine), layers)
    found = search_pipeline(executed(scenario, SEARCHED), stride=ctx // 8)
    assert found.ttft_s <= best_of_all(scenario, ctx // 8) * 1.02


@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3-70b"])
def test_no_slower_than_even_pieces(model: str) -> None:
    """Times are means over the uncertain seconds of a step."""
    scenario = with_step_time(executed(placed(model=model, ctx="128k"), SEARCHED), "mean").placed
    even = search_even_pieces(executed(scenario, get_strategy("pp"))).partition
    even_s = Evaluator(executed(scenario, get_strategy("pp"))).one(even.chunk_lens)
    assert search_pipeline(executed(scenario, SEARCHED)).ttft_s <= even_s


@pytest.mark.parametrize("model", ["qwen2.5-7b"])
@pytest.mark.parametrize("steps", [lambda execution: execution, lambda execution: with_step_time(execution, "mean")])
def test_eight_percent_faster_with_pieces_of_4k(model: str, steps: Callable[[Execution], Execution]) -> None:
    """The gain holds for 128k on eight GPUs, compared with the best number of even pieces of at least 4096 tokens."""
    scenario = steps(executed(placed(model=model, ctx="128k"), SEARCHED)).placed
    even = Evaluator(executed(scenario, get_strategy("pp")))
    even_s = min(even.one(Partition.even(131072, number).chunk_lens) for number in (4, 8, 12, 16, 20, 24, 28, 32))
    found = search_pipeline(executed(scenario, SEARCHED), least_piece=4096)
    assert min(found.partition.chunk_lens) >= 4096
    assert even_s / found.ttft_s >= 1.08


@pytest.mark.parametrize(("ctx", "stride", "least"), [(20000, 256, 1024), (20000, 1000, None), (131072, 64, 16384)])
def test_pieces_are_multiples_and_above_the_floor(ctx: int, stride: int, least: int | None) -> None:
    """The last piece has the rest and may be another number of tokens."""
    found = search_pipeline(executed(placed(ctx=ctx), SEARCHED), stride=stride, least_piece=least)
    pieces = found.partition.chunk_lens
    assert all(piece % stride == 0 for piece in pieces[:-1])
    assert min(pieces) >= (least or stride)


def test_groups_that_are_no_power_of_two_divide_the_pieces() -> None:
    scenario, _ = kvrsim.make_scenario(ctx="12k", gpus=6, model="gpt-j-6b", profile="roofline", cluster="h100-nvlink")
    with pytest.raises(kvrsim.InputError):
        search_pipeline(executed(scenario, SEARCHED), stride=0)
    hybrid = get_strategy("tp2+pp-s")
    found = search_pipeline(executed(place(scenario, hybrid).placed, hybrid))
    assert all(piece % 2 == 0 for piece in found.partition.chunk_lens)
    assert found.strategy.stage_layers is not None
    assert sum(found.strategy.stage_layers) == 28


def test_layers_of_a_stage_are_of_equal_time() -> None:
    """Balanced stages are not slower than equal numbers of layers, for a model with dense layers and experts."""
    scenario = placed(model="deepseek-v3", ctx="32k")
    found = search_pipeline(executed(scenario, SEARCHED))
    layers = found.strategy.stage_layers
    assert layers is not None
    assert sum(layers) == 61
    even = replace(SEARCHED, stage_layers=None)
    assert found.ttft_s <= Evaluator(executed(scenario, even)).one(found.partition.chunk_lens) * (1 + 1e-9)


def test_stages_suit_slow_gpus_and_slow_links() -> None:
    """A slow GPU gets fewer layers; with a slow link in addition, four other distributions are not faster."""
    even = with_layers(placed(model="llama-7b", gpus=3, ctx=2048), 12)
    slow = replace(even, cluster=UnevenCluster.of(even.cluster, [SlowGpu(rank=1, factor=1.9)], []))
    layers = search_pipeline(executed(slow, SEARCHED)).strategy.stage_layers
    assert layers is not None
    assert layers[1] < min(layers[0], layers[2])
    link = even.cluster.with_link(24.6e6, 1e-5)
    scenario = replace(
        slow, cluster=UnevenCluster.of(link, slow.cluster.slow_gpus, [SlowLink(first=0, second=1, factor=16)])
    )
    found = search_pipeline(executed(scenario, SEARCHED))
    same = [replace(SEARCHED, stage_layers=one) for one in ((4, 4, 4), (1, 1, 10), (10, 1, 1), (1, 10, 1))]
    others_s = [Evaluator(executed(scenario, one)).one(found.partition.chunk_lens) for one in same]
    assert found.ttft_s <= min(others_s)


def test_a_stage_holds_the_weights_of_its_layers() -> None:
    scenario = placed(gpus=2, ctx="8k")
    uneven = replace(SEARCHED, stage_layers=(24, 8))
    first, second = memory_of(executed(scenario, uneven), Partition.even(8192, 4))
    assert first.kv_cache == 3 * second.kv_cache


def test_the_plan_says_pieces_and_layers() -> None:
    """The JSON has pieces and layers of every pipeline."""
    about = {"ctx": "32k", "gpus": 8, "model": "llama-3-8b", "cluster": "h100-nvlink"}
    plan = kvrsim.plan(strategies=["pp", "pp-s", "kvr-e"], **about).to_dict()  # type: ignore[arg-type]
    rows = {row["strategy"]: row for row in plan["strategies"]}
    even, searched, chunks = rows["pp"], rows["pp-s"], rows["kvr-e"]
    assert even["layers"] == [4] * 8
    assert even["pieces"] == even["partition"]
    assert sum(searched["pieces"]) == 32768
    assert sum(searched["layers"]) == 32
    assert "pieces" not in chunks
    again = kvrsim.simulate(strategy="pp-s", partition=searched["pieces"], **about).to_dict()  # type: ignore[arg-type]
    assert again["pieces"] == searched["pieces"]
    assert again["ttft_s"] == pytest.approx(searched["ttft_s"], rel=1e-3)


def pipeline(**asked: object) -> tuple[kvrsim.Scenario, list[int]]:
    """A long prefill on eight H100 and its even pieces."""
    about = {"ctx": "128k", "gpus": 8, "model": "llama-3-70b", "cluster": "h100-nvlink"} | asked
    scenario, _ = kvrsim.make_scenario(**about)  # type: ignore[arg-type]
    strategy = get_strategy("pp")
    placed = place(scenario, strategy).placed
    return placed, list(partition_of(executed(placed, strategy)).chunk_lens)


def test_pieces_are_of_a_length_that_engines_run() -> None:
    """Pieces have between 2048 tokens, the smallest step of engines, and 16k, because a step has a cost."""
    scenario, pieces = pipeline(model="llama-3-8b", engine=STEPPING)
    assert scenario.host.step_s > 0
    assert 2048 <= pieces[0] <= 16384
    assert sum(pieces) == 131072


def test_pieces_are_the_best_for_a_dear_step() -> None:
    """At the upper end of the step's interval, no power of two of pieces is better by more than 0.3 %."""
    scenario, pieces = pipeline(engine=STEPPING)
    strategy = get_strategy("pp")
    dear = with_step_time(executed(scenario, strategy), "p90")
    assert dear.placed.host.step_s > 2 * scenario.host.step_s
    evaluator = Evaluator(dear)
    assert search_even_pieces(executed(scenario, strategy)).partition.chunk_lens == tuple(pieces)
    best_s = evaluator.ttft_s(np.array([pieces], dtype=float))[0]
    for number in (8, 16, 32, 64, 128, 256):
        other_s = evaluator.ttft_s(np.full((1, number), 131072 / number))[0]
        assert other_s >= best_s * (1 - 0.003)
