"""The strategies, each a short file; `STRATEGIES` has those of kvrsim, packages and files may add others (load.py)."""

from __future__ import annotations

import re

from kvrsim.errors import InputError
from kvrsim.strategies.base import Step, Strategy
from kvrsim.strategies.kv_runahead import KVR_E, KVR_P, KVR_S
from kvrsim.strategies.kv_runahead_direct import KVR_DIRECT
from kvrsim.strategies.load import from_file, installed, installed_names, is_file
from kvrsim.strategies.pipeline import PIPELINE, PIPELINE_SEARCHED
from kvrsim.strategies.ring import RING, STRIPED
from kvrsim.strategies.single import SINGLE
from kvrsim.strategies.tensor_parallel import TENSOR_PARALLEL, in_groups
from kvrsim.strategies.tsp import TSP
from kvrsim.strategies.ulysses import ULYSSES
from kvrsim.strategies.zigzag import ZIGZAG
from kvrsim.strategies.zigzag_ring import ZIGZAG_RING

__all__ = [
    "KVR_S",
    "STRATEGIES",
    "Step",
    "Strategy",
    "chain_like",
    "get_strategy",
    "hybrid_names",
    "label_of",
    "searched",
    "strategy_names",
]

STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        *(SINGLE, TSP, KVR_E, KVR_S, KVR_P),
        *(KVR_DIRECT, RING, STRIPED, ZIGZAG_RING, ZIGZAG, ULYSSES, TENSOR_PARALLEL, PIPELINE, PIPELINE_SEARCHED),
    )
}
_HYBRID = re.compile(r"tp([1-9]\d{0,4})(?:\+(.+))?")
_CONTEXT_IN_STAGES = re.compile(r"(?:tp\d+\+)?pp(?:\d+(?:\+cp\d+)?|(?:-s)?\+cp\d+)")  # as engines name them
_IN_HYBRIDS = (
    "kvr-s",
    "ring",
    "zigzag",
    "pp",
    "pp-s",
)  # of those that `all` stands for; any but single and tp may be asked for


def get_strategy(strategy: str | Strategy, parameter: str = "strategy") -> Strategy:
    """A strategy by its name, or as it is.

    Names are those of kvrsim's strategies and of installed packages', "FILE.py:NAME", and hybrids such as tp8+kvr-s.
    Raises InputError naming the parameter where there is none, or where another strategy has the name of kvrsim's.
    """
    if isinstance(strategy, Strategy):
        if STRATEGIES.get(strategy.name, strategy) != strategy:
            raise InputError(parameter, strategy.name, "a Strategy with a name that no strategy of kvrsim has")
        return strategy
    if strategy in STRATEGIES:
        return STRATEGIES[strategy]
    if _CONTEXT_IN_STAGES.fullmatch(strategy):
        accepted = "tpN+pp or tpN+pp-s, whose stages are all other GPUs; nothing splits the context inside a stage"
        raise InputError(parameter, strategy, accepted)
    if (hybrid := _HYBRID.fullmatch(strategy)) and hybrid[2]:
        inner = get_strategy(hybrid[2], parameter)
        if inner.group_size == 1 and inner.partition_rule not in ("whole", "table"):
            return inner if hybrid[1] == "1" else in_groups(inner, int(hybrid[1]))
        raise InputError(parameter, strategy, "tpN+ before a strategy that splits the context or the layers")
    if is_file(strategy):
        return get_strategy(from_file(strategy, parameter), parameter)
    if strategy in installed_names():
        return installed(strategy)
    known = ", ".join(strategy_names())
    accepted = f"one of {known}, tpN+ before one, such as tp8+kvr-s, or FILE.py:NAME"
    raise InputError(parameter, strategy, accepted)


def label_of(strategy: str | Strategy) -> str:
    """What a strategy was asked for as, for the record of a question."""
    return strategy if isinstance(strategy, str) else strategy.name


def searched(strategy: str | Strategy, parameter: str = "strategy") -> Strategy:
    """A strategy whose chunks are searched over single GPUs, such as a table holds; raises InputError for another."""
    found = get_strategy(strategy, parameter)
    if found.partition_rule != "search" or found.group_size != 1:
        raise InputError(parameter, found.name, "a strategy of single GPUs whose chunks are searched, such as kvr-s")
    return found


def chain_like(strategy: Strategy) -> Strategy:
    """KVR's chain over ranks of the same size."""
    return KVR_S if strategy.group_size == 1 else in_groups(KVR_S, strategy.group_size or 1)


def strategy_names() -> tuple[str, ...]:
    """Names of kvrsim's strategies, then of those that installed packages add."""
    return tuple(dict.fromkeys((*STRATEGIES, *installed_names())))


def hybrid_names(sizes: tuple[int, ...]) -> tuple[str, ...]:
    """The hybrids that `all` stands for, with groups of these sizes."""
    return tuple(f"tp{size}+{name}" for size in sizes for name in _IN_HYBRIDS)
