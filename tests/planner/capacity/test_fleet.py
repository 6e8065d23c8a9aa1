"""Queues of groups agree with SimPy and with queueing theory; no request is lost."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.capacity.fleet import GpuGroup, GroupPool, GroupType, Overlap, Service, route, run_fleet, run_pool
from planner.capacity.workload import Workload
from planner.percentile import percentile_of
from tests.building import examples
from tests.planner.capacity.made_requests import made
from tests.planner.capacity.simpy_pool import SimpyPool

KINDS = 3
quarters = st.integers(1, 40).map(lambda number: number / 4)  # exact in binary, so that equal times stay equal


@st.composite
def handovers(draw: st.DrawFn) -> Overlap:
    """Random hand-overs: early ranks become free before the last rank, and later ranks may begin later."""
    eighths = st.integers(0, 8).map(lambda number: number / 8)
    finish, slack = [], []
    for _ in range(KINDS):
        first, second, wait = draw(eighths), draw(eighths), draw(eighths)
        finish.append((max(first, 0.125), max(first, second, 0.125), 1.0))
        slack.append((0.0, min(wait, first), min(max(wait, second), second)))
    return Overlap(finish=tuple(finish), slack=tuple(slack), holds=draw(st.booleans()))


@st.composite
def pools(draw: st.DrawFn) -> GroupPool:
    """Random pools with few requests and all features."""
    count = draw(st.integers(1, 30))

    def column(values: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(values, min_size=count, max_size=count))

    holds = draw(st.booleans())
    ttft_s, length_class = np.array(column(quarters)), np.array(column(st.integers(0, KINDS - 1)), dtype=np.int64)
    overlap = draw(handovers())
    service = Service(
        ttft_s=ttft_s,
        busy_s=ttft_s * np.array(overlap.busy)[length_class],
        hold_s=np.array(column(quarters)) if holds else np.zeros(count),
        length_class=length_class,
        strategies=("a", "b", "c"),
        overlap=overlap,
        new_tokens=np.array(column(st.integers(1, 10)), dtype=np.int64),
        cached_prefix=np.array(column(st.integers(0, 8)), dtype=np.int64),
        decode_steps=np.zeros(count, dtype=np.int64),
        cache_bytes=np.zeros(count),
    )
    return GroupPool(
        arrival_s=np.sort(np.array(column(st.integers(0, 80).map(lambda number: number / 4)))),
        service=service,
        replicas=draw(st.integers(1, 4)),
    )


@examples(300)
@given(pool=pools())
def test_pools_equal_simpy_request_by_request(pool: GroupPool) -> None:
    run, reference = run_pool(pool), SimpyPool(pool).run()
    for name in ("begin_s", "end_s", "group"):
        assert np.array_equal(getattr(run, name), getattr(reference, name)), name
    assert run.busy_s == pytest.approx(reference.busy_s)


@examples(200)
@given(pool=pools())
def test_every_request_is_served_and_takes_its_time(pool: GroupPool) -> None:
    run = run_pool(pool)
    assert (run.begin_s >= pool.arrival_s).all()
    alone_s = pool.service.ttft_s
    assert (run.end_s - run.begin_s >= alone_s).all()
    if pool.service.overlap.holds or pool.replicas >= len(pool.arrival_s):
        assert np.array_equal(run.end_s - run.begin_s, alone_s)
    ends_s = run.end_s + pool.service.hold_s
    assert run.busy_s <= pool.replicas * (ends_s.max() - run.begin_s.min()) * (1 + 1e-9)


@examples(60)
@given(pool=pools())
def test_more_like_groups_are_never_worse_first_come(pool: GroupPool) -> None:
    # If all servers are equal, an additional server makes no start later (Kiefer and Wolfowitz).
    service = replace(pool.service, overlap=Overlap.whole(), length_class=0 * pool.service.length_class)
    plain = replace(pool, service=service)
    more = replace(plain, replicas=plain.replicas + 1)
    assert (run_pool(more).begin_s <= run_pool(plain).begin_s + 1e-12).all()


def test_constant_service_of_one_group_waits_as_pollaczek_and_khinchine_say() -> None:
    count, load = 200_000, 0.7
    arrival_s = np.cumsum(np.random.default_rng(0).exponential(1 / load, count))
    run = run_pool(GroupPool(arrival_s=arrival_s, service=Service.plain(np.ones(count)), replicas=1))
    assert (run.begin_s - arrival_s).mean() == pytest.approx(load / (2 * (1 - load)), rel=0.04)


def fleet_workload(count: int = 60) -> Workload:
    rng = np.random.default_rng(5)
    return made(rng.exponential(0.3, count - 1), rng.integers(1, 100, count))


def services(workload: Workload, fits: int) -> dict[GroupType, Service]:
    """Service times proportional to length, half as long on two GPUs; one GPU takes at most `fits` tokens."""
    alone_s = workload.context_len / 50.0
    one = Service.plain(np.where(workload.context_len <= fits, alone_s, np.inf))
    return {GroupType(1): one, GroupType(2): Service.plain(alone_s / 2)}


def test_prompts_go_by_length_unless_they_do_not_fit() -> None:
    workload = fleet_workload()
    short = GpuGroup(type=GroupType(1), replicas=2, least_new=1, most_new=40)
    long = GpuGroup(type=GroupType(2), replicas=1, least_new=41, most_new=100)
    pool_of = route(workload.new_tokens, services(workload, fits=20), (short, long))
    assert np.array_equal(pool_of == 0, workload.new_tokens <= 20)
    alone = route(workload.new_tokens, services(workload, fits=20), (short,))
    assert np.array_equal(alone == -1, workload.new_tokens > 20)


def test_a_fleet_adds_up_and_counts_what_fits_nowhere() -> None:
    workload = fleet_workload()
    fleet = (GpuGroup(type=GroupType(1), replicas=2, least_new=1, most_new=100),)
    run = run_fleet(workload, services(workload, fits=90), fleet)
    never = int((workload.context_len > 90).sum())
    assert never > 0
    assert np.isinf(run.ttft_s).sum() == never
    assert percentile_of(run.ttft_s, 100) == math.inf
    assert run.busy_gpu_s == pytest.approx(workload.context_len[workload.context_len <= 90].sum() / 50)
    by_simpy = run_fleet(workload, services(workload, fits=90), fleet, serve=lambda pool: SimpyPool(pool).run())
    assert by_simpy.ttft_s == pytest.approx(run.ttft_s, rel=1e-12)
