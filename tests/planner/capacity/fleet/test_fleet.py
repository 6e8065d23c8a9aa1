"""Queues of groups: the fast loops against SimPy, both against queueing theory, and nothing is ever lost."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.choices import ORDERS
from planner.capacity.fleet.event import PoolProcesses
from planner.capacity.fleet.fast import run_pool
from planner.capacity.fleet.fleet import Conditions, GroupPlan, percentile_of, route, run_fleet
from planner.capacity.fleet.layouts import Kind
from planner.capacity.fleet.pool import MOST_RETRIES, Outages, Pool
from planner.capacity.fleet.service import Overlap, Service
from planner.capacity.workloads.workload import Workload
from tests.building import examples

KINDS = 3
quarters = st.integers(1, 40).map(lambda number: number / 4)  # exact in binary, so that ties are ties


@st.composite
def handovers(draw: st.DrawFn) -> Overlap:
    """Early ranks are free before the last one, and later ones wait first."""
    eighths = st.integers(0, 8).map(lambda number: number / 8)
    finish, slack = [], []
    for _ in range(KINDS):
        first, second, wait = draw(eighths), draw(eighths), draw(eighths)
        finish.append((max(first, 0.125), max(first, second, 0.125), 1.0))
        slack.append((0.0, min(wait, first), min(max(wait, second), second)))
    return Overlap(finish=tuple(finish), slack=tuple(slack), holds=draw(st.booleans()))


@st.composite
def outages(draw: st.DrawFn) -> Outages:
    """Each group's uptimes over and over."""
    ups = [draw(st.lists(st.integers(1, 200).map(lambda n: n / 4), min_size=1, max_size=4)) for _ in range(4)]

    def uptimes_s(group: int) -> Iterator[float]:
        return iter(cycle(ups[group]))

    return Outages(uptimes_s=uptimes_s, repair_s=draw(quarters))


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    """Few requests, much that can happen to them."""
    count = draw(st.integers(1, 30))

    def column(values: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(values, min_size=count, max_size=count))

    holds = draw(st.booleans())
    service = Service(
        num_gpus=2,
        ttft_s=np.array(column(quarters)),
        hold_s=np.array(column(quarters)) if holds else np.zeros(count),
        length_class=np.array(column(st.integers(0, KINDS - 1)), dtype=np.int64),
        strategies=("a", "b", "c"),
        overlap=draw(handovers()),
        new_tokens=np.array(column(st.integers(1, 10)), dtype=np.int64),
        cached_prefix=np.array(column(st.integers(0, 8)), dtype=np.int64),
    )
    return Pool(
        arrival_s=np.sort(np.array(column(st.integers(0, 80).map(lambda number: number / 4)))),
        service=service,
        replicas=draw(st.integers(1, 4)),
        order=draw(st.sampled_from(ORDERS)),
        slowness=draw(st.sampled_from([(), (2.0,), (1.5, 2.0)])),
        outages=draw(st.none() | outages()),
    )


@examples(300)
@given(pool=pools())
def test_fast_loops_equal_simpy_request_by_request(pool: Pool) -> None:
    fast, reference = run_pool(pool), PoolProcesses(pool).run()
    for name in ("begin_s", "end_s", "group", "retries"):
        assert np.array_equal(getattr(fast, name), getattr(reference, name)), name
    assert fast.busy_s == pytest.approx(reference.busy_s)
    assert fast.lost_s == pytest.approx(reference.lost_s)


