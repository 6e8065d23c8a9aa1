"""Prompts behind each other on a chain: each has its own logits, and early ranks begin the next one early."""

from __future__ import annotations

from typing import Any

import pytest

from kvrsim.errors import InputError
from kvrsim.partition import Partition
from kvrsim.runtime.emulated import EmulatedLink, EmulatedTransport
from kvrsim.runtime.job import Job, ModelChoice
from kvrsim.runtime.model import SleepForward
from kvrsim.runtime.plan import RunPlan
from kvrsim.runtime.prompts.run import PromptRun, PromptsReport, measure_prompts, run_prompts
from kvrsim.runtime.ranks.launch import Launch, launch
from tests.kvrsim.runtime.runtime_models import CONFIGS, KINDS
from tests.kvrsim.runtime.runtime_workers import BYTES_PER_S, CONTEXT_LEN, GEOMETRY, kvr, layer_s

AT_ONCE = (0.0, 0.0, 0.0)


def job(name: str, plan: RunPlan, **settings: Any) -> Job:
    choice = ModelChoice(config=(CONFIGS | KINDS)[name], dtype="fp32", attention="eager", init_std=0.2)
    return Job(model=choice, plans=(plan,), **dict(repeats=1, warmups=0) | settings)


def several(transport: Any) -> tuple[list[PromptsReport], PromptsReport]:
    """Real models, and ranks that sleep over an emulated link."""
    plans = [kvr(9, 5, 9), kvr(9, 5, 9, receives_ahead=2, batch=2), kvr(9, 5, 9, receives_ahead=None), kvr(14, 9)]
    real = [run_prompts(transport, job("llama-gqa", plan), AT_ONCE) for plan in plans]
    real += [run_prompts(transport, job(name, plans[0]), AT_ONCE) for name in ("qwen3_next", "mistral-window")]
    emulated = EmulatedTransport(transport, EmulatedLink(bandwidth_bytes_per_s=BYTES_PER_S, latency_s=1e-3))
    even = job("llama-gqa", RunPlan(strategy="kvr", partition=Partition.even(900, 3)), check_logits=False, repeats=3)
    return real, measure_prompts(emulated, SleepForward(GEOMETRY, layer_s), even, AT_ONCE)


@pytest.mark.slow
def test_prompts_without_a_barrier_have_the_logits_of_one_process_each() -> None:
    real, sleeping = launch(several, how=Launch(num_ranks=3, timeout_s=20, deadline_s=55))[-1]
    for report in real:
        assert report.logits_error <= 1e-4 * report.logits_scale
        (ranks,) = report.repeats
        assert [len(rank.tokens) for rank in ranks] == [0, 0, len(AT_ONCE)]
        assert len(set(ranks[-1].tokens)) > 1  # prompts differ
    # Never with a barrier; without one whenever the machine does not hold up the first rank alone.
    assert any(ranks[0].begin_s[1] < ranks[-1].end_s[0] for ranks in sleeping.repeats)
    for ranks in sleeping.repeats:
        assert list(ranks[-1].end_s) == sorted(ranks[-1].end_s)
        assert ranks[0].waited_s == 0 < ranks[-1].waited_s


def test_strategies_without_a_chain_are_refused() -> None:
    plan = RunPlan(strategy="tsp", partition=Partition.even(CONTEXT_LEN, 2))
    with pytest.raises(InputError, match="requests: got 'tsp"):
        PromptRun(None, None, plan)  # type: ignore[arg-type]
