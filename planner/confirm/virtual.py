"""Virtual ranks composed: measured parts of every layer on every rank, joined by the model of the links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvrsim.compile import build_program
from kvrsim.executors.run import run_program
from kvrsim.program import Compute, Op, Program
from kvrsim.results.timeline import Timeline
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import Strategy

Parts = Mapping[tuple[int | None, str], float]  # seconds by layer (None: outside) and the simulator's word

# TSP's gathered pieces land where they stay: what is left to join is the rank's own chunk.
_MEASURED_AS = {"assemble": "append"}


def measured_program(
    scenario: Scenario, strategy: Strategy, partition: Partition, repeats: Sequence[Sequence[Parts]]
) -> Program:
    """The strategy's program, its device times the measured ones: shape (repetitions,), every layer a kind of its own.

    repeats: by repetition, by rank. What is not measured (messages, and what the host adds to them) is the profile's.
    """
    program = build_program(scenario, strategy, [np.full(len(repeats), float(chunk)) for chunk in partition.chunk_lens])
    ranks = range(program.num_ranks)

    def timed(ops: Sequence[Op], rank: int, layer: int | None) -> tuple[Op, ...]:
        return tuple(_timed(op, [parts[rank] for parts in repeats], layer) for op in ops)

    return replace(
        program,
        prologue=tuple(timed(program.prologue[rank], rank, None) for rank in ranks),
        layers=tuple(
            tuple(timed(program.layers[kind][rank], rank, layer) for rank in ranks)
            for layer, kind in enumerate(program.layer_kind_index)
        ),
        layer_kind_index=tuple(range(len(program.layer_kind_index))),
        epilogue=tuple(timed(program.epilogue[rank], rank, None) for rank in ranks),
    )


def _timed(op: Op, repeats: Sequence[Parts], layer: int | None) -> Op:
    """With the measured time, in which the host's is contained; the mask is made in what is measured as embedding."""
    if not isinstance(op, Compute):
        return op
    key = (layer, _MEASURED_AS.get(op.name, op.name))
    measured_s = np.array([parts.get(key, 0.0) for parts in repeats])
    return Compute(name=op.name, device_s=measured_s, kind=op.kind)


def composed_s(
    scenario: Scenario, strategy: Strategy, partition: Partition, repeats: Sequence[Sequence[Parts]]
) -> tuple[float, ...]:
    """TTFT of each repetition."""
    program = measured_program(scenario, strategy, partition, repeats)
    return tuple(map(float, run_program(program, scenario.cluster)[-1]))


def composed_timeline(
    scenario: Scenario, strategy: Strategy, partition: Partition, repeats: Sequence[Sequence[Parts]]
) -> Timeline:
    """Of the repetition in the middle."""
    order = np.argsort(composed_s(scenario, strategy, partition, repeats))
    middle = measured_program(scenario, strategy, partition, [repeats[order[(len(order) - 1) // 2]]])
    from kvrsim.executors.event import EventSimulation  # SimPy, only where it is needed

    return EventSimulation(middle, scenario.cluster).timeline
