"""Prefill times of one kind of group at knots of prompt length: at each, of the fastest strategy that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrsim.program import Array
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from planner.capacity.fleet.prefills import Prefills
from planner.capacity.workloads.workload import Lengths
from planner.table.table import PartitionTable

KNOTS_PER_DOUBLING = 8  # lengths that are simulated; times between them are interpolated


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceTimeGrid:
    """Times for one kind of group and one cached prefix; arrays of shape (knots,) or (knots, ranks)."""

    cached_prefix: int
    new_tokens: Lengths  # the knots, ascending
    ttft_s: Array
    strategy: tuple[str, ...]  # the fastest at each knot
    finish: Array  # finish time of each rank over ttft_s
    slack_s: Array  # how much later each rank could begin without delaying any rank
    most_new_tokens: int  # the most that fit in memory; 0: none


def knot_lengths(least: int, most: int) -> Lengths:
    """Both ends, powers of two, and seven lengths between any two of these."""
    powers = np.arange(np.floor(np.log2(least)) * KNOTS_PER_DOUBLING, np.ceil(np.log2(most)) * KNOTS_PER_DOUBLING + 1)
    inner = np.rint(2.0 ** (powers / KNOTS_PER_DOUBLING)).astype(np.int64)
    return np.unique(np.concatenate([[least, most], inner[(inner > least) & (inner < most)]]))


class ServiceTimeGrids:
    """Simulates grids for groups of all GPUs of a scenario that run these strategies, all with the same weights."""

    def __init__(self, scenario: Scenario, strategies: Sequence[Strategy], table: PartitionTable | None = None) -> None:
        self.prefills = [Prefills(scenario, strategy, table) for strategy in strategies]
        self.num_ranks = max(one.num_ranks for one in self.prefills)

    def grid(self, cached_prefix: int, knots: Lengths) -> ServiceTimeGrid:
        """Times at all knots for one cached prefix.

        Where no strategy fits, the time is that of the one that fits the longest prompts.
        """
        found = [times for one in self.prefills if (times := one.times(cached_prefix, knots)) is not None]
        shape = (len(knots), self.num_ranks)
        ttft_s, strategy = np.full(len(knots), np.inf), np.full(len(knots), "none", dtype=object)
        finish, slack_s = np.ones(shape), np.zeros(shape)
        most = max((times.most_new_tokens for times in found), default=0)
        for times in found:
            fits = (knots <= times.most_new_tokens) | (times.most_new_tokens == most)
            better = fits & (times.ttft_s < ttft_s)
            ttft_s[better], strategy[better] = times.ttft_s[better], times.label
            finish[better], slack_s[better] = times.finish[better], times.slack_s[better]
        return ServiceTimeGrid(
            cached_prefix=cached_prefix,
            new_tokens=knots,
            ttft_s=ttft_s if found else np.ones(len(knots)),
            strategy=tuple(strategy),
            finish=finish,
            slack_s=slack_s,
            most_new_tokens=most,
        )
