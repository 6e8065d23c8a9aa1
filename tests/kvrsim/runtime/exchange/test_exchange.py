"""Every strategy on real ranks gives the logits of one process, with the planned memory and messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tests.kvrsim.runtime.runtime_workers as workers
from kvrsim.builder import make_scenario
from kvrsim.compile import build_program
from kvrsim.errors import InputError
from kvrsim.hardware import LinkSpec
from kvrsim.kernels.cost import no_time
from kvrsim.memory import memory_of
from kvrsim.program import sent_bytes
from kvrsim.results.timeline import Timeline
from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.plan import RUN_STRATEGIES, RankSettings, RunPlan, run_strategy
from kvrsim.runtime.ranks import launch
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import get_strategy
from tests.building import executed
from tests.kvrsim.runtime.runtime_models import CONFIGS, KINDS, kernels_of
from tests.kvrsim.runtime.runtime_workers import Result, exact, model_of, run_plan

SLOW = LinkSpec(name="slow", bandwidth_bytes_per_s=1e9, latency_s=0.0, source="a test")
OnRanks = Callable[..., list[Any]]  # fixture two_ranks
MODELS = [*CONFIGS, *KINDS]
NAMES = {run: name for name, run in reversed(RUN_STRATEGIES.items())}


def strategies_of(results: list[Result]) -> set[str]:
    return {plan.split()[0] for _, _, plan, _ in results}


@pytest.mark.parametrize(
    ("num_ranks", "models", "without"),
    [
        (2, [("llama-gqa", "sdpa"), ("gemma3", "eager")], set()),
        (3, [("llama-mqa", "flash"), ("qwen3_next", "sdpa")], {"ulysses", "tp"}),  # four heads are not divisible by 3
    ],
)
def test_ranks_give_one_processs_logits(num_ranks: int, models: list[tuple[str, str]], without: set[str]) -> None:
    *others, results = launch(workers.exactness, models, how=RankSettings(num_ranks=num_ranks))
    assert others == [results] * (num_ranks - 1)
    assert [one for one in results if not exact(one[-1])] == []
    assert all(difference.logits_scale > 1 for *_, difference in results)  # small logits would pass any tolerance
    assert strategies_of(results) == {run.replace("_", "-") for run in RUN_STRATEGIES.values()} - without
    assert any(" blocks" in plan for _, _, plan, _ in results)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_model_and_kernel_gives_one_processs_logits(num_ranks: int) -> None:
    """Every model runs with each kernel and with each plan, all on one of these numbers of ranks."""
    models = [(name, kernel) for name in MODELS[num_ranks - 2 :: 3] for kernel in kernels_of(name)]
    work = partial(workers.exactness, shared=True)
    results = launch(work, models, how=RankSettings(num_ranks=num_ranks))[-1]
    assert {(name, kernel) for name, kernel, *_ in results} == set(models)
    assert [one for one in results if not exact(one[-1])] == []
    assert all(difference.logits_scale > 1 for *_, difference in results)


def test_what_is_spoilt_is_noticed(two_ranks: OnRanks) -> None:
    models = [("llama-gqa", "sdpa"), ("gemma3", "sdpa"), ("deepseek_v3", "flash"), ("qwen3_next", "sdpa")]
    results = two_ranks(workers.spoilt, models)[-1]
    assert strategies_of(results) >= {run.replace("_", "-") for run in workers.PLAIN}
    assert [one for one in results if exact(one[-1]) or one[-1].logits < 0.05] == []


def test_messages_through_host_memory_are_the_same(two_ranks: OnRanks) -> None:
    results = two_ranks(partial(workers.over_other_transports, staged=True))[-1]
    assert [one for one in results if not exact(one[-1])] == []


def test_messages_over_an_emulated_link_are_the_same() -> None:
    how = RankSettings(num_ranks=2, link=SLOW)
    results = launch(partial(workers.over_other_transports, staged=False), how=how)[-1]
    assert [one for one in results if not exact(one[-1])] == []


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_memory_and_messages_are_as_planned(num_ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(CONFIGS["llama-gqa"]))
    # Two prompts with two-byte elements need as many bytes as one fp32 prompt on the ranks.
    scenario, _ = make_scenario(ctx=workers.EVEN_LEN, gpus=num_ranks, model=path, profile="roofline", batch=2)
    even = Partition.even(workers.EVEN_LEN, num_ranks)
    sizes, timelines = launch(workers.memory_and_messages, "llama-gqa", how=RankSettings(num_ranks=num_ranks))[0]
    for run in set(workers.PLAIN) - {"kvr", "tsp"}:
        planned = memory_of(executed(scenario, get_strategy(NAMES[run])), even)
        if run == "zigzag":  # engines keep the whole context; these ranks gather it again in each layer
            assert [num_ranks * nbytes for nbytes in sizes[run]] == [rank.kv_cache for rank in planned]
            continue
        assert sizes[run] == [rank.kv_cache for rank in planned], run
        _check_messages(scenario, run, even, timelines[run])


def _check_messages(scenario: Scenario, run: str, even: Partition, timeline: Timeline) -> None:
    """Every message of the program is in the timeline and ends when the receiver waits for it."""
    if run == "zigzag":  # all-gathers appear as waits
        assert all(any(span.name == "all-gather" for span in timeline.of(rank, "wait")) for rank in range(2))
        return
    chunks = [np.array([float(length)]) for length in even.chunk_lens]
    program = build_program(executed(scenario, get_strategy(NAMES[run])), chunks, no_time(scenario.traits))
    for rank in range(program.num_ranks):
        transfers = timeline.of(rank, "transfer")
        assert sum(span.nbytes or 0 for span in transfers) == sent_bytes(program, rank), run
        assert {span.name for span in transfers} <= {f"KV {rank}→{peer}" for peer in range(program.num_ranks)}
        assert any(span.name == "attention" for span in timeline.of(rank, "compute"))


@pytest.mark.parametrize(("name", "kernel", "why"), [
    ("falcon-alibi", "eager", "ALiBi"), ("qwen3_next", "sdpa", "states"), ("deepseek_v3", "flash", "latents"),
    ("mistral-window", "sdpa", "a window of 6 tokens"), ("gpt_oss", "eager", "a sink"),
])  # fmt: skip
def test_what_blocks_of_keys_cannot_do_is_refused_by_name(name: str, kernel: str, why: str) -> None:
    geometry = Geometry.of(model_of(name, kernel))
    for run in ("ring", "striped", "zigzag", "zigzag_ring", "ulysses"):
        message = workers.refused(run_plan(run, 12, 12), geometry)
        assert message.startswith(f"strategy: got '{run.replace('_', '-')}'")
        assert why in message
    assert workers.refused(run_plan("kvr_direct", 12, 12), geometry) == ""
    blocks = run_plan("kvr", 12, 12, query_blocks=((2, 2, 2),) * 2)
    assert ("query_blocks" in workers.refused(blocks, geometry)) == (name not in ("qwen3_next", "mistral-window"))


@pytest.mark.parametrize(
    ("name", "plan", "message"),
    [
        ("qwen3_next", run_plan("pp", 24, stage_layers=(2, 1)), "all have attention, which layers [2] of qwen3_next"),
        ("llama-gqa", run_plan("striped", 11, 12), "12,11"),
        ("nemotron_h", run_plan("kvr", 5, 1, 4), "chunks of at least 2 tokens after the first, for nemotron_h"),
        ("nemotron_h", run_plan("tsp", 5, 1, 4), "chunks of at least 2 tokens after the first, for nemotron_h"),
    ],
)
def test_partitions_that_do_not_suit_the_model_are_refused(name: str, plan: RunPlan, message: str) -> None:
    assert message in workers.refused(plan, Geometry.of(model_of(name)))


def test_a_strategy_without_an_exchange_is_refused() -> None:
    with pytest.raises(InputError, match="strategy: got 'pp-x', accepted: what the runtime runs: single"):
        run_strategy("pp-x")
