"""Plans with noise: the search and the bound take slow GPUs and links into account."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from kvrsim.builder import make_scenario
from kvrsim.executors.access import execution_of
from kvrsim.noise import Distribution, parse_noise
from kvrsim.strategies import STRATEGIES
from planner.candidates import Search
from planner.search.bound import lower_bound_s
from planner.search.minimise import Evaluator
from planner.search.search import search
from planner.uncertainty.noise import Disturbance
from tests.building import Draws, any_partition, any_scenario, draws, examples, executed

KVR = STRATEGIES["kvr-s"]


@pytest.mark.parametrize("slow", range(4))
def test_a_slow_gpu_gets_less_and_costs_less(slow: int) -> None:
    scenario, _ = make_scenario(ctx=8192, gpus=4)
    uneven = Disturbance(noise=parse_noise(f"slow-gpu:{slow}x1.5")).with_fixed_part(scenario)
    clean, aware = search(executed(scenario, KVR)), search(executed(uneven, KVR))
    assert aware.partition.chunk_lens[slow] < clean.partition.chunk_lens[slow]
    unaware_s = Evaluator(executed(uneven, KVR)).one(clean.partition.chunk_lens)
    assert aware.ttft_s < 0.9 * unaware_s
    # With a slow GPU, no plan is as fast as on equal GPUs.
    assert clean.ttft_s < aware.ttft_s


@pytest.mark.parametrize("topology", ["switch", "bus"])
def test_samples_in_blocks_are_those_of_one_block(topology: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks bound the memory and let the progress be reported."""
    scenario, _ = make_scenario(ctx=1024, gpus=2, topology=topology)
    candidate = Search().candidate(execution_of(scenario, KVR))
    disturbance = Disturbance(noise=parse_noise("jitter:0.1"), num_samples=20)

    def distribution(reports: list[float]) -> Distribution:
        own = candidate.execution, candidate.partition, candidate.ttft_s
        even_s = candidate.ttft_s
        return disturbance.distribution(*own, even_s=even_s, on_progress=lambda done, total, text: reports.append(done))

    whole, blocks = list[float](), list[float]()
    expected = distribution(whole)
    monkeypatch.setattr("planner.uncertainty.noise._MOST_FACTORS", 8 * 2048)
    assert distribution(blocks) == expected
    assert (whole, blocks) == ([0], [0, 8, 16])


@pytest.mark.slow
@given(rng=draws())
@examples(25)
def test_the_bound_holds_on_uneven_clusters(rng: Draws) -> None:
    scenario = any_scenario(rng, num_gpus=(2, 5), topologies=("switch", "nodes"))
    ranks, tokens = scenario.cluster.num_gpus, scenario.request.new_tokens
    gpu, link = rng.randrange(ranks), rng.randrange(ranks - 1)
    noise = parse_noise(f"slow-gpu:{gpu}x{rng.uniform(1, 9):.3f}+slow-link:{link}-{link + 1}x{rng.uniform(1, 9):.3f}")
    uneven = Disturbance(noise=noise).with_fixed_part(scenario)
    result = search(executed(uneven, KVR))
    cuts = np.array([any_partition(rng, tokens, ranks) for _ in range(50)], dtype=float)
    ttft_s = Evaluator(executed(uneven, KVR)).ttft_s(cuts)
    bound_s = lower_bound_s(executed(uneven, KVR), result.ttft_s)
    assert bound_s <= min(result.ttft_s, ttft_s.min()) * (1 + 1e-9)
