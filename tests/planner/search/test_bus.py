"""Chunks on a bus, and of ranks that exchange tokens: close to the best of random partitions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from kvrsim.builder import make_scenario
from kvrsim.executors.access import execution_of
from kvrsim.strategies import STRATEGIES, get_strategy
from planner.search.bus import plan_on_a_bus
from planner.search.minimise import Evaluator
from planner.search.search import search
from tests.building import Draws, any_scenario, draws, examples, executed
from tests.planner.search.test_search import CLOSE, random_partitions

KVR = STRATEGIES["kvr-s"]


@given(rng=draws())
@examples(3)
def test_ranks_that_exchange_tokens(rng: Draws) -> None:
    """The result is not worse than random partitions, than KVR's chunks for a dense model, or than its neighbours."""
    gpus, name = rng.choice((2, 4)), rng.choice(("kvr-s", "kvr-direct"))
    asked, strategy = {"gpus": gpus, "ctx": rng.randint(512, 16384), "cluster": "h100-nvlink"}, get_strategy(name)
    scenario = execution_of(make_scenario(model="qwen3-235b-a22b", **asked)[0], strategy).placed
    found, evaluator = search(executed(scenario, strategy)), Evaluator(executed(scenario, strategy))
    assert not evaluator.is_fast
    assert found.ttft_s <= evaluator.ttft_s(random_partitions(rng, scenario, 50)).min() * CLOSE
    dense = search(executed(make_scenario(model="llama-3-8b", **asked)[0], KVR)).partition.chunk_lens
    assert found.ttft_s <= evaluator.one(dense) * CLOSE


@pytest.mark.slow
@given(rng=draws())
@examples(8)
def test_on_a_bus(rng: Draws) -> None:
    """The result is not worse than random partitions or than single tokens on all but one GPU."""
    scenario = any_scenario(rng, num_gpus=(2, 4), topologies=("bus",), decades=(6, 10), layers=(1, 2))
    tokens, ranks = scenario.request.new_tokens, scenario.cluster.num_gpus
    found = search(executed(scenario, KVR))
    evaluator = Evaluator(executed(scenario, KVR))
    assert found.ttft_s <= evaluator.ttft_s(random_partitions(rng, scenario, 50)).min() * CLOSE
    last_alone = (1,) * (ranks - 1) + (tokens - ranks + 1,)
    assert found.ttft_s <= evaluator.one(last_alone) * CLOSE
    own = replace(scenario, cluster=replace(scenario.cluster, topology="switch"))
    plan = search(executed(own, KVR)).partition.chunk_lens
    assert found.ttft_s <= evaluator.one(plan) * CLOSE


@pytest.mark.parametrize("name", ["kvr-s", "kvr-b", "kvr-direct", "tp2+kvr-s"])
def test_the_plan_for_a_bus_is_near_the_best(name: str) -> None:
    """Its least TTFT is no TTFT of a partition, but close to the best; its partition is simulated once."""
    asked = {"gpus": 4, "ctx": 8192, "topology": "bus", "link_bandwidth": 20e9}
    strategy = get_strategy(name)
    scenario = execution_of(make_scenario(**asked)[0], strategy).placed
    least_s, best_s = plan_on_a_bus(executed(scenario, strategy))[1], search(executed(scenario, strategy)).ttft_s
    plan = search(executed(scenario, strategy), method="analytical")
    assert plan.report.evaluations == 1
    assert 0.75 * best_s <= least_s <= 1.02 * best_s
    assert best_s <= plan.ttft_s <= 1.2 * best_s


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "llama-3-8b"])
def test_query_blocks_that_no_rank_uses_need_no_search(model: str) -> None:
    """Causal kernels skip masked scores, so blocks gain nothing: kvr-b has the best partition of kvr-s."""
    scenario = make_scenario(model=model, cluster="h100-nvlink", gpus=4, ctx=4096, topology="bus")[0]
    chain, strategy = search(executed(scenario, KVR)), get_strategy("kvr-b")
    found = search(executed(scenario, strategy), warm_start=chain.partition)
    assert found.report.evaluations == 1
    assert (found.partition, found.ttft_s) == (chain.partition, pytest.approx(chain.ttft_s, rel=1e-12))
    eager = make_scenario(gpus=3, ctx=2048, topology="bus")[0]
    assert search(executed(eager, strategy), warm_start=search(executed(eager, KVR)).partition).report.evaluations > 1
