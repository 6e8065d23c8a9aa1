"""The search: what it finds meets the target, and nothing cheaper of the same design does."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from kvrsim.builder import make_scenario
from kvrsim.interp import percentile_of
from planner.capacity.confidence import of_replications, of_trace
from planner.capacity.designs import DesignSearch, Fit, Limits
from planner.capacity.evaluations import Design, Evaluations, LengthBucket, Target
from planner.capacity.fleet.fleet import Conditions
from planner.capacity.fleet.times import ServiceTimes
from planner.capacity.workloads.source import Source
from planner.capacity.workloads.workload import Workload


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Source.of("synthetic:bursty,rate=6,requests=1500,cv=2,context=lognormal:1k:1,max=8k").workload(3)


@pytest.fixture(scope="module")
def times(workload: Workload) -> ServiceTimes:
    scenario, _ = make_scenario(ctx=1024, gpus=1)
    return ServiceTimes.for_workloads(scenario, [workload])


def evaluations(workload: Workload, times: ServiceTimes, slo_s: float, **conditions: object) -> Evaluations:
    asked = Conditions(**conditions)  # type: ignore[arg-type]
    return Evaluations([workload], times, asked, Target(slo_s=slo_s, percentile=99.0))


LIMITS = Limits(sizes=(1, 2, 4), max_gpus=40)


def meets(tried: Evaluations, fit: Fit) -> bool:
    run = tried.runs(fit.plans)[0]
    return percentile_of(run.ttft_s, tried.target.percentile) <= tried.target.slo_s


@pytest.mark.parametrize("slo_s", [0.6, 1.0, 2.0, 5.0])
def test_uniform_fleets_are_the_smallest(workload: Workload, times: ServiceTimes, slo_s: float) -> None:
    tried = evaluations(workload, times, slo_s)
    search = DesignSearch(tried, LIMITS)
    fits = {fit.sizes[0]: fit for fit in search.fits(search.uniform())}
    for design in search.uniform():
        size = design[0].gpus_per_group
        first = next(
            (n for n in range(1, 1 + LIMITS.max_gpus // size) if tried.misses(design, 0, n) <= tried.allowed), None
        )
        assert (fits[size].replicas[0] if size in fits else None) == first
    assert fits or slo_s < 1
    assert all(meets(tried, fit) for fit in fits.values())


@pytest.mark.parametrize("order", ["first-come", "shortest-first"])
def test_mixed_fleets_meet_the_target_and_are_no_dearer(workload: Workload, times: ServiceTimes, order: str) -> None:
    tried = evaluations(workload, times, 1.0, order=order)
    search = DesignSearch(tried, LIMITS)
    uniform = search.fits(search.uniform())
    fits = search.mixed(uniform)
    assert fits[0].cost <= uniform[0].cost
    assert [fit.cost for fit in fits] == sorted(fit.cost for fit in fits)
    for fit in fits[:6]:
        assert meets(tried, fit)
        late = tried.runs(fit.plans)[0].ttft_s > tried.target.slo_s
        assert late.sum() == fit.misses
        ends = [bucket.most_new for bucket in fit.design]
        assert ends == sorted(set(ends))
        assert [bucket.least_new for bucket in fit.design] == [1, *(end + 1 for end in ends[:-1])]
        assert ends[-1] == workload.new_tokens.max()


def test_no_cheaper_split_of_the_same_design(workload: Workload, times: ServiceTimes) -> None:
    tried = evaluations(workload, times, 1.0)
    search = DesignSearch(tried, LIMITS)
    longest = int(workload.new_tokens.max())
    for sizes in ((1, 2), (2, 4), (1, 1)):
        design: Design = (
            LengthBucket(gpus_per_group=sizes[0], least_new=1, most_new=2048),
            LengthBucket(gpus_per_group=sizes[1], least_new=2049, most_new=longest),
        )
        fit = search.fit(design)
        feasible = [
            sizes[0] * a + sizes[1] * b
            for a, b in itertools.product(range(1, 9), range(1, 9))
            if tried.misses(design, 0, a) + tried.misses(design, 1, b) <= tried.allowed
        ]
        assert (fit.cost if fit else None) == (min(feasible) if feasible else None)


def test_prices_decide_where_they_differ(workload: Workload, times: ServiceTimes) -> None:
    tried = evaluations(workload, times, 2.0)
    dear_alone = replace(LIMITS, prices={1: 10.0, 2: 1.0, 4: 1.0}, by_cost=True)
    search = DesignSearch(tried, dear_alone)
    best = search.mixed(search.fits(search.uniform()))[0]
    assert 1 not in best.sizes
    assert best.cost == sum(plan.num_gpus * dear_alone.prices[plan.gpus_per_group] for plan in best.plans)


def test_several_workloads_are_judged_together(workload: Workload, times: ServiceTimes) -> None:
    half = workload.only(np.arange(len(workload)) < len(workload) // 2)
    both = Evaluations([workload, half], times, Conditions(), Target(slo_s=1.0, percentile=99.0))
    search = DesignSearch(both, LIMITS)
    fit = search.fits(search.uniform())[0]
    late = np.concatenate([run.ttft_s for run in both.runs(fit.plans)]) > 1.0
    assert late.sum() <= both.allowed
    assert both.requests == len(workload) + len(half)


def test_the_interval_of_a_trace_holds_its_percentile_and_widens_with_fewer_requests() -> None:
    rng = np.random.default_rng(1)
    many, few = rng.exponential(1.0, 40_000), rng.exponential(1.0, 2_000)
    wide, narrow = of_trace(few, 99, 0), of_trace(many, 99, 0)
    for found, values in ((wide, few), (narrow, many)):
        assert found.low_s is not None
        assert found.high_s is not None
        assert found.low_s <= percentile_of(values, 99) <= found.high_s
    assert narrow.high_s - narrow.low_s < wide.high_s - wide.low_s  # type: ignore[operator]
    assert of_trace(many, 99, 0) == narrow
    assert of_trace(few[:50], 99, 0).low_s is None
    assert of_trace(np.append(few, [np.inf] * 500), 99, 0).low_s is None


def test_the_bootstrap_covers_as_often_as_it_says() -> None:
    true, covered = -np.log(0.05), 0
    for seed in range(120):
        found = of_trace(np.random.default_rng(seed).exponential(1.0, 4000), 95, seed)
        assert found.low_s is not None
        assert found.high_s is not None
        covered += found.low_s <= true <= found.high_s
    assert 0.87 <= covered / 120 <= 1.0  # 95 %, within three standard errors of 120 trials, and bootstraps are short


def test_the_interval_of_replications_is_students() -> None:
    values = [np.full(100, value) for value in (1.0, 2.0, 3.0)]
    found = of_replications(values, 99)
    assert found.value_s == 3.0  # of all requests, as the fleet is judged
    assert found.high_s == pytest.approx(2.0 + 4.3027 / np.sqrt(3), rel=1e-4)
    assert of_replications(values[:1], 99).low_s is None
    one_is_never_served = of_replications([*values, np.array([1.0, np.inf])], 90)
    assert one_is_never_served.value_s == 3.0
    assert one_is_never_served.high_s is None


def test_a_fleet_of_bands_is_late_as_often_as_its_bands(workload: Workload, times: ServiceTimes) -> None:
    tried = Evaluations([workload, workload], times, Conditions(), Target(slo_s=1.0, percentile=99.0))
    design = (
        LengthBucket(gpus_per_group=1, least_new=1, most_new=1500),
        LengthBucket(gpus_per_group=1, least_new=1501, most_new=8192),
    )
    runs = tried.runs([bucket.with_replicas(4) for bucket in design])
    late = sum(int((run.ttft_s > 1.0).sum()) for run in runs)
    assert late == sum(tried.misses(design, index, 4) for index in range(2))
