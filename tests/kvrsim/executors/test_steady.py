"""Steady state: when all times advance alike, and which layers repeat."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvrsim.executors.steady import _longest_period, periods_of, steady_advance
from kvrsim.program import Array, Load, Op, Program, Recv, Send
from tests.building import examples

SEND, RECV = Send(dst=1, nbytes=np.ones(1)), Recv(src=0)
LOAD = Load(name="host", nbytes=np.ones(1), seconds=np.ones(1))
STATES = [np.array([[0.0], [1.0]]), np.array([[2.0], [3.0]]), np.array([[4.0], [5.0]])]
LATER = [np.array([[2.0 * period], [3.0 * period]]) for period in range(3)]  # the second rank advances more


ROUNDED = [np.array([[1e3 * period], [100.0 + 1e3 * period]]) for period in range(3)]


def late(state: Array, seconds: float) -> Array:
    """The state with a later first rank."""
    return state + np.array([[seconds], [0.0]])


def program_of(kinds: tuple[int, ...], layers: list[tuple[tuple[Op, ...], ...]]) -> Program:
    none: tuple[tuple[Op, ...], ...] = ((),) * len(layers[0])
    return Program(strategy="test", prologue=none, layers=tuple(layers), layer_kind_index=kinds, epilogue=none)


@pytest.mark.parametrize(
    ("states", "issued_s", "in_order", "is_steady"),
    [
        (STATES, 2.0, False, True),
        (STATES, 2.0, True, True),
        (STATES, 2.1, False, False),  # the host delays the next period
        (STATES[:2], 2.0, False, True),  # no host delays anything
        ([*STATES[:2], STATES[1]], 0.0, False, False),  # the advances differ
        ([*STATES[:2], STATES[1]], 0.0, True, False),
        ([*STATES[:2], STATES[2] + [[0.0], [0.1]]], 0.0, False, False),  # one rank is later
        (LATER, 2.0, False, False),  # the second rank advances more
        (LATER, 2.0, True, True),
        (LATER, 2.1, True, False),  # the first rank's host delays it
        ([state[::-1] for state in LATER], 2.0, True, False),  # the first rank delays the second one at last
        # Rounding may change an advance by 1e-13 of the latest time, which is 2100 s.
        *(
            ([*ROUNDED[:2], late(ROUNDED[2], sign * error_s)], 0.0, in_order, abs(error_s) < 2.1e-10)
            for sign in (-1, 1)
            for error_s in (2.05e-10, 2.15e-10)
            for in_order in (False, True)
        ),
    ],
)
def test_an_advance(states: list[Array], issued_s: float, in_order: bool, is_steady: bool) -> None:
    advance_s, steady = steady_advance(states, issued_s, in_order=in_order)
    assert steady.item() is is_steady
    assert (advance_s == states[-1] - states[-2]).all()


@given(
    advances_s=arrays(float, (2, 3, 4), elements=st.integers(1, 2)),
    begin_s=arrays(float, (3, 4), elements=st.integers(0, 9)),
    in_order=st.booleans(),
)
@examples(200)
def test_partitions_are_independent(advances_s: Array, begin_s: Array, in_order: bool) -> None:
    """Two advances of three ranks, in four partitions."""
    states = list(np.cumsum([begin_s, *advances_s], axis=0))
    advance_s, steady = steady_advance(states, 1.0, in_order=in_order)
    alike = (advances_s[0] == advances_s[1]).all(axis=0)
    in_turn = (np.diff(advances_s[1], axis=0) >= 0 if in_order else np.diff(advances_s[1], axis=0) == 0).all(axis=0)
    assert (steady == (alike & in_turn)).all()
    assert (advance_s == advances_s[1]).all()


@given(
    period=st.lists(st.integers(0, 1), min_size=1, max_size=18),
    times=st.integers(1, 9),
    others=st.lists(st.integers(0, 1), max_size=6),
)
@example(period=[0] * 15 + [1], times=3, others=[])
@example(period=[0] * 16 + [1], times=3, others=[])
@examples(200)
def test_the_longest_period_is_found(period: list[int], times: int, others: list[int]) -> None:
    """The period of at most 16 layers that repeats the most layers, and the shortest of those."""
    kinds = tuple(period * times + others)

    def repeated(length: int) -> int:
        number = 1
        while kinds[number * length : (number + 1) * length] == kinds[:length]:
            number += 1
        return (number - 1) * length

    length = max(range(1, 17), key=lambda length: (repeated(length), -length))
    assert _longest_period(kinds, 0) == (length, repeated(length) // length + 1)
    periods = periods_of(program_of(kinds, [((),)] * 2))
    assert tuple(kind for period, times in periods for kind in period * times) == kinds
    assert periods[0][1] > 1 or repeated(length) < 4
    assert all(times == 1 or (times - 1) * len(period) >= 4 for period, times in periods)


@pytest.mark.parametrize(
    ("layer", "is_closed"),
    [
        (((SEND,), (RECV,)), True),
        (((), (RECV,)), False),  # sent by another layer
        (((SEND, SEND), (RECV,)), False),
        (((LOAD,), ()), False),
        (((LOAD, SEND), (RECV,)), False),
    ],
)
def test_layers_that_leave_nothing_to_later_ones_repeat(layer: tuple[tuple[Op, ...], ...], is_closed: bool) -> None:
    assert periods_of(program_of((0,) * 8, [layer])) == ([((0,), 8)] if is_closed else [((0,) * 8, 1)])
    closed, kinds = ((SEND,), (RECV,)), (0, 1) * 8
    for layers in ([layer, closed], [closed, layer]):
        assert periods_of(program_of(kinds, layers)) == ([((0, 1), 8)] if is_closed else [(kinds, 1)])
