"""Packed steps: one prompt is today's, two are between the longer alone and both in turn, and executors agree."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.builder import make_scenario
from kvrsim.compile import for_strategy
from kvrsim.executors.batch import run_batch
from kvrsim.executors.event import EventSimulation
from kvrsim.executors.run import run_partition
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import Strategy, get_strategy
from planner.capacity.fleet.fast import run_pool
from planner.capacity.fleet.pool import Pool
from planner.capacity.fleet.service import Overlap, Service
from planner.packing.prices import Packing, StepPrices
from planner.packing.rule import Begun, PackingRule, Piece
from planner.packing.serve import serve_packed
from planner.packing.steps import StepPrograms
from tests.building import examples

PLACES = [("single", 1), ("tp", 2), ("pp", 3), ("tp2+pp", 4), ("pp-s", 2)]
lengths = st.integers(1, 3000)


class Prompts(NamedTuple):
    """Prompts in the order of their arrival."""

    arrivals_s: tuple[float, ...]
    context_lens: tuple[int, ...]
    cached_prefix: tuple[int, ...]

    @property
    def new_tokens(self) -> tuple[int, ...]:
        return tuple(context - cached for context, cached in zip(self.context_lens, self.cached_prefix, strict=True))


def place(name: str, gpus: int, ctx: int = 4096, **more: str) -> tuple[Scenario, Strategy]:
    scenario, _ = make_scenario(ctx=ctx, gpus=gpus, model="llama-3-8b", cluster="h100-nvlink", **more)
    strategy = get_strategy(name)
    return for_strategy(scenario, strategy), strategy


def prompts_of(new: list[int], gaps_s: list[float], cached: int = 0) -> Prompts:
    times_s = np.cumsum([0.0, *gaps_s])[: len(new)]
    return Prompts(
        arrivals_s=tuple(times_s.tolist()),
        context_lens=tuple(one + cached for one in new),
        cached_prefix=(cached,) * len(new),
    )


def alone_s(placed: Scenario, strategy: Strategy, *pieces: Piece) -> float:
    return float(run_batch(StepPrograms(placed, strategy).of(pieces), placed.cluster)[-1, 0])


@examples(100)
@given(
    new=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    cached=st.integers(0, 9),
    budget=st.integers(1, 50),
    held=st.integers(1, 120),
)
def test_steps_are_filled_in_order(new: list[int], cached: int, budget: int, held: int) -> None:
    rule, queue, begun = PackingRule(new, [cached] * len(new), budget, held), deque(range(len(new))), None
    steps: list[list[Piece]] = []
    while queue or begun is not None:
        pieces, begun = rule.step(begun, lambda: queue[0] if queue else None, queue.popleft)
        steps.append(pieces)
    done = [piece for step in steps for piece in step]
    assert [piece.prompt for piece in done] == sorted(piece.prompt for piece in done)
    for prompt, tokens in enumerate(new):
        mine = [piece for piece in done if piece.prompt == prompt]
        assert sum(piece.tokens for piece in mine) == tokens
        assert [piece.prefix for piece in mine] == [
            cached + sum(one.tokens for one in mine[:i]) for i in range(len(mine))
        ]
        assert [piece.is_first for piece in mine] == [index == 0 for index in range(len(mine))]
        assert [piece.is_last for piece in mine] == [index == len(mine) - 1 for index in range(len(mine))]
    for step in steps:
        assert 0 < sum(piece.tokens for piece in step) <= budget
        assert len(step) == 1 or sum(piece.context for piece in step) <= held


@pytest.mark.parametrize(("name", "gpus"), PLACES[:4])
@pytest.mark.parametrize("engine", ["none", "mooncake-vllm-0.11"])
def test_one_prompt_in_one_step_takes_its_ttft(name: str, gpus: int, engine: str) -> None:
    placed, strategy = place(name, gpus, ctx=3000, cached_prefix="500", engine=engine)
    cut = Partition.even(2500, 1)
    program = StepPrograms(placed, strategy).of([Piece(0, 2500, 500, 3000, True)])
    finish_s = run_partition(placed, strategy, cut).finish_s
    assert run_batch(program, placed.cluster)[:, 0] == pytest.approx(finish_s, rel=1e-12)


@pytest.mark.parametrize("engine", ["none", "serving"])
@examples(40)
@given(first=lengths, second=lengths, cached=st.sampled_from([0, 700]))
def test_two_in_a_step_are_between_the_longer_alone_and_both_in_turn(
    engine: str, first: int, second: int, cached: int
) -> None:
    placed, strategy = place("single", 1, engine=engine)
    pieces = [Piece(number, new, cached, cached + new, True) for number, new in enumerate((first, second))]
    one_s, two_s = (alone_s(placed, strategy, piece) for piece in pieces)
    both_s = alone_s(placed, strategy, *pieces)
    assert max(one_s, two_s) <= both_s * (1 + 1e-9)
    assert both_s <= (one_s + two_s) * (1 + 1e-9)


@pytest.mark.parametrize(("name", "gpus"), PLACES)
@examples(8)
@given(
    new=st.lists(lengths, min_size=1, max_size=8),
    gaps_s=st.lists(st.floats(0, 0.1), min_size=8, max_size=8),
    budget=st.integers(300, 5000),
)
def test_executors_agree(name: str, gpus: int, new: list[int], gaps_s: list[float], budget: int) -> None:
    placed, strategy = place(name, gpus)
    prompts = prompts_of(new, gaps_s, cached=100)
    rule = PackingRule(prompts.new_tokens, prompts.cached_prefix, budget)
    served = serve_packed(StepPrograms(placed, strategy), rule, prompts.arrivals_s)
    programs = [launch.program for launch in served.launches]
    releases_s = [launch.release_s for launch in served.launches]
    event = EventSimulation(programs[0], placed.cluster, record=False, arrivals_s=releases_s, programs=programs)
    ends_s = {prompt: event.finishes_s[-1][step] for step, one in enumerate(served.launches) for prompt in one.ends}
    assert [ends_s[prompt] for prompt in range(len(new))] == pytest.approx(served.first_token_s, rel=1e-9)
    assert max(event.finish_s) == pytest.approx(served.end_s, rel=1e-9)
    begun = [prompt for launch in served.launches for prompt in launch.begins]
    assert begun == list(range(len(new)))
    assert sum(launch.tokens for launch in served.launches) == sum(new)
    # A step begins when rank 0 is free, and not before its prompts have come.
    assert (np.diff(releases_s) > 0).all()
    assert all(prompts.arrivals_s[prompt] <= served.begin_s[prompt] for prompt in range(len(new)))


@pytest.mark.parametrize(("name", "gpus"), PLACES)
def test_prices_are_the_programs(name: str, gpus: int) -> None:
    """Within 1.5 %: hosts are added up for a whole step, and logits and prefixes come from tables."""
    placed, strategy = place(name, gpus, ctx=16384)
    prices, programs, rng = (
        StepPrices(placed, strategy, 4096, 32768),
        StepPrograms(placed, strategy),
        np.random.default_rng(3),
    )
    for _ in range(12):
        news = rng.choice([1, 30, 300, 900], size=rng.integers(1, 5)).tolist()
        pieces = [
            Piece(number, new, old := int(rng.choice([0, 7, 900, 9000])), old + new, True)
            for number, new in enumerate(news)
        ]
        exact_s = float(run_batch(programs.of(pieces), placed.cluster)[-1, 0])
        free_s = [0.0] * prices.num_stages
        prices.run(free_s, 0.0, prices.step(pieces))
        assert free_s[-1] == pytest.approx(exact_s, rel=0.015)


def pool(placed: Scenario, strategy: Strategy, prompts: Prompts, budget: int, replicas: int, **more: object) -> Pool:
    count = len(prompts.arrivals_s)
    prices = StepPrices(placed, strategy, budget, max(prompts.context_lens))
    service = Service(
        num_gpus=placed.num_gpus,
        ttft_s=np.ones(count),
        hold_s=np.zeros(count),
        length_class=np.zeros(count, dtype=np.int64),
        strategies=(strategy.name,),
        overlap=Overlap.whole(),
        new_tokens=np.array(prompts.new_tokens),
        cached_prefix=np.array(prompts.cached_prefix),
        packing=Packing(prices=prices, most_held=1e9),
    )
    return Pool(arrival_s=np.array(prompts.arrivals_s), service=service, replicas=replicas, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "gpus"), [("single", 1), ("pp", 3)])
def test_a_group_of_a_fleet_serves_as_the_simulated_ranks_do(name: str, gpus: int) -> None:
    placed, strategy = place(name, gpus)
    rng = np.random.default_rng(5)
    prompts = prompts_of(rng.integers(20, 4000, 60).tolist(), rng.exponential(0.05, 60).tolist())
    rule = PackingRule(prompts.new_tokens, prompts.cached_prefix, 2048)
    served = serve_packed(StepPrograms(placed, strategy), rule, prompts.arrivals_s)
    run = run_pool(pool(placed, strategy, prompts, 2048, 1))
    waits_s = np.array(served.first_token_s) - prompts.arrivals_s
    assert (run.end_s - prompts.arrivals_s).mean() == pytest.approx(waits_s.mean(), rel=0.03)
    assert run.end_s.max() == pytest.approx(served.end_s, rel=0.02)


@examples(15)
@given(
    replicas=st.integers(1, 3),
    budget=st.integers(50, 3000),
    order=st.sampled_from(["first-come", "shortest-first"]),
    seed=st.integers(0, 99),
)
def test_nothing_is_lost_in_a_fleet(replicas: int, budget: int, order: str, seed: int) -> None:
    placed, strategy = place("pp", 2)
    rng = np.random.default_rng(seed)
    prompts = prompts_of(rng.integers(1, 3000, 30).tolist(), rng.exponential(0.02, 30).tolist())
    run = run_pool(pool(placed, strategy, prompts, budget, replicas, order=order))
    assert (run.begin_s >= np.array(prompts.arrivals_s)).all()
    assert (run.end_s > run.begin_s).all()
    assert run.busy_s <= replicas * run.end_s.max() * (1 + 1e-9)


def test_a_begun_prompt_goes_first() -> None:
    rule = PackingRule([500, 10], [0, 0], 100)
    queue = deque([1])
    pieces, begun = rule.step(Begun(0, 450), lambda: queue[0] if queue else None, queue.popleft)
    assert [(piece.prompt, piece.tokens) for piece in pieces] == [(0, 50), (1, 10)]
    assert begun is None
