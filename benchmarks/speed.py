"""How fast kvrsim answers: cold start, search, executors, tables, long chains.

Shared machines are noisy: cold starts are in CPU time, as ratios to importing numpy, in turn.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvrsim.builder import make_scenario
from kvrsim.compile import build_program, columns
from kvrsim.executors.event import EventSimulation
from kvrsim.executors.run import BLOCK, run_program, ttft_s
from kvrsim.program import Array
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES
from planner.table.build import make_table
from validate.report import write_benchmark
from validate.results import spread

PLAN = ["-m", "kvrsim.cli.main", "plan", "--gpus", "8", "--ctx", "16k", "--json"]


def cpu_s(arguments: Sequence[str]) -> float:
    """User CPU seconds of a fresh Python process, whose modules are compiled already: a busy machine adds little."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    nowhere = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    subprocess.run([sys.executable, *arguments], env=environment, check=True, **nowhere)  # type: ignore[call-overload]
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begin_s


def cold_starts(repeats: int = 15) -> list[str]:
    """Commands in fresh processes, each against importing numpy in one, in turn."""
    commands = {
        "kvrsim plan --gpus 8 --ctx 16k --json": PLAN,
        "kvrsim plan --gpus 8 --ctx 16k --strategies tp --json": [*PLAN, "--strategies", "tp"],
        "the same by simulate --strategy tp": ["-m", "kvrsim.cli.main", "simulate", "--strategy", "tp", *PLAN[3:]],
        "kvrsim engines list --json": ["-m", "kvrsim.cli.main", "engines", "list", "--json"],
        "python -c 'import numpy'": ["-c", "import numpy"],
    }
    for arguments in commands.values():
        cpu_s(arguments)
    rounds = [{name: cpu_s(arguments) for name, arguments in commands.items()} for _ in range(repeats)]
    lines = []
    for name in commands:
        ratios = [one[name] / one["python -c 'import numpy'"] for one in rounds]
        lines.append(f"| `{name}`, user CPU of a cold process | {spread([one[name] for one in rounds])} s |")
        if name.startswith(("kvrsim", "the")):
            lines.append(f"| over that of importing numpy, round by round | {spread(ratios)} |")
    return lines


def partitions(scenario: Scenario) -> Array:
    """Uneven ones, of lengths that are no whole numbers; shape (B, ranks)."""
    ranks = scenario.cluster.num_gpus
    shares = np.random.default_rng(0).dirichlet(np.full(ranks, 50.0), size=4 * BLOCK)
    return np.asarray(shares * scenario.request.context_len)


def partitions_per_s(profile: str, layers: int, repeats: int = 9) -> list[float]:
    """Eight-rank KVR partitions of so many layers a CPU second on one core, as a search asks for them."""
    scenario, _ = make_scenario(ctx=16384, gpus=8, profile=profile)
    model = replace(scenario.model, num_hidden_layers=layers, layers=scenario.model.layers[:1] * layers)
    return rates_of(
        lambda chunks: ttft_s(replace(scenario, model=model), STRATEGIES["kvr-s"], chunks), scenario, repeats
    )


def programs_per_s(profile: str, repeats: int = 9) -> list[float]:
    """The same by programs, which run any strategy."""
    scenario, _ = make_scenario(ctx=16384, gpus=8, profile=profile)

    def run(chunks: Array) -> None:
        for first in range(0, len(chunks), BLOCK):
            block = columns(chunks[first : first + BLOCK])
            run_program(build_program(scenario, STRATEGIES["kvr-s"], block), scenario.cluster)

    return rates_of(run, scenario, repeats)


def rates_of(evaluate: Callable[[Array], object], scenario: Scenario, repeats: int) -> list[float]:
    """Partitions a CPU second."""
    chunks, rates = partitions(scenario), []
    for _ in range(repeats):
        begin_s = time.process_time()
        evaluate(chunks)
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


