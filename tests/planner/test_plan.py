"""Plans: equal answers for equivalent questions, effects of the budget, and notes when the partition matters little."""

from __future__ import annotations

import pickle

import pytest

import kvrsim
from kvrsim.arguments import NoiseArgs, PlanArgs, ScenarioArgs, UsersArgs
from planner.api import plan_of
from planner.candidates import ForEngine, Search


def test_even_chunks_will_do_where_the_host_sets_the_pace() -> None:
    """With 1k on 4 GPUs, the host launches kernels more slowly than they run, so even chunks suffice."""
    assert any(note.startswith("even chunks are") for note in kvrsim.plan(gpus=4, ctx="1k").warnings)


def test_they_will_not_where_attention_is_long() -> None:
    assert not any(note.startswith("even chunks are") for note in kvrsim.plan(gpus=4, ctx="16k").warnings)


QUESTIONS = {
    "vllm": {"model": "llama-3.1-8b", "cluster": "4xh100", "ctx": "4k"},
    "sglang": {"model": "qwen3-30b-a3b", "cluster": "4xh100", "ctx": "2k"},
    "trtllm": {"model": "llama-3.1-70b", "cluster": "4xh200", "ctx": "8k"},
}


@pytest.mark.parametrize("engine", QUESTIONS)
def test_a_question_has_the_same_best_however_it_is_asked(engine: str) -> None:
    """By default few strategies are searched, with `all` every one; an engine only reduces the compared strategies."""
    question = QUESTIONS[engine]
    default, everything = kvrsim.plan(**question), kvrsim.plan(**question, strategies="all")
    assert default.best.ttft_s <= 1.02 * everything.best.ttft_s
    assert {one.strategy for one in default.strategies} >= {one.strategy for one in everything.strategies}
    args = ScenarioArgs.take(dict(question)), PlanArgs.take({}), NoiseArgs.take({}), UsersArgs.take({})
    emit, only = (plan_of(*args, search=Search(engine=ForEngine(engine, only=only)))[1] for only in (False, True))
    has, most = default.best_on(engine), everything.best_on(engine)
    assert has is not None
    assert most is not None
    assert engine in emit.best.engines
    assert (only.best.strategy, only.best.ttft_s) == (emit.best.strategy, emit.best.ttft_s)
    assert emit.best.ttft_s <= 1.02 * min(has.ttft_s, most.ttft_s)


def test_rows_are_computed_when_they_are_read() -> None:
    """Values are computed when they are read; comparing and pickling give the same values."""
    plan = kvrsim.plan(gpus=2, ctx="1k", strategies=["tsp", "kvr-e"])
    row = plan.strategies[-1]
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    assert copy.to_dict() == plan.to_dict()
    assert row.ttft_low_s < row.ttft_s < row.ttft_high_s


def test_a_budget_of_nothing_leaves_what_could_be_the_best() -> None:
    plan = kvrsim.plan(gpus=8, ctx="4k", search_budget=0)
    assert plan.search.unsearched
    rough = {one.strategy for one in plan.strategies if not one.searched}
    assert set(plan.search.unsearched) <= rough
    assert plan.to_dict()["search"]["unsearched"] == list(plan.search.unsearched)
    assert not kvrsim.plan(gpus=8, ctx="4k").search.unsearched


def test_the_interleaved_context_of_sparse_attention_is_compared_by_default() -> None:
    plan = kvrsim.plan(model="deepseek-v3.2", cluster="8xh200", ctx="16k", engine="sglang")
    assert "sglang" in plan["cp8-i+ep8"].engines


def test_mixtures_are_compared_in_the_layouts_of_engines() -> None:
    plan = kvrsim.plan(model="qwen3-30b-a3b", cluster="2x8xh100", ctx="2k", search_budget=0)
    layouts = {one.strategy: one.layout for one in plan.strategies}
    for name in ("tp16+ep16", "dp16+ep16", "dp2+tp8+ep16", "tp8+pp2+ep8", "dp8+pp2+ep8"):
        assert layouts[name].name == name
        assert plan[name].engines
    assert plan["dp16+ep16"].to_dict()["layout"]["expert_parallel"] == 16
