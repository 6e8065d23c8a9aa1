"""One period of layers, traced: which time is the latest of which others, each later by a constant.

A node is such a latest time: `x_k(l) = max over terms (x_j(l - shift) + offset)`, with shift 0 for a node of the same
period and 1 for one of the period before. The offsets are the same in all periods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from kvrsim.program import Array

Offset = Array | float
Term = tuple[int, int, Offset]  # the node, how many periods before, how much later
Terms = dict[int, list[Term]]  # of each node, in the order in which they become known


def plus(one: Offset, other: Offset) -> Offset:
    """Both, without a copy of an array to which nothing is added."""
    if isinstance(one, float) and not one:
        return other
    return one if isinstance(other, float) and not other else one + other


@dataclass(slots=True, eq=False)
class Traced(NDArrayOperatorsMixin):
    """Stands for an array of times while a period is traced: a node and how much later."""

    graph: Graph
    node: int
    offset_s: Offset

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: tuple[Any, ...] | None = None, **options: object
    ) -> Traced:
        """A sum with a constant or a maximum; into `out` where it is given."""
        if method != "__call__" or ufunc not in (np.add, np.maximum) or options:
            raise TypeError(f"{ufunc.__name__} of traced times")
        combine = self.graph.later if ufunc is np.add else self.graph.latest
        found: Traced = combine(*inputs)
        if out is None:
            return found
        target: Traced = out[0]
        target.node, target.offset_s = found.node, found.offset_s
        return target

    def copy(self) -> Traced:
        """The same time."""
        return Traced(self.graph, self.node, self.offset_s)


class Graph:
    """The nodes of a period, in the order in which they become known; the first ones are the states before it."""

    def __init__(self, num_states: int) -> None:
        self.num_states = num_states
        self.terms: list[list[Term]] = [[] for _ in range(num_states)]

    def states(self) -> list[Traced]:
        """What each state is before the period."""
        return [Traced(self, node, 0.0) for node in range(self.num_states)]

    def later(self, one: Any, other: Any) -> Traced:
        """A time and a constant."""
        assert not (isinstance(one, Traced) and isinstance(other, Traced)), "a sum of two times is none"
        time, constant = (one, other) if isinstance(one, Traced) else (other, one)
        return Traced(self, time.node, plus(time.offset_s, constant))

    def latest(self, one: Any, other: Any) -> Traced:
        """The later of two times, a new node where either may be."""
        if not (isinstance(one, Traced) and isinstance(other, Traced)):
            time, constant = (one, other) if isinstance(one, Traced) else (other, one)
            assert np.all(constant == -np.inf), "a time that is not the same number of periods later in each"
            return time.copy()
        if one.node == other.node:
            return Traced(self, one.node, np.maximum(one.offset_s, other.offset_s))
        for time, rival in ((one, other), (other, one)):
            least = [plus(time.offset_s, offset) for node, _, offset in self.terms[time.node] if node == rival.node]
            if least and np.all(least[0] >= rival.offset_s):
                return time.copy()
        self.terms.append([(one.node, 0, one.offset_s - other.offset_s), (other.node, 0, 0.0)])
        return Traced(self, len(self.terms) - 1, other.offset_s)
