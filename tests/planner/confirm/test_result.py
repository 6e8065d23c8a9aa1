"""What holds of confirmations whatever the machine does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.kernels.profile import Gather, load_profile
from kvrsim.program import Compute, Program
from kvrsim.results.question import Question
from kvrsim.results.results import StrategyPrediction
from kvrsim.results.timeline import Timeline
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES
from planner.candidates import Search
from planner.confirm.candidates import further_candidates
from planner.confirm.confirm import composed_s, composed_timeline, corrected_for, drift_of
from planner.confirm.hardware import Hardware, other_device_note
from planner.confirm.result import (
    ClockDrift,
    Confirmation,
    MeasuredCandidate,
    Targets,
    first_token_rank,
    seconds_by_part,
)
from planner.simulate import run_simulation
from tests.building import Draws, any_scenario, draws, examples
from tests.planner.confirm.confirm_setup import made_up_profile
from validate.machine.sleep_ranks import Sleepers, noisy_ttft_s, ring_traffic, sleep

NOTHING = Timeline(strategy="kvr", num_ranks=1, spans=())


def candidate(
    name: str,
    predicted_s: float,
    samples_s: tuple[float, ...],
    logits: float = 0.0,
    drift_corrected_s: float | None = None,
) -> MeasuredCandidate:
    ends = dict(ttft_low_s=predicted_s, ttft_high_s=predicted_s)
    return MeasuredCandidate(
        prediction=StrategyPrediction(strategy=name, partition=(8,), ttft_s=predicted_s, fits=True, **ends),
        drift_corrected_s=drift_corrected_s,
        samples_s=samples_s,
        logits_error=logits,
        logits_scale=2.0,
        predicted=NOTHING,
        measured=None,
    )


def confirmation(
    *candidates: MeasuredCandidate, targets: Targets | None = None, drift: ClockDrift | None = None
) -> Confirmation:
    scenario, _ = make_scenario(ctx=8, gpus=2, model="llama-7b")
    return Confirmation(
        question=replace(Question.of(scenario), dtype="fp32"),
        mode="ranks",
        candidates=candidates,
        chosen=int(np.argmin([one.predicted_s for one in candidates])),
        tsp="",
        measured=(),
        modelled=(),
        conditions={},
        drift=drift,
        targets=targets or Targets(),
        warnings=(),
    )


TIMES = st.lists(st.floats(0.1, 10), min_size=3, max_size=3).map(tuple)


@given(samples=st.lists(TIMES, min_size=1, max_size=5), data=st.data())
def test_regret_is_nothing_for_the_best_and_never_below(samples: list[tuple[float, ...]], data: Any) -> None:
    predicted = data.draw(st.lists(st.floats(0.1, 10), min_size=len(samples), max_size=len(samples)))
    found = confirmation(*(candidate(str(i), p, s) for i, (p, s) in enumerate(zip(predicted, samples, strict=True))))
    assert found.regret >= 0
    assert (found.regret == 0) == (found.choice.median_s == found.best.median_s)
    assert found.to_dict()["ok"] is (not found.reasons)


def test_a_regret_counts_beyond_the_spread_only() -> None:
    steady = candidate("a", 1.0, (1.10, 1.11, 1.12)), candidate("b", 2.0, (1.00, 1.01, 1.02))
    assert confirmation(*steady).regret_beyond_spread
    assert any("regret" in reason for reason in confirmation(*steady).reasons)
    loose = candidate("a", 1.0, (0.90, 1.10, 1.60)), candidate("b", 2.0, (1.20, 1.00, 0.90))
    assert confirmation(*loose).regret == pytest.approx(0.1)
    assert not any("regret" in reason for reason in confirmation(*loose).reasons)


@examples(30)
@given(samples=st.lists(TIMES, min_size=2, max_size=6))
def test_pairs_are_orders_or_ties_and_the_exact_prediction_orders_them_all(samples: list[tuple[float, ...]]) -> None:
    exact = confirmation(*(candidate(str(i), sorted(s)[1], s) for i, s in enumerate(samples)))
    orders, places = exact.orders, exact.places()
    assert orders.right == len(orders.significant)
    assert [one["predicted_rank"] for one in places] == [one["measured_rank"] for one in places]
    assert orders.num_pairs - len(orders.significant) == sum(len(one["tied_with"]) for one in places) / 2
    reverse = confirmation(*(candidate(str(i), -sorted(s)[1], s) for i, s in enumerate(samples)))
    assert set(reverse.orders.wrong) == set(orders.significant)
    few = confirmation(*(candidate(str(i), 1.0, s[:2]) for i, s in enumerate(samples)))
    assert few.orders.significant == ()


@examples(8)
@given(rng=draws(), name=st.sampled_from(["single", "tsp", "kvr-e", "ring", "ulysses"]))
def test_seconds_by_part_add_up_to_the_ttft(rng: Draws, name: str) -> None:
    scenario = any_scenario(rng, topologies=("switch", "bus"))
    try:
        run = run_simulation(scenario, strategy=name, record=["timeline"])
    except InputError:
        return  # heads that the ranks do not divide
    assert run.timeline is not None
    parts = seconds_by_part(run.timeline, first_token_rank(run.timeline))
    assert sum(parts.values()) == pytest.approx(run.ttft_s)
    assert min(parts.values()) >= 0


def test_what_a_slower_machine_explains_is_told() -> None:
    scenario, _ = make_scenario(ctx=8192, gpus=2, model="llama-7b", profile=made_up_profile())
    predicted_s = drift_of(scenario, (1.0,)).predicted_s
    drift = drift_of(scenario, (1.2 * predicted_s, 1.25 * predicted_s, 1.4 * predicted_s))
    assert (drift.num_tokens, drift.speed) == (4096, pytest.approx(0.8))
    slower = drift_of(corrected_for(drift, scenario), (1.0,))
    assert slower.predicted_s == pytest.approx(predicted_s / 0.8, rel=0.02)  # but for the host
    one = candidate("a", 1.0, (1.25, 1.25, 1.25), drift_corrected_s=1.25)
    assert "calibrate again" in confirmation(one, drift=drift).reasons[0]
    other = candidate("a", 1.0, (1.25, 1.25, 1.25), drift_corrected_s=1.0)
    assert "calibrate again" not in confirmation(other, drift=drift).reasons[0]
    assert other.rel_error_after_drift == other.rel_error == pytest.approx(-0.2)


@pytest.mark.parametrize("error", [1e-3, float("nan"), float("inf")])
def test_logits_that_differ_are_a_reason(error: float) -> None:
    good, bad = candidate("a", 1.0, (1.0, 1.0, 1.0)), candidate("b", 1.0, (1.0, 1.0, 1.0), logits=error)
    assert confirmation(good, good).ok
    found = confirmation(good, bad)
    assert not found.ok
    assert "b: logits differ" in found.reasons[0]
    assert found.max_logit_error == pytest.approx(error, nan_ok=True)
    assert confirmation(good, bad, targets=Targets(logits=1.0)).ok is (error == 1e-3)


@pytest.mark.parametrize(("num_gpus", "ctx", "count"), [(2, 2048, 2), (3, 999, 4), (8, 16384, 3), (2, 3, 3)])
def test_further_partitions_are_apart_and_the_best_come_first(num_gpus: int, ctx: int, count: int) -> None:
    scenario, _ = make_scenario(ctx=ctx, gpus=num_gpus, model="llama-7b", profile=made_up_profile())
    first = [Search().candidate(scenario, STRATEGIES[name]) for name in ("kvr-e", "kvr-s")]
    further = list(further_candidates(first[1], first, count).values())
    assert len(further) == count if num_gpus < 8 and ctx > 100 else len(further) <= count
    apart = max(1, round(ctx / num_gpus / 16))
    known = [one.partition for one in (*first, *further)]
    for index, one in enumerate(known[2:], start=2):
        assert one.num_tokens == ctx
        for other in known[:index]:
            assert max(abs(a - b) for a, b in zip(one.boundaries, other.boundaries, strict=True)) >= apart
    ttft_s = [one.ttft_s for one in further]
    assert ttft_s == sorted(ttft_s)


def parts_of(program: Program) -> list[dict[tuple[int | None, str], float]]:
    """A program's own device times, as virtual ranks would bring them."""
    found = []
    for rank in range(program.num_ranks):
        parts: dict[tuple[int | None, str], float] = {}
        for layer, op in program.ops(rank):
            if isinstance(op, Compute):
                names = {"assemble": "append", "step": "embedding", "mask": "embedding"}  # as virtual ranks measure
                key = (layer, names.get(op.name, op.name))
                parts[key] = parts.get(key, 0.0) + op.device_s.item()
        found.append(parts)
    return found


