"""A proven lower bound on the TTFT of every pipeline whose pieces have a least length: any such pieces, any layers.

Why it holds. For each stage s there is a path of the first piece through the stages before s, all pieces through s, and
the last piece through the stages after s. No step of a path overlaps another one, so TTFT is at least the sum of each.
A layer takes at least W for all pieces, F for a first piece and L for a last piece of that least length: the last one
attends to the whole context, however short the others are. With x(s) layers on stage s, TTFT is at least
    x(s) W + F (x(1) + ... + x(s - 1)) + L (x(s + 1) + ... + x(S))    for every s, summed over kinds of layers,
and the whole numbers x(s) that add up to the layers of each kind and make the largest of these the least bound TTFT for
all layouts. The order of the kinds is left out, which only lowers the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvrsim.program import Array

_TOLERANCE = 1e-5  # of the solver, with room


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastTimes:
    """The least seconds of a kind of layer."""

    count: int
    all_s: float  # of all pieces
    first_s: float  # of the first piece
    last_s: float


def layers_s(kinds: list[LeastTimes], num_stages: int) -> float:
    """What the layers take at least along some path, whatever layers the stages have."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # a tenth of a second, which most plans do without

    width, scale_s = len(kinds), sum(kind.count * kind.all_s for kind in kinds) / num_stages
    paths = np.empty((num_stages, num_stages * width + 1))
    paths[:, -1] = -1.0  # times TTFT
    for stage in range(num_stages):
        rows = [_row(kinds, other - stage) / scale_s for other in range(num_stages)]
        paths[stage, :-1] = np.concatenate(rows)
    totals = np.hstack([np.tile(np.eye(width), num_stages), np.zeros((width, 1))])
    counts = [kind.count for kind in kinds]
    objective = np.zeros(num_stages * width + 1)
    objective[-1] = 1.0
    found = milp(
        objective,
        constraints=[LinearConstraint(paths, -np.inf, 0.0), LinearConstraint(totals, counts, counts)],
        integrality=np.append(np.ones(num_stages * width), 0.0),
        bounds=Bounds(0.0, np.inf),
    )
    # The dual bound is proven even where the solver stopped before the least one.
    return max(0.0, float(found.mip_dual_bound) - _TOLERANCE) * scale_s


def _row(kinds: list[LeastTimes], place: int) -> Array:
    """What a layer of each kind adds to a path whose stage of all pieces is so many stages before its own."""
    if place == 0:
        return np.array([kind.all_s for kind in kinds])
    return np.array([kind.last_s if place > 0 else kind.first_s for kind in kinds])
