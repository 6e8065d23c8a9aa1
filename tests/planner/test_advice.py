"""Advice: each change of the question is simulated, is new to the question, and gives what it says."""

from __future__ import annotations

from typing import Any

import pytest

import kvrsim
import planner.advice as module
from kvrsim.arguments import ScenarioArgs
from kvrsim.builder import build_scenario
from kvrsim.units import format_seconds
from kvrsim.views.plan_text import sentences
from planner.candidates import ComparedStrategies, Comparison, Search, first_s, search_all

MIXTURE = {"model": "qwen3-30b-a3b", "cluster": "8xh100", "ctx": "4k"}
QUESTIONS: tuple[dict[str, Any], ...] = (
    {"ctx": "16k", "gpus": 8},
    {"ctx": "2k", "gpus": 2, "cached_prefix": "1k"},
    {"ctx": "1k", "gpus": 2, "profile": "roofline"},
    {"ctx": "4k", "model": "llama-3.1-8b", "cluster": "4xh100", "profile": "roofline"},
    {"model": "llama-3.1-8b", "cluster": "8xh100", "ctx": "16k", "gpus": 4},
    {"model": "llama-3.1-8b", "cluster": "8xa100-80gb", "ctx": "4k", "engine": "vllm"},
    {"model": "llama-3.1-8b", "cluster": "1xh100", "ctx": "4k", "dtype": "fp8"},
    {"model": "llama-3.1-70b", "cluster": "8xh100", "ctx": "32k", "engine": "sglang", "strategies": "tp,pp,pp-s"},
    {"model": "mixtral-8x7b", "cluster": "8xa100-80gb", "ctx": "8k"},
    {"model": "deepseek-v3.2", "cluster": "8xh200", "ctx": "8k", "engine": "sglang"},
    MIXTURE | {"expert_parallel": True, "engine": "trtllm"},
    {"model": "qwen3-30b-a3b", "cluster": "2x8xh100", "ctx": "1k"},
)


def options(change: str) -> dict[str, Any]:
    """The arguments of a change such as "--dtype fp8"."""
    name, *values = change.split()
    return {name.removeprefix("--").replace("-", "_"): values[0] if values else True}


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_a_change_gives_the_ttft_that_the_advice_states(question: dict[str, Any]) -> None:
    plan = kvrsim.plan(**question)
    asked = build_scenario(ScenarioArgs(**{name: value for name, value in question.items() if name != "strategies"}))[0]
    for advice in plan.advice:
        changed = options(advice.change)
        assert set(changed) <= {"expert_parallel", "dtype", "attention", "gpus", "cached_prefix"}
        again = kvrsim.plan(**question | changed)
        assert again.best.ttft_s <= 1.02 * advice.ttft_s
        assert advice.ttft_s < plan.best.ttft_s
    given = {one.change.split()[0] for one in plan.advice}
    assert not (asked.request.dtype == "fp8" and "--dtype" in given)
    assert not (asked.request.cached_prefix and "--cached-prefix" in given)
    assert not (asked.expert_parallel and "--expert-parallel" in given)


def test_changes_that_make_a_plan_slower_are_no_advice() -> None:
    question = {"model": "mixtral-8x7b", "cluster": "8xa100-80gb", "ctx": "8k"}
    slower = kvrsim.plan(**question, expert_parallel=True)
    plan = kvrsim.plan(**question)
    assert slower.best.ttft_s > plan.best.ttft_s
    assert "--expert-parallel" not in {one.change for one in plan.advice}


def test_fewer_gpus_are_advised_where_they_are_faster() -> None:
    question = {"model": "qwen3-30b-a3b", "cluster": "2x8xh100", "ctx": "1k"}
    plan = kvrsim.plan(**question)
    fewer = kvrsim.plan(**question, gpus=8)
    assert fewer.best.ttft_s < 0.99 * plan.best.ttft_s
    assert "--gpus 8" in {advice.change for advice in plan.advice}


