"""Tables, maps, plans with noise and fleets are byte for byte the same for any number of processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

import kvrsim
from kvrsim.arguments import FleetArgs
from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.io.schema import to_json
from kvrsim.noise import parse_noise
from planner import processes
from planner.capacity.plan import plan_capacity
from planner.capacity.request import make_request
from planner.capacity.times import StrategyPolicy
from planner.map.map import make_map
from planner.plan import make_plan
from planner.processes import Pool
from planner.table.build import make_table
from planner.uncertainty.noise import Disturbance

REQUESTS = "synthetic:poisson,rate=8,requests=60,context=lognormal:600:0.5,max=1k,cached=20%"


def answers(pool: Pool | None) -> dict[str, str]:
    """JSON of four commands' answers, without the seconds of computing."""
    scenario, _ = make_scenario(ctx=1024, gpus=2)
    noise = Disturbance(noise=parse_noise("jitter:0.1"), num_samples=4, seed=1, pool=pool)
    options = make_request(FleetArgs(requests=REQUESTS, slo_ttft="1s", group_sizes="1,2", replications=1), scenario)
    plan = make_plan(scenario, disturbance=noise, strategies=("kvr-e", "kvr-s"))
    fleet = plan_capacity(scenario, options, StrategyPolicy(names=("single", "tsp", "kvr-s")), pool=pool)
    result = {
        "table": make_table(scenario, (2,), (512, 1024, 768), pool=pool).to_dict(),
        "map": make_map(scenario, lengths=(512, 1024), gpu_counts=(1, 2), pool=pool).to_dict(),
        "plan": to_json(replace(plan, search=replace(plan.search, seconds=0.0))),
        "capacity": to_json(replace(fleet, seconds=0.0)),
    }
    return {name: json.dumps(one) for name, one in result.items()}


@cache
def in_this_process() -> dict[str, str]:
    return answers(None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("backend", "package"), [("loky", "joblib"), ("dask", "distributed"), ("ray", "ray")])
def test_no_backend_changes_a_byte(backend: str, package: str) -> None:
    pytest.importorskip(package)
    with Pool(jobs=2, backend=backend) as pool:
        assert answers(pool) == in_this_process()


def test_progress_counts_up_to_all() -> None:
    reports: list[tuple[float, float | None, str]] = []
    results = Pool().run_in_order(pow, [(2, 3), (3, 2)], "powers", lambda *report: reports.append(report))
    assert (results, reports) == ([8, 9], [(1, 2, "powers"), (2, 2, "powers")])


def test_a_time_budget_ends_only_calls_that_may_be_left_out() -> None:
    pool = Pool(time_budget_s=1e-6)
    assert list(pool.run(pow, [(2, 3)], share=1.0)) == []
    assert list(pool.run(pow, [(2, 3)])) == [8]
    assert list(Pool(time_budget_s=1e6).run(pow, [(2, 3)], share=1.0)) == [8]


@pytest.mark.parametrize("build", [kvrsim.build_table, kvrsim.build_predictor])
def test_a_time_budget_without_a_result_is_refused(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "Pool", partial(Pool, time_budget_s=1e-6))
    with pytest.raises(InputError, match=r"^time_budget: got '1e-06s', accepted: a longer time"):
        build(ctx=256, gpus=2, model="llama-7b", cluster="a100-nvlink", strategy="kvr-s")


@pytest.mark.parametrize(
    ("simulations", "sure", "missing"),
    [(5, False, "on groups of 2 GPUs tsp"), (7, False, "designs of fleets"), (7, True, "designs of fleets")],
)
def test_a_time_budget_leaves_out_strategies_and_fleets(
    monkeypatch: pytest.MonkeyPatch, simulations: int, sure: bool, missing: str
) -> None:
    scenario, _ = make_scenario(ctx=1024, gpus=2)
    asked = FleetArgs(requests=REQUESTS, slo_ttft="1s", group_sizes="1,2", replications=1, sure=sure)
    reports: list[float] = []

    def report(done: float, total: float | None, text: str) -> None:
        reports.append(0.0 if total is None else 100 * done / total)  # without a total, a count of requests

    begin_s = time.time()
    monkeypatch.setattr(processes.time, "time", lambda: begin_s + 10 * (len(reports) >= simulations))
    pool, policy = Pool(time_budget_s=10), StrategyPolicy(names=("single", "tsp"))
    plan = plan_capacity(scenario, make_request(asked, scenario), policy, pool=pool, on_progress=report)
    assert plan.answer is not None
    assert plan.answer.meets
    assert plan.tried
    assert not plan.infeasible  # fleets that are not simulated have no reason
    (note,) = (one for one in plan.warnings if "time-budget 10s ended before all was simulated" in one)
    assert missing in note
    assert 0 == reports[0] <= min(reports[1:]) <= max(reports) <= 100
    assert len(reports) < 20  # simulations; without a budget: 25 or 27


def test_a_backend_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="pool: got 'slurm', accepted: one of loky, dask, ray"):
        Pool(backend="slurm")
