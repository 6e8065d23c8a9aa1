"""The batch executor where flows share one bandwidth: the way that suits the program, all of them exact."""

from __future__ import annotations

from kvrsim.executors.bus.alike import run_alike
from kvrsim.executors.bus.flows import FlowGraph
from kvrsim.executors.bus.lanes import run_lanes
from kvrsim.executors.bus.moments import SharedRun
from kvrsim.hardware import Cluster
from kvrsim.program import Array, Program


def run_shared(program: Program, cluster: Cluster) -> Array:
    """When each rank has finished, seconds, shape (num_ranks, B), on a cluster whose flows share a bus.

    TTFT is the last rank's. Equal to the event executor's to rounding.
    """
    for run in (run_lanes, run_alike):
        if (found := run(program, cluster)) is not None:
            return found
    return SharedRun(FlowGraph.of(program, cluster)).run()
