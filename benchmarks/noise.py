"""Partitions planned for a noise against those planned without, judged on samples that no plan has seen.

Two readings of "without": known slow GPUs and links are left out of the quiet plan altogether, as by a planner that
does not know of them (`clean`), or it knows them but not the random part (`fixed`).
"""

from __future__ import annotations

import sys
import time

import numpy as np
from _report import write

from kvrsim.builder import make_scenario
from kvrsim.executors.run import ttft_s
from kvrsim.noise import NoiseDraw, objective_of, parse_noise
from kvrsim.partition import Partition
from kvrsim.strategies import STRATEGIES
from planner.search.search import search
from planner.uncertainty.disturbed import FIRST_JUDGING_SAMPLE, with_fixed
from planner.uncertainty.robust import robust_plan

KVR = STRATEGIES["kvr-s"]
JUDGES = 1000
NOISES = (
    "paper",
    "side-traffic:duty=0.5,share=0.67,slowdown=0.2,dwell=50ms",
    "side-traffic:share=0.5,slowdown=0.3,dwell=1s",
    "jitter:0.1",
    "jitter:0.3",
    "slow-gpu:3x1.2",
    "slow-link:2-3x8",
    "slow-gpu:0x1.3+jitter:0.1",
    "slow-gpu:2x1.5+slow-link:2-3x4+side-traffic:duty=0.5,share=0.67,slowdown=0.1",
)
CASES = ((8192, 4), (16384, 8))


def case(spec: str, context_len: int, num_gpus: int, objective: str) -> str:
    """One row: the objective of three partitions, and what planning gained with its 95 % interval."""
    noise = parse_noise(spec)
    clean, _ = make_scenario(ctx=context_len, gpus=num_gpus)
    scenario = with_fixed(clean, noise)
    unaware, fixed = search(clean, KVR), search(scenario, KVR)
    begin_s = time.perf_counter()
    planned = robust_plan(scenario, KVR, noise, fixed.partition, objective=objective, quiet_s=fixed.ttft_s)
    seconds = time.perf_counter() - begin_s
    judges = range(FIRST_JUDGING_SAMPLE, FIRST_JUDGING_SAMPLE + (JUDGES if noise.is_random else 1))
    draw = NoiseDraw(noise, scenario.cluster.num_gpus, seed=0, samples=judges)
    cuts: tuple[Partition, ...] = (unaware.partition, fixed.partition, planned.partition)
    samples_s = ttft_s(scenario, KVR, np.array([cut.chunk_lens for cut in cuts]), draw=draw)
    values_s = objective_of(samples_s, objective)
    gains = [f"{1 - values_s[2] / values_s[other]:+.2%} {_limits(samples_s, other, objective)}" for other in (0, 1)]
    kept = "" if planned.partition != fixed.partition else " (kept)"
    shown = " | ".join(f"{value_s:.4f}" for value_s in values_s)
    return f"| {spec} | {num_gpus}, {context_len} | {objective} | {shown}{kept} | {' | '.join(gains)} | {seconds:.1f} |"


def _limits(samples_s: np.ndarray, other: int, objective: str) -> str:  # type: ignore[type-arg]
    """The middle 95 % of the gain over resampled judges, the same for both partitions."""
    if samples_s.shape[1] < 2:
        return ""
    draws = np.random.default_rng(0).integers(0, samples_s.shape[1], size=(400, samples_s.shape[1]))
    gains = 1 - objective_of(samples_s[2][draws], objective) / objective_of(samples_s[other][draws], objective)
    low, high = np.quantile(gains, (0.025, 0.975))
    return f"({low:+.2%} to {high:+.2%})"


def main() -> None:
    """Measure, and write benchmarks/results/noise.md."""
    lines = [
        "llama-7b, a100-nvlink, profile a100-eager. KVR-S planned knowing nothing of the noise (clean), knowing slow",
        "GPUs and links (fixed), and for the objective under the noise (robust), judged on",
        f"{JUDGES} samples of it that planning has not seen; gains with the middle 95 % over resampled judges. (kept):",
        "planning found nothing that held on its own checking samples, and kept the fixed plan. Seconds: of the robust",
        "search.",
        "",
        "| noise | GPUs, tokens | objective | clean s | fixed s | robust s | gain on clean | gain on fixed | seconds |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for spec in NOISES:
        for context_len, num_gpus in CASES:
            for objective in ("mean", "p95"):
                lines.append(case(spec, context_len, num_gpus, objective))
                print(lines[-1], file=sys.stderr, flush=True)
    write("noise", "python benchmarks/noise.py", lines)


if __name__ == "__main__":
    main()
