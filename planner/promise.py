"""The promise for a prefill: a TTFT that is kept on idle GPUs or under load; and the operations that limit TTFT."""

from __future__ import annotations

import numpy as np

from kvrsim.arguments import TargetArgs
from kvrsim.compile import build_program, columns
from kvrsim.executors.run import Runner
from kvrsim.kernels.cost import WeightedCost, listing
from kvrsim.results.results import Limit, Promise
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import Strategy
from kvrsim.units import scale

SHARE = 0.9  # share of prefills that keep the promise: the upper end of an 80 % interval
_REQUESTS, _WARM_UP = 40_000, 4_000  # requests of a simulated queue; the first ones are not counted
_HALVINGS = 12  # steps of the bisection over loads
_STEP = 1e-3  # relative slowdown with which shares are measured
_LEAST = 0.005  # least share of TTFT for which a limit is listed
_WORDS = {  # kind of operation: its name, and how to make it faster
    "gemm": ("matrix products", "FP8 weights (--dtype fp8), or more GPUs that split each matrix"),
    "attention": ("attention", "a cached prefix, or more GPUs per prompt"),
    "latent": ("latent attention", "a cached prefix, or more GPUs per prompt"),
    "sparse": ("sparse attention", "a cached prefix, or more GPUs that split the context"),
    "experts": ("experts", "--expert-parallel, or more GPUs"),
    "recurrence": ("recurrences", "more GPUs per prompt"),
    "elementwise": ("norms, rotary and copies", "more GPUs that split the tokens"),
    "links": ("communication", "faster links, fewer GPUs that split each matrix, or a pipeline"),
    "host": ("the engine's host", "an engine with fewer launches, or longer pieces"),
}


def limits_of(scenario: Scenario, strategy: Strategy, partition: Partition) -> tuple[Limit, ...]:
    """The shares of the kinds of operations in the critical path, largest first.

    The share is the relative growth of TTFT if only these operations are slower, over their relative slowdown. With a
    single critical path, this is their share of its seconds. scenario: as one rank of the strategy sees it.
    """
    chunks = columns(partition.chunk_lens)
    cost, parts = listing(scenario.cost)
    build_program(scenario, strategy, chunks[: 1 if strategy.pipeline else None], cost)
    kinds = list(dict.fromkeys(part.kind for part in parts))
    weights = {part: np.where(np.arange(len(kinds) + 1) == kinds.index(part.kind), 1 + _STEP, 1.0) for part in parts}
    wide = np.stack([np.repeat(chunk, len(kinds) + 1) for chunk in chunks])

    def ttft_s(changed: Scenario, partitions: np.ndarray, weighted: WeightedCost | None = None) -> np.ndarray:
        return np.asarray(Runner(changed, strategy, cost=weighted).finish_s(partitions)[-1])

    *slowed_s, base_s = ttft_s(scenario, wide, WeightedCost(cost=scenario.cost, weights=weights))
    others = {
        "links": scenario.with_slower_links(1 + _STEP),
        "host": scenario.with_host(scale(scenario.host, 1 + _STEP)),
    }
    times = dict(zip(kinds, slowed_s, strict=True))
    times |= {kind: ttft_s(changed, wide[:, -1:])[0] for kind, changed in others.items()}
    shares = {kind: float(seconds / base_s - 1) / _STEP for kind, seconds in times.items()}
    whole = max(1.0, sum(shares.values()))  # above 1 if several paths are critical at the same time
    ranked = sorted(((kind, share / whole) for kind, share in shares.items()), key=lambda item: -item[1])
    words = dict(_WORDS)
    if scenario.expert_placement.layout.expert_parallel > 1:
        words["experts"] = ("experts", "more GPUs")
    return tuple(
        Limit(operation=words[kind][0], share=share, remedy=words[kind][1]) for kind, share in ranked if share >= _LEAST
    )


def promise_of(ttft_high_s: float, target: TargetArgs) -> Promise:
    """The TTFT that 90 % of prefills do not exceed, on idle GPUs or with Poisson arrivals in first-come order.

    ttft_high_s: one-sided 90 % upper limit of one prefill. Under load, the model assumes that every prefill takes this
    long and that the GPUs prefill one prompt at a time. Pipelines and batches serve more.
    """
    seconds: float | None = ttft_high_s
    if target.rate is not None:
        load = target.rate * ttft_high_s
        seconds = ttft_high_s * float(_sojourn(load)) if load < 1 else None
    most = None
    if target.slo is not None:
        low, high = 0.0, 1.0 if ttft_high_s <= target.slo else 0.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if ttft_high_s * _sojourn(middle) <= target.slo else (low, middle)
        most = low / ttft_high_s
    return Promise(
        ttft_s=seconds,
        share=SHARE,
        rate_per_s=target.rate,
        slo_s=target.slo,
        meets=None if target.slo is None else seconds is not None and seconds <= target.slo,
        most_rate_per_s=most,
    )


def _sojourn(load: float) -> float:
    """90th percentile of wait plus service time, in service times; load: arrivals per service time, below 1."""
    if load <= 0:
        return 1.0
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / load, _REQUESTS))
    before = np.arange(_REQUESTS)
    done = np.maximum.accumulate(arrivals - before) + before + 1
    return float(np.quantile((done - arrivals)[_WARM_UP:], SHARE))
