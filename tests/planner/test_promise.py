"""The promise of a plan, and the operations that limit it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvrsim
from kvrsim.arguments import TargetArgs
from kvrsim.executors.access import execution_of
from kvrsim.noise import Distribution
from kvrsim.strategies import get_strategy
from planner.candidates import Candidate, Search
from planner.capacity.fleet import Overlap, Service
from planner.capacity.workload import RequestSource
from planner.percentile import percentile_of
from planner.promise import promise_of
from planner.prompt_queue import PromptQueue
from tests.building import examples


def candidate(strategy: str = "tsp", **asked: Any) -> Candidate:
    scenario, _ = kvrsim.make_scenario(**{"gpus": 2, "ctx": "4k"} | asked)
    return Search().candidate(execution_of(scenario, get_strategy(strategy)))


def test_an_idle_promise_is_the_upper_end_of_the_interval() -> None:
    plan = kvrsim.plan(ctx="4k", gpus=2, strategies=["tp", "tsp"])
    promise = plan.promise
    assert promise is not None
    assert (promise.expected_s, promise.high_s, promise.confidence) == (plan.best.ttft_s, plan.best.ttft_high_s, 0.9)
    assert (promise.at_rate, promise.under_noise, promise.meets, promise.most_rate_per_s) == (None,) * 4


def share_waiting_at_most(waits: float, load: float) -> float:
    """Erlang's distribution of the waiting time in an M/D/1 queue; waits: in units of the service time."""
    terms = (
        (load * (k - waits)) ** k / math.factorial(k) * math.exp(-load * (k - waits)) for k in range(int(waits) + 1)
    )
    return (1 - load) * sum(terms)


@pytest.mark.parametrize(("load", "percentile"), [(0.3, 90.0), (0.6, 90.0), (0.6, 99.0), (0.8, 50.0), (0.8, 90.0)])
def test_ranks_that_end_together_serve_as_a_queue_of_equal_services(load: float, percentile: float) -> None:
    prefill = candidate("tp")
    rate = load / prefill.ttft_s
    at_rate = promise_of(prefill, TargetArgs(rate=rate, percentile=percentile)).at_rate
    assert at_rate is not None
    assert at_rate.expected_s is not None
    share = share_waiting_at_most(at_rate.expected_s / prefill.ttft_s - 1, load)
    assert share == pytest.approx(percentile / 100, abs=0.01)


STRATEGIES = ("tp", "tsp", "kvr-s", "pp", "tp2+kvr-s")


@examples(12)
@given(
    strategy=st.sampled_from(STRATEGIES),
    load=st.floats(0.05, 0.9),
    percentile=st.sampled_from((50.0, 90.0, 99.0)),
    context=st.sampled_from((1500, 2048, 3001, 16_384)),
)
def test_a_rate_has_the_percentile_of_a_capacity_plan(
    strategy: str, load: float, percentile: float, context: int
) -> None:
    """The same strategy in one group, the same arrivals: only a searched partition may differ."""
    asked: dict[str, Any] = {"model": "llama-3.1-8b", "cluster": "h100-nvlink"}
    prefill = candidate(strategy, gpus=4, ctx=context, **asked)
    rate = load / prefill.ttft_s
    at_rate = promise_of(prefill, TargetArgs(rate=rate, percentile=percentile)).at_rate
    assert at_rate is not None
    assert at_rate.expected_s is not None
    fleet = kvrsim.capacity(
        requests=f"synthetic:poisson,rate={rate!r},context={context}",
        slo_ttft=1000,
        percentile=percentile,
        strategies=strategy,
        group_sizes="4",
        max_gpus=4,
        **asked,
    )
    assert fleet.answer is not None
    allowed = 0.03 if get_strategy(strategy).partition_rule == "search" else 1e-6
    assert at_rate.expected_s == pytest.approx(fleet.answer.target_ttft_s, rel=allowed)


def test_a_pipeline_works_on_several_prompts() -> None:
    """At a rate above one prompt per TTFT, ranks that end together fall behind, and stages do not."""
    together, stages = (candidate(name, ctx="8k", gpus=4) for name in ("tp", "pp"))
    for prefill, keeps_up in ((together, False), (stages, True)):
        at_rate = promise_of(prefill, TargetArgs(rate=1.03 / prefill.ttft_s)).at_rate
        assert at_rate is not None
        assert (at_rate.expected_s is not None) is keeps_up


@given(rates=st.lists(st.floats(0.01, 2.0), min_size=2, max_size=5).map(sorted), slower=st.floats(1.0, 3.0))
@examples(20)
def test_more_load_and_slower_machines_never_take_less(rates: list[float], slower: float) -> None:
    workload = RequestSource.of("synthetic:poisson,rate=1,requests=2000,context=8").workload(0)
    overlap = Overlap(finish=((0.5, 0.75, 1.0),), slack=((0.0, 0.125, 0.25),))
    service = replace(Service.plain(np.ones(len(workload))), overlap=overlap)
    queue = PromptQueue(arrivals=(workload,), services=(service,), prompts_together=1)
    assert queue.busy_s == 0.75
    times = [queue.percentile_s(rate, 90.0) for rate in rates]
    slow = [queue.percentile_s(rate, 90.0, slower) for rate in rates]
    for rate, taken_s, slow_s in zip(rates, times, slow, strict=True):
        assert (taken_s is None) == (rate * 0.75 >= 1)
        assert slow_s is None or (taken_s is not None and slow_s >= taken_s * (1 - 1e-9))
    finite = [taken_s for taken_s in times if taken_s is not None]
    assert finite == sorted(finite)


