"""The strategies, each a short file; `STRATEGIES` is the only list of them."""

from __future__ import annotations

from kvrsim.errors import InputError
from kvrsim.strategies.base import Step, Strategy
from kvrsim.strategies.kv_runahead import KVR_E, KVR_P, KVR_S
from kvrsim.strategies.single import SINGLE
from kvrsim.strategies.tsp import TSP

__all__ = ["STRATEGIES", "Step", "Strategy", "get_strategy"]

STRATEGIES = {strategy.name: strategy for strategy in (SINGLE, TSP, KVR_E, KVR_S, KVR_P)}


def get_strategy(name: str, argument: str = "--strategy") -> Strategy:
    """The strategy of that name; raises InputError naming `argument` where there is none."""
    if name not in STRATEGIES:
        raise InputError(argument, name, "one of " + ", ".join(STRATEGIES))
    return STRATEGIES[name]
