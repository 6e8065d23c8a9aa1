"""Laws of confirmations that do not depend on the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.builder import make_scenario
from kvrsim.executors.access import execution_of
from kvrsim.kernels.profile import Gather
from kvrsim.program import Compute, Program
from kvrsim.results.question import Question
from kvrsim.results.results import StrategyPrediction
from kvrsim.results.timeline import Timeline
from kvrsim.runtime.plan import Difference, RunPlan, Timing
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import STRATEGIES
from kvrsim.views.confirm import verdict
from planner.candidates import Search
from planner.confirm.confirm import _chosen, compose, further_candidates
from planner.confirm.hardware import Hardware, is_same_device
from planner.confirm.result import Confirmation, MeasuredCandidate, Targets
from planner.confirm.saved import SavedPlan, SavedRow
from tests.building import Draws, any_scenario, draws, examples
from tests.planner.confirm.confirm_setup import made_up_profile

NOTHING = Timeline(strategy="kvr", num_ranks=1, spans=())


PLAN = RunPlan(strategy="single", partition=Partition(chunk_lens=(8,)))


def candidate(name: str, predicted_s: float, ttft_s: tuple[float, ...], logits: float = 0.0) -> MeasuredCandidate:
    ends = dict(ttft_low_s=predicted_s, ttft_high_s=predicted_s)
    difference = Difference(logits=logits, logits_scale=2.0)
    return MeasuredCandidate(
        prediction=StrategyPrediction(strategy=name, partition=(8,), ttft_s=predicted_s, fits=True, **ends),
        timing=Timing(plan=PLAN, ttft_s=ttft_s, difference=difference),
        predicted=NOTHING,
    )


def confirmation(*candidates: MeasuredCandidate, targets: Targets | None = None) -> Confirmation:
    scenario, _ = make_scenario(ctx=8, gpus=2, model="llama-7b")
    return Confirmation(
        question=replace(Question.of(scenario), dtype="fp32"),
        mode="ranks",
        candidates=candidates,
        chosen=int(np.argmin([one.predicted_s for one in candidates])),
        conditions={},
        targets=targets or Targets(),
        warnings=(),
    )


TIMES = st.lists(st.floats(0.1, 10), min_size=3, max_size=3).map(tuple)


@given(samples=st.lists(TIMES, min_size=1, max_size=5), data=st.data())
def test_regret_is_nothing_for_the_best_and_never_below(samples: list[tuple[float, ...]], data: Any) -> None:
    predicted = data.draw(st.lists(st.floats(0.1, 10), min_size=len(samples), max_size=len(samples)))
    result = confirmation(*(candidate(str(i), p, s) for i, (p, s) in enumerate(zip(predicted, samples, strict=True))))
    assert result.regret >= 0
    assert (result.regret == 0) == (result.choice.median_s == result.best.median_s)
    assert result.to_dict()["ok"] is (not result.reasons)


def test_whether_the_plans_best_was_the_best() -> None:
    """Of a saved plan, its best is the choice whatever this machine's profile predicts; a tie is no defeat."""
    question = dict(model="llama-7b", context_len=8, num_gpus=2, batch=1, cached_prefix=0, profile="p")
    rows = tuple(SavedRow(strategy=name, partition=(8,), layers=None, ttft_s=1.0) for name in "abc")
    plan = SavedPlan(file="plan.json", **question, dtype="fp32", attention="eager", best="a", rows=rows)
    steady = (candidate("b", 1.0, (1.00, 1.01, 1.02)), candidate("a", 2.0, (1.10, 1.11, 1.12)))
    slower = replace(confirmation(*steady), plan=plan, chosen=_chosen(steady, plan))
    assert (slower.choice.strategy, slower.best_was_best) == ("a", False)
    assert verdict(slower) == "The plan's best, a, was not the fastest: b was 9.9% faster."
    loose = (candidate("b", 1.0, (1.00, 1.10, 1.20)), candidate("a", 2.0, (1.01, 1.11, 1.21)))
    tied = replace(confirmation(*loose), plan=plan, chosen=_chosen(loose, plan))
    assert (tied.choice.strategy, tied.best_was_best) == ("a", True)
    lacking = (candidate("c", 1.0, (1.0, 1.0, 1.0)), candidate("b", 2.0, (2.0, 2.0, 2.0)))
    unknown = replace(confirmation(*lacking), plan=plan, chosen=_chosen(lacking, plan))
    assert (unknown.choice.strategy, unknown.best_was_best) == ("b", None)
    assert "was not measured" in verdict(unknown)
    assert confirmation(*lacking).best_was_best is True


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
    assert exact.wrong_pairs == []
    reverse = confirmation(*(candidate(str(i), -sorted(s)[1], s) for i, s in enumerate(samples)))
    assert len(reverse.wrong_pairs) == len(exact.significant_pairs) == exact.to_dict()["orders"]["right"]
    few = confirmation(*(candidate(str(i), 1.0, s[:2]) for i, s in enumerate(samples)))
    assert few.significant_pairs == []


