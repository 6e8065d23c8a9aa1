"""The same question to kvrsim and to AIConfigurator of NVIDIA, in one run: how long each takes to answer.

AIConfigurator is installed from the package index into a virtual environment of its own, in --folder or a temporary
folder. Both are asked for the TTFT of one prompt of Qwen3-8B on H200s with vLLM and tensor parallelism, and then for
one prompt length after another in a process that runs already.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import numpy as np
from _report import spread, write

PACKAGE = "aiconfigurator==0.12.0"
GPUS, TOKENS = 4, 16384
COLD_REPEATS = WARM_REPEATS = 7
LENGTHS = tuple(range(1024, 1024 + 25 * 512, 512))  # 25 prompts
ROOT = Path(__file__).resolve().parents[1]

SETTING = f"model='qwen3-8b', cluster='h200-nvlink', profile='h200-flash', engine='serving', gpus={GPUS}"
OWN = f"""
import kvrsim
def ttft_s(tokens):
    return kvrsim.simulate(strategy='tp', ctx=tokens, {SETTING}).ttft_s
"""
PEER = f"""
import logging
logging.disable(logging.CRITICAL)
from aiconfigurator.cli.api import cli_estimate
def ttft_s(tokens):
    asked = dict(mode='static_ctx', backend_name='vllm', isl=tokens, osl=1, batch_size=1, tp_size={GPUS})
    return cli_estimate('Qwen/Qwen3-8B', 'h200_sxm', **asked).ttft / 1e3
"""
COLD = f"\nprint(ttft_s({TOKENS}))\n"
WARM = f"""
import json, sys, time
ttft_s({TOKENS})
for _ in range({WARM_REPEATS}):
    begin_s = time.process_time()
    answers = [ttft_s(tokens) for tokens in {LENGTHS}]
    print(json.dumps([len(answers) / (time.process_time() - begin_s), answers[-1]]), flush=True)
    sys.stdin.readline()
"""


def installed(folder: Path) -> Path:
    """The Python of an environment that has the peer, made in the folder where it is not there yet."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", PACKAGE], check=True)
    return python


def environment() -> dict[str, str]:
    """Of both: modules stay compiled, and kvrsim is this checkout's."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def cold(python: str | Path, code: str) -> tuple[float, float, float]:
    """User CPU seconds and wall seconds of a process that answers one question, and the answer in seconds."""
    begin_s, cpu_s = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([python, "-c", code + COLD], env=environment(), capture_output=True, text=True, check=True)
    wall_s = time.perf_counter() - begin_s
    used_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - cpu_s
    return used_s, wall_s, float(done.stdout.splitlines()[-1])


def started(python: str | Path, code: str) -> subprocess.Popen[str]:
    """A process that answers a round of lengths for each line it is sent."""
    command = [str(python), "-c", code + WARM]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return subprocess.Popen(command, env=environment(), text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def round_of(process: subprocess.Popen[str]) -> float:
    """Lengths a CPU second of the next round, which the process begins when it has been read."""
    assert process.stdout is not None
    assert process.stdin is not None
    while not (line := process.stdout.readline()).startswith("["):
        assert line, "the process has ended"
    rate = float(json.loads(line)[0])
    process.stdin.write("\n")
    process.stdin.flush()
    return rate


def warm(python: Path) -> list[tuple[float, float]]:
    """Lengths a CPU second of both, in turn, in processes that have answered before."""
    with started(sys.executable, OWN) as own, started(python, PEER) as peer:
        return [(round_of(own), round_of(peer)) for _ in range(WARM_REPEATS)]


def compared(python: Path) -> list[str]:
    """The lines of the result."""
    for one, code in ((sys.executable, OWN), (python, PEER)):
        cold(one, code)
    pairs = [(cold(sys.executable, OWN), cold(python, PEER)) for _ in range(COLD_REPEATS)]
    rates = warm(python)
    lines = ["| what | kvrsim | AIConfigurator | ratio, in turn |", "|---|---|---|---|"]
    for index, what in enumerate(("user CPU seconds of a cold process", "wall seconds of a cold process")):
        own, peer = ([pair[side][index] for pair in pairs] for side in (0, 1))
        ratios = [b / a for a, b in zip(own, peer, strict=True)]
        lines.append(f"| {what} | {spread(own)} | {spread(peer)} | {spread(ratios)} times as long |")
    own, peer = ([rate[side] for rate in rates] for side in (0, 1))
    ratios = [a / b for a, b in rates]
    lines.append(f"| lengths a CPU second, warm | {spread(own)} | {spread(peer)} | {spread(ratios)} times as many |")
    answers = [1e3 * float(np.median([pair[side][2] for pair in pairs])) for side in (0, 1)]
    lines.append(f"| the answer, TTFT in ms | {answers[0]:.0f} | {answers[1]:.0f} | |")
    return lines


def main() -> None:
    """Install, measure, and write benchmarks/results/peers.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="Environment to use or make. Default: a temporary one.")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as temporary:
        lines = compared(installed(folder or Path(temporary)))
    lines += [
        "",
        f"Question: the TTFT of one prompt of {TOKENS} tokens by Qwen3-8B, BF16, on {GPUS} H200 with tensor"
        f" parallelism; warm, {len(LENGTHS)} prompts from {LENGTHS[0]} to {LENGTHS[-1]} tokens. The peer is {PACKAGE},"
        " mode static_ctx, with its tables of vLLM; kvrsim has the profile h200-flash and the engine `serving`."
        f" Medians of {COLD_REPEATS} (smallest to largest).",
        "",
        "The questions differ. The peer looks its operations up in tables measured on H200 and adds them up; it gives"
        " TTFT, memory and power, and without an interval. kvrsim computes each operation from a profile, simulates"
        " ranks and messages, adds an engine's host and steps, and gives an 80 % interval, memory and exposed"
        " communication. The peer has no partitions over the context to search, so none is searched here. Its tables"
        " also cover decoding, which kvrsim does not predict. The peer is asked by its function cli_estimate;"
        " its sweeps, which may keep more between questions, were not measured. No answer is compared with a"
        " measured TTFT, so it says nothing about which is nearer to a server.",
    ]
    write("peers", "python benchmarks/peers.py", lines)


if __name__ == "__main__":
    main()
