"""A graph of moments on a bus, many partitions at once, each at its own next event.

Between events, ranks are independent: see flows.py. The bus is kept in virtual time, as the event executor's: n flows
at once get 1/n of the bandwidth each, and `served_s` is what each has been given, in seconds of the whole bandwidth.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvrsim.executors.bus.flows import FlowGraph
from kvrsim.program import Array, beside_message_s

Index = npt.NDArray[np.intp]


class SharedRun:
    """One evaluation; moments and partitions are numbered together, as moment times B plus partition."""

    def __init__(self, graph: FlowGraph) -> None:
        self.graph, self.num_rows = graph, graph.num_rows
        num_moments = len(graph.floors_s)
        pairs = np.array([edge[:2] for edge in graph.edges], dtype=np.intp).reshape(-1, 2)
        order = np.argsort(pairs[:, 0], kind="stable")
        delay_of, delays_s = graph.merged_delays()
        self.delays_s = delays_s.ravel()
        self.successor, self.delay_of = pairs[order, 1] * self.num_rows, delay_of[order] * self.num_rows
        self.degree = np.bincount(pairs[:, 0], minlength=num_moments)
        self.first = np.cumsum(self.degree) - self.degree
        self.time_s = graph.rows(graph.floors_s).ravel()
        missing = np.bincount(pairs[:, 1], minlength=num_moments)
        self.missing = np.repeat(missing.astype(np.int32), self.num_rows)
        self.beside = np.full(num_moments, -1, dtype=np.intp)  # the work of a ring's round
        self.beside[list(graph.beside)] = np.arange(len(graph.beside))
        works = list(graph.beside.values())
        self.begins = np.array([one.begins for one in works], dtype=np.intp)
        self.work_s = graph.rows(one.work_s for one in works)
        self.stamp = np.empty(self.time_s.size, dtype=np.intp)
        lanes = max(1, len(graph.lanes))
        self.lane = np.full(num_moments, -1, dtype=np.intp)
        self.lane[list(graph.flows)] = [lane for lane, _ in graph.flows.values()]
        self.row_of_flow = np.zeros(num_moments, dtype=np.intp)
        self.row_of_flow[list(graph.flows)] = np.arange(len(graph.flows))
        self.sizes_s = graph.rows(seconds for _, seconds in graph.flows.values())
        self.enters_s = np.full((lanes, self.num_rows), np.inf)  # of the flow that waits, by lane
        self.leaves_at = np.full((lanes, self.num_rows), np.inf)  # served_s when the flow on the bus leaves
        self.flow = np.zeros((lanes, self.num_rows), dtype=np.intp)  # which it is
        first = np.flatnonzero(missing == 0)
        self._come(np.repeat(first, self.num_rows), np.tile(np.arange(self.num_rows), len(first)))

    def run(self) -> Array:
        """Every partition from event to event until no flow is left."""
        now_s, served_s = np.zeros(self.num_rows), np.zeros(self.num_rows)
        num_flows = np.zeros(self.num_rows, dtype=np.intp)
        while True:
            share = np.maximum(num_flows, 1)
            enter_s, leave_at = np.minimum.reduce(self.enters_s), np.minimum.reduce(self.leaves_at)
            leave_s = np.maximum(now_s, now_s + (leave_at - served_s) * share)
            next_s = np.minimum(enter_s, leave_s)
            done = np.isinf(next_s)
            if done.all():
                break
            next_s = np.where(done, now_s, next_s)
            served_s += (next_s - now_s) / share
            np.maximum(served_s, leave_at, out=served_s, where=(leave_s <= enter_s) & ~done)
            now_s = next_s
            lanes, rows = np.nonzero(self.leaves_at <= served_s)
            if lanes.size:
                flows = self.flow[lanes, rows]
                self.leaves_at[lanes, rows] = np.inf
                self.time_s[flows * self.num_rows + rows] = now_s[rows]
                self._follow(flows, rows)
            lanes, rows = np.nonzero(self.enters_s <= now_s)
            if lanes.size:
                self.enters_s[lanes, rows] = np.inf
                sizes_s = self.sizes_s[self.row_of_flow[self.flow[lanes, rows]], rows]
                self.leaves_at[lanes, rows] = served_s[rows] + sizes_s
            num_flows = np.add.reduce(self.leaves_at < np.inf, dtype=np.intp)
        assert not self.missing.any(), "the program deadlocks"
        return np.asarray(self.time_s.reshape(-1, self.num_rows)[self.graph.ends])

    def _come(self, moments: Index, rows: Index) -> None:
        """All that these wait for has come: they come at once, or they enter the bus as flows."""
        while moments.size:
            lanes = self.lane[moments]
            flows = lanes >= 0
            if flows.any():
                lanes, enter, at = lanes[flows], moments[flows], rows[flows]
                self.enters_s[lanes, at] = self.time_s[enter * self.num_rows + at]
                self.flow[lanes, at] = enter
                moments, rows = moments[~flows], rows[~flows]
            if self.graph.beside:
                self._work_beside(moments, rows)
            if not moments.size:
                return
            moments, rows = self._told(moments, rows)

    def _follow(self, moments: Index, rows: Index) -> None:
        """These have come: take those after them as far as they get."""
        self._come(*self._told(moments, rows))

    def _told(self, moments: Index, rows: Index) -> tuple[Index, Index]:
        """Tell those after them when these have come; the ones that miss nothing any more."""
        degree = self.degree[moments]
        ends = degree.cumsum()
        edges = (self.first[moments] - ends + degree).repeat(degree) + np.arange(ends[-1])
        time_s, rows = self.time_s[moments * self.num_rows + rows].repeat(degree), rows.repeat(degree)
        after = self.successor[edges] + rows
        np.maximum.at(self.time_s, after, time_s + self.delays_s[self.delay_of[edges] + rows])
        np.subtract.at(self.missing, after, 1)
        after = after[self.missing[after] == 0]
        number = np.arange(after.size)
        self.stamp[after] = number  # one that was told by several counts once
        after = after[self.stamp[after] == number]
        return after // self.num_rows, after % self.num_rows

    def _work_beside(self, moments: Index, rows: Index) -> None:
        """Rounds of a ring: `time_s` is when the messages are there; they end when the work is done, too."""
        works = self.beside[moments]
        moments, rows, works = moments[works >= 0], rows[works >= 0], works[works >= 0]
        there_s = self.time_s[moments * self.num_rows + rows]
        begin_s = self.time_s[self.begins[works] * self.num_rows + rows]
        work_s = beside_message_s(self.work_s[works, rows], there_s - begin_s, self.graph.message_share)
        self.time_s[moments * self.num_rows + rows] = np.maximum(there_s, begin_s + work_s)