@examples(200)
@given(pool=pools())
def test_every_request_is_served_or_given_up(pool: Pool) -> None:
    run = run_pool(pool)
    served = np.isfinite(run.end_s)
    assert np.array_equal(served, run.group >= 0)
    assert (run.retries[~served] > MOST_RETRIES).all()
    assert (run.retries[served] <= MOST_RETRIES).all()
    assert (run.begin_s[served] >= pool.arrival_s[served]).all()
    factors = np.array(pool.factors())[run.group[served]]
    alone_s = pool.service.ttft_s[served] * factors
    assert (run.end_s[served] - run.begin_s[served] >= alone_s).all()
    if pool.service.overlap.holds or pool.replicas >= len(pool.arrival_s):
        assert np.array_equal(run.end_s[served] - run.begin_s[served], alone_s)
    if pool.outages is None:
        assert served.all()
        assert run.lost_s == 0
        ends_s = run.end_s + pool.service.hold_s
        assert run.busy_s <= pool.replicas * (ends_s.max() - run.begin_s.min()) * (1 + 1e-9)
        assert not run.retries.any()


@examples(100)
@given(pool=pools())
def test_a_failure_ends_what_runs_and_nothing_begins_on_a_group_that_is_away(pool: Pool) -> None:
    if pool.outages is None:
        return
    run = run_pool(pool)
    for group in range(pool.replicas):
        mine = (run.group == group) & np.isfinite(run.end_s)
        back_s = 0.0
        for uptime_s in pool.outages.uptimes_s(group):
            fails_s = back_s + uptime_s
            if fails_s > run.end_s[mine].max(initial=0.0):
                break
            assert not ((run.begin_s[mine] < fails_s) & (run.end_s[mine] > fails_s)).any()
            back_s = fails_s + pool.outages.repair_s
            assert not ((run.begin_s[mine] > fails_s) & (run.begin_s[mine] < back_s)).any()


@examples(60)
@given(pool=pools())
def test_more_like_groups_are_never_worse_first_come(pool: Pool) -> None:
    # Begins only move earlier with more servers, where nothing depends on which server (Kiefer and Wolfowitz).
    service = replace(pool.service, overlap=Overlap.whole(), length_class=0 * pool.service.length_class)
    plain = replace(pool, service=service, order="first-come", slowness=(), outages=None)
    more = replace(plain, replicas=plain.replicas + 1)
    assert (run_pool(more).begin_s <= run_pool(plain).begin_s + 1e-12).all()


def poisson(count: int, rate_per_s: float, seed: int) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate_per_s, count))


