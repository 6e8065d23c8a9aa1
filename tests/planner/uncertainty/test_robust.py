"""Robust planning: better than the quiet plan on samples that nobody has planned on, or the quiet plan itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.executors.run import ttft_s
from kvrsim.noise import NoiseDraw, parse_noise
from kvrsim.strategies import STRATEGIES
from planner.search.bound import lower_bound_s
from planner.search.minimise import Evaluator
from planner.search.search import search
from planner.uncertainty.disturbed import FIRST_JUDGING_SAMPLE, with_fixed
from planner.uncertainty.robust import robust_plan
from tests.building import Draws, any_partition, any_scenario, draws, examples

KVR = STRATEGIES["kvr-s"]


def test_a_robust_plan_holds_on_other_samples() -> None:
    noise = parse_noise("jitter:0.3")
    scenario, _ = make_scenario(ctx=8192, gpus=4)
    quiet = search(scenario, KVR)
    plan = robust_plan(scenario, KVR, noise, quiet.partition, objective="mean", quiet_s=quiet.ttft_s)
    judges = range(FIRST_JUDGING_SAMPLE, FIRST_JUDGING_SAMPLE + 400)
    draw = NoiseDraw(noise, scenario.cluster.num_gpus, seed=0, samples=judges)
    cuts = np.array([plan.quiet_partition.chunk_lens, plan.partition.chunk_lens], dtype=float)
    quiet_s, robust_s = ttft_s(scenario, KVR, cuts, draw=draw).mean(axis=1)
    assert plan.partition != plan.quiet_partition
    assert robust_s < quiet_s
    assert plan.planned_s < plan.quiet_planned_s


def test_without_a_random_part_the_quiet_plan_stays() -> None:
    scenario, _ = make_scenario(ctx=2048, gpus=4)
    quiet = search(scenario, KVR)
    plan = robust_plan(
        scenario, KVR, parse_noise("slow-gpu:1x1"), quiet.partition, objective="p95", quiet_s=quiet.ttft_s
    )
    assert plan.partition == quiet.partition
    assert plan.planned_s == pytest.approx(quiet.ttft_s)


def test_the_same_seed_gives_the_same_plan() -> None:
    noise = parse_noise("side-traffic:slowdown=0.5")
    scenario, _ = make_scenario(ctx=2048, gpus=4)
    quiet = search(scenario, KVR)
    first, second = (
        robust_plan(scenario, KVR, noise, quiet.partition, objective="p95", quiet_s=quiet.ttft_s, num_samples=16)
        for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("slow", range(4))
def test_a_slow_gpu_gets_less_and_costs_less(slow: int) -> None:
    scenario, _ = make_scenario(ctx=8192, gpus=4)
    uneven = with_fixed(scenario, parse_noise(f"slow-gpu:{slow}x1.5"))
    clean, aware = search(scenario, KVR), search(uneven, KVR)
    assert aware.partition.chunk_lens[slow] < clean.partition.chunk_lens[slow]
    unaware_s = Evaluator(uneven, KVR).one(clean.partition.chunk_lens)
    assert aware.ttft_s < 0.9 * unaware_s
    # A quarter of the GPUs' speed less a third of one: no plan can be as fast as on even GPUs.
    assert clean.ttft_s < aware.ttft_s


@pytest.mark.slow
@given(rng=draws())
@examples(25)
def test_the_bound_holds_on_uneven_clusters(rng: Draws) -> None:
    scenario = any_scenario(rng, num_gpus=(2, 5), topologies=("switch", "nodes"))
    ranks, tokens = scenario.cluster.num_gpus, scenario.request.new_tokens
    gpu, link = rng.randrange(ranks), rng.randrange(ranks - 1)
    noise = parse_noise(f"slow-gpu:{gpu}x{rng.uniform(1, 9):.3f}+slow-link:{link}-{link + 1}x{rng.uniform(1, 9):.3f}")
    uneven = with_fixed(scenario, noise)
    found = search(uneven, KVR)
    cuts = np.array([any_partition(rng, tokens, ranks) for _ in range(50)], dtype=float)
    ttft_s = Evaluator(uneven, KVR).ttft_s(cuts)
    bound_s = lower_bound_s(uneven, KVR, found.ttft_s)
    assert bound_s <= min(found.ttft_s, ttft_s.min()) * (1 + 1e-9)


def test_an_unknown_objective() -> None:
    scenario, _ = make_scenario(ctx=512, gpus=2)
    quiet = search(scenario, KVR)
    with pytest.raises(InputError, match="objective"):
        robust_plan(scenario, KVR, parse_noise("jitter:0.1"), quiet.partition, objective="p90", quiet_s=1.0)
