"""Which strategies a plan or map compares: those asked for, or those that a machine and a model allow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrsim.compile import for_strategy
from kvrsim.errors import InputError
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES, Strategy, get_strategy, hybrid_names, sizes_names, strategy_names

# Compared where nobody says what: the paper's own, and those whose only partition takes one evaluation.
QUICK = ("single", "tsp", "kvr-e", "kvr-s", "ring", "striped", "zigzag-ring", "zigzag", "ulysses", "tp")
ON_ONE_GPU = ("single", "tsp", "kvr-e", "kvr-s")  # the others are `single` there, under other names
RINGS, MOST_IN_RINGS = ("ring", "striped", "zigzag-ring", "zigzag"), 128  # their cost grows with the square of the GPUs
UNDER_NOISE = tuple(name for name in QUICK if name != "tp")  # noise is of single GPUs


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What a plan compares."""

    strategies: tuple[Strategy, ...]
    ranked: bool  # by TTFT; else in the order asked for
    notes: tuple[str, ...] = ()  # on those that the machine or the model does not allow
    not_compared: tuple[str, ...] = ()  # left to "all", because each takes a search of its own, or long


def choose(scenario: Scenario, asked: Sequence[str | Strategy] | None, *, noisy: bool = False) -> Chosen:
    """The strategies asked for; "all" stands for every one that runs here, None for the quick ones.

    Raises InputError where none are asked for, or two have one name.
    """
    if asked is None:
        return _quick(scenario, noisy=noisy)
    if not asked:
        raise InputError("strategies", "", "at least one of " + ", ".join(STRATEGIES))
    if "all" not in asked:
        return Chosen(strategies=distinct(asked), ranked=False)
    allowed, notes = all_for(scenario)
    named = [one for one in asked if one != "all"]
    return Chosen(strategies=distinct((*allowed, *named)), ranked=True, notes=notes)


def distinct(asked: Iterable[str | Strategy]) -> tuple[Strategy, ...]:
    """Each strategy once, in the order given; raises InputError where two have one name."""
    found: dict[str, Strategy] = {}
    for one in asked:
        strategy = get_strategy(one, "strategies")
        if found.setdefault(strategy.name, strategy) != strategy and strategy.group_size == 1:
            raise InputError("strategies", strategy.name, "strategies with a name each")
    return tuple(found.values())


def _quick(scenario: Scenario, *, noisy: bool) -> Chosen:
    cluster = scenario.cluster
    if cluster.num_gpus == 1:
        return Chosen(strategies=distinct(ON_ONE_GPU), ranked=True)
    quick = UNDER_NOISE if noisy else QUICK
    slow = RINGS if cluster.num_gpus > MOST_IN_RINGS else ()
    strategies, notes = _allowed(scenario, [name for name in quick if name not in slow])
    later = slow if noisy else (*slow, "kvr-b", "kvr-direct", "pp", "pp-s", *hybrids(scenario))
    return Chosen(strategies=strategies, ranked=True, notes=notes, not_compared=later)


def all_for(scenario: Scenario) -> tuple[tuple[Strategy, ...], tuple[str, ...]]:
    """Every strategy that runs here without a table, hybrids included; and a note on those that do not run."""
    return _allowed(scenario, (*strategy_names(), *hybrids(scenario)))


def hybrids(scenario: Scenario) -> tuple[str, ...]:
    """The hybrids that `all` stands for; no group of GPUs and no stage with context ranks spans nodes."""
    num_gpus, per_node = scenario.cluster.num_gpus, scenario.cluster.gpus_per_node
    return (*hybrid_names(group_sizes(num_gpus, per_node)), *sizes_names(num_gpus, min(num_gpus, per_node or num_gpus)))


def _allowed(scenario: Scenario, wanted: Sequence[str]) -> tuple[tuple[Strategy, ...], tuple[str, ...]]:
    """Those that need no table and that the machine and the model allow; and a note on the others."""
    found, reasons = [], dict[str, list[str]]()
    for name in wanted:
        strategy = get_strategy(name, "strategies")
        if strategy.partition_rule == "table":
            continue
        try:
            for_strategy(scenario, strategy)
        except InputError as error:
            reasons.setdefault(error.accepted, []).append(name)
        else:
            found.append(strategy)
    notes = (f"not compared: {', '.join(names)}: takes {accepted}" for accepted, names in reasons.items())
    return tuple(found), tuple(notes)


def group_sizes(num_gpus: int, per_node: int | None) -> tuple[int, ...]:
    """Powers of two that divide the GPUs into groups, none of which spans nodes."""
    most = min(num_gpus // 2, per_node or num_gpus)
    powers = (2**exponent for exponent in range(1, 17))
    return tuple(size for size in powers if size <= most and num_gpus % size == 0)
