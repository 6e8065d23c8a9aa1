"""The search: its fleets meet the target, no cheaper fleet of the same design does; and the fleets next to the best."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvrsim.builder import make_scenario
from planner.capacity.fleet import Fleet, FleetLimits, GpuGroup, GroupPool, GroupType, run_pool
from planner.capacity.request import CapacityRequest, Target
from planner.capacity.search import FleetFit, FleetSearch, FleetSimulator
from planner.capacity.times import ServiceTimes, StrategyPolicy, service_times
from planner.capacity.workload import RequestSource, Workload
from planner.percentile import percentile_of

SOURCE = RequestSource.of("synthetic:bursty,rate=6,requests=1500,cv=2,context=lognormal:1k:1,max=8k")
LIMITS = FleetLimits(sizes=(1, 2, 4), max_gpus=40)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return SOURCE.workload(3)


@pytest.fixture(scope="module")
def times(workload: Workload) -> ServiceTimes:
    policy = StrategyPolicy(names=("single", "tsp", "kvr-s"))
    return service_times(make_scenario(ctx=1024, gpus=1)[0], [workload], policy)


def simulator(workloads: list[Workload], times: ServiceTimes, slo_s: float, **more: Any) -> FleetSimulator:
    target = Target(slo_s=slo_s, percentile=99.0)
    return FleetSimulator(
        CapacityRequest(source=SOURCE, target=target, **({"limits": LIMITS} | more)), workloads, times
    )


def bucket(gpus: int, least_new: int, most_new: int) -> GpuGroup:
    return GpuGroup(type=GroupType(gpus), least_new=least_new, most_new=most_new)


def meets(simulated: FleetSimulator, fit: FleetFit) -> bool:
    ttft_s = simulated.runs(fit.fleet)[0].ttft_s
    return percentile_of(ttft_s, simulated.target.percentile) <= simulated.target.slo_s


@pytest.mark.parametrize("slo_s", [0.6, 1.0, 2.0, 5.0])
def test_uniform_fleets_are_the_smallest(workload: Workload, times: ServiceTimes, slo_s: float) -> None:
    simulated = simulator([workload], times, slo_s)
    search = FleetSearch(simulated)
    fits = {fit.sizes[0]: fit for fit in search.fits(search.uniform(search.types))}
    for design in search.uniform(search.types):
        size = design[0].type.gpus
        numbers = range(1, 1 + LIMITS.max_gpus // size)
        first = next((n for n in numbers if simulated.buckets(design)[0].late(n) <= simulated.allowed), None)
        assert (fits[size].design[0].replicas if size in fits else None) == first
    assert fits or slo_s < 1
    assert all(meets(simulated, fit) for fit in fits.values())


def test_mixed_fleets_meet_the_target_and_are_no_dearer(workload: Workload, times: ServiceTimes) -> None:
    simulated = simulator([workload], times, 1.0)
    search = FleetSearch(simulated)
    uniform = search.fits(search.uniform(search.types))
    fits = search.mixed(uniform)
    assert fits[0].cost <= uniform[0].cost
    assert [fit.cost for fit in fits] == sorted(fit.cost for fit in fits)
    for fit in fits[:6]:
        assert meets(simulated, fit)
        assert (simulated.runs(fit.fleet)[0].ttft_s > 1.0).sum() == fit.late
        ends = [group.most_new for group in fit.design]
        assert ends == sorted(set(ends))
        assert [group.least_new for group in fit.design] == [1, *(end + 1 for end in ends[:-1])]
        assert ends[-1] == workload.new_tokens.max()


def test_no_cheaper_split_of_the_same_design(workload: Workload, times: ServiceTimes) -> None:
    simulated = simulator([workload], times, 1.0)
    search = FleetSearch(simulated)
    longest = int(workload.new_tokens.max())
    for sizes in ((1, 2), (2, 4), (1, 1)):
        design: Fleet = (bucket(sizes[0], 1, 2048), bucket(sizes[1], 2049, longest))
        fit = search.fit(design)
        short, long = simulated.buckets(design)
        feasible = [
            sizes[0] * a + sizes[1] * b
            for a, b in itertools.product(range(1, 9), range(1, 9))
            if short.late(a) + long.late(b) <= simulated.allowed
        ]
        assert (fit.cost if fit else None) == (min(feasible) if feasible else None)


def test_prices_decide_where_they_differ(workload: Workload, times: ServiceTimes) -> None:
    limits = replace(LIMITS, prices={1: 10.0, 2: 1.0, 4: 1.0}, by_cost=True)
    search = FleetSearch(simulator([workload], times, 2.0, limits=limits))
    best = search.mixed(search.fits(search.uniform(search.types)))[0]
    assert 1 not in best.sizes
    assert best.cost == limits.cost_per_hour(best.fleet)


@pytest.mark.parametrize("replicas", [2, 6, 8])
def test_a_fleet_of_two_buckets_is_late_as_often_as_its_buckets(
    workload: Workload, times: ServiceTimes, replicas: int
) -> None:
    """Above the number that may be late, a simulation may end early."""
    simulated = simulator([workload, workload], times, 1.0)
    design = (bucket(1, 1, 1500), bucket(1, 1501, 8192))
    runs = simulated.runs(tuple(group.of(replicas) for group in design))
    late = sum(int((run.ttft_s > 1.0).sum()) for run in runs)
    in_buckets = sum(pool.late(replicas) for pool in simulated.buckets(design))
    assert (late <= simulated.allowed) == (in_buckets <= simulated.allowed)
    if late <= simulated.allowed:
        assert in_buckets == late


def test_an_early_end_changes_no_request_before_it(workload: Workload, times: ServiceTimes) -> None:
    simulated = simulator([workload], times, 1.0)
    for group in (GroupType(1), GroupType(4)):
        service = times.service(group, workload)
        pool = GroupPool(arrival_s=workload.arrival_s, service=service, replicas=2)
        limit = replace(simulated.limit, allowed=40)
        whole = run_pool(pool)
        early = run_pool(pool, limit)
        served = np.isfinite(early.end_s)
        assert (early.end_s[served] == whole.end_s[served]).all()
        assert (early.end_s[served] - workload.arrival_s[served] > limit.ttft_s).sum() <= limit.allowed + 1
        late = int((whole.end_s - workload.arrival_s > limit.ttft_s).sum())
        assert served.all() == (late <= limit.allowed)


def test_what_costs_more_than_is_wanted_is_left_out(workload: Workload, times: ServiceTimes) -> None:
    simulated = simulator([workload], times, 1.0)
    found = FleetSearch(simulated)
    best = found.answers(found.all_fits())[0]
    only_best = FleetSearch(simulated, dearest=1.0)
    again = only_best.answers(only_best.all_fits())
    assert again[0].fleet == best.fleet
    assert all(only_best.cost(answer) == only_best.cost(best) for answer in again)
    cheaper = FleetSearch(simulated, below=found.cost(best))
    assert not cheaper.answers(cheaper.all_fits())


def test_a_run_that_is_used_again_is_that_of_the_whole_fleet(workload: Workload, times: ServiceTimes) -> None:
    simulated = simulator([workload], times, 1.0)
    search = FleetSearch(simulated)
    (fit, *_) = search.fits(search.uniform(search.types))
    before = simulated.work.simulated
    again = simulated.runs(fit.fleet)[0]
    assert simulated.work.simulated == before
    fresh = simulator([workload], times, 1.0).runs(fit.fleet)[0]
    assert (again.ttft_s == fresh.ttft_s).all()
    assert (again.begin_s == fresh.begin_s).all()
    assert again.busy_gpu_s == fresh.busy_gpu_s
