"""Where a program repeats itself, and what its ranks' times are after many periods that are alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import numpy as np

from kvrsim.executors.maxplus import SAME
from kvrsim.executors.period import Period
from kvrsim.executors.steps import RankState, Step
from kvrsim.executors.trace import Graph, Traced
from kvrsim.program import AllGather, AllToAll, Array, Load, Op, Program, Recv, RingPass, Send

_MOST_KINDS = 16  # layers of the longest period that is looked for
_LEAST_SPARED = 4  # layers, below which a period is not worth a part of its own


class Evaluator(Protocol):
    """What takes ranks through steps: kvrsim.executors.batch."""

    ranks: list[RankState]
    links_s: dict[tuple[int, int], Array]  # when each is free
    scratch: Array
    shape: tuple[int, ...]

    def run_steps(self, steps: Sequence[list[Step]]) -> None:
        """Take every rank to the end of its steps."""
        ...


def runs(kinds: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    """The kinds of layers in order, as periods and how often each follows itself; the longest repeats first found."""
    first = alone = 0
    while first < len(kinds):
        length, times = _longest(kinds, first)
        if (times - 1) * length >= _LEAST_SPARED:
            if alone < first:
                yield tuple(kinds[alone:first]), 1
            yield tuple(kinds[first : first + length]), times
            first = alone = first + times * length
        else:
            first += 1
    if alone < first:
        yield tuple(kinds[alone:first]), 1


def _longest(kinds: Sequence[int], first: int) -> tuple[int, int]:
    """The period that begins there and spares the most layers: its length, and how often it follows itself."""
    best = 1, 1
    for length in range(1, min(_MOST_KINDS, (len(kinds) - first) // 2) + 1):
        same = first
        while same + length < len(kinds) and kinds[same] == kinds[same + length]:
            same += 1
        times = (same - first) // length + 1
        if (times - 1) * length > (best[1] - 1) * best[0]:
            best = length, times
    return best


def has_runs(program: Program) -> bool:
    """Whether every layer ends for all ranks what it begins: its messages are received in it, in every kind."""
    if program.layer_numbers is not None:  # a block is a step of a pipeline
        return False
    ends = [op for ops in (*program.prologue, *program.epilogue) for op in ops]
    if any(isinstance(op, Send | Recv | Load) for op in ends):
        return False
    return all(_is_closed(program.layers[kind]) for kind in set(program.layer_kind_index))


def _is_closed(layer: Sequence[Sequence[Op]]) -> bool:
    sent: Counter[tuple[int, int]] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    for rank, ops in enumerate(layer):
        for op in ops:
            if isinstance(op, Load):
                return False
            if isinstance(op, Send):
                sent[rank, op.dst] += 1
            elif isinstance(op, Recv):
                received[op.src, rank] += 1
    return sent == received


def repeat(evaluator: Evaluator, steps: Sequence[list[Step]], times: int) -> None:
    """Take all ranks through a period so many times."""
    evaluator.run_steps(steps)  # once as it is: from then on every period begins as the one before
    if any(isinstance(step, AllGather | RingPass | AllToAll) for of_rank in steps for step in of_rank):
        _walk(evaluator, steps, times - 1)
        return
    ranks, links = evaluator.ranks, list(evaluator.links_s)
    states_s = [
        *_moving_s(evaluator),
        *(np.broadcast_to(rank.begin_s + rank.host_s, evaluator.shape) for rank in ranks),
    ]
    period, hosts_s = _traced(evaluator, steps, len(states_s))
    after = period.after(states_s, times - 1)
    for rank, clock_s, host_s in zip(ranks, after, hosts_s, strict=False):
        rank.clock = clock_s
        rank.host_s += (times - 1) * host_s
    evaluator.links_s.update(zip(links, after[len(ranks) :], strict=True))


def _moving_s(evaluator: Evaluator) -> list[Array]:
    """When each rank and each link is free, each of shape (B,)."""
    return [*(rank.clock for rank in evaluator.ranks), *evaluator.links_s.values()]


def _traced(evaluator: Evaluator, steps: Sequence[list[Step]], num_states: int) -> tuple[Period, list[float]]:
    """The period that follows, and what each rank's host issues in it; the evaluator's clocks are to be set again."""
    ranks, links = evaluator.ranks, list(evaluator.links_s)
    graph = Graph(num_states)
    states = graph.states()
    clocks, of_links, hosts = states[: len(ranks)], states[len(ranks) : -len(ranks)], states[-len(ranks) :]
    begins = [(rank.begin_s, rank.host_s) for rank in ranks]
    for rank, clock, host in zip(ranks, clocks, hosts, strict=True):
        rank.clock, rank.begin_s, rank.host_s = _as_array(clock), _as_array(host), 0.0
    evaluator.links_s.update(zip(links, map(_as_array, of_links), strict=True))
    scratch, evaluator.scratch = evaluator.scratch, _as_array(Traced(graph, 0, 0.0))
    evaluator.run_steps(steps)
    evaluator.scratch = scratch
    issued_s = [rank.host_s for rank in ranks]
    moving = cast(list[Traced], _moving_s(evaluator))
    ends = [
        *moving,
        *(
            Traced(graph, host.node, issued)
            for host, issued in zip(graph.states()[-len(ranks) :], issued_s, strict=True)
        ),
    ]
    for rank, (begin_s, host_s) in zip(ranks, begins, strict=True):
        rank.begin_s, rank.host_s = begin_s, host_s
    return Period(graph, ends, num_wanted=len(moving)), issued_s


def _as_array(traced: Traced) -> Array:
    """What stands for an array of times."""
    return cast(Array, traced)


def _walk(evaluator: Evaluator, steps: Sequence[list[Step]], times: int) -> None:
    """One period after another, until all that moves advances by the same time, and no host by more."""
    ranks = evaluator.ranks
    before = np.stack(_moving_s(evaluator))
    for left in reversed(range(times)):
        hosts_s = [rank.host_s for rank in ranks]
        evaluator.run_steps(steps)
        after = np.stack(_moving_s(evaluator))
        issued_s = [rank.host_s - host_s for rank, host_s in zip(ranks, hosts_s, strict=True)]
        with np.errstate(invalid="ignore"):  # what nothing has begun yet is -inf
            advance = after - before
            least = advance.min(axis=0)
            same = advance.max(axis=0) - least <= SAME * after.max(axis=0)
        if (same & (least >= max(issued_s))).all():
            for rank, host_s in zip(ranks, issued_s, strict=True):
                rank.clock += left * least
                rank.host_s += left * host_s
            for edge, free_s in evaluator.links_s.items():
                evaluator.links_s[edge] = free_s + left * least
            return
        before = after
