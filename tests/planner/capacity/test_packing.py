"""Packed steps: their prompts, their time compared with a simulated program, and queues of packed prompts."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.execution import place
from kvrsim.executors.run import run_partition
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import Strategy, get_strategy
from planner.capacity.fleet import GroupPool, PoolRun, Service, run_pool
from planner.capacity.packing import Packing, PackingRule, Piece
from planner.capacity.times import StrategyPolicy
from tests.building import examples, executed

LAYOUTS = [("single", 1), ("tp", 2), ("pp", 3), ("tp2+pp", 4)]
BUDGET = 4096
lengths = st.integers(1, 3000)


def per_rank(name: str, gpus: int, ctx: int = 4096, **more: Any) -> tuple[Scenario, Strategy]:
    scenario, _ = make_scenario(ctx=ctx, gpus=gpus, model="llama-3-8b", cluster="h100-nvlink", **more)
    strategy = get_strategy(name)
    return place(scenario, strategy).placed, strategy


@examples(100)
@given(
    new=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    cached=st.integers(0, 9),
    budget=st.integers(1, 50),
    most=st.integers(1, 120),
)
def test_steps_are_filled_in_order(new: list[int], cached: int, budget: int, most: int) -> None:
    rule, queue, begun = PackingRule(new, [cached] * len(new), budget, most), deque(range(len(new))), None
    steps: list[list[Piece]] = []
    while queue or begun is not None:
        pieces, begun = rule.step(begun, queue)
        steps.append(pieces)
    done = [piece for step in steps for piece in step]
    assert [piece.prompt for piece in done] == sorted(piece.prompt for piece in done)
    for prompt, tokens in enumerate(new):
        mine = [piece for piece in done if piece.prompt == prompt]
        before = np.cumsum([0, *(piece.tokens for piece in mine)]).tolist()
        assert before[-1] == tokens
        assert [piece.prefix for piece in mine] == [cached + one for one in before[:-1]]
        assert [piece.is_first for piece in mine] == [index == 0 for index in range(len(mine))]
        assert [piece.is_last for piece in mine] == [index == len(mine) - 1 for index in range(len(mine))]
    for step in steps:
        assert 0 < sum(piece.tokens for piece in step) <= budget
        assert len(step) == 1 or sum(piece.context for piece in step) <= most


@pytest.mark.parametrize(("name", "gpus"), LAYOUTS)
@pytest.mark.parametrize("engine", ["none", "mooncake-vllm-0.11"])
def test_one_prompt_in_one_step_takes_its_ttft(name: str, gpus: int, engine: str) -> None:
    """The error is up to 1.5 %: host times are summed per step; times of logits and prefixes are interpolated."""
    for new, cached in ((2500, 500), (40, 9000)):
        scenario, strategy = per_rank(name, gpus, ctx=new + cached, cached_prefix=cached, engine=engine)
        ttft_s = run_partition(executed(scenario, strategy), Partition.even(new, 1)).ttft_s
        packing = Packing(executed(scenario, strategy), BUDGET, 32768)
        assert packing.alone_s(new, cached) == pytest.approx(ttft_s, rel=0.015)


def test_a_prompt_longer_than_the_budget_runs_as_pieces_of_a_pipeline() -> None:
    scenario, strategy = per_rank("pp", 3)
    ttft_s = run_partition(executed(scenario, strategy), Partition(chunk_lens=(1000, 1000, 1000, 1000, 96))).ttft_s
    assert Packing(executed(scenario, strategy), 1000, 4096).alone_s(4096, 0) == pytest.approx(ttft_s, rel=0.02)


@pytest.mark.parametrize("engine", ["none", "serving"])
def test_two_in_a_step_are_between_the_longer_alone_and_both_in_turn(engine: str) -> None:
    packing = Packing(executed(*per_rank("single", 1, engine=engine)), 6000, 4096)

    def seconds(*pieces: Piece) -> float:
        free_s = [0.0]
        packing.run(free_s, 0.0, pieces)
        return free_s[0]

    @examples(60)
    @given(first=lengths, second=lengths, cached=st.sampled_from([0, 700]))
    def law(first: int, second: int, cached: int) -> None:
        pieces = [Piece(number, new, cached, cached + new, True) for number, new in enumerate((first, second))]
        one_s, two_s = (seconds(piece) for piece in pieces)
        assert max(one_s, two_s) <= seconds(*pieces) * (1 + 1e-9)
        assert seconds(*pieces) <= (one_s + two_s) * (1 + 1e-9)

    law()


def served(packing: Packing, new: np.ndarray, arrival_s: np.ndarray, replicas: int) -> PoolRun:
    service = replace(Service.plain(np.ones(len(new))), new_tokens=new, packing=packing)
    return run_pool(GroupPool(arrival_s=arrival_s, service=service, replicas=replicas))


@pytest.mark.parametrize("budget", [300, 3000])
def test_every_packed_prompt_is_served(budget: int) -> None:
    packing = Packing(executed(*per_rank("pp", 2)), budget, 4096)

    @examples(15)
    @given(replicas=st.integers(1, 3), seed=st.integers(0, 99))
    def law(replicas: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        new, arrival_s = rng.integers(1, 3000, 30), np.cumsum(rng.exponential(0.02, 30))
        run = served(packing, new, arrival_s, replicas)
        assert (run.begin_s >= arrival_s).all()
        assert (run.end_s > run.begin_s).all()
        assert run.busy_s <= replicas * run.end_s.max() * (1 + 1e-9)
        far_apart = served(packing, new, 10.0 * np.arange(30), 1)
        alone_s = [packing.alone_s(one, 0) for one in new.tolist()]
        assert far_apart.end_s - far_apart.begin_s == pytest.approx(alone_s, rel=1e-9)

    law()


@pytest.mark.parametrize("name", ["single", "pp"])
def test_a_full_pipeline_serves_as_fast_as_its_slowest_stage(name: str) -> None:
    packing = Packing(executed(*per_rank(name, 1 if name == "single" else 3, ctx=2048)), 2048, 4096)
    free_s = [0.0] * packing.num_stages
    packing.run(free_s, 0.0, [Piece(0, 2048, 0, 2048, True)])
    slowest_s = max(np.diff(free_s, prepend=0.0))
    run = served(packing, np.full(30, 2048), np.zeros(30), 1)
    assert np.diff(run.end_s)[5:] == pytest.approx(slowest_s, rel=0.02)


def test_what_cannot_be_packed_is_refused() -> None:
    for name in ("kvr-e", "pp2+cp2"):
        with pytest.raises(InputError, match=r"^strategies"):
            StrategyPolicy(names=(name,), packs=True)
    for more in ({"engine": "lmdeploy-0.1"}, {"cached_prefix": 1024, "prefix_placement": "host"}):
        with pytest.raises(InputError) as caught:
            Packing(executed(*per_rank("tp", 2, **more)), BUDGET, 4096)
        assert caught.value.parameter in more
