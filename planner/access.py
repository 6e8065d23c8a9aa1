"""How the ranks of a strategy attend to a cached prefix that lies elsewhere: the fastest way is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kvrsim.choices import PrefixAccess
from kvrsim.compile import build_program, for_strategy
from kvrsim.executors.batch import run_batch
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from kvrsim.strategies.layers import supported_prefix_access


def told_access(placed: Scenario, strategy: Strategy) -> PrefixAccess | None:
    """How ranks attend to a cached prefix that does not lie where it is used; None: it does."""
    way = placed.prefix_access_plan
    there = way.is_local or (strategy.pipeline is not None and way.source is None)  # each stage has its own layers'
    return None if there else way.access


def access_notes(accesses: Mapping[str, PrefixAccess | None], *, had_choice: bool) -> list[str]:
    """How the ranks of each strategy attend to a cached prefix that does not lie on all of them.

    had_choice: whether some strategy has more than one way.
    """
    told = {
        "whole": "each rank loads all that it needs",
        "pass-kv": "its shares go to all ranks",
    }
    ways = {way: [name for name, one in accesses.items() if one == way] for way in told}
    parts = [f"{way} ({told[way]}) in {', '.join(names)}" for way, names in ways.items() if names]
    how = ", the faster way of each by even chunks" if had_choice else ""
    return [f"cached prefix{how}: {'; '.join(parts)}"] if parts else []


def placed_for(scenario: Scenario, strategy: Strategy) -> Scenario:
    """The scenario as the strategy sees it (see for_strategy), with the fastest access to a prefix, by even chunks.

    Where a rank can load the whole prefix no later than its shares go round, it does.
    """
    placed = for_strategy(scenario, strategy)
    if not scenario.request.cached_prefix or scenario.prefix_placement.place == "all":
        return placed
    ways = _ways(placed, strategy)
    if len(ways) == 1:
        return placed if placed.prefix_access == ways[0] else replace(placed, prefix_access=ways[0])
    ranks, cluster = placed.cluster.num_gpus, placed.cluster
    chunks = [np.array([placed.request.new_tokens / ranks])] * ranks
    if cluster.shares_bandwidth:  # a fair share each: this is asked for many times, and only tells which is faster
        cluster = placed.with_own_links(cluster.link.bandwidth_bytes_per_s / (ranks - 1)).cluster
    each = [replace(placed, prefix_access=way) for way in ways]
    ttfts_s = [float(run_batch(build_program(one, strategy, chunks), cluster)[-1, 0]) for one in each]
    if ways[0] == "whole" and ttfts_s[0] <= ttfts_s[1]:
        return each[0]
    return each[int(np.argmin(ttfts_s))]


def has_choice(scenario: Scenario, strategy: Strategy) -> bool:
    """Whether the ranks of a strategy have several ways to a cached prefix that lies elsewhere than on all of them."""
    placed = for_strategy(scenario, strategy)
    elsewhere = scenario.request.cached_prefix and scenario.prefix_placement.place != "all"
    return bool(elsewhere) and len(_ways(placed, strategy)) > 1


def _ways(placed: Scenario, strategy: Strategy) -> tuple[PrefixAccess, ...]:
    return supported_prefix_access(strategy, placed.prefix_placement, placed.cluster.num_gpus)
