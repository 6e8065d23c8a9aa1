"""The paper's hierarchical grid search: its worked example, number of evaluations, and allowed pruning."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.builder import make_scenario
from kvrsim.execution import place
from kvrsim.program import Array
from kvrsim.strategies import KVR_S
from planner.search.grid import Grid
from planner.search.minimise import Boundaries, chunk_lens
from planner.search.search import search
from tests.building import Draws, draws, examples, executed


class Counted:
    """An objective that records the boundaries of each call."""

    def __init__(self, objective: Any) -> None:
        self.objective = objective
        self.calls: list[Boundaries] = []

    def __call__(self, boundaries: Boundaries, enough_s: float = math.inf, /) -> Array:
        self.calls.append(boundaries)
        return np.array([self.objective(*row) for row in boundaries], dtype=float)

    @property
    def rows(self) -> int:
        return sum(len(call) for call in self.calls)


def near(*target: int) -> Any:
    """An objective with its minimum at the target."""
    return lambda *row: 1.0 + sum((at - want) ** 2 for at, want in zip(row, target, strict=True))


def slowest(num_tokens: int, *target: int) -> Any:
    """An objective like TTFT: the maximum over ranks of chunk / target chunk."""
    want = chunk_lens(target, num_tokens)
    return lambda *row: max(chunk / share for chunk, share in zip(chunk_lens(row, num_tokens), want, strict=True))


def follow(counted: Counted, center: tuple[int, ...], strides: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """Check each pass: five values per boundary, in all combinations without an empty chunk; the last is its best."""
    calls = iter(counted.calls)
    assert next(calls).tolist() == [list(center)]
    for stride in strides:
        is_moving = True
        while is_moving:
            values = [[at + stride * offset for offset in (-2, -1, 0, 1, 2)] for at in center]
            combinations = list(itertools.product(*values))
            assert len(combinations) == 5 ** len(center)
            rows = [tuple(row) for row in next(calls).tolist()]
            assert sorted(rows) == sorted(row for row in combinations if min(chunk_lens(row, num_tokens)) >= 1)
            best = min(rows, key=lambda row: (counted.objective(*row), _moves(row, center)))
            is_moving = counted.objective(*best) < counted.objective(*center)
            if is_moving:
                center = best
    assert list(calls) == []
    return center


def _moves(row: tuple[int, ...], center: tuple[int, ...]) -> int:
    return sum(abs(at - from_) for at, from_ in zip(row, center, strict=True))


@pytest.mark.parametrize("objective", [near(28, 70), slowest(96, 28, 70)], ids=["distance", "slowest rank"])
def test_the_papers_worked_example(objective: Any) -> None:
    """96 tokens on 3 ranks, strides 8, 4, 2, from [0, 32, 64, 96] to [0, 28, 70, 96] (Fig. 6)."""
    counted = Counted(objective)
    grid = Grid(num_tokens=96, num_ranks=3, evaluate=counted)
    assert list(grid.strides(2)) == [8, 4, 2]
    boundaries, best = grid.search(2)
    assert boundaries == (28, 70)
    assert best == objective(28, 70)
    assert follow(counted, (32, 64), (8, 4, 2), 96) == (28, 70)


@pytest.mark.parametrize("num_ranks", [3, 5])
def test_five_values_a_boundary_and_level(num_ranks: int) -> None:
    """A level has 5^(p - 1) candidates, without those in which two boundaries meet."""
    tokens = 4096 * num_ranks
    even = tuple(4096 * rank for rank in range(1, num_ranks))
    counted = Counted(near(*(boundary + 700 for boundary in even)))
    boundaries, _ = Grid(num_tokens=tokens, num_ranks=num_ranks, evaluate=counted).search(512)
    strides = {3: (1024, 512), 5: (4096, 2048, 1024, 512)}[num_ranks]
    assert follow(counted, even, strides, tokens) == boundaries
    assert boundaries == tuple(boundary + 512 for boundary in even)  # 700 is nearer to 512 than to 1024


@given(rng=draws(), ranks=st.integers(3, 5))
@examples(50)
def test_only_candidates_that_leave_every_rank_a_token(rng: Draws, ranks: int) -> None:
    tokens = rng.randint(ranks, 60)
    target = sorted(rng.sample(range(1, tokens), ranks - 1))
    counted = Counted(near(*target))
    boundaries, _ = Grid(num_tokens=tokens, num_ranks=ranks, evaluate=counted).search(1)
    for row in np.concatenate(counted.calls).tolist():
        assert all(chunk >= 1 for chunk in chunk_lens(row, tokens))
    assert sum(chunk_lens(boundaries, tokens)) == tokens


@given(tokens=st.integers(2, 100_000), stride=st.integers(1, 512), share=st.floats(0, 1))
@examples(100)
def test_two_ranks_take_a_binary_search(tokens: int, stride: int, share: float) -> None:
    """O(log C) evaluations find the minimum of a function that first falls and then rises."""
    stride = min(stride, tokens // 2)
    places = max(1, (tokens - 1) // stride)
    lowest = 1 + share * (tokens - 2)
    counted = Counted(lambda at: 1.0 + abs(at - lowest))
    (boundary,), best = Grid(num_tokens=tokens, num_ranks=2, evaluate=counted).search(stride)
    assert best == min(1.0 + abs(place * stride - lowest) for place in range(1, places + 1))
    assert 1 <= boundary < tokens
    assert counted.rows <= 2 * math.ceil(math.log2(places)) + 1


@pytest.mark.parametrize(("gpus", "ctx"), [(4, "16k"), (8, "8k"), (8, "16k")])
def test_the_grid_is_as_good_as_the_search_in_use(gpus: int, ctx: str) -> None:
    """A boundary can move by more than the even share, and rank 0 has the longest chunk (Fig. 10 a)."""
    scenario = place(make_scenario(model="llama-7b", gpus=gpus, ctx=ctx)[0], KVR_S).placed
    grid = search(executed(scenario, KVR_S), method="grid")
    assert grid.ttft_s == pytest.approx(search(executed(scenario, KVR_S)).ttft_s, rel=1e-3)
    assert grid.partition.chunk_lens[0] == max(grid.partition.chunk_lens)


def test_equal_times_leave_boundaries_where_they_are() -> None:
    """Ties go to the centre, so that no rank is starved where its chunk does not matter."""
    boundaries, _ = Grid(
        num_tokens=4096, num_ranks=4, evaluate=lambda rows, enough_s=math.inf: np.ones(len(rows))
    ).search(16)
    assert boundaries == (1024, 2048, 3072)
    last_only = Counted(lambda *row: float(abs(row[-1] - 3000)))
    boundaries, _ = Grid(num_tokens=4096, num_ranks=4, evaluate=last_only).search(8)
    assert boundaries == (1024, 2048, 3000)


def test_many_ranks_move_a_few_boundaries_at_a_time() -> None:
    """All combinations of 15 boundaries would be 5^15 per level; the search moves only four boundaries at a time."""
    counted = Counted(near(*(100 * rank + 20 for rank in range(1, 16))))
    boundaries, _ = Grid(num_tokens=1600, num_ranks=16, evaluate=counted).search(1)
    assert boundaries == tuple(100 * rank + 20 for rank in range(1, 16))
    assert counted.rows < 100_000
