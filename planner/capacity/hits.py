"""What the prefix caches of a simulated fleet give: the share of the prompts that they hold, and TTFTs by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.capacity.fleet import FleetRun
from planner.capacity.prefixes import TIERS
from planner.capacity.workload import Lengths
from planner.percentile import percentile_of


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheHits:
    """Shares of the prompt tokens of all served requests."""

    hit_rate: float  # share that was computed before
    gpu: float  # share on the GPUs of the group
    host: float  # share loaded from the memory of the host
    remote: float  # share loaded from the store
    unlimited: float  # hit rate of a cache without limit that all groups share


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTimes:
    """Served requests that are the first turn of their session, the second, or one of several later ones."""

    first: int  # number of the first of these turns, from 1
    last: int  # number of the last of them
    requests: int
    hit_rate: float  # share of their prompt tokens that was computed before
    p50_ttft_s: float
    target_ttft_s: float  # requested percentile of TTFT


def cache_hits(runs: Sequence[FleetRun], unlimited: Sequence[Lengths]) -> CacheHits | None:
    """The hits in all runs; unlimited: tokens of each prompt that an unlimited cache has. None: no turns."""
    if not any(run.hits for run in runs):
        return None
    prompts = 0
    possible = 0
    tokens = dict.fromkeys(TIERS, 0)
    for run, longest in zip(runs, unlimited, strict=True):
        served = np.isfinite(run.ttft_s)
        prompts += int(run.workload.context_len[served].sum())
        possible += int(longest[served].sum())
        for tier, hits in run.hits.items():
            tokens[tier] += int(hits[served].sum())
    if not prompts:
        return None
    return CacheHits(
        hit_rate=sum(tokens.values()) / prompts,
        gpu=tokens["gpu"] / prompts,
        host=tokens["host"] / prompts,
        remote=tokens["remote"] / prompts,
        unlimited=possible / prompts,
    )


def times_by_turn(runs: Sequence[FleetRun], percentile: float) -> tuple[TurnTimes, ...]:
    """TTFTs of turn 1, 2, 3 and 4, 5 to 8, and so on; empty if no session has a second turn."""
    turns = [run.workload.turns for run in runs if run.workload.turns is not None]
    if not turns:
        return ()
    number = np.concatenate([sessions.numbers() for sessions in turns])
    ttft_s = np.concatenate([run.ttft_s for run in runs])
    context_len = np.concatenate([run.workload.context_len for run in runs])
    cached = np.concatenate([run.workload.cached_prefix for run in runs])
    if number.max() == 1:
        return ()
    times: list[TurnTimes] = []
    bins = np.ceil(np.log2(number)).astype(np.int64)  # turn 1, 2, 3 and 4, 5 to 8, ...
    for power in range(int(bins.max()) + 1):
        here = (bins == power) & np.isfinite(ttft_s)
        if here.any():
            times.append(
                TurnTimes(
                    first=(1 << power) // 2 + 1,
                    last=min(1 << power, int(number.max())),
                    requests=int(here.sum()),
                    hit_rate=float(cached[here].sum() / context_len[here].sum()),
                    p50_ttft_s=percentile_of(ttft_s[here], 50),
                    target_ttft_s=percentile_of(ttft_s[here], percentile),
                )
            )
    return tuple(times)
