"""How the weights lie on a group of GPUs, and which strategies can run on them.

A group loads its weights once. Strategies that need the same weights on every GPU share a layout, and a group
uses the fastest of them for each prompt; strategies of different layouts need different groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvrsim.compile import for_strategy
from kvrsim.errors import InputError
from kvrsim.scenario import Scenario
from kvrsim.strategies import KVR_S, STRATEGIES, Strategy, get_strategy, hybrid_names
from planner.candidates import all_for, distinct, group_sizes
from planner.deploy import DeployEngine
from planner.packing.rule import ACCEPTED, takes_steps
from planner.table.table import PartitionTable

WHOLE = "whole"  # every GPU of a group holds all weights
_USUAL = ("single", "tsp", "kvr-s", "ring", "striped", "zigzag-ring", "zigzag", "ulysses", "tp", "pp")
_ON_A_BUS = ("single", "tsp", "kvr-s", "tp")  # all usual ones take four times as long where flows share a bus


class Kind(NamedTuple):
    """Groups that are alike: their GPUs, and how the weights lie on them."""

    gpus: int
    weights: str = WHOLE  # WHOLE, or as engines name it: tp4, tp2+pp4; the rest of the GPUs split the context


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The strategies that groups may run; None: the usual ones.

    engines: that must have them. A server of an engine runs one strategy, so that each has groups of its own.
    """

    asked: tuple[str | Strategy, ...] | None = None
    table: PartitionTable | None = None
    engines: tuple[DeployEngine, ...] = ()
    packs: bool = False  # whether groups pack prompts into steps, so that only strategies of whole steps can run

    def __post_init__(self) -> None:
        if self.asked is not None and not self.asked:
            raise InputError("strategies", "", "at least one of " + ", ".join(STRATEGIES))
        for one in self.asked or ():
            strategy = None if one == "all" else get_strategy(one, "strategies")
            if strategy is not None and strategy.approximate is not None:  # it would compete with exact ones
                accepted = f"exact strategies; this one is approximate: {strategy.approximate}"
                raise InputError("strategies", strategy.name, accepted)
            if strategy is not None and self.packs and not takes_steps(strategy):
                raise InputError("strategies", strategy.name, f"with `pack_tokens`, {ACCEPTED}")
            if strategy is not None and strategy.partition_rule == "table" and self.table is None:
                raise InputError("table", "nothing", f"a file of kvrsim table build, for {strategy.name}")

    def layouts(self, scenario: Scenario) -> dict[str, tuple[Strategy, ...]]:
        """Strategies that the scenario's GPUs and model allow, by layout of the weights."""
        found: dict[str, list[Strategy]] = {}
        for strategy in self._wanted(scenario):
            try:
                for_strategy(scenario, strategy)
            except InputError:
                continue
            if strategy.approximate is None:
                found.setdefault(self._layout(strategy, scenario.num_gpus), []).append(strategy)
        return {weights: tuple(strategies) for weights, strategies in found.items()}

    def _layout(self, strategy: Strategy, num_gpus: int) -> str:
        return strategy.name if self.engines and num_gpus > 1 else weights_of(strategy, num_gpus)

    def left_out(self, scenario: Scenario) -> tuple[str, ...]:
        """Exact strategies that run on these GPUs and that only `all` or their own names bring in."""
        if self.asked is not None or scenario.num_gpus == 1:
            return ()
        usual = {strategy.name for strategy in self._wanted(scenario)} | {"kvr-e"}  # KVR-S has even chunks too
        exact = [one for one in all_for(scenario)[0] if one.approximate is None and self._has(one, scenario)]
        return tuple(one.name for one in exact if one.name not in usual)

    def _has(self, strategy: Strategy, scenario: Scenario) -> bool:
        """Whether all engines run a strategy on all of the GPUs, with packed prompts where they are packed."""
        idle = (self.packs or bool(self.engines)) and strategy.name == "single" and scenario.num_gpus > 1
        packs = not self.packs or takes_steps(strategy)
        return packs and not idle and all(engine.has(strategy, scenario) for engine in self.engines)

    def _wanted(self, scenario: Scenario) -> tuple[Strategy, ...]:
        return tuple(one for one in self._asked_for(scenario) if self._has(one, scenario))

    def _asked_for(self, scenario: Scenario) -> tuple[Strategy, ...]:
        asked = [KVR_S if one == "kvr-p" else one for one in self.asked or ()]  # with the chunks of the table
        if scenario.num_gpus == 1:  # where all strategies of single GPUs are `single`
            alone = not asked or any(one == "all" or get_strategy(one).group_size in (1, None) for one in asked)
            return (STRATEGIES["single"],) if alone else ()
        named = [one for one in asked if one != "all"]
        if len(named) < len(asked):
            return distinct((*all_for(scenario)[0], *named))
        return distinct(named or _usual(scenario))


def weights_of(strategy: Strategy, num_gpus: int) -> str:
    """How the weights lie under a strategy."""
    tensor, stages, _ = strategy.sizes(num_gpus)
    parts = [f"tp{tensor}"] * (tensor > 1) + [f"pp{stages}"] * (stages > 1)
    return "+".join(parts) or WHOLE


def _usual(scenario: Scenario) -> Sequence[str]:
    cluster = scenario.cluster
    if cluster.shares_bandwidth:
        return _ON_A_BUS
    return (*_USUAL, *hybrid_names(group_sizes(cluster.num_gpus, cluster.gpus_per_node)))
