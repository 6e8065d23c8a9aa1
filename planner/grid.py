"""Candidates over a grid of scenarios: what tables, maps and predictors share."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.partition import Partition
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from planner.candidates import Candidate, Search, per_rank_scenario
from planner.search.search import search

_EXPOSED = 0.05  # of TTFT without communication; from there on balanced chunks may be far from the best


def quick_candidate(scenario: Scenario, strategy: Strategy) -> Candidate:
    """The strategy with its own partition; a searched one is balanced or even, unless links are slow."""
    if strategy.partition_rule != "search":
        return Search().candidate(scenario, strategy)
    per_rank = per_rank_scenario(scenario, strategy)
    found = search(per_rank, strategy, method="analytical")
    balanced = Candidate(scenario=scenario, strategy=strategy, partition=found.partition, search=found)
    even = Partition.even(per_rank.request.new_tokens, per_rank.cluster.num_gpus)
    best = min(balanced, replace(balanced, partition=even, search=None), key=lambda one: one.ttft_s)
    if best.ttft_s <= balanced.ttft_without_communication_s * (1 + _EXPOSED):
        return best
    return Search().candidate(scenario, strategy)