def waits(arrival_s: np.ndarray, service_s: np.ndarray, groups: int) -> np.ndarray:
    """Without the first tenth, in which queues build up."""
    run = run_pool(Pool(arrival_s=arrival_s, service=Service.plain(service_s), replicas=groups))
    return (run.begin_s - arrival_s)[len(arrival_s) // 10 :]


def erlang_c(groups: int, load: float) -> float:
    """Probability that a Poisson arrival waits for one of so many exponential servers; load in servers."""
    terms = [load**k / math.factorial(k) for k in range(groups)]
    last = load**groups / math.factorial(groups) * groups / (groups - load)
    return last / (sum(terms) + last)


@pytest.mark.parametrize(("groups", "share"), [(1, 0.5), (4, 0.7), (8, 0.7)])
def test_exponential_service_waits_as_erlang_says(groups: int, share: float) -> None:
    # Waits depend on each other, so one seed's mean is off by 1 to 3 %, and that of eight by 0.3 to 1 %.
    count, load = 250_000, groups * share
    drawn = [np.random.default_rng(100 + seed).exponential(1.0, count) for seed in range(8)]
    waited = np.concatenate([waits(poisson(count, load, seed), drawn[seed], groups) for seed in range(8)])
    chance = erlang_c(groups, load)
    assert (waited > 0).mean() == pytest.approx(chance, rel=0.02)
    assert waited.mean() == pytest.approx(chance / (groups - load), rel=0.02)
    tail_s = math.log(chance / 0.02) / (groups - load)  # P(W > t) = C exp(-(c - load) t)
    assert np.quantile(waited, 0.98) == pytest.approx(tail_s, rel=0.02)


def crommelin(groups: int, load: float) -> float:
    """Mean wait of Poisson arrivals for servers that take one second each.

    Every c-th prompt comes to the same server (Crommelin 1932), so the wait is the largest of a random walk with
    steps 1 - Erlang(c): Spitzer's sum of E(k - Erlang(kc))+ / k.
    """
    from scipy.stats import poisson as law

    k = np.arange(1, 3000)
    return float((law.sf(k * groups - 1, k * load) - groups / load * law.sf(k * groups, k * load)).sum())


def test_the_formula_for_one_server_is_pollaczek_and_khinchine() -> None:
    assert crommelin(1, 0.7) == pytest.approx(0.7 / (2 * (1 - 0.7)), rel=1e-9)


@pytest.mark.parametrize(("groups", "share"), [(1, 0.7), (3, 0.7), (8, 0.75)])
def test_constant_service_waits_as_crommelin_says(groups: int, share: float) -> None:
    # Means of so many waits that depend on each other differ by 1 to 2 % from seed to seed; six of them by 0.7 %.
    count, load = 400_000, groups * share
    means = [waits(poisson(count, load, seed), np.ones(count), groups).mean() for seed in range(6)]
    assert np.mean(means) == pytest.approx(crommelin(groups, load), rel=0.02)


def test_failures_of_a_single_server_cost_what_theory_says() -> None:
    # Work is lost and begun anew: exponential service s, failures at rate f, repair r. Each try ends by finishing
    # (rate 1/s) or failing (rate f), so a prompt needs 1 + f s tries on average, and f s repairs.
    count, mean_s, mtbf_s, repair_s = 200_000, 1.0, 5.0, 0.5
    rng = np.random.default_rng(31)
    service_s = np.full(count, 1.0)
    run = run_pool(
        Pool(
            arrival_s=np.zeros(count),
            service=Service.plain(service_s),
            replicas=1,
            outages=Outages.drawn(mtbf_s, repair_s, seed=int(rng.integers(100))),
        )
    )
    # Constant service: (e^(f s) - 1) / f of uptime a prompt, and a repair each time that fails: e^(f s) - 1 times.
    tries = math.exp(mean_s / mtbf_s) - 1
    assert run.end_s.max() / count == pytest.approx(tries * (mtbf_s + repair_s), rel=0.02)
    assert run.retries.mean() == pytest.approx(tries, rel=0.02)


def test_requests_that_cannot_finish_are_given_up_and_told() -> None:
    def uptimes_s(group: int) -> Iterator[float]:
        return iter(cycle([1.0]))

    pool = Pool(
        arrival_s=np.array([0.0, 0.5]),
        service=Service.plain(np.array([2.0, 0.25])),
        replicas=1,
        outages=Outages(uptimes_s=uptimes_s, repair_s=1.0),
        order="shortest-first",
    )
    for run in (run_pool(pool), PoolProcesses(pool).run()):
        assert np.isinf(run.end_s[0])
        assert run.retries[0] == MOST_RETRIES + 1
        assert np.isfinite(run.end_s[1])


def fleet_workload(count: int = 60) -> Workload:
    rng = np.random.default_rng(5)
    return Workload(
        name="made",
        kind="csv",
        arrival_s=np.cumsum(np.concatenate([[0.0], rng.exponential(0.3, count - 1)])),
        context_len=rng.integers(1, 100, count),
        cached_prefix=np.zeros(count, dtype=np.int64),
        output_tokens=np.ones(count, dtype=np.int64),
    )


def services(workload: Workload, fits: int) -> dict[Kind, Service]:
    """Times in proportion to length, twice as fast on two GPUs; one GPU takes contexts up to `fits`."""
    alone_s = workload.context_len / 50.0
    one = replace(
        Service.plain(np.where(workload.context_len <= fits, alone_s, np.inf)), new_tokens=workload.context_len
    )
    two = replace(Service.plain(alone_s / 2, num_gpus=2), new_tokens=workload.context_len)
    return {Kind(1): one, Kind(2): two}


def test_prompts_go_by_length_unless_they_do_not_fit() -> None:
    workload = fleet_workload()
    short = GroupPlan(gpus_per_group=1, replicas=2, least_new=1, most_new=40)
    long = GroupPlan(gpus_per_group=2, replicas=1, least_new=41, most_new=100)
    pool_of = route(workload.new_tokens, services(workload, fits=20), (short, long))
    assert np.array_equal(pool_of == 0, workload.new_tokens <= 20)
    alone = route(workload.new_tokens, services(workload, fits=20), (short,))
    assert np.array_equal(alone == -1, workload.new_tokens > 20)


def test_a_fleet_adds_up_and_counts_what_fits_nowhere() -> None:
    workload = fleet_workload()
    plans = (GroupPlan(gpus_per_group=1, replicas=2, least_new=1, most_new=100),)
    run = run_fleet(workload, services(workload, fits=90), plans, Conditions())
    never = int((workload.context_len > 90).sum())
    assert never > 0
    assert run.unserved == never
    assert percentile_of(run.ttft_s, 100) == math.inf
    assert 0 < run.utilisation < 1
    assert (run.ttft_s <= 1e9).mean() == pytest.approx(1 - never / len(workload))
    assert run.goodput_per_s(1e9) * run.horizon_s == pytest.approx(len(workload) - never)
    by_simpy = run_fleet(
        workload, services(workload, fits=90), plans, Conditions(), serve=lambda pool: PoolProcesses(pool).run()
    )
    assert by_simpy.ttft_s == pytest.approx(run.ttft_s, rel=1e-12)


def test_slow_groups_and_failures_are_the_same_for_the_same_seed() -> None:
    workload = fleet_workload(400)
    plans = (GroupPlan(gpus_per_group=2, replicas=4, least_new=1, most_new=100),)
    calm, rough = Conditions(), Conditions(mtbf_s=20.0, repair_s=3.0, slow_share=0.3, slow_factor=2.0, seed=1)
    first, again = (run_fleet(workload, services(workload, 100), plans, rough) for _ in range(2))
    assert np.array_equal(first.ttft_s, again.ttft_s)
    assert first.retries.sum() > 0
    assert first.lost_gpu_s > 0
    assert first.unserved == 0
    assert first.ttft_s.mean() > run_fleet(workload, services(workload, 100), plans, calm).ttft_s.mean()
    other = run_fleet(workload, services(workload, 100), plans, replace(rough, seed=2))
    assert not np.array_equal(first.ttft_s, other.ttft_s)


@given(values=st.lists(st.integers(0, 50), min_size=1, max_size=60), percentile=st.floats(0.1, 100))
def test_a_percentile_is_met_exactly_when_enough_are_in_time(values: list[int], percentile: float) -> None:
    array = np.array(values, dtype=float)
    value = percentile_of(array, percentile)
    needed = math.ceil(percentile / 100 * len(array) - 1e-9)
    assert (array <= value).sum() >= needed
    assert (array < value).sum() < max(1, needed)


def test_a_million_requests_take_seconds() -> None:
    count = 200_000  # a fifth of them, in a fifth of 30 s
    arrival_s = poisson(count, 10.0, seed=41)
    service = Service.plain(np.random.default_rng(42).exponential(1.0, count))
    outages = Outages.drawn(1000.0, 10.0, seed=1)
    begin_s = time.process_time()
    run = run_pool(Pool(arrival_s=arrival_s, service=service, replicas=12))
    rough = run_pool(Pool(arrival_s=arrival_s, service=service, replicas=12, order="shortest-first", outages=outages))
    assert time.process_time() - begin_s < 2 * 6
    assert run.busy_s == pytest.approx(service.ttft_s.sum())
    assert rough.busy_s == pytest.approx(service.ttft_s.sum() + rough.lost_s)
