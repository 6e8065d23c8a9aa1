"""A period of layers in as few nodes and terms as it takes: what is asked for once, or never matters, is left out."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from kvrsim.executors.maxplus import advanced, part, walked
from kvrsim.executors.trace import Graph, Offset, Term, Terms, Traced, plus
from kvrsim.program import Array, Flags

_LONGEST_LOOP = 4  # nodes


class Period:
    """A traced period: its nodes, with the states replaced by what they were at the end of the period before."""

    def __init__(self, graph: Graph, ends: list[Traced], num_wanted: int) -> None:
        num_states, self.num_wanted = graph.num_states, num_wanted
        self.ends: list[tuple[int, Offset]] = []
        nodes = [list(terms) for terms in graph.terms]
        for state, end in enumerate(ends):
            if end.node < num_states and end.node != state:  # another state's, from before the period
                nodes.append([(end.node, 0, end.offset_s)])
                self.ends.append((len(nodes) - 1, 0.0))
            else:
                self.ends.append((end.node, end.offset_s))
        for state, (node, offset) in enumerate(self.ends):
            if node == state:  # advances by a constant: a node of its own, at the end of a period
                nodes[state] = [(state, 0, offset)]
                self.ends[state] = (state, 0.0)

        def before(term: Term) -> Term:
            node, shift, offset = term
            if node >= num_states:
                return term
            end, ends_by = self.ends[node]
            return end, shift + 1, plus(ends_by, offset)

        nodes = [[before(term) for term in terms] for terms in nodes]
        self.terms = _inlined(dict(enumerate(nodes)), [node for node, _ in self.ends[:num_wanted]])

    def after(self, states_s: list[Array], periods: int) -> list[Array]:
        """The states that are wanted, after so many periods more, each of shape (B,)."""
        x = {
            node: state_s - offset
            for state_s, (node, offset) in zip(states_s, self.ends, strict=True)
            if node in self.terms
        }
        x = walked(self.terms, x, 1, checks=(), whole=True)
        ends = self.ends[: self.num_wanted]
        if periods == 1:
            return [x[node] + offset for node, offset in ends]
        terms, is_fast = _without_slow_lines(self.terms, states_s[0].size)
        if is_fast.all():
            return _advanced(terms, x, ends, periods - 1)
        found = [np.empty(states_s[0].shape) for _ in ends]
        for some, own in ((is_fast, terms), (~is_fast, self.terms)):
            if some.any():
                mine = {
                    node: [(other, shift, part(offset, some)) for other, shift, offset in of]
                    for node, of in own.items()
                }
                x_mine = {node: values[some] for node, values in x.items()}
                ends_mine = [(node, part(offset, some)) for node, offset in ends]
                for array, values in zip(found, _advanced(mine, x_mine, ends_mine, periods - 1), strict=True):
                    array[some] = values
        return found


def _advanced(terms: Terms, x: dict[int, Array], ends: list[tuple[int, Offset]], periods: int) -> list[Array]:
    """The times at the ends after so many periods, from all nodes."""
    terms, ends = _without_aliases(terms, ends)
    nodes = [node for node, _ in ends]
    x = advanced(_inlined(terms, nodes), x, nodes, periods)
    return [x[node] + offset for node, offset in ends]


def _without_slow_lines(terms: Terms, size: int) -> tuple[Terms, Flags]:
    """Leave out what advances by a constant, where the node itself advances at least as much in every period.

    Also says in which of so many partitions it does, at all nodes where anything is left out.
    """
    rates = {node: found[0][2] for node, found in terms.items() if all(other == node for other, _, _ in found)}
    kept, is_fast = {}, np.ones(size, dtype=bool)
    for node, found in terms.items():
        kept[node] = found
        lines = {other: rates[other] for other, _, _ in found if other in rates and node not in rates}
        advance: Offset = -np.inf
        for loop in _loops(terms, node, rates) if lines else ():
            advance = np.maximum(advance, sum(loop[1:], loop[0]))
            if all(np.all(rate <= advance) for rate in lines.values()):
                break
        slow = {other for other, rate in lines.items() if np.any(rate <= advance)}
        for other in slow:
            is_fast &= rates[other] <= advance
        kept[node] = [term for term in found if term[0] not in slow]
    return kept, is_fast


def _loops(
    terms: Terms,
    node: int,
    lines: Collection[int],
    path: tuple[Offset, ...] = (),
    at: int | None = None,
    shift: int = 0,
) -> Iterator[tuple[Offset, ...]]:
    """The offsets along short ways from a node to itself one period later, not by way of lines."""
    for other, more, offset in terms[node if at is None else at]:
        if other == node and shift + more == 1:
            yield (*path, offset)
        elif other not in lines and shift + more <= 1 and len(path) < _LONGEST_LOOP:
            yield from _loops(terms, node, lines, (*path, offset), other, shift + more)


def _without_aliases(terms: Terms, ends: list[tuple[int, Offset]]) -> tuple[Terms, list[tuple[int, Offset]]]:
    """Ask nodes that are a constant later than another one for that other one."""
    same = {
        node: (found[0][0], found[0][2])
        for node, found in terms.items()
        if len(found) == 1 and found[0][0] != node and not found[0][1]
    }

    def origin(node: int, offset: Offset) -> tuple[int, Offset]:
        while node in same:
            node, later = same[node]
            offset = plus(offset, later)
        return node, offset

    def asked(term: Term) -> Term:
        node, offset = origin(term[0], term[2])
        return node, term[1], offset

    return {node: [asked(term) for term in found] for node, found in terms.items()}, [origin(*end) for end in ends]


def _inlined(nodes: Terms, ends: list[int]) -> Terms:
    """The nodes that the ends need; one that a single other node asks for, in the same period, is made part of it."""
    needed, asked = set(ends), list(ends)
    uses: dict[int, int] = dict.fromkeys(ends, 2)
    while asked:
        for other, shift, _ in nodes[asked.pop()]:
            uses[other] = uses.get(other, 0) + (2 if shift else 1)
            if other not in needed:
                needed.add(other)
                asked.append(other)
    found: Terms = {}
    for node in sorted(needed):
        terms: dict[tuple[int, int], Offset] = {}
        for other, shift, offset in nodes[node]:
            alone = not shift and uses[other] == 1
            for inner, inner_shift, inner_offset in found[other] if alone else [(other, 0, 0.0)]:
                key = inner, shift + inner_shift
                total = plus(offset, inner_offset)
                terms[key] = np.maximum(terms[key], total) if key in terms else total
        found[node] = [(*key, offset) for key, offset in terms.items()]
    return {node: terms for node, terms in found.items() if uses[node] > 1}
