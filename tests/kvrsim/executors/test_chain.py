"""The recurrence of chains: rows of messages that hold both ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from kvrsim.executors.chain import last_of_row, row_after
from kvrsim.program import Array
from tests.building import Draws, draws, examples


def row_by_row(x: Array, on: Array, back: Array, periods: int) -> Array:
    """The definition of row_after, node by node."""
    now = x.copy()
    for _ in range(periods):
        before = np.concatenate([now, now[-1:]])
        for node in range(len(x)):
            now[node] = np.maximum((now[node - 1] if node else before[0]) + on[node], before[node + 1] + back[node])
    return now


@given(rng=draws())
@examples(60)
def test_rows(rng: Draws) -> None:
    """Starts of the first period may, but need not, be those of a chain whose last rank waits for no message."""
    nodes, more = rng.randint(1, 5), rng.randint(0, 6)
    on, back = (np.array([[rng.uniform(0, 3)] for _ in range(nodes)]) for _ in range(2))
    x = np.maximum.accumulate(np.array([[rng.uniform(0, 9)] for _ in range(nodes)]) - np.cumsum(on, axis=0), axis=0)
    x = row_by_row(x + np.cumsum(on, axis=0), on, back, rng.randint(0, 1))
    want = row_by_row(x, on, back, more)
    assert row_after(x, on, back, more) == pytest.approx(want, rel=1e-12)
    periods = 2 * nodes + more
    want = row_by_row(x, on, back, periods)
    assert last_of_row(x, on, back, periods) == pytest.approx(want[-1], rel=1e-12)
