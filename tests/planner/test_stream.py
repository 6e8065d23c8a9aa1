"""Requests behind each other: the recurrence agrees with the replay, and nobody serves more than its busiest rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.builder import make_scenario
from kvrsim.compile import build_program
from kvrsim.errors import InputError
from kvrsim.executors.batch import run_batch
from kvrsim.executors.event import EventSimulation
from kvrsim.hardware import Cluster
from kvrsim.program import Program, compute_s, computes_s
from kvrsim.results.stream import Arrivals, Prompts, StreamResult
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES
from planner.packing.serve import Recurrence, cycle_time_s
from planner.simulate import run_simulation
from planner.stream import alike
from planner.uncertainty.disturbed import Disturbance
from tests.building import Draws, any_partition, any_scenario, draws, examples

SEEDS = st.integers(0, 2**32 - 1)
SHARED = ("tsp", "kvr-s")


def program_of(rng: Draws, name: str) -> tuple[Scenario, Program]:
    scenario = any_scenario(rng, num_gpus=(2, 5), layers=(1, 4))
    cut = any_partition(rng, scenario.request.new_tokens, scenario.cluster.num_gpus)
    return scenario, build_program(scenario, STRATEGIES[name], [np.array([float(chunk)]) for chunk in cut])


def run_stream(program: Program, cluster: Cluster, arrivals: Arrivals) -> StreamResult:
    return alike(program, cluster, Prompts.alike(arrivals, 0, 1, 0)).run(computes_s)


@pytest.mark.parametrize("name", SHARED)
@given(rng=draws(), seed=SEEDS, poisson=st.booleans())
@examples(50)
def test_the_recurrence_is_the_replay(name: str, rng: Draws, seed: int, poisson: bool) -> None:
    scenario, program = program_of(rng, name)
    ttft_s = float(run_batch(program, scenario.cluster)[-1, 0])
    arrivals = Arrivals(count=6, every_s=ttft_s * rng.choice([0.0, rng.random(), 3.0]), poisson=poisson)
    times_s = arrivals.times_s(seed)
    tokens_s, end_s = Recurrence.of(program, scenario.cluster).run(times_s)
    event = EventSimulation(program, scenario.cluster, record=False, arrivals_s=times_s)
    assert tokens_s == pytest.approx(event.finishes_s[-1], rel=1e-9)
    assert end_s == pytest.approx(max(event.finish_s), rel=1e-9)


@pytest.mark.parametrize("name", ["single", *SHARED])
@given(rng=draws())
@examples(30)
def test_the_first_request_is_todays(name: str, rng: Draws) -> None:
    if name == "single":
        scenario = any_scenario(rng, num_gpus=(1, 1))
        program = build_program(scenario, STRATEGIES[name], [np.array([float(scenario.request.new_tokens)])])
    else:
        scenario, program = program_of(rng, name)
    ttft_s = run_batch(program, scenario.cluster)[-1, 0]
    for count in (1, 4):
        stream = run_stream(program, scenario.cluster, Arrivals(count=count))
        assert stream.ttft_s[0] == pytest.approx(ttft_s, rel=1e-12)
    if name == "single":
        assert stream.throughput_per_s == pytest.approx(1 / ttft_s, rel=1e-9)


@pytest.mark.parametrize("name", SHARED)
@given(rng=draws())
@examples(50)
def test_nobody_serves_more_than_its_busiest_rank(name: str, rng: Draws) -> None:
    scenario, program = program_of(rng, name)
    busy_s = [compute_s(program, rank) for rank in range(program.num_ranks)]
    stream = run_stream(program, scenario.cluster, Arrivals(count=20))
    assert stream.steady_per_s is not None
    assert stream.steady_per_s <= 1 / max(busy_s) * (1 + 1e-9)
    assert stream.throughput_per_s <= 1 / max(busy_s) * (1 + 1e-9)
    assert max(stream.utilisation) <= 1 + 1e-9
    # At least one after the other, each alone.
    alone_s = float(run_batch(program, scenario.cluster)[:, 0].max())
    assert stream.throughput_per_s >= 1 / alone_s * (1 - 1e-9)
    waits = np.diff(stream.ttft_s)
    assert (waits >= -1e-9 * stream.ttft_s[-1]).all()


@pytest.mark.parametrize("name", SHARED)
@given(rng=draws())
@examples(20)
def test_the_long_run_is_what_many_requests_come_to(name: str, rng: Draws) -> None:
    scenario, program = program_of(rng, name)
    recurrence = Recurrence.of(program, scenario.cluster)
    ends_s, _ = recurrence.run((0.0,) * 800)
    assert cycle_time_s(recurrence.matrix) == pytest.approx((ends_s[-1] - ends_s[399]) / 400, rel=1e-3)


@given(rng=draws())
@examples(20)
def test_far_apart_they_do_not_meet(rng: Draws) -> None:
    scenario, program = program_of(rng, "kvr-s")
    ttft_s = float(run_batch(program, scenario.cluster)[:, 0].max())
    stream = run_stream(program, scenario.cluster, Arrivals(count=5, every_s=3 * ttft_s))
    assert stream.ttft_s == pytest.approx([stream.ttft_s[0]] * 5, rel=1e-9)


def test_tsp_gains_its_idle_time_alone() -> None:
    """Its ranks end together but for the head, so the next prompt starts when the last is done."""
    scenario, _ = make_scenario(ctx=8192, gpus=8)
    streams = {}
    for name in ("tsp", "kvr-e", "kvr-s"):
        stream = run_simulation(scenario, strategy=name, arrivals=Arrivals(count=50)).stream
        assert stream is not None
        streams[name] = stream
    gains = {name: (stream.steady_per_s or 0.0) * stream.ttft_s[0] - 1 for name, stream in streams.items()}
    assert gains["tsp"] < 0.005
    assert gains["kvr-s"] > 0.02
    assert gains["kvr-e"] > 0.01


def test_under_noise_and_on_a_bus_the_event_executor_runs_it() -> None:
    scenario, _ = make_scenario(ctx=512, gpus=2, topology="bus", link_bandwidth=1e10)
    quiet = run_simulation(scenario, strategy="kvr-e", arrivals=Arrivals(count=3)).stream
    assert quiet is not None
    assert quiet.steady_per_s is None
    assert quiet.ttft_s[0] == pytest.approx(run_simulation(scenario, strategy="kvr-e").ttft_s, rel=1e-9)
    from kvrsim.noise import Noise

    disturbance = Disturbance(noise=Noise(compute_jitter=0.2), num_samples=2)
    noisy = run_simulation(scenario, strategy="kvr-e", arrivals=Arrivals(count=3), disturbance=disturbance)
    assert noisy.stream is not None
    assert noisy.stream.ttft_s[0] == pytest.approx(noisy.ttft_s, rel=1e-12)


def test_arrivals() -> None:
    assert Arrivals.parse(3, "500ms").times_s(0) == (0.0, 0.5, 1.0)
    assert Arrivals.parse(3, "0s").times_s(0) == (0.0, 0.0, 0.0)
    poisson = Arrivals.parse(2000, "poisson:10ms")
    assert poisson.times_s(1) == poisson.times_s(1) != poisson.times_s(2)
    assert poisson.times_s(1)[-1] == pytest.approx(20.0, rel=0.1)
    assert list(poisson.times_s(1)) == sorted(poisson.times_s(1))
    for count, every in ((0, "1s"), (10**6, "1s"), (3, "1"), (3, "poisson"), (3, "poisson:"), (3, "-1s")):
        with pytest.raises(InputError, match=r"requests|--every"):
            Arrivals.parse(count, every)


def test_every_rank_runs_all_requests() -> None:
    scenario, _ = make_scenario(ctx=512, gpus=2)
    program = build_program(scenario, STRATEGIES["kvr-s"], [np.array([300.0]), np.array([212.0])])
    replay = EventSimulation(program, scenario.cluster, arrivals_s=(0.0, 1.0))
    assert [len(ends) for ends in replay.finishes_s] == [2, 2]
    assert replay.timeline.end_s == max(replay.finish_s)
