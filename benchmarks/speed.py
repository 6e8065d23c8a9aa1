"""Speed of kvrsim: times of commands in fresh processes, relative to importing numpy; partitions per second.

Commands that take seconds run once. On a busy machine, wall times mean nothing, and CPU times mean little.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvrsim.builder import make_scenario
from kvrsim.compile import build_program
from kvrsim.execution import place
from kvrsim.executors.event import EventSimulation
from kvrsim.executors.run import ttft_s
from kvrsim.program import Array
from kvrsim.strategies import get_strategy
from validate.report import write_benchmark
from validate.results import spread

NUMPY = ["-c", "import numpy"]
NUMPY_S = 0.27  # seconds to import numpy on the machine for which the targets in seconds hold


@dataclass(frozen=True, kw_only=True)
class Question:
    """A command, and its time limit."""

    command: str
    repeats: int
    most: float | None = None  # longest accepted time, as a multiple of the time to import numpy; None: no target


ON_A_BUS = "--topology bus --link-bandwidth 10GB/s"
QUESTIONS = (
    Question(command="plan --gpus 8 --ctx 16k", repeats=7, most=3.0),
    Question(command="plan --gpus 8 --ctx 16k --json", repeats=5),
    Question(command="plan --gpus 8 --ctx 16k --strategies tp", repeats=5),
    Question(command="engines list --json", repeats=5),
    Question(command="plan --gpus 64 --ctx 1m --json", repeats=1, most=1 / NUMPY_S),
    Question(
        command="plan --model llama-3-70b --cluster h100-2x8-ndr400 --gpus 16 --ctx 128k --strategies all --json",
        repeats=1,
        most=3 / NUMPY_S,
    ),
    Question(
        command="plan --model qwen3-235b-a22b --cluster h100-2x8-ndr400 --gpus 16 --ctx 32k --strategies all --json",
        repeats=1,
        most=3 / NUMPY_S,
    ),
    Question(command=f"plan --gpus 8 --ctx 16k {ON_A_BUS} --json", repeats=1),
    Question(command=f"plan --gpus 8 --ctx 32k {ON_A_BUS} --strategies all --json", repeats=1, most=4 / NUMPY_S),
    Question(command="plan --gpus 1024 --ctx 10m --json", repeats=1, most=3 / NUMPY_S),
    Question(command="table build --gpus 2,4,8 --ctx 1k:32k:1k --jobs 2 -o table.json", repeats=1, most=2.5 / NUMPY_S),
)


def process_s(arguments: list[str], folder: Path) -> tuple[float, float]:
    """Wall and CPU seconds of a fresh Python process, whose modules are already compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), environment.get("PYTHONPATH", "")])
    before, begin_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, check=False)
    wall_s, after = time.perf_counter() - begin_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):  # 1: nothing fits in memory
        raise SystemExit(done.stderr.decode())
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def answers() -> list[str]:
    """Measure each command and the import of numpy alternately."""
    lines = ["| command | wall, s | CPU, s | wall over `import numpy` | target | |", "|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process_s(NUMPY, folder)
        for asked in QUESTIONS:
            arguments = ["-m", "kvrsim.cli.main", *asked.command.split()]
            if asked.repeats > 3:
                process_s(arguments, folder)  # compiles the command's modules
            rounds = [(process_s(NUMPY, folder), process_s(arguments, folder)) for _ in range(asked.repeats)]
            ratios = [own[0] / numpy[0] for numpy, own in rounds]
            own_s, cpu_s = (spread([own[index] for _, own in rounds]) for index in (0, 1))
            target, verdict = "", ""
            if asked.most is not None:
                met = float(np.median(ratios)) <= asked.most
                target, verdict = f"{asked.most:.1f}", "met" if met else "not met"
            lines.append(f"| `kvrsim {asked.command}` | {own_s} | {cpu_s} | {spread(ratios)} | {target} | {verdict} |")
    return lines


RUNS = {  # strategy, model, profile, and minimum of partitions per second, in millions
    "a chain, messages hold the streams": ("kvr-s", "llama-7b", "a100-eager", 5.0),
    "a chain, messages overlap": ("kvr-s", "llama-7b", "roofline", 5.0),
    "a chain with layers of several kinds": ("kvr-s", "gemma-3-27b", "roofline", 3.0),
    "a hybrid": ("tp2+kvr-s", "llama-7b", "a100-eager", 3.0),
    "a ring": ("zigzag-ring", "llama-7b", "a100-eager", 3.0),
    "an all-gather": ("zigzag", "llama-7b", "a100-eager", 3.0),
}


def rates(call: Callable[[], object], number: int, repeats: int) -> list[float]:
    """Rates of several runs, in partitions per CPU second on one core."""
    each = []
    for _ in range(repeats):
        begin_s = time.process_time()
        call()
        each.append(number / (time.process_time() - begin_s))
    return each


def partitions_per_s(name: str, model: str, profile: str) -> list[float]:
    """Rates of a strategy on 8 GPUs and 16k tokens, with uneven chunks whose lengths are not whole numbers."""
    strategy = get_strategy(name)
    scenario = place(make_scenario(ctx=16384, gpus=8, model=model, profile=profile)[0], strategy).placed
    shares = np.random.default_rng(0).dirichlet(np.full(scenario.cluster.num_gpus, 50.0), size=2**14)
    chunks: Array = np.asarray(shares * scenario.request.context_len)
    return rates(lambda: ttft_s(place(scenario, strategy), chunks), len(chunks), repeats=7)


def executors() -> list[str]:
    """Partitions per second of all kinds of programs, and of the event executor."""
    lines = ["| executor | partitions per CPU second | target | |", "|---|---|---|---|"]
    for title, (name, model, profile, least) in RUNS.items():
        each = partitions_per_s(name, model, profile)
        verdict = "met" if float(np.median(each)) >= 1e6 * least else "not met"
        lines.append(f"| batch: {title} (`{name}`, {model}, {profile}) | {spread(each)} | {least:g} M | {verdict} |")
    scenario, _ = make_scenario(ctx=16384, gpus=8)
    program = build_program(place(scenario, get_strategy("kvr-s")), [np.array([2048.0])] * 8)
    each = rates(lambda: EventSimulation(program, scenario.cluster, record=False), 1, repeats=20)
    return [*lines, f"| event: a chain, one partition at a time | {spread(each)} | | |"]


def main() -> None:
    """Measure, and write benchmarks/results/speed.md."""
    text = (
        f"Medians (smallest to largest). Targets in seconds are for a machine that imports numpy in {NUMPY_S} s; here"
        " they are multiples of that import."
    )
    lines = [text, "", *answers(), "", *executors()]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    write_benchmark("speed", [*lines, "", f"Peak memory of the largest of these processes: {peak:.0f} MiB."])


if __name__ == "__main__":
    main()
