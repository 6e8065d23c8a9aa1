"""Requests behind each other on the same GPUs: a chain's early ranks begin the next prompt while its last is busy.

Every rank runs the requests in order, as soon as it has done the one before and the next has come; host and
device begin a request together, since a serving loop fetches the token of the one before. On links that
nobody shares, when ranks and links are free after a request depends on when they were free before it by
maxima and sums alone: x' = A (x) x in max-plus algebra. One evaluation from every unit vector gives A; requests
then cost a matrix-vector product each, and the largest mean weight of a cycle of A is the time that a request
takes in the long run (Karp, 1978; Baccelli et al., Synchronization and Linearity, 1992).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvrsim.executors.batch import BatchEvaluator, Start
from kvrsim.hardware.cluster import Cluster
from kvrsim.noise.draw import NoiseDraw
from kvrsim.program.operations import Array, Program
from kvrsim.results.stream import Arrivals, StreamResult
from kvrsim.results.timeline import Timeline

_MOST_STATES = 256  # ranks and links, up to which the long run is worked out


def run_stream(
    program: Program,
    cluster: Cluster,
    arrivals: Arrivals,
    *,
    busy_s: Sequence[float],
    seed: int = 0,
    noise: NoiseDraw | None = None,
) -> StreamResult:
    """TTFT of every request, throughput and utilisation; the event executor runs what the recurrence cannot.

    busy_s: device time of each rank's own operations in one request.
    """
    times_s = arrivals.times_s(seed)
    steady_s: float | None = None
    if noise is None and not cluster.shares_bandwidth:
        recurrence = Recurrence.of(program, cluster)
        first_token_s, end_s = recurrence.run(times_s)
        if len(recurrence.matrix) <= _MOST_STATES:
            steady_s = cycle_time_s(recurrence.matrix)
    else:
        first_token_s, end_s = simulated(program, cluster, times_s, noise)
    return StreamResult(
        arrivals=arrivals.describe(),
        arrivals_s=times_s,
        ttft_s=tuple(token_s - time_s for token_s, time_s in zip(first_token_s, times_s, strict=True)),
        throughput_per_s=len(times_s) / end_s,
        steady_per_s=1.0 / steady_s if steady_s else None,
        busy_s=tuple(busy_s),
        utilisation=tuple(len(times_s) * busy / end_s for busy in busy_s),
    )


def simulated(
    program: Program, cluster: Cluster, arrivals_s: Sequence[float], noise: NoiseDraw | None = None
) -> tuple[tuple[float, ...], float]:
    """When each request has its first token, and when all ranks are done, by the event executor."""
    from kvrsim.executors.event import EventSimulation  # SimPy, only where it is needed

    simulation = EventSimulation(program, cluster, record=False, noise=noise, arrivals_s=arrivals_s)
    return simulation.finishes_s[-1], max(simulation.finish_s)


def timeline_of(
    program: Program, cluster: Cluster, arrivals_s: Sequence[float], noise: NoiseDraw | None = None
) -> Timeline:
    """What happens when, while these requests run behind each other."""
    from kvrsim.executors.event import EventSimulation  # SimPy, only where it is needed

    simulation = EventSimulation(program, cluster, noise=noise, arrivals_s=arrivals_s)
    return replace(simulation.timeline, first_tokens_s=simulation.finishes_s[-1])


@dataclass(frozen=True, slots=True)
class Recurrence:
    """One request as a max-plus matrix."""

    matrix: Array  # [i, j]: when i is free again, if j alone were not free before 0; shape (states, states)
    num_ranks: int  # the first states; the others are links

    @classmethod
    def of(cls, program: Program, cluster: Cluster) -> Recurrence:
        """Evaluate the program once, with one column a state."""
        num_ranks = program.num_ranks
        edges = sorted(BatchEvaluator(program, cluster).links_s)
        units = np.where(np.eye(num_ranks + len(edges), dtype=bool), 0.0, -np.inf)
        start = Start(list(units[:num_ranks]), dict(zip(edges, units[num_ranks:], strict=True)))
        end = BatchEvaluator(program, cluster, start=start)
        return cls(np.stack([*end.finish_s, *(end.links_s[edge] for edge in edges)]), num_ranks)

    def run(self, arrivals_s: Sequence[float]) -> tuple[tuple[float, ...], float]:
        """When the last rank has finished each request, and when all ranks are done."""
        free_s = np.full(len(self.matrix), -np.inf)
        tokens = []
        for arrival_s in arrivals_s:
            free_s[: self.num_ranks] = np.maximum(free_s[: self.num_ranks], arrival_s)
            free_s = (self.matrix + free_s).max(axis=1)
            tokens.append(float(free_s[self.num_ranks - 1]))
        return tuple(tokens), float(free_s[: self.num_ranks].max())


def cycle_time_s(matrix: Array) -> float:
    """The largest mean weight of a cycle (Karp, 1978): seconds a request in the long run."""
    count = len(matrix)
    longest = np.full((count + 1, count), -np.inf)
    longest[0] = 0.0  # from a source beside the graph, which reaches every state
    for step in range(count):
        longest[step + 1] = (matrix + longest[step]).max(axis=1)
    steps = np.arange(count)[:, None]
    with np.errstate(invalid="ignore"):
        means = (longest[count] - longest[:count]) / (count - steps)
    means[~np.isfinite(longest[:count])] = np.inf
    reached = np.isfinite(longest[count])
    return float(means[:, reached].min(axis=0).max())