@examples(40)
@given(rng=draws(), name=st.sampled_from(["single", "tsp", "kvr-e"]))
def test_virtual_ranks_that_measure_what_is_predicted_compose_to_the_prediction(rng: Draws, name: str) -> None:
    scenario: Scenario = any_scenario(rng, host=False, topologies=("switch", "chain", "bus"))
    one = Search().candidate(scenario, STRATEGIES[name])
    repeats = [parts_of(one.program)] * 2
    assert composed_s(one, repeats) == pytest.approx((one.ttft_s,) * 2)
    assert composed_timeline(one, repeats).end_s >= one.ttft_s * (1 - 1e-9)


def test_the_all_gather_is_the_one_that_links_were_fitted_to(tmp_path: Path) -> None:
    profile = made_up_profile()
    fitted_to: dict[Gather | None, Gather] = {"ring": "ring", "collective": "collective", None: "ring"}
    for fitted, gather in fitted_to.items():
        # A sentence about the source decides nothing.
        fit = replace(profile.operations["all_gather"], source="x (nccl, faster than ring)", gather=fitted)
        replace(profile, operations={"all_gather": fit}).write(tmp_path / "profile.json")
        told = load_profile(tmp_path / "profile.json")
        assert told.operations["all_gather"].gather == fitted
        scenario, _ = make_scenario(ctx=64, gpus=2, model="llama-7b", profile=told)
        assert Hardware(config="").gather(scenario) == gather
        assert Hardware(config="", emulated=True).gather(scenario) == "ring"
    assert Hardware(config="").gather(make_scenario(ctx=64, gpus=2, model="llama-7b", profile="roofline")[0]) == "ring"


