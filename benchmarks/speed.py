"""How fast kvrsim answers: cold start, search, executors, long chains.

Shared machines are noisy: the cold start is a ratio to importing numpy, the two in turn.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
from _report import spread, write

from kvrsim.compile import build_program
from kvrsim.executors.batch import run_batch
from kvrsim.executors.event import EventSimulation
from kvrsim.executors.run import BLOCK
from kvrsim.setup import make_scenario
from kvrsim.strategies import STRATEGIES

PLAN = ["-m", "kvrsim.cli.main", "plan", "--gpus", "8", "--ctx", "16k", "--json"]


def wall_s(arguments: Sequence[str]) -> float:
    """Seconds of a fresh Python process."""
    begin_s = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin_s


def cold_start(repeats: int = 15) -> list[str]:
    """A plan in a fresh process against importing numpy in one, in turn."""
    wall_s(PLAN)
    pairs = [(wall_s(PLAN), wall_s(["-c", "import numpy"])) for _ in range(repeats)]
    plan, numpy_s = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    ratios = [a / b for a, b in pairs]
    return [
        f"| `kvrsim plan --gpus 8 --ctx 16k`, cold process | {spread(plan)} s |",
        f"| `python -c 'import numpy'` | {spread(numpy_s)} s |",
        f"| ratio, pair by pair | {spread(ratios)} |",
    ]


def partitions_per_s(profile: str, repeats: int = 9) -> list[float]:
    """Eight-rank, 32-layer KVR partitions a CPU second on one core, programs built anew for each block."""
    scenario, _ = make_scenario(ctx=16384, gpus=8, profile=profile)
    rng = np.random.default_rng(0)
    chunks = rng.dirichlet(np.full(8, 50.0), size=4 * BLOCK) * 16384
    rates = []
    for _ in range(repeats):
        begin_s = time.process_time()
        for first in range(0, len(chunks), BLOCK):
            block = list(np.ascontiguousarray(chunks[first : first + BLOCK].T))
            run_batch(build_program(scenario, STRATEGIES["kvr-s"], block), scenario.cluster)
        rates.append(len(chunks) / (time.process_time() - begin_s))
    return rates


def replays_per_s(repeats: int = 20) -> list[float]:
    """The same by the event executor, one at a time."""
    scenario, _ = make_scenario(ctx=16384, gpus=8)
    program = build_program(scenario, STRATEGIES["kvr-s"], [np.array([2048.0])] * 8)
    rates = []
    for _ in range(repeats):
        begin_s = time.process_time()
        EventSimulation(program, scenario.cluster, record=False)
        rates.append(1 / (time.process_time() - begin_s))
    return rates


def long_chain(gpus: str, ctx: str) -> str:
    """A whole plan in a fresh process."""
    arguments = ["-m", "kvrsim.cli.main", "plan", "--gpus", gpus, "--ctx", ctx, "--json"]
    begin_s = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=False)  # 1: nothing fits in memory
    return f"| `kvrsim plan --gpus {gpus} --ctx {ctx}` | {time.perf_counter() - begin_s:.1f} s |"


def main() -> None:
    """Measure, and write benchmarks/results/speed.md."""
    lines = ["| what | median (smallest to largest) |", "|---|---|", *cold_start()]
    for profile, what in (("a100-eager", "messages hold the streams"), ("roofline", "messages overlap")):
        lines.append(f"| batch executor, {what}: partitions a second | {spread(partitions_per_s(profile))} |")
    lines.append(f"| event executor: partitions a second | {spread(replays_per_s())} |")
    lines += [long_chain("64", "1m"), long_chain("1024", "10m")]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    lines.append(f"| peak memory of the largest of these processes | {peak:.0f} MiB |")
    write("speed", "python benchmarks/speed.py", lines)


if __name__ == "__main__":
    main()
