"""Errors of predictors relative to the simulator, on and between their knots, and the time to build predictors.

The simulator is `kvrsim simulate` with the strategy's own partition, from a full search. For "best", all strategies of
the predictor are simulated, and the fastest that fits is taken.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.execution import place
from kvrsim.executors.run import run_partition
from kvrsim.memory import fits, memory_of
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from planner.candidates import partition_of
from planner.predictor.build import make_predictor
from planner.predictor.predictor import TtftPredictor
from planner.processes import Pool, cores
from validate.report import write_benchmark

SETTINGS: dict[str, tuple[str, str | None, int, str]] = {  # model, cluster, GPUs, strategy
    "llama-3-70b, 8 H100": ("llama-3-70b", "h100-nvlink", 8, "tp"),
    "qwen3-235b-a22b, 8 B200": ("qwen3-235b-a22b", "b200-nvlink5", 8, "tp"),
    "deepseek-v3, 8 B200": ("deepseek-v3", "b200-nvlink5", 8, "tp"),
    "llama-7b, 8 A100, eager": ("llama-7b", None, 8, "kvr-s"),
    "qwen3-32b, 4 H200": ("qwen3-32b", "h200-nvlink", 4, "tp2+pp"),
}
PLACES = 30  # number of prefills on knots, and of prefills between knots


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A prefill on a knot of the predictor's grid, or between knots."""

    new_tokens: int
    cached_prefix: int
    batch: int


def simulated_s(scenario: Scenario, predictor: TtftPredictor, point: Place) -> tuple[float, str] | None:
    """TTFT and name of the predictor's fastest strategy that fits; None: no strategy fits."""
    context_len = point.new_tokens + point.cached_prefix
    request = replace(scenario.request, context_len=context_len, cached_prefix=point.cached_prefix, batch=point.batch)
    asked, found = replace(scenario, request=request), []
    for times in predictor.strategies:
        strategy = get_strategy(times.strategy)
        execution = place(asked, strategy)
        partition = partition_of(execution)
        if fits(execution.placed, memory_of(execution, partition)):
            found.append((run_partition(execution, partition).ttft_s, strategy.name))
    return min(found, default=None)


def places(predictor: TtftPredictor, rng: np.random.Generator, *, on_knots: bool) -> list[Place]:
    """Draw random prefills within the longest context; between knots, new tokens and prefixes are log-uniform."""
    found: list[Place] = []
    knots, longest = predictor.new_tokens, predictor.longest_context
    while len(found) < PLACES:
        if on_knots:
            new, prefix = int(rng.choice(knots)), int(rng.choice(predictor.cached_prefix))
            batch = int(rng.choice(predictor.batch))
        else:
            new = int(np.exp(rng.uniform(*np.log([knots[0], longest]))))
            prefix = int(np.exp(rng.uniform(0, np.log(longest)))) if rng.random() < 0.7 else 0
            batch = int(rng.integers(1, predictor.batch[-1] + 1))
        if new + prefix <= longest:
            found.append(Place(new_tokens=new, cached_prefix=prefix, batch=batch))
    return found


def errors(scenario: Scenario, predictor: TtftPredictor, asked: Sequence[Place]) -> tuple[list[float], int, int]:
    """Relative errors, number of prefills that fit by only one method, and number with different strategies."""
    found, disagree, other = [], 0, 0
    for point in asked:
        truth = simulated_s(scenario, predictor, point)
        context_len = point.new_tokens + point.cached_prefix
        try:
            told = predictor.predict(ctx=context_len, cached_prefix=point.cached_prefix, batch=point.batch)
        except InputError:
            disagree += truth is not None
            continue
        if truth is None:
            disagree += 1
            continue
        found.append(abs(told.ttft_s / truth[0] - 1))
        other += told.strategy != truth[1]
    return found, disagree, other


def row(name: str) -> str:
    """A row with a setting's build seconds, size, and errors."""
    model, cluster, gpus, strategy = SETTINGS[name]
    scenario, _ = make_scenario(ctx="128k", batch=8, model=model, cluster=cluster, gpus=gpus)
    begin_s = time.perf_counter()
    with Pool(jobs=cores()) as pool:
        predictor = make_predictor(scenario, strategy=strategy, pool=pool)
    took_s = time.perf_counter() - begin_s
    rng, cells = np.random.default_rng(0), []
    for on_knots in (True, False):
        found, disagree, other = errors(scenario, predictor, places(predictor, rng, on_knots=on_knots))
        p95, worst = np.quantile(found, 0.95), max(found)
        cells.append(f"{np.median(found):.2%}, {p95:.2%}, {worst:.2%} ({len(found)}; {disagree}; {other})")
    names = ", ".join(one.strategy for one in predictor.strategies)
    size = f"{len(predictor.new_tokens)} x {len(predictor.cached_prefix)} x {len(predictor.batch)}"
    kilobytes = len(predictor.to_json()) / 1000
    return f"| {name} | {strategy}: {names} | {size} | {kilobytes:.0f} kB | {took_s:.0f} s | {' | '.join(cells)} |"


def main() -> None:
    """Measure, and write benchmarks/results/predictor.md."""
    lines = [
        "Predictors of up to 128k tokens and a batch of 8, against the simulator. Errors: median, 95th percentile,",
        "worst (prefills compared; prefills on whose fit in memory both disagree; prefills where another strategy is",
        "named).",
        "Between knots, new tokens and prefix are drawn by their logarithms and the batch from 1 to 8.",
        "",
        "| setting | strategy: kept | knots: new x prefix x batch | file | build | on knots | between knots |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [row(name) for name in SETTINGS]
    write_benchmark("predictor", [*lines, "", f"Build: {cores()} processes, on a machine that others used as well."])


if __name__ == "__main__":
    main()
