"""The analytical planner: on a quiet, fast network the best partition makes all ranks equally long."""

from __future__ import annotations

import numpy as np

from kvrsim.program import Array
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from planner.search.work import Chain, settled

_TARGETS, _ZOOMS, _AROUND = 12, 2, 0.08
_SPREAD, _AGAIN = 0.25, 0.05  # of a chunk, to either side of it, in which the longest is sought
_POINTS = 129  # of the context, at which a token's time is looked up
_ROUNDS = 32
_PRECISION = 2.0**-14  # of a chunk


def balanced_chunks(scenario: Scenario, strategy: Strategy) -> Array:
    """Chunk lengths, shape (num_ranks,), real-valued tokens, whose ranks are busy equally long.

    For a target time, each rank takes the longest chunk that keeps it within; the least target that covers the
    context is found by zooming, and between two close ones by a straight line. All ranks and targets are asked for
    at once, so that the number of calls does not grow with the ranks.
    """
    chain, request = Chain(scenario, strategy), scenario.request
    tokens = float(request.new_tokens)
    if chain.num_ranks == 1:
        return np.array([tokens])
    chunks = _smooth(chain)[:, None]
    middle_s = float(np.sort(_busy_s(chain, chunks, _starts(chain, chunks)), axis=0)[chain.num_ranks // 2, 0])
    low, high = (1.0 - _AROUND) * middle_s, (1.0 + _AROUND) * middle_s
    for zoom in range(_ZOOMS):
        targets = np.linspace(low, high, _TARGETS)
        found = _longest(chain, targets, chunks, _SPREAD if zoom == 0 else _AGAIN)
        lengths = found.sum(axis=0)
        while zoom == 0 and not lengths[0] <= tokens <= lengths[-1]:
            targets = targets * (targets[0] / targets[-1] if lengths[0] >= tokens else targets[-1] / targets[0])
            found = _longest(chain, targets, found, _SPREAD)
            lengths = found.sum(axis=0)
        above = max(1, int((lengths >= tokens).argmax()))
        low, high, chunks = targets[above - 1], targets[above], found[:, above, None]
    share = (tokens - lengths[above - 1]) / max(1.0, lengths[above] - lengths[above - 1])
    return np.asarray(found[:, above - 1] + share * (found[:, above] - found[:, above - 1]))


def _smooth(chain: Chain) -> Array:
    """Chunks that would be balanced, if the time of a token were that of one in the middle of an even chunk."""
    request = chain.scenario.request
    share = request.new_tokens / chain.num_ranks
    ends = np.linspace(0.0, 1.0, _POINTS) * request.new_tokens
    starts = request.cached_prefix + np.maximum(0.0, ends - 0.5 * share)
    token_s = chain.work(
        range(chain.num_ranks // 2, chain.num_ranks // 2 + 1), np.full((1, _POINTS), share), starts[None]
    ).busy_s[0]
    until_s = np.concatenate([[0.0], np.cumsum(0.5 * (token_s[1:] + token_s[:-1]))])
    shares = np.linspace(0.0, 1.0, chain.num_ranks + 1) * until_s[-1]
    return np.diff(np.interp(shares, until_s, ends))


def _busy_s(chain: Chain, chunks: Array, starts: Array) -> Array:
    return chain.work(range(chain.num_ranks), chunks, starts).busy_s


def _starts(chain: Chain, chunks: Array) -> Array:
    return chain.scenario.request.cached_prefix + np.cumsum(chunks, axis=0) - chunks


def _longest(chain: Chain, targets: Array, chunks: Array, spread: float) -> Array:
    """The longest chunks that keep all ranks within each target, shape (num_ranks, targets); from one to begin with."""

    def needed_s(settling: Array, tried: Array) -> Array:
        return _busy_s(chain, tried, _starts(chain, settling)[:, None])

    most = float(chain.scenario.request.context_len)
    begin = np.broadcast_to(chunks, (len(chunks), len(targets)))
    return settled(needed_s, targets, begin, lambda _: most, _PRECISION, spread, _ROUNDS)[0]
