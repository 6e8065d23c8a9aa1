"""Sources of random choices for the builders of this package.

`Drawn` draws from Hypothesis, for tests of laws: Hypothesis shrinks a counterexample. `random.Random(seed)` has the
same methods, for tests that need one fixed scenario.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from hypothesis import currently_in_test_context, note
from hypothesis import strategies as st

T = TypeVar("T")

_floats, _integers = cache(st.floats), cache(st.integers)


class Drawn:
    """Random choices from Hypothesis; Hypothesis shrinks each to the first choice or the smallest number."""

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
        indices = list(range(len(population)))
        return [population[indices.pop(self.randrange(len(indices)))] for _ in range(k)]


Draws = Drawn | random.Random


@st.composite
def draws(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Drawn:
    """The Hypothesis strategy for tests that draw while they run."""
    return Drawn(draw)


def strategy_of(build: Callable[..., T]) -> Callable[..., st.SearchStrategy[T]]:
    """The Hypothesis strategy of a builder: it takes the builder's arguments without `rng`."""

    @st.composite
    def built(draw: Callable[[st.SearchStrategy[Any]], Any], *arguments: Any, **options: Any) -> T:
        return build(Drawn(draw), *arguments, **options)

    return built


def noted(value: T) -> T:
    """Return the value; Hypothesis prints it with a counterexample."""
    if currently_in_test_context():
        note(value)  # type: ignore[arg-type]
    return value


def maybe(rng: Draws, usual: T, draw: Callable[[], T]) -> T:
    """The usual value or a drawn value, each with probability 1/2."""
    return usual if rng.randrange(2) == 0 else draw()


def log(rng: Draws, low: float, high: float) -> float:
    """A number between 10^low and 10^high whose logarithm is uniform."""
    return float(10 ** rng.uniform(low, high))


def tokens(*values: float) -> npt.NDArray[np.float64]:
    """An array of numbers of tokens, as costs take."""
    return np.array(values, dtype=float)