PLANS = {
    "16 H100 on two nodes, Qwen3-235B, 32k, all strategies": (
        "--model qwen3-235b-a22b --cluster h100-2x8-ndr400 --gpus 16 --ctx 32k --strategies all"
    ),
    "16 H100 on two nodes, Llama-3-70B, 128k, all strategies": (
        "--model llama-3-70b --cluster h100-2x8-ndr400 --gpus 16 --ctx 128k --strategies all"
    ),
    "8 GPUs on a bus of 10 GB/s, 16k": "--gpus 8 --ctx 16k --topology bus --link-bandwidth 10GB/s",
    "8 GPUs on a bus of 10 GB/s, 32k, all strategies": (
        "--gpus 8 --ctx 32k --topology bus --link-bandwidth 10GB/s --strategies all"
    ),
}


def plans(repeats: int = 7) -> list[str]:
    """Whole plans in fresh processes, in turn."""
    commands = {name: ["-m", "kvrsim.cli.main", "plan", "--json", *asked.split()] for name, asked in PLANS.items()}
    rounds = [{name: cpu_s(arguments) for name, arguments in commands.items()} for _ in range(repeats)]
    return [f"| `plan`, {name}: user CPU | {spread([one[name] for one in rounds])} s |" for name in commands]


def long_chain(gpus: str, ctx: str) -> str:
    """A whole plan in a fresh process, and how far KVR-S is above its lower bound."""
    arguments = ["-m", "kvrsim.cli.main", "plan", "--gpus", gpus, "--ctx", ctx, "--json"]
    begin_s, begin_cpu_s = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, *arguments], capture_output=True, check=False)  # 1: nothing fits in memory
    wall_s, cpu_s = time.perf_counter() - begin_s, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begin_cpu_s
    gap = json.loads(done.stdout)["bounds"]["gap"]
    took = f"{wall_s:.1f} s, of it {cpu_s:.1f} s of CPU; kvr-s {gap:.1%} above its bound"
    return f"| `kvrsim plan --gpus {gpus} --ctx {ctx}` | {took} |"


def table() -> str:
    """The table of {2, 4, 8} GPUs and 1k to 32k by 1k, in two processes."""
    arguments = ["-m", "kvrsim.cli.main", "table", "build", "--gpus", "2,4,8", "--ctx", "1k:32k:1k", "--jobs", "2"]
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, *arguments, "-o", f"{folder}/table.json"], capture_output=True, check=True)
    wall_s = time.perf_counter() - begin_s
    scenario, _ = make_scenario(ctx=32768, gpus=8)
    begin_s = time.process_time()
    entries = len(make_table(scenario, (2, 4, 8), range(1024, 32769, 1024)).entries)
    each_ms = 1e3 * (time.process_time() - begin_s) / entries
    took = f"{wall_s:.1f} s; in one process {each_ms:.1f} ms of CPU an entry"
    return f"| `kvrsim table build --gpus 2,4,8 --ctx 1k:32k:1k --jobs 2`, {entries} entries | {took} |"


def main() -> None:
    """Measure, and write benchmarks/results/speed.md."""
    lines = ["| what | median (smallest to largest) |", "|---|---|", *cold_starts()]
    for profile, what in (("a100-eager", "messages hold the streams"), ("roofline", "messages overlap")):
        for layers in (32, 80):
            rates = spread(partitions_per_s(profile, layers))
            lines.append(f"| batch executor, {what}, {layers} layers: partitions a second | {rates} |")
        rates = spread(programs_per_s(profile))
        lines.append(f"| programs of any strategy, {what}, 32 layers: partitions a second | {rates} |")
    lines.append(f"| event executor: partitions a second | {spread(replays_per_s())} |")
    lines += plans()
    lines += [table(), long_chain("64", "1m"), long_chain("1024", "10m")]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    lines.append(f"| peak memory of the largest of these processes | {peak:.0f} MiB |")
    write_benchmark("speed", lines)


if __name__ == "__main__":
    main()
