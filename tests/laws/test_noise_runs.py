"""Runs with noise: noise never makes a run faster, a seed reproduces a run, and executors agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.builder import make_scenario
from kvrsim.compile import build_program, columns
from kvrsim.errors import InputError
from kvrsim.executors.batch import run_batch
from kvrsim.executors.event import EventSimulation
from kvrsim.executors.run import run_program
from kvrsim.noise import Noise, NoiseDraw, SideTraffic, parse_noise
from kvrsim.program import Array, Program
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES, get_strategy
from planner.plan import make_plan
from planner.simulate import run_simulation
from planner.uncertainty.noise import Disturbance
from tests.building import Draws, any_partition, any_placed, any_scenario, draws, examples, executed
from validate.figures import Predictions, Scope, increases

SEEDS = st.integers(0, 2**32 - 1)
SHARED = ("tsp", "kvr-s")
HYBRIDS = ("tp2+kvr-s", "tp2+ring")
NAMES = (*(name for name in STRATEGIES if name not in ("kvr-s", "kvr-p")), *HYBRIDS)  # both run kvr-e's program
EXACT = 1e-12
ROUNDED = 1e-9  # tolerance for slots whose start is a difference of large times


def program_of(rng: Draws, name: str, **kind: Any) -> tuple[Scenario, Program]:
    scenario = any_scenario(rng, num_gpus=(2, 5), layers=(1, 4), **kind)
    cut = any_partition(rng, scenario.request.new_tokens, scenario.cluster.num_gpus)
    return scenario, build_program(executed(scenario, STRATEGIES[name]), [np.array([float(chunk)]) for chunk in cut])


def noise_of(rng: Draws, ttft_s: float) -> Noise:
    """Random noise; side traffic changes its pair of ranks 3 to 300 times per prefill."""
    traffic = SideTraffic(
        duty=rng.random(),
        share=rng.random() * 0.95,
        slowdown=rng.random(),
        dwell_s=ttft_s / 10 ** rng.uniform(0.5, 2.5),
    )
    jitters = [rng.choice([0.0, rng.random() / 2]) for _ in range(2)]
    return Noise(side_traffic=rng.choice([None, traffic]), compute_jitter=jitters[0], message_jitter=jitters[1])


def quiet_s(scenario: Scenario, program: Program) -> Array:
    return run_batch(program, scenario.cluster)[:, 0]


@pytest.mark.parametrize("name", NAMES)
@given(rng=draws(), seed=SEEDS)
@examples(12)
def test_both_executors_agree_sample_by_sample(name: str, rng: Draws, seed: int) -> None:
    strategy = get_strategy(name)
    placed, cut = any_placed(rng, strategy, topologies=rng.choice([("switch", "chain", "nodes"), ("bus",)]))
    program = build_program(executed(placed, strategy), columns(cut))
    noise = noise_of(rng, float(run_program(program, placed.cluster).max()))
    if placed.cluster.shares_bandwidth:
        noise = replace(noise, side_traffic=None)
    draw = NoiseDraw(noise, program.num_ranks, seed=seed, samples=range(5))
    finish_s = run_program(program, placed.cluster, draw)
    for sample in (0, 3):
        replay = EventSimulation(program, placed.cluster, record=False, noise=draw.only([sample]))
        assert finish_s[:, 0, sample] == pytest.approx(np.array(replay.finish_s), rel=1e-9, abs=0)


@pytest.mark.parametrize("name", NAMES)
@given(rng=draws(), seed=SEEDS)
@examples(5)
def test_partitions_under_noise_are_independent(name: str, rng: Draws, seed: int) -> None:
    strategy = get_strategy(name)
    placed, cut = any_placed(rng, strategy)
    cuts = [cut, *(any_partition(rng, placed.request.new_tokens, len(cut)) for _ in range(2))]
    programs = [build_program(executed(placed, strategy), columns(one)) for one in (cuts, *([one] for one in cuts))]
    noise = noise_of(rng, float(quiet_s(placed, programs[0]).max()))
    draw = NoiseDraw(noise, programs[0].num_ranks, seed=seed, samples=range(3))
    together, *alone = (run_batch(program, placed.cluster, draw) for program in programs)
    np.testing.assert_allclose(together, np.concatenate(alone, axis=1), rtol=ROUNDED)
    sliced = [run_batch(programs[0].row(row), placed.cluster, draw) for row in range(len(cuts))]
    np.testing.assert_allclose(together, np.concatenate(sliced, axis=1), rtol=ROUNDED)


@pytest.mark.parametrize("name", SHARED)
@given(rng=draws(), seed=SEEDS)
@examples(20)
def test_noise_of_size_zero_is_the_quiet_timeline(name: str, rng: Draws, seed: int) -> None:
    scenario, program = program_of(rng, name)
    quiet = EventSimulation(program, scenario.cluster)
    for noise in (Noise(), Noise(side_traffic=SideTraffic(duty=0.0)), Noise(side_traffic=SideTraffic(share=0.0))):
        replay = EventSimulation(program, scenario.cluster, noise=NoiseDraw(noise, program.num_ranks, seed=seed))
        assert replay.timeline == quiet.timeline
        assert replay.finish_s == quiet.finish_s


@pytest.mark.parametrize("name", SHARED)
@given(rng=draws(), seed=SEEDS)
@examples(20)
def test_the_same_seed_gives_the_same_timeline(name: str, rng: Draws, seed: int) -> None:
    scenario, program = program_of(rng, name)
    noise = replace(noise_of(rng, float(quiet_s(scenario, program).max())), compute_jitter=0.2)
    first, second, other = (
        EventSimulation(program, scenario.cluster, noise=NoiseDraw(noise, program.num_ranks, seed=number))
        for number in (seed, seed, seed + 1)
    )
    assert first.timeline == second.timeline
    assert first.timeline != other.timeline


@pytest.mark.parametrize("name", SHARED)
@given(rng=draws(), seed=SEEDS)
@examples(60)
def test_side_traffic_only_delays_and_more_of_it_more(name: str, rng: Draws, seed: int) -> None:
    """In every run, traffic only delays, and more traffic delays more; drawn pairs do not depend on its amount."""
    scenario, program = program_of(rng, name)
    quiet = quiet_s(scenario, program)
    less = SideTraffic(
        duty=rng.random(),
        share=rng.random() * 0.9,
        slowdown=rng.random(),
        dwell_s=float(quiet.max()) / rng.uniform(2, 80),
    )
    more = replace(
        less,
        duty=less.duty + (1 - less.duty) * rng.random(),
        share=less.share + (0.95 - less.share) * rng.random(),
        slowdown=less.slowdown + rng.random(),
    )
    runs = [
        run_batch(
            program,
            scenario.cluster,
            NoiseDraw(Noise(side_traffic=traffic), program.num_ranks, seed=seed, samples=range(20)),
        )
        for traffic in (less, more)
    ]
    assert (runs[0] >= quiet[:, None, None] * (1 - EXACT)).all()
    assert (runs[1] >= runs[0] * (1 - 1e-9)).all()


@pytest.mark.parametrize("name", SHARED)
@given(rng=draws(), seed=SEEDS)
@examples(15)
def test_jitter_never_shortens_in_expectation(name: str, rng: Draws, seed: int) -> None:
    """TTFT is a maximum of sums, so it is convex in the durations, and jitter does not change their means."""
    scenario, program = program_of(rng, name)
    noise = Noise(compute_jitter=0.2, message_jitter=0.2)
    draw = NoiseDraw(noise, program.num_ranks, seed=seed, samples=range(400))
    ttft_s = run_batch(program, scenario.cluster, draw)[-1, 0]
    assert ttft_s.mean() >= quiet_s(scenario, program)[-1] - 4 * ttft_s.std() / 20


@given(rng=draws())
@examples(30)
def test_slow_gpus_and_links_only_delay(rng: Draws) -> None:
    scenario = any_scenario(rng, num_gpus=(2, 5), topologies=("switch", "nodes"))
    ranks = scenario.cluster.num_gpus
    gpu, link = rng.randrange(ranks), rng.randrange(ranks - 1)
    noise = parse_noise(f"slow-gpu:{gpu}x{rng.uniform(1, 5):.3f}+slow-link:{link}-{link + 1}x{rng.uniform(1, 9):.3f}")
    uneven = Disturbance(noise=noise).with_fixed_part(scenario)
    cut = [np.array([float(chunk)]) for chunk in any_partition(rng, scenario.request.new_tokens, ranks)]
    for name in SHARED:
        even_program, program = (build_program(executed(one, STRATEGIES[name]), cut) for one in (scenario, uneven))
        slow_s = run_batch(program, uneven.cluster)[:, 0]
        assert (slow_s >= run_batch(even_program, scenario.cluster)[:, 0] * (1 - EXACT)).all()


def test_jitter_and_slow_gpus_on_a_bus() -> None:
    quiet, _ = make_scenario(ctx=512, gpus=2, topology="bus", link_bandwidth=1e10)
    noise = Disturbance(noise=parse_noise("jitter:0.1+slow-gpu:1x1.5"), num_samples=4)
    result = run_simulation(quiet, strategy="kvr-e", disturbance=noise)
    assert result.noisy is not None
    assert len({result.ttft_s, result.noisy.worst_s, result.noisy.quiet_s}) == 3
    assert result.noisy.quiet_s == run_simulation(quiet, strategy="kvr-e").ttft_s


def test_the_answer_under_noise() -> None:
    scenario, _ = make_scenario(ctx=2048, gpus=4)
    disturbance = Disturbance(noise=parse_noise("paper"), seed=7, num_samples=50)
    result = run_simulation(scenario, strategy="kvr-e", disturbance=disturbance)
    content = result.to_dict()
    assert content["noise"]["spec"] == "paper"
    assert content["noise"]["samples"] == 50
    assert content["noise"]["quiet_ttft_s"] == run_simulation(scenario, strategy="kvr-e").ttft_s
    assert content["noise"]["mean_s"] > content["noise"]["quiet_ttft_s"]
    assert content["ttft_s"] == run_simulation(scenario, strategy="kvr-e", disturbance=disturbance).ttft_s
    for rank in result.per_rank:
        assert rank.compute_s + rank.wait_s <= result.ttft_s * (1 + 1e-9)


def test_side_traffic_that_changes_too_often_is_refused() -> None:
    scenario, _ = make_scenario(ctx=2**20, gpus=4)
    disturbance = Disturbance(noise=parse_noise("side-traffic:dwell=100us"), num_samples=1000)
    with pytest.raises(InputError, match="dwell"):
        run_simulation(scenario, strategy="kvr-e", disturbance=disturbance)


def test_a_plan_under_noise_shows_every_strategy() -> None:
    scenario, _ = make_scenario(ctx=2048, gpus=2)
    plan = make_plan(scenario, disturbance=Disturbance(noise=parse_noise("jitter:0.2"), num_samples=60))
    mean_s = {result.strategy: result.noisy.mean.value_s for result in plan.strategies if result.noisy is not None}
    assert min(mean_s, key=mean_s.__getitem__) == plan.best.strategy
    content = plan.to_dict()
    assert all(one["under_noise"]["samples"] == 60 for one in content["strategies"])


def test_the_papers_noise() -> None:
    """Mean slowdowns over contexts and GPUs agree with the paper's within margins, and have the paper's order."""
    predictions = Predictions(Scope(noise_samples=100))
    shares, margins = predictions.printed["noisy_network"]["shares"], {"tsp": 0.02, "kvr-s": 0.04, "kvr-e": 0.02}
    cases = increases(predictions).values()
    means = {strategy: float(np.mean([case[strategy][0] for case in cases])) for strategy in margins}
    for strategy, margin in margins.items():
        assert means[strategy] == pytest.approx(shares[strategy], abs=margin)
    assert list(means.values()) == sorted(means.values(), reverse=True)


@pytest.mark.parametrize("spec", ["slowdown=1000,dwell=100us", "share=0.999,dwell=100us", "slowdown=10,dwell=1ms"])
def test_a_slowdown_counts_in_the_length_of_a_noise(spec: str) -> None:
    # Without the slowdown, the prefill is short enough for each of these noises.
    noise = parse_noise(f"side-traffic:{spec}")
    assert noise.side_traffic is not None
    quiet_s = 0.9 * 2.0**24 * noise.side_traffic.dwell_s / (3 * 200)
    quick = replace(noise, side_traffic=replace(noise.side_traffic, slowdown=0.0, share=1e-9))
    Disturbance(noise=quick).check_length(quiet_s, 2)
    with pytest.raises(InputError, match="dwell") as caught:
        Disturbance(noise=noise).check_length(quiet_s, 2)
    least_s = float(caught.value.accepted.split()[2][:-2])
    slower = replace(noise, side_traffic=replace(noise.side_traffic, dwell_s=least_s))
    Disturbance(noise=slower).check_length(quiet_s, 2)
