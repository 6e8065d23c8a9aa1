"""Draws: what the builders of this package take their choices from.

Hypothesis, in tests of laws (`Drawn`), so that a counterexample shrinks; `random.Random(seed)` has the same methods and
serves tests that need one scenario, always the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

from hypothesis import currently_in_test_context, note
from hypothesis import strategies as st

T = TypeVar("T")

_floats, _integers = cache(st.floats), cache(st.integers)


class Drawn:
    """Draws from Hypothesis: each shrinks to the first choice, the least number."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def __repr__(self) -> str:
        return "draws()"

    def random(self) -> float:
        return self.uniform(0.0, 1.0)

    def uniform(self, a: float, b: float) -> float:
        return float(self._draw(_floats(a, b)))

    def randint(self, a: int, b: int) -> int:
        return int(self._draw(_integers(a, b)))

    def randrange(self, start: int) -> int:
        return self.randint(0, start - 1)

    def choice(self, seq: Sequence[T]) -> T:
        return seq[self.randrange(len(seq))]

    def sample(self, population: Sequence[T], k: int) -> list[T]:
        kept = list(range(len(population)))
        return [population[kept.pop(self.randrange(len(kept)))] for _ in range(k)]


Draws = Drawn | random.Random


@st.composite
def draws(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Drawn:
    """For tests that draw as they go."""
    return Drawn(draw)


def strategy_of(build: Callable[..., T]) -> Callable[..., st.SearchStrategy[T]]:
    """The Hypothesis strategy of a builder: the same arguments, without the draws."""

    @st.composite
    def built(draw: Callable[[st.SearchStrategy[Any]], Any], *arguments: Any, **options: Any) -> T:
        return build(Drawn(draw), *arguments, **options)

    return built


def noted(value: T) -> T:
    """The same; a counterexample prints it."""
    if currently_in_test_context():
        note(value)  # type: ignore[arg-type]
    return value


def maybe(rng: Draws, usual: T, draw: Callable[[], T]) -> T:
    """What is usual, or as drawn, each half of the time."""
    return usual if rng.randrange(2) == 0 else draw()


def log(rng: Draws, low: float, high: float) -> float:
    """Between 10^low and 10^high, each decade as likely."""
    return float(10 ** rng.uniform(low, high))