def test_every_surface_has_the_same_advice() -> None:
    plan = kvrsim.plan(model="llama-3.1-8b", cluster="8xh100", ctx="16k", gpus=4)
    assert plan.advice
    said = " ".join(sentences(plan))
    listed = plan.to_dict()["advice"]
    assert [(one["change"], one["ttft_s"]) for one in listed] == [(one.change, one.ttft_s) for one in plan.advice]
    for one in plan.advice:
        assert f"{one.change}: {format_seconds(one.ttft_s)}" in said


def test_named_strategies_are_the_only_ones_tried() -> None:
    question = {"model": "llama-3.1-8b", "cluster": "8xh100", "ctx": "4k", "gpus": 4, "strategies": ["tp"]}
    plan = kvrsim.plan(**question)
    for advice in plan.advice:
        assert kvrsim.plan(**question | options(advice.change)).best.ttft_s == pytest.approx(advice.ttft_s, rel=1e-9)


def test_there_is_no_advice_where_nothing_fits_or_under_noise() -> None:
    misfit = kvrsim.plan(model="llama-3-70b", cluster="h100-nvlink", gpus=2, ctx="64k", strategies=["tp"])
    assert not misfit.feasible
    assert misfit.advice == ()
    noisy = kvrsim.plan(ctx="1k", gpus=2, strategies=["tsp"], noise="jitter:0.05", samples=4)
    assert noisy.advice == ()


def test_with_a_short_budget_the_advice_names_its_strategy() -> None:
    """A plan of the changed question with such a budget may end before it comes to that strategy."""
    question: dict[str, Any] = {"model": "internlm-20b", "cluster": "4xl40s", "ctx": "16k", "cached_prefix": 8192}
    plan = kvrsim.plan(**question, engine="sglang", search_budget="1s")
    (advice,) = plan.advice
    change, name = advice.change.split(" --strategies ")
    assert change == "--dtype fp8"
    changed = kvrsim.plan(**question, engine="sglang", search_budget="1s", dtype="fp8", strategies=name)
    assert changed.best.ttft_s <= advice.ttft_s * 1.001


@pytest.mark.parametrize("ctx", [128, 256, 512, 1024, 2048, 8192])
def test_half_of_the_gpus_are_named_where_they_are_as_fast(ctx: int) -> None:
    question: dict[str, Any] = {"model": "llama-3.1-8b", "cluster": "8xh100", "ctx": ctx, "strategies": ["tp", "kvr-s"]}
    plan = kvrsim.plan(**question)
    fewer_s = kvrsim.plan(**question, gpus=4).fastest.ttft_s
    is_near = 0.99 * plan.best.ttft_s <= fewer_s <= 1.02 * plan.best.ttft_s
    assert (plan.as_fast is not None) == is_near
    if plan.as_fast is not None:
        assert (plan.as_fast.change, plan.as_fast.ttft_s) == ("--gpus 4", pytest.approx(fewer_s))
        assert format_seconds(plan.as_fast.ttft_s) in " ".join(sentences(plan))


@pytest.mark.parametrize("budget", [0.0, 0.01, 1.5])
def test_the_first_simulations_of_changes_keep_to_the_budget(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in modelled seconds. Changes that cost more are named."""
    spent = list[float]()

    def counted(compared: ComparedStrategies, search: Search) -> Comparison:
        spent.extend(map(first_s, compared.executions))
        return search_all(compared, search)

    monkeypatch.setattr(module, "search_all", counted)
    plan = kvrsim.plan(model="qwen3.5-35b-a3b", cluster="2x8xh100", ctx="16k", search_budget=budget)
    assert {*(one.change.split(" --strategies ")[0] for one in plan.advice)}.isdisjoint(plan.advice_not_tried)
    assert sum(spent) <= budget
    if budget == 0.0:
        assert plan.advice_not_tried
