"""The search is within 0.1 % of the best partition on any machine, and an error names its parameter."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given

import kvrsim
from kvrsim.builder import make_scenario
from kvrsim.choices import METHODS
from kvrsim.errors import InputError
from kvrsim.program import Array
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES
from planner.search.minimise import Evaluator
from planner.search.search import default_stride, search
from tests.building import Draws, any_partition, any_scenario, draws, examples, executed, scenario_in, scenarios

KVR = STRATEGIES["kvr-s"]
CLOSE = 1.001  # within 0.1 %


def all_partitions(tokens: int, ranks: int, stride: int) -> Array:
    """All partitions whose boundaries are multiples of the stride."""
    places = range(stride, tokens, stride)
    rows = [(0, *row, tokens) for row in itertools.combinations(places, ranks - 1)]
    return np.diff(np.array(rows, dtype=float), axis=1)


def neighbours(chunks: tuple[int, ...], stride: int) -> Array:
    """Partitions in which one boundary or several neighbouring ones move by a stride."""
    rows = []
    for first, last in itertools.combinations(range(len(chunks)), 2):
        for step in (-stride, stride):
            row = list(chunks)
            row[first] += step
            row[last] -= step
            if min(row) >= 1:
                rows.append(row)
    return np.array(rows or [chunks], dtype=float)


def random_partitions(rng: Draws, scenario: Scenario, count: int) -> Array:
    tokens, ranks = scenario.request.new_tokens, scenario.cluster.num_gpus
    return np.array([any_partition(rng, tokens, ranks) for _ in range(count)], dtype=float)


@given(rng=draws())
@examples(60)
def test_as_good_as_trying_all(rng: Draws) -> None:
    scenario = any_scenario(rng, num_gpus=(2, 4), tokens=(20, 4000))
    tokens, ranks = scenario.request.new_tokens, scenario.cluster.num_gpus
    stride = max(1, tokens // {2: 1000, 3: 120, 4: 40}[ranks])
    found = search(executed(scenario, KVR), stride=stride)
    assert sum(found.partition.chunk_lens) == tokens
    evaluator = Evaluator(executed(scenario, KVR))
    assert evaluator.one(found.partition.chunk_lens) == pytest.approx(found.ttft_s, rel=1e-12)
    best_s = evaluator.ttft_s(all_partitions(tokens, ranks, stride)).min()
    assert found.ttft_s <= best_s * CLOSE


@pytest.mark.slow
@given(rng=draws())
@examples(8)
def test_nothing_near_or_random_is_better(rng: Draws) -> None:
    """No random or neighbouring partition is better than the result with the default stride, for up to eight ranks."""
    scenario = any_scenario(rng, num_gpus=(2, 8))
    found = search(executed(scenario, KVR))
    stride = default_stride(scenario.request.new_tokens, scenario.cluster.num_gpus)
    evaluator = Evaluator(executed(scenario, KVR))
    assert found.ttft_s <= evaluator.ttft_s(random_partitions(rng, scenario, 300)).min() * CLOSE
    assert found.ttft_s <= evaluator.ttft_s(neighbours(found.partition.chunk_lens, stride)).min() * CLOSE


@given(scenario=scenarios(num_gpus=(2, 4), tokens=(2100, 8000), decades=(6, 10)))
@example(scenario=scenario_in(Path(__file__).parent / "cases" / "slow-links-one-token"))
@examples(8)
def test_the_default_stride_is_fine_enough(scenario: Scenario) -> None:
    """The default stride also suits very slow links, where all but one rank should have a single token."""
    assert search(executed(scenario, KVR)).ttft_s <= search(executed(scenario, KVR), stride=1).ttft_s * CLOSE


@pytest.mark.parametrize("method", METHODS)
@given(scenario=scenarios(num_gpus=(1, 5)))
@examples(10)
def test_every_method_answers_with_a_partition(method: str, scenario: Scenario) -> None:
    found = search(executed(scenario, KVR), method=method)
    assert sum(found.partition.chunk_lens) == scenario.request.new_tokens
    assert len(found.partition.chunk_lens) == scenario.cluster.num_gpus
    assert found.report.evaluations >= 1
    again = search(executed(scenario, KVR), method=method)
    assert (again.partition, again.ttft_s) == (found.partition, found.ttft_s)


@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("method", METHODS)
def test_a_token_a_rank(ranks: int, method: str) -> None:
    scenario, _ = kvrsim.make_scenario(ctx=ranks, gpus=ranks)
    assert search(executed(scenario, KVR), method=method).partition.chunk_lens == (1,) * ranks


@pytest.mark.parametrize(
    ("about", "gpus", "asked", "parameter"),
    [
        ({}, 4, {"stride": 0}, "stride"),
        ({}, 4, {"stride": 34}, "stride"),
        ({}, 4, {"method": "exhaustive"}, "method"),
        ({}, 101, {}, "gpus"),
        ({"cached_prefix": 98}, 3, {}, "gpus"),
    ],
)
def test_mistakes_name_the_argument(about: Any, gpus: int, asked: Any, parameter: str) -> None:
    scenario, _ = kvrsim.make_scenario(ctx=100, gpus=2, **about)
    assert sum(search(executed(scenario, KVR)).partition.chunk_lens) == scenario.request.new_tokens
    with pytest.raises(InputError) as caught:
        search(executed(scenario.on_gpus(gpus), KVR), **asked)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("name", ["kvr-b", "kvr-direct"])
def test_a_search_near_the_chain_begins_from_its_best_partition(name: str) -> None:
    """The result is the same with a given and with a searched start, and not slower than the chain's chunks."""
    scenario, _ = make_scenario(gpus=4, ctx=4096)
    chain, strategy = search(executed(scenario, STRATEGIES["kvr-s"])), STRATEGIES[name]
    found, given = (
        search(executed(scenario, strategy)),
        search(executed(scenario, strategy), warm_start=chain.partition),
    )
    assert (found.partition, found.ttft_s) == (given.partition, given.ttft_s)
    assert found.ttft_s <= Evaluator(executed(scenario, strategy)).one(chain.partition.chunk_lens)
