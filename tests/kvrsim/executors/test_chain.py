"""The recurrence of chains gives the TTFT of the program, with any hosts, links, layers and ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvrsim.builder import make_scenario
from kvrsim.compile import build_program, columns
from kvrsim.executors.batch import run_batch
from kvrsim.executors.chain.program import Chain
from kvrsim.executors.chain.walk import chain_finish_s
from kvrsim.executors.run import finish_s, ttft_s
from kvrsim.hardware import SlowGpu, SlowLink, UnevenCluster
from kvrsim.program import Array, Flags
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES, Strategy, get_strategy
from tests.building import Draws, any_partition, any_placed, draws, examples

SAME = 1e-12


def by_program(scenario: Scenario, strategy: Strategy, chunks: Array, layers: int) -> Array:
    program = build_program(scenario, strategy, columns(chunks))
    return run_batch(replace(program, layer_kind_index=(0,) * layers), scenario.cluster)


def by_recurrence(scenario: Scenario, strategy: Strategy, chunks: Array, layers: int) -> tuple[Array, Flags]:
    """TTFT, which is the same if all ranks' times are asked for."""
    program = Chain(scenario, strategy, scenario.cluster).program(np.ascontiguousarray(chunks.T))
    program = replace(program, num_layers=layers)
    (last_s, known), (all_s, _) = (chain_finish_s(program, whole=whole) for whole in (False, True))
    assert last_s[-1] == pytest.approx(all_s[-1], rel=SAME, abs=0)
    return all_s, known


def shares_of(seed: int, ranks: int, tokens: int, evenness: float) -> Array:
    shares = np.random.default_rng(seed).dirichlet(np.full(ranks, evenness), size=12)
    return np.asarray(1.0 + shares * (tokens - ranks))


@pytest.mark.parametrize("name", ["kvr-s", "kvr-b", "tp2+kvr-s"])
@given(rng=draws(), layers=st.integers(1, 40))
@examples(25)
def test_as_the_program(name: str, rng: Draws, layers: int) -> None:
    strategy = get_strategy(name)
    placed, cut = any_placed(rng, strategy)
    assume(Chain.suits(placed, strategy, placed.cluster))
    cuts = [cut, *(any_partition(rng, sum(cut), len(cut)) for _ in range(3))]
    chunks = np.array(cuts, dtype=float)
    found_s, known = by_recurrence(placed, strategy, chunks, layers)
    assert found_s[:, known] == pytest.approx(by_program(placed, strategy, chunks, layers)[:, known], rel=SAME, abs=0)
    whole_s = by_program(placed, strategy, chunks, placed.share.num_hidden_layers)
    assert pytest.approx(whole_s, rel=SAME, abs=0) == finish_s(placed, strategy, chunks).T
    assert (found_s[-1] <= by_program(placed, strategy, chunks, layers)[-1] * (1 + SAME)).all()


def test_above_what_is_enough_a_bound_will_do() -> None:
    """Where hosts delay devices: what is exact is as it was, what is not lies between the limit and the TTFT."""
    scenario, _ = make_scenario(ctx=2048, gpus=8)
    chunks = shares_of(1, 8, 2048, 3.0)
    exact_s = ttft_s(scenario, STRATEGIES["kvr-s"], chunks)
    seen = set()
    for limit_s in (0.5 * exact_s.min(), np.median(exact_s), np.inf):
        found_s = ttft_s(scenario, STRATEGIES["kvr-s"], chunks, enough_s=limit_s)
        as_it_was = np.isclose(found_s, exact_s, rtol=SAME, atol=0)
        seen |= {*as_it_was.tolist()}
        assert as_it_was[exact_s <= limit_s].all()
        assert (found_s[~as_it_was] > limit_s).all()
        assert (found_s <= exact_s * (1 + SAME)).all()
    assert seen == {False, True}


@pytest.mark.parametrize("profile", ["a100-eager", "h100-flash", "roofline"])
@given(rng=draws(), seed=st.integers(0, 2**32))
@examples(15)
def test_as_the_program_where_some_ranks_or_links_are_slow(profile: str, rng: Draws, seed: int) -> None:
    """Few layers are swept, many are one step; ranks with few tokens wait for messages of all others."""
    gpus, bandwidth = rng.randint(2, 24), 10.0 ** rng.uniform(7, 12)
    scenario, _ = make_scenario(ctx=65536, gpus=gpus, profile=profile, link_bandwidth=bandwidth)
    slow = SlowGpu(rank=rng.randrange(gpus), factor=rng.choice([1.0, 3.0]))
    first = rng.randrange(gpus - 1)
    link = SlowLink(first=first, second=first + 1, factor=rng.choice([1.0, 30.0]))
    scenario = replace(scenario, cluster=UnevenCluster.of(scenario.cluster, [slow], [link]))
    chunks, layers = shares_of(seed, gpus, 65536, rng.choice([0.3, 3.0, 50.0])), rng.randint(1, 90)
    found_s, known = by_recurrence(scenario, STRATEGIES["kvr-s"], chunks, layers)
    whole_s = by_program(scenario, STRATEGIES["kvr-s"], chunks, layers)
    assert found_s[:, known] == pytest.approx(whole_s[:, known], rel=SAME, abs=0)


def test_most_partitions_of_a_long_context_need_no_program() -> None:
    for profile in ("a100-eager", "h100-flash", "roofline"):
        scenario, _ = make_scenario(ctx=65536, gpus=8, profile=profile)
        _, known = by_recurrence(scenario, STRATEGIES["kvr-s"], shares_of(0, 8, 65536, 50.0), 32)
        assert known.all(), profile


def test_where_hosts_delay_devices_for_long_the_program_is_evaluated() -> None:
    scenario, _ = make_scenario(ctx=4096, gpus=8, profile="a100-eager")
    chunks = shares_of(0, 8, 4096, 5.0)
    assert not by_recurrence(scenario, STRATEGIES["kvr-s"], chunks, 32)[1].any()
    whole_s = by_program(scenario, STRATEGIES["kvr-s"], chunks, scenario.share.num_hidden_layers)
    assert ttft_s(scenario, STRATEGIES["kvr-s"], chunks) == pytest.approx(whole_s[-1], rel=SAME, abs=0)


@pytest.mark.parametrize(("name", "options"), [("kvr-s", {"topology": "bus"}), ("tsp", {}), ("kvr-direct", {})])
def test_other_programs_are_no_chains(name: str, options: dict[str, str]) -> None:
    scenario, _ = make_scenario(ctx=4096, gpus=4, profile="roofline", **options)  # type: ignore[arg-type]
    assert not Chain.suits(scenario, STRATEGIES[name], scenario.cluster)
