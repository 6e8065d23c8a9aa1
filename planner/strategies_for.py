"""Which strategies `all` stands for: those that a machine and a model allow.

In how many pieces a pipeline takes the context: more fill the stages sooner, fewer waste less on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrsim.compile import for_strategy
from kvrsim.errors import InputError
from kvrsim.partition import Partition
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES, get_strategy, hybrid_names, strategy_names
from planner.evaluate import Evaluator

# Compared where nobody says what: the paper's own, and those whose only partition takes one evaluation.
QUICK = ("single", "tsp", "kvr-e", "kvr-s", "ring", "striped", "zigzag", "ulysses", "tp")
ON_ONE_GPU = ("single", "tsp", "kvr-e", "kvr-s")  # the others are `single` there, under other names
RINGS, MOST_IN_RINGS = ("ring", "striped", "zigzag"), 128  # their cost grows with the square of the GPUs
UNDER_NOISE = tuple(name for name in QUICK if name != "tp")  # noise is of single GPUs


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What a plan compares."""

    names: tuple[str, ...]
    ranked: bool  # by TTFT; else in the order asked for
    notes: tuple[str, ...] = ()  # on those that the machine or the model does not allow
    not_compared: tuple[str, ...] = ()  # left to "all", because each takes a search of its own, or long


def choose(scenario: Scenario, asked: Sequence[str] | None, *, noisy: bool = False) -> Chosen:
    """The strategies asked for; "all" stands for every one that runs here, None for the quick ones.

    Raises InputError where none are asked for.
    """
    if asked is None:
        return _quick(scenario, noisy=noisy)
    if "all" in asked:
        names, notes = names_for_all(scenario)
        return Chosen(names=names, ranked=True, notes=notes)
    if not asked:
        raise InputError("strategies", "", "at least one of " + ", ".join(STRATEGIES))
    return Chosen(names=tuple(dict.fromkeys(asked)), ranked=False)


def _quick(scenario: Scenario, *, noisy: bool) -> Chosen:
    cluster = scenario.cluster
    if cluster.num_gpus == 1:
        return Chosen(names=ON_ONE_GPU, ranked=True)
    quick = UNDER_NOISE if noisy else QUICK
    slow = RINGS if cluster.num_gpus > MOST_IN_RINGS else ()
    names, notes = _allowed(scenario, [name for name in quick if name not in slow])
    sizes = group_sizes(cluster.num_gpus, cluster.gpus_per_node)
    later = slow if noisy else (*slow, "kvr-direct", "pp", *hybrid_names(sizes))
    return Chosen(names=names, ranked=True, notes=notes, not_compared=later)


def names_for_all(scenario: Scenario) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Every strategy that runs here without a table, hybrids included; and a note on those that do not run."""
    num_gpus, per_node = scenario.cluster.num_gpus, scenario.cluster.gpus_per_node
    return _allowed(scenario, (*strategy_names(), *hybrid_names(group_sizes(num_gpus, per_node))))


def _allowed(scenario: Scenario, wanted: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those that need no table and that the machine and the model allow; and a note on the others."""
    names, notes = [], []
    for name in wanted:
        strategy = get_strategy(name, "strategies")
        if strategy.partition_rule == "table":
            continue
        try:
            for_strategy(scenario, strategy)
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


_GAIN = 0.002  # of TTFT, less than which twice the pieces are not worth it
_MOST_A_STAGE = 64  # pieces; with so many, filling and emptying the stages takes less than 1.6 % of TTFT


def best_pieces(evaluator: Evaluator) -> Partition:
    """Even pieces, 1, 2, 4, ... of them, as long as TTFT falls.

    It has one minimum: S stages take (S + M - 1) x (work / M + the fixed cost of a piece) for M pieces.
    """
    scenario = evaluator.scenario
    tokens = scenario.request.new_tokens
    best, best_s, number = Partition.even(tokens, 1), float("inf"), 1
    while number <= min(tokens, _MOST_A_STAGE * scenario.cluster.num_gpus):
        partition = Partition.even(tokens, number)
        ttft_s = float(evaluator.ttft_s(np.array([partition.chunk_lens], dtype=float))[0])
        if ttft_s > best_s * (1 - _GAIN):
            break
        best, best_s, number = partition, ttft_s, 2 * number
    return best