@pytest.mark.parametrize(
    ("gpu", "device", "same"),
    [
        ("amd-epyc-1-thread", "CPU (AMD EPYC)", True),
        ("H100-SXM-80GB", "NVIDIA H100 80GB HBM3", True),
        ("A100-SXM-80GB", "NVIDIA H100 PCIe", False),
    ],
)
def test_a_profile_of_another_device_is_told(gpu: str, device: str, same: bool) -> None:
    assert (other_device_note(gpu, device) == ()) is same


def test_side_traffic_costs_tsp_more_than_kvr_in_the_simulation() -> None:
    sleepers = Sleepers(num_ranks=4, context_len=2048, link_bytes_per_s=30e6)
    worse: dict[str, float] = {}
    for name, plan in sleepers.plans().items():
        program, cluster = sleepers.program(plan), sleepers.cluster
        alone = execute_alone(program, cluster)
        light, heavy = (
            noisy_ttft_s(program, cluster, ring_traffic(4, share, 2**18), range(30)) for share in (0.05, 0.4)
        )
        assert min(light) >= alone * (1 - 1e-9)
        assert np.median(heavy) >= np.median(light)
        assert heavy == noisy_ttft_s(program, cluster, ring_traffic(4, 0.4, 2**18), range(30))
        worse[name] = float(np.median(heavy)) / alone
    assert worse["tsp"] > max(worse["kvr, even"], worse["kvr, shrinking"])


def execute_alone(program: Program, cluster: Any) -> float:
    from kvrsim.executors.batch import run_batch

    return float(run_batch(program, cluster)[-1, 0])


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "share"), [(4, 0.4), (8, None)])
def test_sleeping_ranks_are_never_faster_than_simulated(num_ranks: int, share: float | None) -> None:
    """Other processes, and others' messages, only slow them."""
    traffic = None if share is None else ring_traffic(num_ranks, share, 2**17)
    sleepers = Sleepers(num_ranks=num_ranks, context_len=1024, link_bytes_per_s=20e6)
    results = sleep(sleepers, repeats=2, traffic=traffic, num_seeds=1)
    assert len(results) == 3
    assert all(one.error < 0.02 for one in results), results
