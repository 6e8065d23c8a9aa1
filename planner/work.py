"""The modelled CPU time of simulations: what a plan compares and searches within its budget.

The time is modelled, not measured, so that a busy machine finds the same result. Measured times of plans on 8 to 1024
GPUs are from a third to three times the modelled ones; benchmarks/defaults.py measures the CPU time of whole plans.
"""

from __future__ import annotations

from typing import NamedTuple

from kvrsim.execution import Execution
from kvrsim.executors.chain import Chain
from kvrsim.model.mixers import Recurrence
from kvrsim.once import once
from kvrsim.strategies.pipeline import context_ranks

# Seconds of one core of 2026, from measured first simulations of default plans.
_BLOCK_S = 2e-4  # a rank's operations in a kind of layer, or in a stage
_LAYER_S = 2e-5  # a rank's part in a layer of a chain whose layers differ
_PAIR_S = 2e-6  # a message of a layer between any two ranks
_MESSAGE_S = 1.5e-4  # a message on a bus, where each one is simulated by itself
_STEP_S = 5e-5  # a step of all stages of a pipeline, in a kind of layer
_CHAIN_S = 1e-6  # a rank of a chain of equal layers, in a partition
_SHARE_OF_PARTITION = 0.002  # of the seconds of a batch's program, for each partition; 0.0007 were measured
_EVEN_PIECES = 16  # pieces per stage, in all numbers of even pieces together that a pipeline's first simulations try
_EQUAL_LAYERS = 8  # layers of one kind that are simulated until times advance steadily
_FEW_ERRORS_S = 0.0125  # a simulation of all ranks that takes longer is not repeated for each source of errors


class ModelledWork(NamedTuple):
    """Modelled CPU seconds of simulations."""

    program_s: float  # for each batch of partitions, which share a program
    partition_s: float  # for each partition of a batch


def work_of(execution: Execution, pieces: int) -> ModelledWork:
    """The modelled work of a strategy's simulations; pieces: their number, for pipelines."""
    strategy = execution.strategy
    placed = execution.placed
    ranks = execution.cluster.num_gpus
    layers = placed.share.num_hidden_layers
    kinds = len(placed.share.layer_kinds)
    if execution.cluster.shares_bandwidth:
        messages = layers * ranks
        if strategy.is_pipeline and context_ranks(strategy) == 1:
            messages = pieces * ranks
        elif not strategy.chains:
            messages = layers * ranks * ranks
        return _shared(_MESSAGE_S * messages)
    if strategy.is_pipeline:
        program_s = _BLOCK_S * ranks + _STEP_S * kinds * (pieces + ranks)
        if placed.prefix_access_plan.source is not None:  # a program for each layout of the stages
            return ModelledWork(0.0, program_s)
        return _shared(program_s)
    if Chain.suits(execution, execution.cluster):
        return ModelledWork(0.0, _CHAIN_S * ranks)
    program_s = _BLOCK_S * kinds * ranks
    if strategy.chains or strategy.partition_rule == "search":
        program_s += _LAYER_S * layers * ranks
        simulated = sum(_attends(layer.mixer) for layer in placed.share.layers)
    else:
        simulated = min(layers, _EQUAL_LAYERS) if kinds == 1 else layers
    if not strategy.chains and (strategy.partition_rule == "search" or not placed.chain_is_proven):
        program_s += _PAIR_S * simulated * ranks * ranks
    return _shared(program_s)


def _attends(mixer: object) -> bool:
    """Whether a layer's mixer attends to tokens on other ranks; a recurrence passes a state to the next rank only."""
    return mixer is not None and not isinstance(mixer, Recurrence)


def _shared(program_s: float) -> ModelledWork:
    """The work of partitions that are simulated together."""
    return ModelledWork(program_s, _SHARE_OF_PARTITION * program_s)


@once
def first_s(execution: Execution) -> float:
    """Modelled CPU seconds of the first simulation of a strategy; of a pipeline, of all its numbers of even pieces."""
    strategy = execution.strategy
    ranks = execution.cluster.num_gpus
    block_s = _BLOCK_S * len(execution.placed.share.layer_kinds)
    if execution.cluster.shares_bandwidth or strategy.is_pipeline:
        return sum(work_of(execution, min(execution.request.new_tokens, _EVEN_PIECES * ranks)))
    if strategy.partition_rule == "search":
        return sum(work_of(execution, ranks)) + block_s * ranks  # balanced chunks
    if not strategy.chains and execution.placed.chain_is_proven:
        return block_s  # ranks with even chunks do the same work
    return sum(work_of(execution, ranks))


def has_many_errors(execution: Execution, pieces: int) -> bool:
    """Whether simulations of all sources of a prediction's error take long."""
    return sum(work_of(execution, pieces)) > _FEW_ERRORS_S
