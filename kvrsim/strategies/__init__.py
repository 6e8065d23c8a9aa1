"""The strategies, each a short file; `STRATEGIES` has those of kvrsim, packages and files may add others (load.py)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from kvrsim.errors import InputError
from kvrsim.strategies.base import Step, Strategy
from kvrsim.strategies.gather import TSP, ZIGZAG
from kvrsim.strategies.kv_runahead import KVR_B, KVR_DIRECT, KVR_E, KVR_P, KVR_S
from kvrsim.strategies.load import from_file, installed, installed_names, is_file
from kvrsim.strategies.pipeline import PIPELINE, PIPELINE_SEARCHED, with_stages
from kvrsim.strategies.ring import RING, STRIPED, ZIGZAG_RING
from kvrsim.strategies.single import SINGLE, TENSOR_PARALLEL, in_groups
from kvrsim.strategies.ulysses import ULYSSES

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
    "sizes_names",
    "strategy_names",
]

STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        *(SINGLE, TSP, KVR_E, KVR_S, KVR_P),
        *(KVR_B, KVR_DIRECT, RING, STRIPED, ZIGZAG_RING, ZIGZAG, ULYSSES, TENSOR_PARALLEL, PIPELINE, PIPELINE_SEARCHED),
    )
}
_HYBRID = re.compile(r"tp([1-9]\d{0,4})(?:\+(.+))?")
_STAGES = re.compile(r"pp([1-9]\d{0,4})?(-s)?(?:\+cp([1-9]\d{0,4}))?")  # as engines name pipeline and context sizes
_CONTEXT = re.compile(r"cp([1-9]\d{0,4})")
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
    if (split := _by_sizes(strategy, parameter)) is not None:
        return split
    hybrid = _HYBRID.fullmatch(strategy)
    if hybrid and hybrid[2] is None:
        return replace(TENSOR_PARALLEL, name=strategy, group_size=int(hybrid[1]), context_size=1)
    if hybrid:
        try:
            inner = get_strategy(hybrid[2], parameter)
        except InputError as error:
            raise InputError(parameter, strategy, error.accepted) from error
        if inner.group_size == 1 and inner.partition_rule not in ("whole", "table"):
            return inner if hybrid[1] == "1" else in_groups(inner, int(hybrid[1]))
        raise InputError(parameter, strategy, "tpN+ before a strategy that splits the context or the layers")
    if is_file(strategy):
        return get_strategy(from_file(strategy, parameter), parameter)
    if strategy in installed_names():
        return installed(strategy)
    known = ", ".join(strategy_names())
    accepted = f"one of {known}, tpN+ before one, such as tp8+kvr-s, sizes such as tp4+pp2+cp2, or FILE.py:NAME"
    raise InputError(parameter, strategy, accepted)


def _by_sizes(name: str, parameter: str) -> Strategy | None:
    """The strategy that pipeline and context sizes name: pp4, pp4-s, pp2+cp4, cp4; None: the name is another.

    A size of 1 splits nothing: pp1+cp4 is cp4, and pp4+cp1 is pp4. cp4 is zigzag over four ranks.
    """
    if alone := _CONTEXT.fullmatch(name):
        return replace(ZIGZAG, name=name, context_size=int(alone[1]))
    if not (sizes := _STAGES.fullmatch(name)):
        return None
    stages, context = (None if size is None else int(size) for size in sizes.group(1, 3))
    if context is not None and sizes[2]:
        raise InputError(parameter, name, "even pieces where ranks split the context: ppM+cpK, without -s")
    if stages == 1 and context is not None:
        return _by_sizes(f"cp{context}", parameter)
    return with_stages(stages, None if context == 1 else context, searched=sizes[2] is not None)


def label_of(strategy: str | Strategy) -> str:
    """The name by which a strategy was given, for the record of a question."""
    return strategy if isinstance(strategy, str) else strategy.name


def searched(strategy: str | Strategy, parameter: str = "strategy") -> Strategy:
    """A strategy whose chunks are searched over single GPUs, such as a table holds; raises InputError for another."""
    resolved = get_strategy(strategy, parameter)
    if resolved.partition_rule != "search" or resolved.group_size != 1:
        raise InputError(parameter, resolved.name, "a strategy of single GPUs whose chunks are searched, such as kvr-s")
    return resolved


def chain_like(strategy: Strategy) -> Strategy:
    """KVR's chain over ranks of the same size."""
    return KVR_S if strategy.group_size == 1 else in_groups(KVR_S, strategy.group_size or 1)


def strategy_names() -> tuple[str, ...]:
    """Names of kvrsim's strategies, then of those that installed packages add."""
    return tuple(dict.fromkeys((*STRATEGIES, *installed_names())))


def hybrid_names(sizes: Sequence[int]) -> tuple[str, ...]:
    """The hybrids of two strategies that `all` stands for, with groups of these sizes."""
    return tuple(f"tp{size}+{name}" for size in sizes for name in _IN_HYBRIDS)


def sizes_names(num_gpus: int, together: int) -> tuple[str, ...]:
    """The hybrids of stages and context ranks that `all` stands for: all GPUs, and powers of two but for the stages.

    together: GPUs of a stage at most.
    """
    powers = [2**exponent for exponent in range(17) if 2**exponent <= together]
    pairs = [(tensor, context) for tensor in powers for context in powers[1:] if tensor * context <= together]
    return tuple(
        f"tp{tensor}+" * (tensor > 1) + f"pp{num_gpus // (tensor * context)}+cp{context}"
        for tensor, context in pairs
        if num_gpus % (tensor * context) == 0 and num_gpus > tensor * context
    )
