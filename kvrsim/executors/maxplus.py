"""Periods of max-plus arithmetic that are alike, without walking through every one.

Three laws spare most periods, all exact; `x_k(l)` is a node in period l (see trace.py):

- Convexity. Where no node depends on itself but by its own term of weight w, every x_k(l) is convex in l from some
  period D on. The latest of `u(m) + (l - m) w` over m, u being what the other terms say, is then at an end, so that
  `x_k(l) = max(x_k(D) + (l - D) w, u_k(l))`: the last period follows from the period D.
- Chains. Where nodes depend on the one before and, of the period before, on the one behind and on themselves, ways back
  to a node all take one period for each neighbour that they pass. The longest way of n periods goes to the slowest of
  the loops that it meets, stays there, and goes on: no loop between them is passed more often than it must be.
- Homogeneity. Where all nodes of a partition advance by the same time from one period to the next, they do so for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrsim.executors.trace import Offset, Term, Terms
from kvrsim.program import Array

_COLUMNS = 2048  # partitions that are walked together, whose arrays stay in a core's cache
_MOST_LEFT = 0.75  # of the partitions: where more remain, none leaves
_CHECKS = (4, 8, 16, 32)  # periods after which partitions that repeat leave the walk
SAME = 1e-13  # of the time, by which two advances differ that are the same but for rounding


def advanced(terms: Terms, x: dict[int, Array], ends: list[int], periods: int) -> dict[int, Array]:
    """The nodes at the ends after so many periods, from all nodes."""
    kept = {*ends, *(node for found in terms.values() for node, shift, _ in found if shift)}
    x = {node: x[node] for node in terms if node in kept}
    depth = _depth(terms)
    if depth is not None and depth < periods:
        return _Convex(terms, walked(terms, x, depth, checks=(), whole=True), depth).at(ends, periods)
    if (chain := _Chain.of(terms)) and x.keys() == terms.keys() and periods >= 2 * len(terms):
        return dict(zip(terms, chain.after(list(x.values()), periods), strict=True))
    size = next(iter(x.values())).size
    found = {node: np.empty(size) for node in ends}
    for first in range(0, size, _COLUMNS):
        some = slice(first, first + _COLUMNS)
        mine = {node: [(other, shift, part(offset, some)) for other, shift, offset in of] for node, of in terms.items()}
        ended = walked(mine, {node: values[some] for node, values in x.items()}, periods)
        for node, values in found.items():
            values[some] = ended[node]
    return found


def part(offset: Offset, some: slice | npt.NDArray[np.bool_]) -> Offset:
    """Of some partitions."""
    return offset if isinstance(offset, float) or offset.size == 1 else offset[some]


def _depth(terms: Terms) -> int | None:
    """Periods from which on all nodes are convex; None: nodes depend on each other in a circle."""
    depths: dict[int, int] = {}
    waiting = dict(terms)
    while waiting:
        known = {
            node
            for node, found in waiting.items()
            if all(other in depths or (other == node and shift == 1) for other, shift, _ in found)
        }
        if not known:
            return None
        for node in known:
            others = [depths[other] + shift for other, shift, _ in waiting.pop(node) if other != node]
            depths[node] = max(others, default=1)
    return max(depths.values())


def walked(
    terms: Terms,
    x: dict[int, Array],
    periods: int,
    *,
    checks: Iterable[int] = _CHECKS,
    whole: bool = False,
) -> dict[int, Array]:
    """The nodes that x has, after so many periods; all nodes, if `whole`. Each of shape (B,)."""
    size = next(iter(x.values())).size
    left = np.arange(size)  # partitions that have not left
    ended = {node: np.empty(size) for node in x}
    checks = {number for number in checks if number < periods}
    lines = [node for node, found in terms.items() if all(other == node for other, _, _ in found)]
    buffers = [{node: np.empty(size) for node in terms} for _ in range(2)]
    scratch, new = np.empty(size), x
    for number in range(1, periods + 1):
        old, new = new, buffers[number % 2]
        for node, found in terms.items():
            _latest(found, old, new, new[node], scratch)
        if number not in checks:
            continue
        with np.errstate(invalid="ignore"):  # a time that nothing has begun yet is -inf, and never leaves
            advance = {node: new[node] - old[node] for node in x}
            of_others = np.stack([advance[node] for node in x if node not in lines])
            low = of_others.min(axis=0)
            leaves = of_others.max(axis=0) - low <= SAME * new[next(iter(x))]
        for node in lines:
            leaves &= advance[node] <= low
        stays = ~leaves
        if stays.mean() > _MOST_LEFT:
            continue
        for node, end in ended.items():
            end[left[leaves]] = (new[node] + (periods - number) * (advance[node] if node in lines else low))[leaves]
        left = left[stays]
        if not left.size:
            return ended
        terms = {
            node: [(other, shift, part(offset, stays)) for other, shift, offset in found]
            for node, found in terms.items()
        }
        new = {node: values[stays] for node, values in new.items()}
        buffers = [{node: np.empty(left.size) for node in terms} for _ in range(2)]
        scratch = np.empty(left.size)
    if whole:
        return new
    for node, end in ended.items():
        end[left] = new[node]
    return ended


def _latest(terms: list[Term], old: dict[int, Array], new: dict[int, Array], out: Array, scratch: Array) -> None:
    """The latest of the terms, into `out`."""
    first, *others = terms
    np.add((old if first[1] else new)[first[0]], first[2], out=out)
    for node, shift, offset in others:
        time = (old if shift else new)[node]
        if not isinstance(offset, float) or offset:
            time = np.add(time, offset, out=scratch)
        np.maximum(out, time, out=out)


class _Convex:
    """Nodes far from a period D, all known there, from which on they are convex."""

    def __init__(self, terms: Terms, x: dict[int, Array], base: int) -> None:
        self.terms, self.base = terms, base
        self.known = {(node, base): values for node, values in x.items()}

    def at(self, nodes: list[int], period: int) -> dict[int, Array]:
        """The nodes then."""
        return {node: self._at(node, period) for node in nodes}

    def _at(self, node: int, period: int) -> Array:
        if (node, period) not in self.known:
            value: Array | None = None
            for other, shift, offset in self.terms[node]:
                if other == node:
                    time = self.known[node, self.base] + (period - self.base) * offset
                else:
                    time = self._at(other, period - shift) + offset
                value = time if value is None else np.maximum(value, time, out=value)
            assert value is not None
            self.known[node, period] = value
        return self.known[node, period]


@dataclass(frozen=True, slots=True)
class _Chain:
    """Nodes in a row: `x_i(l) = max(x_(i-1)(l) + on_i, x_(i+1)(l-1) + back_i, x_i(l-1) + own_i)`."""

    on: list[Offset]  # the first one is not used
    back: list[Offset | None]  # None: the node does not wait for the one behind
    loops: list[Offset | None]  # the slowest loop of a node: its own, or by way of the one behind; None: it has none

    @classmethod
    def of(cls, terms: Terms) -> _Chain | None:
        """None: they are none."""
        place = {node: index for index, node in enumerate(terms)}
        kinds: list[dict[tuple[int, int], Offset]] = [
            {(place[other] - index, shift): offset for other, shift, offset in found}
            for index, found in enumerate(terms.values())
        ]
        if any(not of.keys() <= {(-1, 0), (1, 1), (0, 1)} or ((-1, 0) in of) != (i > 0) for i, of in enumerate(kinds)):
            return None
        on: list[Offset] = [of.get((-1, 0), 0.0) for of in kinds]
        back = [of.get((1, 1)) for of in kinds]
        round_trips = [None if way is None else way + then for way, then in zip(back, [*on[1:], 0.0], strict=True)]
        own = [of.get((0, 1)) for of in kinds]
        return cls(on, back, [_slower(*both) for both in zip(own, round_trips, strict=True)])

    def after(self, x: list[Array], periods: int) -> list[Array]:
        """The nodes after at least twice as many periods as there are nodes."""
        found = [np.full(x[0].shape, -np.inf) for _ in x]
        onward, gone = found[0], found[0]  # the latest before a node: of where ways begin, and of where they stayed
        for index, (loop, on) in enumerate(zip(self.loops, self.on, strict=True)):
            onward = np.maximum(onward + on, x[index])
            gone = gone + on
            if loop is not None:
                stayed = np.maximum(onward, self._come_back(x, index, loop)) + periods * loop
                gone = np.maximum(gone, stayed)
                for before in reversed(range(index)):
                    if (back := self.back[before]) is None:
                        break
                    stayed = stayed + (back - loop)
                    np.maximum(found[before], stayed, out=found[before])
            found[index] = np.maximum(found[index], gone)
        return found

    def _come_back(self, x: list[Array], index: int, loop: Offset) -> Array:
        """The latest at a node of what begins there or behind, each period less the loop."""
        latest = x[-1]
        for node in reversed(range(index, len(x) - 1)):
            back = self.back[node]
            latest = x[node] if back is None else np.maximum(latest + (back - loop), x[node])
        return latest


def last_of_row(x: Array, on: Array, back: Array, periods: int) -> Array:
    """The last of the nodes of row_after; x: after a period, so that no node is before the one before it plus `on`."""
    if periods < 2 * len(x):
        return np.asarray(row_after(x, on, back, periods)[-1])
    loops = np.empty_like(back)
    np.add(back[:-1], on[1:], out=loops[:-1])
    loops[-1] = back[-1]
    np.maximum(loops[0], on[0], out=loops[0])
    begun = x
    if (x[1:] > (1.0 + SAME) * (x[:-1] + on[1:])).any():  # else no node is better begun at than the one before it
        to_first = np.zeros_like(x)  # from each node back to the first one
        np.cumsum(back[:-1], axis=0, out=to_first[1:])
        far, begun = x + to_first, np.full_like(x, -np.inf)
        for further in reversed(range(len(x))):  # what begins so many nodes behind comes back, each period less a loop
            count = len(x) - further
            begun[:count] -= loops[:count]
            np.maximum(begun[:count], far[further:], out=begun[:count])
        begun -= to_first
    stayed = begun + periods * loops
    gone: Array = stayed[0]
    for index in range(1, len(x)):
        gone = np.maximum(gone + on[index], stayed[index])
    return gone


def row_after(x: Array, on: Array, back: Array, periods: int) -> Array:
    """Nodes in a row after so many periods: `x_i(l) = max(x_(i-1)(l) + on_i, x_(i+1)(l-1) + back_i)`.

    At the ends, `on_0` and the last `back` are the nodes' own loops. All have the shape (nodes, B).
    By anti-diagonals: step s has period l of every node i with s = i + 2 l, none of which needs another.
    """
    nodes = len(x)
    row = np.concatenate([x[:1], x, x[-1:]])  # beyond the ends stand copies of the ends
    one, other = np.empty_like(x), np.empty_like(x)
    for step in range(2, nodes + 2 * periods):
        first = max(step - 2 * periods, step % 2)
        now = slice(first, min(nodes, step - 1), 2)
        size = len(range(nodes)[now])
        np.add(row[:-2][now], on[now], out=one[:size])
        np.add(row[2:][now], back[now], out=other[:size])
        np.maximum(one[:size], other[:size], out=row[1:-1][now])
        row[0], row[-1] = row[1], row[-2]
    return row[1:-1]


def _slower(one: Offset | None, other: Offset | None) -> Offset | None:
    return other if one is None else one if other is None else np.maximum(one, other)
