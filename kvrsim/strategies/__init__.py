"""The strategies, each a short file; `STRATEGIES` lists those of kvrsim, other packages may add theirs.

A package adds one by an entry point of the group "kvrsim.strategies", whose name is the strategy's and whose
object is a Strategy. Entry points are looked for only where a name is not one of kvrsim's, or all are listed.
"""

from __future__ import annotations

import re
from functools import lru_cache

from kvrsim.errors import InputError
from kvrsim.strategies.base import Step, Strategy
from kvrsim.strategies.kv_runahead import KVR_E, KVR_P, KVR_S
from kvrsim.strategies.kv_runahead_direct import KVR_DIRECT
from kvrsim.strategies.pipeline import PIPELINE
from kvrsim.strategies.ring import RING, STRIPED
from kvrsim.strategies.single import SINGLE
from kvrsim.strategies.tensor_parallel import TENSOR_PARALLEL, in_groups
from kvrsim.strategies.tsp import TSP
from kvrsim.strategies.ulysses import ULYSSES
from kvrsim.strategies.zigzag import ZIGZAG

__all__ = [
    "ENTRY_POINTS",
    "STRATEGIES",
    "Step",
    "Strategy",
    "chain_like",
    "get_strategy",
    "hybrid_names",
    "strategy_names",
]

ENTRY_POINTS = "kvrsim.strategies"
STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        *(SINGLE, TSP, KVR_E, KVR_S, KVR_P),
        *(KVR_DIRECT, RING, STRIPED, ZIGZAG, ULYSSES, TENSOR_PARALLEL, PIPELINE),
    )
}
_HYBRID = re.compile(r"tp([1-9]\d{0,4})(?:\+(.+))?")
_IN_HYBRIDS = (
    "kvr-s",
    "ring",
    "zigzag",
    "pp",
)  # of those that `all` stands for; any but single and tp may be asked for


def get_strategy(name: str, argument: str = "strategy") -> Strategy:
    """The strategy of that name: kvrsim's, another package's, or a hybrid such as tp8+kvr-s.

    Raises InputError naming `argument` where there is none.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    if (hybrid := _HYBRID.fullmatch(name)) and hybrid[2]:
        inner = get_strategy(hybrid[2], argument)
        if inner.group_size == 1 and inner.partition_rule not in ("whole", "table"):
            return inner if hybrid[1] == "1" else in_groups(inner, int(hybrid[1]))
        raise InputError(argument, name, "tpN+ before a strategy that splits the context or the layers")
    if name in strategy_names():
        return _loaded(name)
    raise InputError(argument, name, f"one of {', '.join(strategy_names())}, or tpN+ before one, such as tp8+kvr-s")


def chain_like(strategy: Strategy) -> Strategy:
    """KVR's chain over ranks of the same size."""
    return KVR_S if strategy.group_size == 1 else in_groups(KVR_S, strategy.group_size or 1)


def strategy_names() -> tuple[str, ...]:
    """Names of kvrsim's strategies, then of those that installed packages add."""
    from importlib.metadata import entry_points

    added = sorted(entry.name for entry in entry_points(group=ENTRY_POINTS))
    return tuple(dict.fromkeys((*STRATEGIES, *added)))


@lru_cache
def _loaded(name: str) -> Strategy:
    """Another package's strategy; InputError where its entry point does not hold one of that name."""
    from importlib.metadata import entry_points

    entry = next(iter(entry_points(group=ENTRY_POINTS, name=name)))
    try:
        strategy = entry.load()
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"entry point {ENTRY_POINTS}: {name}", entry.value, f"what can be imported ({error})"
        ) from None
    if not isinstance(strategy, Strategy) or strategy.name != name:
        raise InputError(f"entry point {ENTRY_POINTS}: {name}", entry.value, f"a kvrsim Strategy named {name}")
    return strategy


def hybrid_names(sizes: tuple[int, ...]) -> tuple[str, ...]:
    """The hybrids that `all` stands for, with groups of these sizes."""
    return tuple(f"tp{size}+{name}" for size in sizes for name in _IN_HYBRIDS)
