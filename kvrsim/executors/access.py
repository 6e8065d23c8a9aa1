"""Executions with the fastest access to a cached prefix: each rank loads all that it needs, or shares go round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvrsim.choices import PrefixAccess
from kvrsim.execution import Execution, place
from kvrsim.executors.run import Runner
from kvrsim.once import once
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from kvrsim.strategies.layers import supported_prefix_access


def execution_of(scenario: Scenario, strategy: Strategy) -> Execution:
    """Place a scenario for a strategy, with the fastest access to a cached prefix for even chunks.

    Raises InputError where the strategy cannot run.
    """
    if strategy.stage_layers is None:
        return _with_prefix_access(place(scenario, strategy))
    return execution_of(scenario, replace(strategy, stage_layers=None)).by(strategy)


@once
def _with_prefix_access(execution: Execution) -> Execution:
    if not execution.request.cached_prefix or execution.placed.prefix_placement.place == "all":
        return execution
    choices = [execution.on(replace(execution.placed, prefix_access=access)) for access in prefix_accesses(execution)]
    if len(choices) == 1:
        return choices[0]
    ranks = execution.cluster.num_gpus
    cluster = execution.cluster
    chunks = np.full((ranks, 1), execution.request.new_tokens / ranks)
    if cluster.shares_bandwidth:  # fair shares are exact enough to compare accesses
        cluster = execution.placed.with_own_links(cluster.link.bandwidth_bytes_per_s / (ranks - 1)).cluster
    return min(choices, key=lambda choice: float(Runner(choice, cluster=cluster).finish_s(chunks)[-1, 0]))


def prefix_accesses(execution: Execution) -> tuple[PrefixAccess, ...]:
    """The ways in which the strategy can attend to a cached prefix at its place."""
    return supported_prefix_access(execution.strategy, execution.placed.prefix_placement, execution.cluster.num_gpus)
