"""Exchanges: how the ranks of each strategy run a prefill; one file for each, which `RUN_STRATEGIES` names.

A file defines a subclass of `base.Exchange` as EXCHANGE. Here nothing needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvrsim.errors import InputError

if TYPE_CHECKING:
    from kvrsim.runtime.exchange.base import Exchange

# What the runtime runs: a registered strategy's name, and the file here that runs it. All others are refused.
RUN_STRATEGIES: Mapping[str, str] = MappingProxyType(
    {
        **{"single": "single", "tsp": "tsp", "kvr-e": "kvr", "kvr-s": "kvr", "kvr-p": "kvr", "kvr-b": "kvr"},
        **{"kvr-direct": "kvr_direct", "ring": "ring", "striped": "striped", "zigzag": "zigzag"},
        **{"zigzag-ring": "zigzag_ring", "ulysses": "ulysses", "tp": "tp", "pp": "pp", "pp-s": "pp"},
    }
)


def run_strategy(name: str, argument: str = "strategy") -> str:
    """How ranks run a strategy; raises InputError, naming `argument`, for one that the runtime cannot run."""
    if name not in RUN_STRATEGIES:
        raise InputError(argument, name, f"what the runtime runs: {', '.join(RUN_STRATEGIES)}")
    return RUN_STRATEGIES[name]


def exchange_of(strategy: str) -> type[Exchange]:
    """The class of a plan's strategy, one of the values of `RUN_STRATEGIES`."""
    if strategy not in RUN_STRATEGIES.values():
        raise InputError("strategy", strategy, f"one of {', '.join(dict.fromkeys(RUN_STRATEGIES.values()))}")
    found: type[Exchange] = import_module(f"{__name__}.{strategy}").EXCHANGE
    return found
