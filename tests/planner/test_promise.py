"""The promise of a plan, and the operations that limit it."""

from __future__ import annotations

import math
from typing import Any

import pytest

import kvrsim
from kvrsim.arguments import TargetArgs
from planner.candidates import Search
from planner.promise import promise_of


def test_an_idle_promise_is_the_upper_end_of_the_interval() -> None:
    plan = kvrsim.plan(ctx="4k", gpus=2, strategies=["tp", "tsp"])
    assert plan.promise is not None
    assert (plan.promise.ttft_s, plan.promise.share) == (plan.best.ttft_high_s, 0.9)
    assert (plan.promise.meets, plan.promise.most_rate_per_s) == (None, None)


def share_waiting_at_most(waits: float, load: float) -> float:
    """Erlang's distribution of the waiting time in an M/D/1 queue; waits: in units of the service time."""
    terms = (
        (load * (k - waits)) ** k / math.factorial(k) * math.exp(-load * (k - waits)) for k in range(int(waits) + 1)
    )
    return (1 - load) * sum(terms)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_under_load_the_queue_is_that_of_equal_services(load: float) -> None:
    promise = promise_of(2.0, TargetArgs(rate=load / 2.0))
    assert promise.ttft_s is not None
    assert share_waiting_at_most(promise.ttft_s / 2.0 - 1, load) == pytest.approx(0.9, abs=0.01)


def test_more_load_never_takes_less_and_too_much_has_no_promise() -> None:
    times = [promise_of(1.0, TargetArgs(rate=rate)).ttft_s for rate in (0.1, 0.3, 0.5, 0.7, 0.9, 0.95)]
    assert None not in times
    assert times == sorted(times)  # type: ignore[type-var]
    assert promise_of(1.0, TargetArgs(rate=1.0)).ttft_s is None


def test_the_largest_rate_meets_the_target_and_more_misses_it() -> None:
    most = promise_of(1.0, TargetArgs(slo=2.0)).most_rate_per_s
    assert most is not None
    assert promise_of(1.0, TargetArgs(slo=2.0, rate=0.99 * most)).meets is True
    assert promise_of(1.0, TargetArgs(slo=2.0, rate=1.02 * most)).meets is False
    assert promise_of(1.0, TargetArgs(slo=0.5)).most_rate_per_s == 0


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
    from kvrsim.strategies import get_strategy

    scenario, _ = kvrsim.make_scenario(**asked)
    limits = Search().candidate(scenario, get_strategy(strategy)).limits
    assert sum(one.share for one in limits) == pytest.approx(1, abs=0.05)
    assert [one.share for one in limits] == sorted((one.share for one in limits), reverse=True)
    assert top in limits[0].operation


@pytest.mark.parametrize(
    ("strategies", "remedy"), [("cp2+ep2", "more GPUs"), ("tp", "--expert-parallel, or more GPUs")]
)
def test_the_remedy_for_experts_depends_on_their_layout(strategies: str, remedy: str) -> None:
    plan = kvrsim.plan(model="mixtral-8x7b", cluster="8xh200", gpus=2, ctx="4k", strategies=strategies)
    assert [one.remedy for one in plan.limits if one.operation == "experts"] == [remedy]
