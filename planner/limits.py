"""The operations that limit TTFT."""

from __future__ import annotations

import numpy as np

from kvrsim.compile import build_program, columns
from kvrsim.execution import Execution
from kvrsim.executors.run import Runner
from kvrsim.kernels.cost import WeightedCost, listing
from kvrsim.results.results import Limit
from kvrsim.scenario import Partition
from kvrsim.units import scale
from planner.estimate import estimates_s

OPERATIONS = {  # kind of operation: its name in answers
    "gemm": "matrix products",
    "attention": "attention",
    "latent": "latent attention",
    "sparse": "sparse attention",
    "experts": "experts",
    "recurrence": "recurrences",
    "elementwise": "norms, rotary and copies",
    "links": "communication",
    "host": "the host CPU",
}
_STEP = 1e-3  # relative slowdown with which shares are measured
_LEAST = 0.005  # least share of TTFT for which a limit is listed


def limits_of(execution: Execution, partition: Partition, *, is_estimated: bool = False) -> tuple[Limit, ...]:
    """The shares of the kinds of operations in the critical path, largest first.

    The share is the relative growth of TTFT if only these operations are slower, over their relative slowdown. With a
    single critical path, this is their share of its seconds.

    is_estimated: the growth is that of the estimate of TTFT, with even chunks, and nothing is simulated.
    """
    chunks = columns(partition.chunk_lens)
    cost, parts = listing(execution.placed.cost)
    if is_estimated:
        estimates_s(execution, cost)
    else:
        build_program(execution, chunks[: 1 if execution.strategy.is_pipeline else None], cost)
    kinds = list(dict.fromkeys(part.kind for part in parts))
    weights = {part: np.where(np.arange(len(kinds) + 1) == kinds.index(part.kind), 1 + _STEP, 1.0) for part in parts}
    wide = np.stack([np.repeat(chunk, len(kinds) + 1) for chunk in chunks])

    def ttft_s(changed: Execution, partitions: np.ndarray, weighted: WeightedCost | None = None) -> np.ndarray:
        if is_estimated:
            return estimates_s(changed, weighted or changed.placed.cost, partitions.shape[1])
        return np.asarray(Runner(changed, cost=weighted).finish_s(partitions)[-1])

    *slowed_s, base_s = ttft_s(execution, wide, WeightedCost(cost=execution.placed.cost, weights=weights))
    others = {
        "links": execution.placed.with_slower_links(1 + _STEP),
        "host": execution.placed.with_host(scale(execution.placed.host, 1 + _STEP)),
    }
    times = dict(zip(kinds, slowed_s, strict=True))
    times |= {kind: ttft_s(execution.on(changed), wide[:, -1:])[0] for kind, changed in others.items()}
    shares = {kind: float(seconds / base_s - 1) / _STEP for kind, seconds in times.items()}
    whole = max(1.0, sum(shares.values()))  # above 1 if several paths are critical at the same time
    ranked = sorted(((kind, share / whole) for kind, share in shares.items()), key=lambda item: -item[1])
    return tuple(Limit(operation=OPERATIONS[kind], share=share) for kind, share in ranked if share >= _LEAST)
