"""The analytical plan of chunks for a shared bus: rank work and bus time together are as short as possible.

On a bus, fewer bytes cross it if later ranks have more of the context. In the best partition, nearly all of it may be
on the last rank, or some ranks may be idle with a single token each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvrsim.execution import Execution
from kvrsim.once import once
from kvrsim.program import Array
from kvrsim.strategies import chain_like
from planner.search.balance import ChainWork, balanced_chunks
from planner.search.minimise import Boundaries, Evaluator, Row, chunks_between, minimise, rounded, unique_rows

_ENDLESS = 1e30  # bytes/s of links that take no time
_STRIDES = 64  # strides per even chunk: the plan is a start of a search, which moves chunks by single tokens
_ROUNDS = 12  # rounds of the pattern search for the plan


@once
def plan_on_a_bus(execution: Execution) -> tuple[Row, float]:
    """A partition for a shared bus, and about the least TTFT of all partitions, in seconds.

    No partition is faster than on links that take no time, nor faster than the bus carries its messages: each rank's
    keys and values pass once to every later rank, or to the next rank with those of all earlier ranks. The partition
    with the least maximum of both is searched from balanced chunks of the last ranks.
    """
    tokens = execution.request.new_tokens
    num_ranks = execution.cluster.num_gpus
    chain = execution.by(chain_like(execution.strategy))
    quiet = Evaluator(execution.on(execution.placed.with_own_links(_ENDLESS, latency_s=0.0)))
    messages = ChainWork(chain)

    def least_s(boundaries: Boundaries, enough_s: float = math.inf) -> Array:
        chunks = chunks_between(boundaries, tokens).astype(float)
        starts = execution.request.cached_prefix + np.cumsum(chunks, axis=1) - chunks
        sent_s = messages.work(range(num_ranks), chunks.T, starts.T).sends_s.sum(axis=0)
        return np.asarray(np.maximum(sent_s, quiet.ttft_s(chunks, enough_s)))

    stride = max(1, tokens // num_ranks // _STRIDES)
    plans = last_ranks_balanced(chain, range(1, num_ranks + 1))
    seeds = unique_rows([rounded(plan, stride, tokens) for plan in plans])
    best = seeds[int(least_s(seeds).argmin())]
    return minimise(best, tokens, stride, least_s, rounds=_ROUNDS)


def last_ranks_balanced(chain: Execution, counts: Sequence[int]) -> Iterator[Array]:
    """Yield, for each count, balanced chunks of as many last ranks; the other ranks are idle, with 0 tokens."""
    request = chain.request
    num_ranks = chain.cluster.num_gpus
    for used in counts:
        fewer = replace(request, context_len=request.context_len - (num_ranks - used))
        balanced = balanced_chunks(chain.on(replace(chain.placed.on_gpus(used), request=fewer)))
        yield np.append(np.zeros(num_ranks - used), balanced)
