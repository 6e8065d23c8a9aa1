"""Rings, zigzag, Ulysses and direct sends on real ranks: exact, with the memory and the messages that are planned."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tests.kvrsim.runtime.ranks.exchange_workers as workers
from kvrsim.builder import make_scenario
from kvrsim.compile import build_program
from kvrsim.errors import InputError
from kvrsim.kernels.roofline import NoTime
from kvrsim.memory import memory_of
from kvrsim.program import sent_bytes
from kvrsim.results.timeline import Timeline
from kvrsim.runtime.exchange import RUN_STRATEGIES, exchange_of, run_strategy
from kvrsim.runtime.faults import RankError
from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.plan import RunPlan
from kvrsim.runtime.ranks import Launch, launch
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import get_strategy
from tests.kvrsim.runtime.runtime_models import CONFIGS
from tests.kvrsim.runtime.runtime_workers import exact, model_of, troubled

NAMES = {run: name for name, run in RUN_STRATEGIES.items() if run in workers.STRATEGIES}


def on(num_ranks: int) -> Launch:
    return Launch(num_ranks=num_ranks, timeout_s=20, deadline_s=55)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_together_give_what_one_gives(num_ranks: int) -> None:
    found = launch(workers.exactness, how=on(num_ranks))[0]
    assert [one for one in found if not exact(one[1])] == []
    assert all(difference.logits_scale > 1 for _, difference in found)
    ran = {difference.plan.split()[0] for _, difference in found}
    # Four heads do not divide into three ranks.
    assert ran == {name for name in NAMES.values() if num_ranks != 3 or name != "ulysses"}


def test_direct_sends_carry_every_kind_of_layer() -> None:
    found = launch(workers.ahead, how=on(3))[0]
    assert len(found) == 8
    assert [one for one in found if not exact(one)] == []


@pytest.mark.parametrize(("num_ranks", "name"), [(2, "llama-gqa"), (4, "llama-gqa")])
def test_memory_and_messages_are_as_planned(num_ranks: int, name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(CONFIGS[name]))
    # Numbers of two bytes, twice as many: the ranks compute in fp32.
    scenario, _ = make_scenario(ctx=workers.EVEN_LEN, gpus=num_ranks, model=path, profile="roofline", batch=2)
    even = Partition.even(workers.EVEN_LEN, num_ranks)
    held, timelines = launch(workers.held_and_shown, name, how=on(num_ranks))[0]
    for run, strategy in NAMES.items():
        planned = memory_of(scenario, get_strategy(strategy), even)
        assert [kept for kept, _ in held[run]] == [rank.kv_cache for rank in planned], strategy
        _check_scratch(run, [scratch for _, scratch in held[run]], [rank.gathered for rank in planned], num_ranks)
        _check_messages(scenario, strategy, even, timelines[run])


def _check_scratch(run: str, found: list[int], planned: list[int], num_ranks: int) -> None:
    """Pieces of direct sends arrive in place; Ulysses makes its messages anew in each layer."""
    if run in ("kvr_direct", "ulysses"):
        assert found == [0] * num_ranks
    elif run == "zigzag" or num_ranks > 2:
        assert found == planned
    else:  # of two ranks, none passes on what it has received
        assert [2 * one for one in found] == planned


def _check_messages(scenario: Scenario, strategy: str, even: Partition, timeline: Timeline) -> None:
    """Every message of the program is in the timeline, and ends where the receiver waits for it."""
    if strategy == "zigzag":  # all-gathers are shown as waiting
        assert all(any(span.name == "all-gather" for span in timeline.of(rank, "wait")) for rank in range(2))
        return
    chunks = [np.array([float(length)]) for length in even.chunk_lens]
    program = build_program(scenario, get_strategy(strategy), chunks, NoTime())
    for rank in range(program.num_ranks):
        transfers = timeline.of(rank, "transfer")
        assert sum(span.nbytes or 0 for span in transfers) == sent_bytes(program, rank), strategy
        assert {span.name for span in transfers} <= {f"KV {rank}→{peer}" for peer in range(program.num_ranks)}
        assert any(span.name == "attention" for span in timeline.of(rank, "compute"))


def test_what_is_spoilt_is_noticed() -> None:
    found = launch(workers.spoilt, how=on(2))[0]
    assert {one.plan.split()[0] for one in found} == set(NAMES.values())
    assert [one for one in found if exact(one) or one.logits < 0.05] == []


@pytest.mark.parametrize(("name", "kernel", "why"), [
    ("falcon-alibi", "eager", "ALiBi"), ("qwen3_next", "sdpa", "states"), ("deepseek_v3", "flash", "latents"),
    ("mistral-window", "sdpa", "a window of 6 tokens"), ("gpt_oss", "eager", "a sink"),
])  # fmt: skip
def test_what_blocks_of_keys_cannot_do_is_refused_by_name(name: str, kernel: str, why: str) -> None:
    geometry = Geometry.of(model_of(name, kernel))
    for run in workers.STRATEGIES:
        plan = RunPlan(strategy=run, partition=Partition.even(24, 2))
        told = workers.refused(plan, geometry)
        assert (told == "") == (run == "kvr_direct")
        assert run == "kvr_direct" or (told.startswith(f"strategy: got '{plan.name}'") and why in told)


def test_heads_and_stripes_that_do_not_fit_are_refused() -> None:
    geometry = Geometry.of(model_of("llama-gqa"))
    for run, chunks, said in (("ulysses", (8, 8, 8), "4 heads and 2 KV heads"), ("striped", (11, 12), "12,11")):
        plan = RunPlan(strategy=run, partition=Partition(chunk_lens=chunks))
        assert said in workers.refused(plan, geometry)
    with pytest.raises(InputError, match="a chunk a rank"):
        exchange_of("ring").place_of(RunPlan(strategy="ring", partition=Partition.even(24, 2)), 0, 3)
    with pytest.raises(InputError, match="strategy: got 'pp-x', accepted: what the runtime runs: single"):
        run_strategy("pp-x")


def test_a_rank_that_dies_in_a_ring_is_named_with_its_layer() -> None:
    with pytest.raises(RankError) as caught:
        launch(troubled, "dies", 1, 1, 1, "llama-gqa", "ring", how=Launch(num_ranks=3, timeout_s=5, deadline_s=40))
    cause = caught.value.cause
    assert (cause.rank, cause.kind, cause.layer) == (1, "died", 1)