def test_the_largest_rates_meet_the_target_and_more_misses_it() -> None:
    prefill = candidate()
    slo_s = 2 * prefill.ttft_s
    idle = promise_of(prefill, TargetArgs(slo=slo_s))
    assert idle.most_rate_per_s is not None
    assert idle.expected_most_rate_per_s is not None
    assert idle.most_rate_per_s < idle.expected_most_rate_per_s
    for most, name in ((idle.most_rate_per_s, "meets"), (idle.expected_most_rate_per_s, "expected_meets")):
        assert getattr(promise_of(prefill, TargetArgs(slo=slo_s, rate=0.99 * most)), name) is True
        assert getattr(promise_of(prefill, TargetArgs(slo=slo_s, rate=1.02 * most)), name) is False
    hasty = promise_of(prefill, TargetArgs(slo=prefill.ttft_s / 2))
    assert (hasty.meets, hasty.expected_meets) == (False, False)
    assert (hasty.most_rate_per_s, hasty.expected_most_rate_per_s) == (0, 0)


def noise_of(samples_s: np.ndarray[Any, Any]) -> Distribution:
    return Distribution.of(samples_s.tolist(), quiet_s=1.0, seed=0)


@pytest.mark.parametrize("log_sd", [0.02, 0.3])
def test_under_noise_the_promise_is_that_of_a_prompt_drawn_at_random(log_sd: float) -> None:
    """A Monte Carlo of the error of the prediction times a sample of the noise."""
    prefill, rng = candidate(), np.random.default_rng(1)
    noisy = noise_of(prefill.ttft_s * 1.2 * np.exp(log_sd * rng.standard_normal(400)))
    promise = promise_of(prefill, TargetArgs(slo=1.0), noisy)
    assert promise.expected_s == noisy.mean.value_s
    low_s, high_s = prefill.interval.low_s, prefill.interval.high_s
    normal = rng.standard_normal(100_000) / 1.2816
    sides = np.where(normal < 0, np.log(prefill.ttft_s / low_s), np.log(high_s / prefill.ttft_s))
    drawn_s = np.exp(normal * sides) * rng.choice(noisy.samples_s, len(normal))
    assert float((drawn_s <= promise.high_s).mean()) == pytest.approx(0.9, abs=0.005)
    assert promise.under_noise is not None
    assert promise.under_noise.expected_s == percentile_of(noisy.samples_s, 90)
    machine = high_s / prefill.ttft_s
    assert promise.under_noise.high_s == pytest.approx(machine * percentile_of(noisy.samples_s, 90))


def test_a_target_under_noise_is_compared_with_the_noise_and_not_with_the_quiet_machine() -> None:
    prefill = candidate()
    noisy = noise_of(np.linspace(1.5, 2.0, 200) * prefill.ttft_s)
    quiet = promise_of(prefill, TargetArgs(slo=1.3 * prefill.ttft_s))
    assert quiet.meets is True
    assert promise_of(prefill, TargetArgs(slo=1.3 * prefill.ttft_s), noisy).expected_meets is False
    busy = promise_of(prefill, TargetArgs(rate=0.1 / prefill.ttft_s), noisy).at_rate
    assert busy is not None
    assert busy.expected_s is not None
    assert busy.expected_s >= percentile_of(noisy.samples_s, 90) * 0.99


QUESTIONS: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"model": "deepseek-v3.2", "cluster": "h100-2x8-ndr400", "ctx": "128k"}, "tp", "sparse attention"),
    ({"gpus": 8, "ctx": "16k"}, "tsp", "attention"),
    ({"model": "llama-3.1-8b", "cluster": "h100-nvlink", "ctx": "4k"}, "single", "matrix products"),
    ({"gpus": 8, "ctx": "4k", "link_bandwidth": "1GB/s"}, "tsp", "communication"),
    ({"gpus": 8, "ctx": "16k", "link_bandwidth": "10GB/s", "topology": "bus"}, "kvr-s", "attention"),
)


@pytest.mark.parametrize(("asked", "strategy", "top"), QUESTIONS)
def test_shares_of_the_critical_path_add_up_to_ttft(asked: dict[str, Any], strategy: str, top: str) -> None:
    """If all operations take twice as long, so does TTFT; therefore the shares add up to one."""
    scenario, _ = kvrsim.make_scenario(**asked)
    limits = Search().candidate(execution_of(scenario, get_strategy(strategy))).limits
    assert sum(one.share for one in limits) == pytest.approx(1, abs=0.05)
    assert [one.share for one in limits] == sorted((one.share for one in limits), reverse=True)
    assert top in limits[0].operation