def test_a_machine_of_another_speed_is_named() -> None:
    slower = [candidate(str(i), float(i), (1.25 * i,) * 3) for i in (1, 2, 3)]
    assert "0.80 times as fast as predicted: calibrate again" in confirmation(*slower).reasons[0]
    other = [candidate("a", 1.0, (1.25,) * 3), candidate("b", 1.0, (0.8,) * 3), candidate("c", 1.0, (1.0,) * 3)]
    assert "calibrate again" not in confirmation(*other).reasons[0]


@pytest.mark.parametrize("error", [1e-3, float("nan"), float("inf")])
def test_logits_that_differ_are_a_reason(error: float) -> None:
    good, bad = candidate("a", 1.0, (1.0, 1.0, 1.0)), candidate("b", 1.0, (1.0, 1.0, 1.0), logits=error)
    assert confirmation(good, good).ok
    result = confirmation(good, bad)
    assert not result.ok
    assert "b: logits differ" in result.reasons[0]
    assert result.max_logit_error == pytest.approx(error, nan_ok=True)
    assert confirmation(good, bad, targets=Targets(logits=1.0)).ok is (error == 1e-3)


@pytest.mark.parametrize(("num_gpus", "ctx", "count"), [(2, 2048, 2), (3, 999, 4), (8, 16384, 3), (2, 3, 3)])
def test_further_partitions_are_apart_and_the_best_come_first(num_gpus: int, ctx: int, count: int) -> None:
    scenario, _ = make_scenario(ctx=ctx, gpus=num_gpus, model="llama-7b", profile=made_up_profile())
    first = [Search().candidate(execution_of(scenario, STRATEGIES[name])) for name in ("kvr-e", "kvr-s")]
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
    """Device times of a program, in the form in which virtual ranks return them."""
    result = []
    for rank in range(program.num_ranks):
        parts: dict[tuple[int | None, str], float] = {}
        for layer, op in program.ops(rank):
            if isinstance(op, Compute):
                names = {"step": "embedding", "mask": "embedding"}  # names that virtual ranks use
                key = (layer, names.get(op.name, op.name))
                parts[key] = parts.get(key, 0.0) + op.device_s.item()
        result.append(parts)
    return result


@examples(40)
@given(rng=draws(), name=st.sampled_from(["single", "tsp", "kvr-e"]))
def test_virtual_ranks_that_measure_what_is_predicted_compose_to_the_prediction(rng: Draws, name: str) -> None:
    scenario: Scenario = any_scenario(rng, host=False, topologies=("switch", "chain", "bus"))
    one = Search().candidate(execution_of(scenario, STRATEGIES[name]))
    timing = compose(one, Timing(plan=PLAN, parts=(tuple(parts_of(one.program)),) * 2))
    assert timing.ttft_s == pytest.approx((one.ttft_s,) * 2)
    assert timing.timeline is not None
    assert timing.timeline.end_s >= one.ttft_s * (1 - 1e-9)


@pytest.mark.parametrize(("fitted", "gather"), [("ring", "ring"), ("collective", "collective"), (None, "ring")])
def test_the_all_gather_is_the_one_that_links_were_fitted_to(fitted: Gather | None, gather: Gather) -> None:
    profile = made_up_profile()
    fit = replace(profile.operations["all_gather"], gather=fitted)
    profile = replace(profile, operations={"all_gather": fit})
    scenario, _ = make_scenario(ctx=64, gpus=2, model="llama-7b", profile=profile)
    assert Hardware(config="").gather(scenario) == gather
    assert Hardware(config="", emulated=True).gather(scenario) == "ring"


@pytest.mark.parametrize(
    ("gpu", "device", "same"),
    [
        ("amd-epyc-1-thread", "CPU (AMD EPYC)", True),
        ("H100-SXM-80GB", "NVIDIA H100 80GB HBM3", True),
        ("A100-SXM-80GB", "NVIDIA H100 PCIe", False),
    ],
)
def test_a_profile_of_another_device_is_told(gpu: str, device: str, same: bool) -> None:
    assert is_same_device(gpu, device) is same
