"""The fleet that decodes what another fleet has prefilled.

Its groups use tensor parallelism. A sequence goes to the group with the fewest sequences when its cache has arrived,
and decodes in the steps of that group: the loop of groups that also prefill (serving.py), without new tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvrsim.io.schema import fields_to_json
from kvrsim.program import Array
from planner.capacity.fleet import FleetLimits, FleetRun, fewest_groups
from planner.capacity.request import Target
from planner.capacity.serving import LateLimit, StepRequests, StepRun, number_late, run_steps
from planner.capacity.steps import StepTimes
from planner.capacity.times import ServiceTimes
from planner.capacity.work import Work
from planner.percentile import percentile_of

MEANING = (
    "each group uses tensor parallelism; a sequence goes to the group with the fewest sequences, and begins if its"
    " whole cache fits; the percentage of the target applies to the TPOT, too"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeFleet:
    """Equal groups that decode."""

    num_gpus: int
    gpus_per_group: int
    replicas: int
    strategy: str
    batch: int  # most sequences that a group decodes at one time
    tpot_s: float  # target of the time per output token
    reached_tpot_s: float  # the requested percentile of TPOT
    utilisation: float  # busy share of the groups, from the first sequence to the last token
    cost_per_hour: float | None  # None: no price was given

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return fields_to_json(self) | {"meaning": MEANING}


class DecodePool:
    """The sequences of every workload, on groups of one size that decode."""

    def __init__(self, gpus: int, times: StepTimes, sequences: Sequence[StepRequests], tpot_s: float) -> None:
        self.gpus = gpus
        self.times = times
        self.sequences = sequences
        self.tpot_s = tpot_s
        self.requests = sum(len(decoded.arrival_s) for decoded in sequences)
        self.mean_keys = mean_keys(sequences)  # tokens of a cache in a decode step
        self.batch = self._largest_batch()  # 0: a group cannot decode within the TPOT
        self.load = math.inf  # mean number of busy groups, with the largest batch
        if self.batch:
            steps = sum(int(decoded.decode_steps.sum()) for decoded in sequences)
            span_s = sum(float(np.ptp(decoded.arrival_s)) for decoded in sequences) + steps / self.requests * tpot_s
            self.load = steps / self.batch * self.step_s(self.batch) / span_s

    def step_s(self, batch: int) -> float:
        """Seconds of a step of sequences of the mean context."""
        return self.times.decoding_s(1, batch, round(batch * self.mean_keys))

    def _largest_batch(self) -> int:
        """Most sequences of the mean size whose step is within the TPOT and whose caches fit in memory."""
        mean_bytes = float(np.concatenate([decoded.cache_bytes for decoded in self.sequences]).mean())
        batch = min(self.times.most_sequences, int(self.times.room_bytes / mean_bytes))
        while batch > 0 and self.step_s(batch) > self.tpot_s:
            batch -= 1
        return max(0, batch)

    def runs(self, replicas: int, limit: LateLimit | None = None) -> list[StepRun]:
        """The simulations of all workloads."""
        return [run_steps(decoded, self.times, replicas, limit=limit) for decoded in self.sequences]

    def late(self, replicas: int, allowed: int) -> int:
        """Number of sequences with a longer TPOT than the target; above `allowed`, some may not be counted."""
        limit = LateLimit(ttft_s=math.inf, tpot_s=self.tpot_s, allowed=allowed)
        runs = self.runs(replicas, limit)
        return sum(
            number_late(run.tpot_s(decoded), self.tpot_s) for decoded, run in zip(self.sequences, runs, strict=True)
        )


class Decoding:
    """Sizes the fleets that decode. The size that was found last is tried first for other prefills."""

    def __init__(self, times: ServiceTimes, limits: FleetLimits, target: Target, work: Work) -> None:
        self.times = times
        self.limits = limits
        self.target = target
        self.work = work
        self._found: dict[int, int] = {}  # replicas of the last fleet found, by GPUs per group

    def pools(self, runs: Sequence[FleetRun], sizes: Sequence[int] | None = None) -> list[DecodePool]:
        """The sequences of these prefills on groups of each size that can decode one of them."""
        assert self.target.tpot_s is not None
        pools: list[DecodePool] = []
        for size in sizes or self.limits.sizes:
            times = self.times.steps(size)
            if times is not None and times.room_bytes > 0:
                sequences = [self._sequences(size, run) for run in runs]
                if all((decoded.cache_bytes <= times.room_bytes).all() for decoded in sequences):
                    pools.append(DecodePool(size, times, sequences, self.target.tpot_s))
        return pools

    def _sequences(self, size: int, run: FleetRun) -> StepRequests:
        """The sequences that are decoded after the prefills of a workload, in the order of their first tokens."""
        workload = run.workload
        first_s = workload.arrival_s + run.ttft_s
        decoded = np.flatnonzero(decodes(run))
        order = decoded[np.argsort(first_s[decoded], kind="stable")]
        return StepRequests(
            arrival_s=first_s[order],
            new_tokens=np.zeros(len(order), dtype=np.int64),
            cached_prefix=workload.context_len[order],
            decode_steps=workload.output_tokens[order] - 1,
            cache_bytes=self.times.cache_bytes(size, workload.context_len + workload.output_tokens)[order],
        )

    def fleet(self, runs: Sequence[FleetRun]) -> tuple[DecodeFleet, list[Array]] | str:
        """The smallest or cheapest fleet that decodes within the TPOT, and the TPOTs of each workload's requests.

        A text instead: why there is no such fleet. At least one request has more than one output token.
        """
        allowed = self.target.most_late(sum(len(run.workload) for run in runs))
        pools = self.pools(runs)
        best: tuple[float, DecodePool, int] | None = None
        for pool in sorted(pools, key=lambda pool: self.limits.cost(pool.gpus) * pool.load):
            cost = self.limits.cost(pool.gpus)
            most = self.limits.max_gpus // pool.gpus
            if best is not None:
                most = min(most, math.ceil(best[0] / cost) - 1)
            if not pool.batch or pool.load > most:
                continue
            fewest = self._fewest(pool, allowed, most)
            if fewest is not None:
                best = (cost * fewest, pool, fewest)
        if best is None:
            return self._reason(pools)
        _, pool, replicas = best
        return self._answer(pool, replicas, runs)

    def _fewest(self, pool: DecodePool, allowed: int, most: int) -> int | None:
        def is_enough(replicas: int) -> bool:
            self.work.simulate(pool.requests)
            return pool.late(replicas, allowed) <= allowed

        start = self._found.get(pool.gpus, math.ceil(pool.load))
        fewest = fewest_groups(is_enough, start, most)
        if fewest is not None:
            self._found[pool.gpus] = fewest
        return fewest

    def _reason(self, pools: Sequence[DecodePool]) -> str:
        assert self.target.tpot_s is not None
        reason = "a cache does not fit beside the weights"
        if pools:
            least_s = min(pool.step_s(1) for pool in pools)
            reason = f"a step of one sequence takes at least {1e3 * least_s:.3g} ms"
            if least_s <= self.target.tpot_s:
                reason = f"{self.limits.max_gpus} GPUs are too few"
        return f"no group decodes at {1e3 * self.target.tpot_s:g} ms per token: {reason}"

    def least_tpot_s(self, runs: Sequence[FleetRun], num_gpus: int) -> float | None:
        """The least requested percentile of TPOT of fleets of this number of GPUs; None: no sequence fits in memory."""
        values_s: list[float] = []
        for pool in self.pools(runs):
            replicas = min(num_gpus // pool.gpus, pool.requests)
            if replicas:
                values_s.append(self._answer(pool, replicas, runs)[0].reached_tpot_s)
        return min(values_s, default=None)

    def _answer(self, pool: DecodePool, replicas: int, runs: Sequence[FleetRun]) -> tuple[DecodeFleet, list[Array]]:
        assert self.target.tpot_s is not None
        tpots_s: list[Array] = []
        busy_s = 0.0
        span_s = 0.0
        batch = 0
        for run, decoded, served in zip(runs, pool.sequences, pool.runs(replicas), strict=True):
            tpot_s = np.zeros(len(run.workload))
            decoded_here = np.flatnonzero(decodes(run))
            first_s = (run.workload.arrival_s + run.ttft_s)[decoded_here]
            tpot_s[decoded_here[np.argsort(first_s, kind="stable")]] = served.tpot_s(decoded)
            tpots_s.append(tpot_s)
            busy_s += served.busy_s
            span_s += float(served.last_s.max() - decoded.arrival_s[0])
            batch = max(batch, served.most_at_once())
        self.work.simulate(pool.requests)
        prices = self.limits.prices
        fleet = DecodeFleet(
            num_gpus=pool.gpus * replicas,
            gpus_per_group=pool.gpus,
            replicas=replicas,
            strategy=pool.times.strategy,
            batch=batch,
            tpot_s=self.target.tpot_s,
            reached_tpot_s=percentile_of(np.concatenate(tpots_s), self.target.percentile),
            utilisation=busy_s / (replicas * span_s),
            cost_per_hour=prices[pool.gpus] * pool.gpus * replicas if prices else None,
        )
        return fleet, tpots_s


def decodes(run: FleetRun) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether each request is served and has more than one output token."""
    return np.isfinite(run.ttft_s) & (run.workload.output_tokens > 1)


def mean_keys(sequences: Sequence[StepRequests]) -> float:
    """Mean tokens of a cache in a decode step; at least one sequence needs a step."""
    steps = np.concatenate([decoded.decode_steps for decoded in sequences])
    context = np.concatenate([decoded.new_tokens + decoded.cached_prefix for decoded in sequences])
    return float((steps * (context + steps / 2)).sum() / steps.sum())
