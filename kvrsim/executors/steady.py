"""Steady state: once all times advance by the same amount from period to period, all further periods do so.

A layer's times are maxima of sums of earlier times. So if all times of a state are later by some seconds, all times of
the next state are later by the same seconds. A host that issues a period in less time gets further ahead of its device
and delays nothing. Times may also advance alike only over several periods, if the longest chain of waits goes through
several periods before it comes back to the same rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import numpy as np

from kvrsim.program import Array, Flags, Load, Program, Recv, Send

_MOST_KINDS = 16  # largest number of layers in a period
_LEAST_REPEATED = 4  # number of repeated layers below which a period is not checked
CYCLES = (1, 2, 3, 4, 6)  # numbers of periods over which times may advance alike
ROUNDING = 1e-13  # relative difference of two times or advances that rounding can cause


def steady_advance(
    states_s: Sequence[Array], issued_s: float | Array, *, in_order: bool = False
) -> tuple[Array, Flags]:
    """Seconds by which each state advances, shape (states, ..., B), and whether all further advances are equal.

    In the result, all states of a partition advance alike. With `in_order`, each state depends only on itself and on
    states before it, and later states may advance more: the longest way to a state that has advanced as before then
    comes from a state that advances as much, and no other way becomes longer.
    states_s: three states, each of shape (states, ..., B), after periods or after cycles of several periods. Two
    advances are compared, because a host that leads in the first one may not lead in the next; if no host delays
    anything between them, two states are enough.
    issued_s: the largest host seconds from one state to the next.
    """
    with np.errstate(invalid="ignore"):  # an unused link has -inf
        advances_s = [late_s - early_s for early_s, late_s in pairwise(states_s)]
        last_s = advances_s[-1]
        tolerance_s = ROUNDING * states_s[-1].max(axis=0)
        least_s = last_s.min(axis=0)
        is_steady = least_s >= issued_s
        if in_order:
            is_steady &= (np.abs(last_s - advances_s[0]) <= tolerance_s).all(axis=0)
            is_steady &= (last_s[1:] >= last_s[:-1] - tolerance_s).all(axis=0)
        else:
            for earlier_s in advances_s[:-1]:
                is_steady &= np.abs(earlier_s - least_s).max(axis=0) <= tolerance_s
            is_steady &= last_s.max(axis=0) - least_s <= tolerance_s
    return last_s, is_steady


def periods_of(program: Program) -> list[tuple[tuple[int, ...], int]]:
    """The kinds of layers in order, as periods with their numbers of repetitions.

    A single period if a layer leaves messages or loads to a later layer, because states of ranks and links do not
    contain them.
    """
    if is_closed(program) and not _loads(program):
        return list(_periods(program.layer_kind_index))
    return [(program.layer_kind_index, 1)]


def _loads(program: Program) -> bool:
    for kind in set(program.layer_kind_index):
        ops = chain.from_iterable(program.layers[kind])
        if any(isinstance(op, Load) for op in ops):
            return True
    return False


def _periods(kinds: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the longest periods that repeat, and the layers between them as periods that occur once."""
    first = 0
    alone = 0  # the first layer that is in no period yet
    while first < len(kinds):
        length, times = _longest_period(kinds, first)
        if (times - 1) * length >= _LEAST_REPEATED:
            if alone < first:
                yield tuple(kinds[alone:first]), 1
            yield tuple(kinds[first : first + length]), times
            first += times * length
            alone = first
        else:
            first += 1
    if alone < first:
        yield tuple(kinds[alone:first]), 1


def _longest_period(kinds: Sequence[int], first: int) -> tuple[int, int]:
    """Length and repetitions of the period that starts at `first` and covers the most layers."""
    best = 1, 1
    for length in range(1, _MOST_KINDS + 1):
        if (best[1] - 1) * best[0] >= len(kinds) - first - length:
            break  # a longer period repeats no more layers
        same = first
        while same + length < len(kinds) and kinds[same] == kinds[same + length]:
            same += 1
        times = (same - first) // length + 1
        if (times - 1) * length > (best[1] - 1) * best[0]:
            best = length, times
    return best


def is_closed(program: Program) -> bool:
    """Whether the ranks of each layer receive all messages that are sent in this layer."""
    for layer in program.layers:
        sent: list[tuple[int, int]] = []
        received: list[tuple[int, int]] = []
        for rank, ops in enumerate(layer):
            for op in ops:
                if isinstance(op, Send):
                    sent.append((rank, op.dst))
                elif isinstance(op, Recv):
                    received.append((op.src, rank))
        if sorted(sent) != sorted(received):
            return False
    return True
