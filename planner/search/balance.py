"""The analytical planner: on a quiet, fast network the best partition makes all ranks equally long."""

from __future__ import annotations

import numpy as np

from kvrsim.program.operations import Array, Flags
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from planner.search.work import Chain, largest_within

_TARGETS, _ZOOMS = 16, 3
_PRECISION = 2.0**-16  # of a chunk's length against what is left of the context


def balanced_chunks(scenario: Scenario, strategy: Strategy) -> Array:
    """Chunk lengths, shape (num_ranks,), real-valued tokens, whose ranks are busy equally long.

    For a target time, each rank from the left takes the longest chunk that keeps it within; the least
    target that covers the context is found by zooming. O(p log C) for any p.
    """
    chain = Chain(scenario, strategy)
    if chain.num_ranks == 1:
        return np.array([float(scenario.request.new_tokens)])
    low = 0.0
    whole = np.array([float(scenario.request.new_tokens)])
    high = float(chain.work(0, whole, np.array([float(scenario.request.cached_prefix)])).busy_s[0]) * 1.01
    while not _fill(chain, np.array([high]))[1].any():
        low, high = high, 2.0 * high
    best = np.zeros(0)
    for _ in range(_ZOOMS):
        targets = np.linspace(low, high, _TARGETS + 1)[1:]
        ends, covered = _fill(chain, targets)
        first = int(covered.argmax())
        low, high, best = (targets[first - 1] if first else low), targets[first], ends[:, first]
    total = float(scenario.request.context_len)
    return np.diff(np.concatenate([[float(scenario.request.cached_prefix)], best, [total]]))


def _fill(chain: Chain, targets: Array) -> tuple[Array, Flags]:
    """Ends of all ranks but the last, shape (num_ranks - 1, targets), and whether the last can do the rest."""
    request = chain.scenario.request
    end = np.full_like(targets, float(request.cached_prefix))
    ends, possible = [], np.ones(len(targets), dtype=bool)
    for rank in range(chain.num_ranks - 1):
        start = end
        most = np.full_like(targets, float(request.context_len - (chain.num_ranks - 1 - rank)))
        end = largest_within(
            lambda e, r=rank, s=start: chain.work(r, e - s, s).busy_s,  # type: ignore[misc]
            np.minimum(start + 1.0, most),
            most,
            targets,
            _PRECISION,
        )
        possible &= ~np.isnan(end)
        end = np.where(np.isnan(end), np.minimum(start + 1.0, most), end)
        ends.append(end)
    rest = request.context_len - end
    return np.array(ends), possible & (chain.work(chain.num_ranks - 1, rest, end).busy_s <= targets)
