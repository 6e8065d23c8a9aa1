"""Speedup of tables, maps, fleets and noisy plans with two processes, and projected speedup with more processes.

A projection takes the CPU time of every call, measured in one process, and gives each call to the worker that is free
first. It adds the time that one process needs before, between and after the calls, and the start of the workers.
"""

from __future__ import annotations

import heapq
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvrsim.arguments import FleetArgs
from kvrsim.builder import make_scenario
from kvrsim.noise import parse_noise
from planner.capacity.plan import plan_capacity
from planner.capacity.request import make_request
from planner.map.map import make_map
from planner.plan import make_plan
from planner.processes import Pool
from planner.table.build import make_table
from planner.uncertainty.noise import Disturbance
from validate.report import write_benchmark
from validate.results import spread

REPEATS = 3
WORKERS = (2, 16, 64)
REQUESTS = "synthetic:poisson,rate=4,requests=1000,context=lognormal:3000:0.8,max=4k,cached=20%"


class Timed(Pool):
    """A pool that works in this process and stores the CPU seconds of each call, in one list per round of calls."""

    rounds: list[list[float]]

    def run(
        self, call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], *, share: float = math.inf
    ) -> Iterator[Any]:
        """Make the calls in this process, in order."""
        self.rounds.append([])
        for each in arguments:
            begin_s = time.process_time()
            found = call(*each)
            self.rounds[-1].append(time.process_time() - begin_s)
            yield found


def makespan_s(calls_s: Sequence[float], workers: int) -> float:
    """Seconds until all calls are done; the worker that is free first takes the next call."""
    free_s = [0.0] * workers
    for one_s in calls_s:
        heapq.heapreplace(free_s, free_s[0] + one_s)
    return max(free_s)


def tasks() -> dict[str, Callable[[Pool], object]]:
    """The measured work, by its command."""
    scenario, _ = make_scenario(ctx=65536, gpus=8)
    noisy, _ = make_scenario(ctx=16384, gpus=8)
    asked = make_request(FleetArgs(requests=REQUESTS, slo_ttft="2s", group_sizes="1,2,4"), scenario)
    lengths, counts = range(1024, 65537, 1024), (2, 4, 8)
    return {
        "table build --gpus 2,4,8 --ctx 1k:64k:1k": lambda pool: make_table(scenario, counts, lengths, pool=pool),
        "map --gpus 2,4,8 --ctx 1k:64k:1k": lambda pool: make_map(
            scenario, lengths=lengths, gpu_counts=counts, pool=pool
        ),
        f"capacity --requests {REQUESTS} --slo-ttft 2s --group-sizes 1,2,4": lambda pool: plan_capacity(
            scenario, asked, pool=pool
        ),
        "plan --gpus 8 --ctx 16k --noise jitter:0.1 --samples 400": lambda pool: make_plan(
            noisy, disturbance=Disturbance(noise=parse_noise("jitter:0.1"), num_samples=400, pool=pool)
        ),
    }


def start_s() -> float:
    """Seconds until two new processes have imported the search and returned a result."""
    begin_s = time.perf_counter()
    scenario, _ = make_scenario(ctx=256, gpus=2, profile="roofline")
    with Pool(jobs=2) as pool:
        make_table(scenario, (2,), (128, 256), pool=pool)
    return time.perf_counter() - begin_s


def measured(work: Callable[[Pool], object]) -> list[float]:
    """Ratios of wall time in this process to wall time in two running processes, measured alternately."""
    ratios = []
    for _ in range(REPEATS):
        begin_s = time.perf_counter()
        work(Pool())
        alone_s = time.perf_counter() - begin_s
        with Pool(jobs=2) as pool:
            begin_s = time.perf_counter()
            work(pool)
        ratios.append(alone_s / (time.perf_counter() - begin_s))
    return ratios


def main() -> None:
    """Measure, and write benchmarks/results/workers.md."""
    begins_s, load = start_s(), os.getloadavg()[0]
    heads = ["command", "CPU s, one process", "calls", "longest call, s", "two processes measured, times as fast"]
    heads += [f"{count} projected" for count in WORKERS]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, work in tasks().items():
        pool = Timed(jobs=2)
        pool.rounds = []
        begin_s = time.process_time()
        work(pool)
        total_s = time.process_time() - begin_s
        calls = [one_s for calls_s in pool.rounds for one_s in calls_s]
        rest_s = total_s - sum(calls)
        projected = [
            total_s / (begins_s + rest_s + sum(makespan_s(one, count) for one in pool.rounds)) for count in WORKERS
        ]
        cells = [f"`{name}`", f"{total_s:.2f}", str(len(calls)), f"{np.max(calls):.2f}", spread(measured(work))]
        lines.append(f"| {' | '.join([*cells, *(f'{one:.1f}' for one in projected)])} |")
    lines += ["", f"The workers' start, {begins_s:.1f} s here, counts in the projections but not in what was measured."]
    lines += [f"Load average of the machine when this began: {load:.1f}. Above 0, others slow what was measured."]
    lines += ["Projected are the measured CPU times of the calls, given in order to the worker that is free first."]
    write_benchmark("workers", lines)


if __name__ == "__main__":
    main()
