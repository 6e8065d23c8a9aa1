"""Laws of cached prefixes in other places, for random models, machines and partitions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

import kvrsim
from kvrsim.builder import make_scenario
from kvrsim.choices import PREFIX_PLACEMENTS, PrefixPlace
from kvrsim.compile import build_program, columns
from kvrsim.errors import InputError
from kvrsim.executors.access import execution_of
from kvrsim.executors.batch import run_batch
from kvrsim.kernels.prefix import PrefixPlacement
from kvrsim.memory import memory_of
from kvrsim.placement import PlacedScenario
from kvrsim.program import AllToAll, RingPass, loaded_bytes
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import STRATEGIES, Strategy, get_strategy
from kvrsim.strategies.layers import placement_refusal, supported_prefix_access
from planner.search.bound import lower_bound_s
from tests.building import Draws, any_partition, any_placed, any_scenario, draws, examples, executed

ELSEWHERE: tuple[PrefixPlace, ...] = PREFIX_PLACEMENTS[1:]
NAMES = tuple(name for name in STRATEGIES if name not in ("kvr-e", "kvr-p", "single", "pp-s"))


def ttft_s(scenario: Scenario, strategy: Strategy, cut: tuple[int, ...]) -> float:
    return float(run_batch(build_program(executed(scenario, strategy), columns(cut)), scenario.cluster)[-1, 0])


def placed_at(scenario: PlacedScenario, strategy: Strategy, rng: Draws, place: PrefixPlace) -> PlacedScenario | None:
    """The scenario with a prefix in this place and a random access to it, or None if the strategy refuses it."""
    rate = 10.0 ** rng.uniform(6, 13) if place in ("host", "remote") and rng.random() < 0.8 else None
    placement = PrefixPlacement(place=place, bytes_per_s=rate)
    prefix = 1 + rng.randrange(5000)
    request = replace(scenario.request, cached_prefix=prefix, context_len=scenario.request.new_tokens + prefix)
    if placement_refusal(strategy, placement):
        return None
    ways = supported_prefix_access(strategy, placement, scenario.cluster.num_gpus)
    return replace(scenario, request=request, prefix_placement=placement, prefix_access=rng.choice(ways))


@given(rng=draws())
@examples(60)
def test_a_prefix_is_no_sooner_there(rng: Draws) -> None:
    """A prefix that must be loaded takes at least the time of a local one."""
    strategy = STRATEGIES[rng.choice(NAMES)]
    plain, cut = any_placed(rng, strategy)
    scenario = placed_at(plain, strategy, rng, rng.choice(ELSEWHERE))
    if scenario is None:
        return
    if scenario.prefix_access == "whole":
        there = replace(scenario, prefix_placement=PrefixPlacement(), prefix_access=None)
        assert ttft_s(scenario, strategy, cut) >= ttft_s(there, strategy, cut) * (1 - 1e-9)


@given(rng=draws())
@examples(30)
def test_bounds_hold_wherever_the_prefix_lies(rng: Draws) -> None:
    """No partition of the chain is faster than the proven bound."""
    strategy = STRATEGIES["kvr-s"]
    scenario = placed_at(any_scenario(rng), strategy, rng, rng.choice(ELSEWHERE))
    assert scenario is not None
    if scenario.chain_is_proven:
        cut = any_partition(rng, scenario.request.new_tokens, scenario.cluster.num_gpus)
        found_s = ttft_s(scenario, strategy, cut)
        assert lower_bound_s(executed(scenario, strategy), 1.5 * found_s) <= found_s * (1 + 1e-9)


@given(rng=draws())
@examples(20)
def test_limits(rng: Draws) -> None:
    """Without a cached prefix, on one GPU, or with infinitely fast loading, the place of the prefix has no effect."""
    strategy = STRATEGIES[rng.choice(NAMES)]
    plain, cut = any_placed(rng, strategy)
    base = replace(plain, group=None, cluster=plain.cluster)
    for place in ELSEWHERE:
        none = replace(plain.request, cached_prefix=0, context_len=plain.request.new_tokens)
        nothing = replace(plain, request=none)
        moved = replace(nothing, prefix_placement=PrefixPlacement(place=place))
        assert ttft_s(moved, strategy, cut) == ttft_s(nothing, strategy, cut)
    alone = base.on_gpus(1)
    whole = (alone.request.new_tokens,)
    moved = replace(alone, prefix_placement=PrefixPlacement(place="sharded"))
    assert ttft_s(moved, STRATEGIES["single"], whole) == ttft_s(alone, STRATEGIES["single"], whole)
    for place in ("host", "remote"):
        cluster = replace(
            plain.cluster, network=plain.cluster.network and replace(plain.cluster.network, latency_s=0.0)
        )
        fast = replace(plain, prefix_placement=PrefixPlacement(place=place, bytes_per_s=1e18), cluster=cluster)
        all_there = ttft_s(replace(plain, cluster=cluster), strategy, cut)
        latency_s = 1e-4 + 1e-9 * all_there
        result = ttft_s(replace(fast, prefix_access="whole"), strategy, cut)
        assert all_there * (1 - 1e-9) <= result <= all_there + latency_s


@given(rng=draws())
@examples(20)
def test_bytes_are_conserved(rng: Draws) -> None:
    """Ranks load exactly the part of the prefix that they need and do not have."""
    strategy = STRATEGIES["kvr-s"]
    scenario = placed_at(any_scenario(rng), strategy, rng, rng.choice(ELSEWHERE))
    assert scenario is not None
    ranks, way = scenario.cluster.num_gpus, scenario.prefix_access_plan
    layers = scenario.layer_costs()
    prefix = sum(float(layers[kind].prefix_bytes[0]) for kind in scenario.share.layer_kind_index)
    cut = any_partition(rng, scenario.request.new_tokens, ranks)
    loaded = sum(loaded_bytes(build_program(executed(scenario, strategy), columns(cut)), rank) for rank in range(ranks))
    wanted = {
        ("all", "pass-kv"): (ranks - 1) * prefix,
        ("loaded", "whole"): ranks * prefix,
        ("loaded", "pass-kv"): ranks * prefix,  # from the source, or from a rank that loaded it
    }
    source = "all" if way.source is None else "loaded"
    assert loaded == pytest.approx(wanted[source, way.access], rel=1e-9)


@pytest.mark.parametrize("name", ["tsp", "kvr-s", "ring", "zigzag"])
def test_a_sharded_prefix_needs_less_memory(name: str) -> None:
    """Each rank keeps its share of the prefix; gathered parts are freed after each layer."""
    about = {"model": "llama-3-8b", "cluster": "h100-nvlink", "ctx": "132k", "cached_prefix": "128k"}
    strategy, cut = STRATEGIES[name], Partition.even(4096, 8)
    peaks = {}
    for place in ("all", "sharded"):
        scenario = execution_of(make_scenario(**about, prefix_placement=place)[0], strategy).placed
        for access in supported_prefix_access(strategy, scenario.prefix_placement, 8):
            rank = memory_of(executed(replace(scenario, prefix_access=access), strategy), cut)[0]
            peaks[place, access] = rank.kv_cache
            assert rank.total < memory_of(execution_of(make_scenario(**about)[0], strategy), cut)[0].total + 1
    whole = peaks["all", "whole"]
    assert all(0.12 * whole < peaks[key] < 0.17 * whole for key in peaks if key[0] != "all"), peaks


@pytest.mark.parametrize("name", ["striped", "zigzag-ring", "tp2+zigzag-ring"])
def test_queries_pass_where_few_tokens_are_new(name: str) -> None:
    """Over a slow network the access with fewer bytes wins; its ring and its all-to-all send exactly these bytes."""
    strategy = get_strategy(name)
    about = {"model": "llama-3.1-70b", "cluster": "h100-nvlink", "gpus": 8, "link_bandwidth": "1GB/s", "ctx": "128k"}
    about |= {"prefix_placement": "sharded", "engine": "none"}
    ways = {}
    for cached in ("99%", "20%"):
        execution = execution_of(make_scenario(**about, cached_prefix=cached)[0], strategy)
        ways[cached] = execution.placed.prefix_access
        ranks = execution.cluster.num_gpus
        chunk = execution.request.new_tokens // ranks
        passing = execution.on(replace(execution.placed, prefix_access="pass-q"))
        program = build_program(passing, columns((chunk,) * ranks))
        heads = 64 * ranks // 8  # query heads of a rank's GPU, each of 128 elements of 2 bytes
        ring = (ranks - 1) * chunk * heads * 128 * 2
        results = (ranks - 1) * chunk * heads * (128 * 2 + 4)
        sent = sum(float(op.nbytes.sum()) for op in program.layers[0][0] if isinstance(op, AllToAll | RingPass))
        assert sent == pytest.approx(ring + results)
    assert ways == {"99%": "pass-q", "20%": "pass-kv"}


@pytest.mark.parametrize("text", ["", "disk", "layers", "sharded:10GB/s", "host:", "host:10", "remote:-1GB/s", "all:"])
def test_bad_placements(text: str) -> None:
    with pytest.raises(InputError, match="prefix_placement"):
        make_scenario(ctx="8k", cached_prefix="4k", prefix_placement=text)


def test_strategies_say_where_a_prefix_must_lie() -> None:
    scenario, _ = make_scenario(ctx="8k", gpus=4, cached_prefix="4k", prefix_placement="sharded")
    for name in ("tp", "pp", "tp2+pp"):
        with pytest.raises(InputError, match="a prefix"):
            execution_of(scenario, get_strategy(name))


@pytest.mark.parametrize(
    ("name", "place", "told"),
    [("tp2+kvr-s", "host:1000GB/s", "whole"), ("kvr-s", "sharded", "pass-kv"), ("tsp", "all", None)],
)
def test_an_answer_says_how_ranks_attend(name: str, place: str, told: str | None) -> None:
    """The question contains the place of the prefix, and the answer contains the ranks' access to it."""
    about = {"gpus": 4, "ctx": 5000, "cached_prefix": 4096, "prefix_placement": place}
    for answer in (kvrsim.simulate(strategy=name, **about), kvrsim.plan(strategies=[name], **about)):
        content = answer.to_dict()
        assert content["question"]["prefix_placement"] == place
        rows = content.get("strategies", [content])
        assert [row.get("prefix_access") for row in rows] == [told]
