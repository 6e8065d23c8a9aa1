"""Which strategies `all` stands for: those that a machine and a model allow."""

from __future__ import annotations

from kvrsim.errors import InputError
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy, hybrid_names, strategy_names


def names_for_all(scenario: Scenario) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Every strategy that runs here without a table, hybrids included; and a note on those that do not run."""
    num_gpus, per_node = scenario.cluster.num_gpus, scenario.cluster.gpus_per_node
    names, notes = [], []
    for name in (*strategy_names(), *hybrid_names(group_sizes(num_gpus, per_node))):
        strategy = get_strategy(name, "strategies")
        if strategy.partition_rule == "table":
            continue
        try:
            scenario.for_strategy(strategy)
        except InputError as error:
            notes.append(f"{name} takes {error.accepted}")
        else:
            names.append(name)
    return tuple(names), tuple(f"not compared: {note}" for note in notes)


def group_sizes(num_gpus: int, per_node: int | None) -> tuple[int, ...]:
    """Powers of two that divide the GPUs into groups, none of which spans nodes."""
    most = min(num_gpus // 2, per_node or num_gpus)
    powers = (2**exponent for exponent in range(1, 17))
    return tuple(size for size in powers if size <= most and num_gpus % size == 0)
