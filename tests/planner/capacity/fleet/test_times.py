"""Service times: near a full search, and a hand-over that changes no finish time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvrsim.builder import make_scenario
from kvrsim.compile import build_program
from kvrsim.executors.batch import run_batch
from kvrsim.executors.event import EventSimulation
from kvrsim.executors.run import run_partition
from kvrsim.program import Compute, Program
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES
from planner.candidates import partition_of
from planner.capacity.fleet.decoding import Decoding
from planner.capacity.fleet.knots import ServiceTimeGrids, knot_lengths
from planner.capacity.fleet.prefills import Prefills
from planner.capacity.fleet.times import ServiceTimes
from planner.capacity.workloads.workload import Workload
from planner.search.search import search

KVR = STRATEGIES["kvr-s"]


def scenario(profile: str, gpus: int = 1, ctx: int = 1024, cached: int = 0) -> Scenario:
    model = "llama-3-8b" if profile == "h100-flash" else "llama-7b"
    cluster = "h100-nvlink" if profile == "h100-flash" else None
    made, _ = make_scenario(ctx=ctx, gpus=gpus, model=model, profile=profile, cluster=cluster, cached_prefix=cached)
    return made


def best_s(profile: str, gpus: int, new: int, cached: int) -> float:
    """TTFT of the best strategy with its best partition."""
    asked = scenario(profile, gpus, new + cached, cached)
    found = [search(asked, KVR).ttft_s] if gpus > 1 else []
    for name, count in (("single", 1), ("tsp", gpus)):
        placed, strategy = asked.on_gpus(count), STRATEGIES[name]
        found.append(run_partition(placed, strategy, partition_of(placed, strategy, None)).ttft_s)
    return min(found)


@pytest.mark.parametrize("profile", ["a100-eager", "h100-flash", "roofline"])
@pytest.mark.parametrize("gpus", [1, 4])
def test_times_are_near_those_of_a_full_search(profile: str, gpus: int) -> None:
    times = ServiceTimes(scenario(profile), 8192, 4096)
    rng = np.random.default_rng(3)
    new = np.exp2(rng.uniform(5, 12.9, 12)).astype(np.int64)
    cached = np.where(rng.random(12) < 0.5, 0, rng.integers(1, 4096, 12))
    errors = times.seconds(gpus, new, cached) / [
        best_s(profile, gpus, n, c) for n, c in zip(new.tolist(), cached.tolist(), strict=True)
    ]
    assert np.median(np.abs(errors - 1)) < 0.01
    assert np.abs(errors - 1).max() < 0.15


def delayed(program: Program, delays_s: np.ndarray) -> Program:
    """Each rank begins so much later, host and device."""
    waits = [Compute(name="before", device_s=np.array([delay]), host_s=float(delay)) for delay in delays_s]
    prologue = tuple((wait, *ops) for wait, ops in zip(waits, program.prologue, strict=True))
    return replace(program, prologue=prologue)


@pytest.mark.parametrize("profile", ["a100-eager", "h100-flash", "roofline"])
@pytest.mark.parametrize(("new", "cached"), [(600, 0), (5000, 0), (3000, 8192)])
def test_ranks_that_begin_within_their_slack_end_no_later(profile: str, new: int, cached: int) -> None:
    maker = Prefills(scenario(profile, 4), KVR)
    knots = np.array([new], dtype=np.int64)
    chunks, finish_s = maker.chains(knots, cached)
    slack_s = maker.slack_s(chunks, finish_s, cached)[0]
    assert slack_s[0] == 0
    assert (slack_s[1:] > 0).any()
    asked = maker.at(cached, new)
    program = build_program(asked, KVR, [np.array([chunk]) for chunk in chunks[0]])
    late = delayed(program, slack_s)
    assert run_batch(late, asked.cluster)[:, 0] == pytest.approx(finish_s[0], rel=1e-6)
    assert EventSimulation(late, asked.cluster, record=False).finish_s == pytest.approx(finish_s[0].tolist(), rel=1e-6)
    too_late = delayed(program, slack_s + 0.05 * finish_s[0, -1])
    assert run_batch(too_late, asked.cluster)[-1, 0] > finish_s[0, -1] * 1.01


def test_the_next_prompt_begins_between_rank_0_and_the_first_token() -> None:
    times = ServiceTimes(scenario("h100-flash"), 4096, 600)
    service = times.service(4, requests([10, 300, 3000, 3000], [0, 0, 0, 600]))
    overlap = service.overlap
    finish, slack = np.array(overlap.finish), np.array(overlap.slack)
    assert finish[:, -1] == pytest.approx(1.0)
    assert (slack[:, 0] == 0).all()
    assert (slack <= finish + 1e-9).all()
    assert finish.min() < 0.99  # something is gained
    assert service.length_class.max() < len(service.strategies)
    kind, free = int(service.length_class[2]), [-np.inf] * 4
    begin_s, first_s = overlap.run(kind, 2.0, 1.0, free)
    assert begin_s == 1.0
    assert first_s == pytest.approx((1.0 + 2.0 * finish[kind]).tolist())
    _, second_s = overlap.run(kind, 2.0, first_s[0], first_s)
    assert 0 <= second_s[-1] - (first_s[0] + 2.0) <= first_s[-1] - first_s[0]
    assert second_s[-1] < first_s[-1] + 2.0


def requests(new: list[int], cached: list[int], output: int = 5) -> Workload:
    count = len(new)
    return Workload(
        name="made",
        kind="csv",
        arrival_s=np.arange(count, dtype=float),
        context_len=np.array(new) + np.array(cached),
        cached_prefix=np.array(cached, dtype=np.int64),
        output_tokens=np.full(count, output, dtype=np.int64),
    )


def test_more_tokens_take_longer_and_a_cached_prefix_shortens_the_rest() -> None:
    times = ServiceTimes(scenario("a100-eager"), 8192, 8191)
    new, cached = np.array([256, 1024, 2048, 4096, 6144]), np.full(5, 2048)
    for gpus in (1, 2):
        alone = times.seconds(gpus, new, 0 * cached)
        behind = times.seconds(gpus, new, cached)
        whole = times.seconds(gpus, new + cached, 0 * cached)
        assert (np.diff(alone) > 0).all()
        assert (behind >= alone).all()  # the same new tokens attend to more
        assert (behind < whole).all()  # the same context, less of it to compute


def test_contexts_that_do_not_fit_in_memory_take_forever() -> None:
    times = ServiceTimes(scenario("a100-eager"), 32768, 0)
    new = np.array([1000, times.grids(1)[0].most_new_tokens, times.grids(1)[0].most_new_tokens + 1, 32768])
    seconds = times.seconds(1, new, np.zeros(4, dtype=np.int64))
    assert np.isfinite(seconds).tolist() == [True, True, False, False]
    assert times.grids(4)[0].most_new_tokens > times.grids(1)[0].most_new_tokens


def test_decoding_on_the_last_gpu_holds_the_group() -> None:
    assert Decoding().hold_s(np.array([1, 100])).tolist() == [0, 0]
    assert Decoding(seconds_per_token=0.02).hold_s(np.array([0, 1, 101])).tolist() == pytest.approx([0, 0, 2.0])
    assert "another fleet" in Decoding().describe()
    assert "20 ms a token" in Decoding(seconds_per_token=0.02).describe()


def test_groups_on_a_shared_bus_have_times_too() -> None:
    bus, _ = make_scenario(ctx=512, gpus=2, topology="bus", link_bandwidth=1e10)
    grid = ServiceTimeGrids(bus, [STRATEGIES["tsp"], KVR]).grid(0, np.array([256, 2048], dtype=np.int64))
    assert np.isfinite(grid.ttft_s).all()
    assert not grid.slack_s.any()


def test_nodes_hold_both_ends_and_the_powers_of_two() -> None:
    knots = knot_lengths(3, 5000)
    assert knots[0] == 3
    assert knots[-1] == 5000
    assert {4, 8, 1024, 4096} <= set(knots.tolist())
    assert (np.diff(knots) > 0).all()
