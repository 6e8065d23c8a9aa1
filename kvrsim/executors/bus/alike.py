"""Layers that repeat themselves on a bus: where ranks meet in every layer, a few layers tell the time of all.

Once all flows of a layer have left before any rank begins the next one, the next one depends on when ranks begin it
alone, and on their hosts. If then all ranks advance by the same time in two layers one after the other, and no host by
more, every further layer advances them by the same time again.
"""

from __future__ import annotations

import numpy as np

from kvrsim.executors.bus.flows import FlowGraph, RankFlows
from kvrsim.executors.bus.moments import SharedRun
from kvrsim.executors.maxplus import SAME
from kvrsim.executors.repeats import has_runs, runs
from kvrsim.executors.steps import Segment, Steps
from kvrsim.hardware import Cluster
from kvrsim.program import Array, Program

_WALKED, _LEAST = 4, 8  # periods that are run; and that there must be, so that it pays
_MEETINGS = ("gather", "pass", "exchange")  # flows whose number is that of a collective, the same for all ranks


def run_alike(program: Program, cluster: Cluster) -> Array | None:
    """When each rank has finished, seconds, shape (num_ranks, B), on a bus; None: it takes all layers to tell."""
    if not has_runs(program):
        return None
    periods = list(runs(program.layer_kind_index))
    if len(periods) != 1 or periods[0][1] < _LEAST:
        return None
    (period, times), steps = periods[0], Steps(cluster)
    first, layers, last = steps.of(program, [(period, 1)])
    graph, ranks = FlowGraph(program.num_rows), []
    for rank in range(program.num_ranks):
        one = RankFlows(graph, cluster, rank, program.num_ranks)
        hosts_s = []
        for part in (first, *[layers] * _WALKED):
            one.take(part.steps[rank])
            hosts_s.append(one.host_s)
        ranks.append(hosts_s)
    keys = {moment: key for key, moment in graph.moments.items() if moment in graph.flows}
    if not keys or any(kind not in _MEETINGS for kind, *_ in keys.values()):
        return None
    run = SharedRun(graph)
    ends_s = run.run().reshape(program.num_ranks, _WALKED + 1, -1)
    left_s = run.time_s.reshape(-1, program.num_rows)[list(keys)]
    meetings = (1 + max(number for _, _, number, _ in keys.values())) // _WALKED
    layer = np.array([number // meetings for _, _, number, _ in keys.values()])
    issued_s = np.array([hosts_s[-1] - hosts_s[-2] for hosts_s in ranks])
    advance_s = np.diff(ends_s[:, -3:], axis=1)
    least_s = advance_s.min(axis=(0, 1))
    same = advance_s.max(axis=(0, 1)) - least_s <= SAME * ends_s[:, -1].max(axis=0)
    apart = [
        (left_s[layer == number].max(axis=0) <= ends_s[:, number + 1].min(axis=0)).all() for number in range(_WALKED)
    ]
    if not (same.all() and all(apart) and issued_s.max() <= least_s.min()):
        return None
    finish_s = ends_s[:, -1] + (times - _WALKED) * least_s
    for rank, hosts_s in enumerate(ranks):
        host_s = hosts_s[-1] + (times - _WALKED) * issued_s[rank]
        for step in last.steps[rank]:
            assert isinstance(step, Segment)
            finish_s[rank] += step.device_s
            if step.host_floor_s is not None:
                finish_s[rank] = np.maximum(finish_s[rank], step.host_floor_s + host_s)
            host_s += step.host_s
    return np.asarray(finish_s)
