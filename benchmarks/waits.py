"""Estimates after two seconds, and time budgets, of commands that take long: predictors, fleets and tables.

Estimates are measured in CPU seconds of one process. Time budgets are wall times, on a machine that others use as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kvrsim.arguments import FleetArgs
from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from planner.capacity.plan import plan_capacity
from planner.capacity.request import make_request
from planner.predictor.build import make_predictor
from planner.processes import Pool
from planner.table.build import make_table
from validate.report import write_benchmark

FLEETS: tuple[tuple[str, str, dict[str, Any]], ...] = (  # model, cluster and options of `capacity`
    (
        "llama-3.1-8b",
        "h100-2x8-ndr400",
        {"requests": "poisson,rate=4,requests=2000,context=lognormal:3000:0.8,max=12k"},
    ),
    (
        "deepseek-v3",
        "8xh200",
        {"requests": "bursty,rate=5,requests=20000,context=lognormal:4000:1.0,max=64k", "slo_ttft": "3s"},
    ),
    ("llama-3.1-70b", "8xh100", {"requests": "poisson,rate=6,requests=50000,context=lognormal:3000:1.0,max=32k"}),
    (
        "llama-3.1-70b",
        "8xa100",
        {"requests": "poisson,rate=2,requests=10000,context=lognormal:3000:1.0,max=32k", "slo_ttft": "4s"},
    ),
    (
        "llama-3.1-8b",
        "8xh100",
        {
            "requests": "poisson,rate=20,requests=5000,context=lognormal:2000:1.0,max=32k",
            "max_num_batched_tokens": 8192,
        },
    ),
    (
        "qwen3-30b-a3b",
        "4xh100",
        {"requests": "diurnal,rate=8,requests=20000,context=lognormal:2500:1.0,max=32k", "sure": True},
    ),
)
ESTIMATE_S = 2.0  # time of the estimate


class Watch:
    """Stores the total time that the progress reports of a command promise after ESTIMATE_S, in CPU seconds."""

    def __init__(self) -> None:
        self.begin_s = self.text_s = time.process_time()
        self.text, self.total_s = "", float("nan")

    def __call__(self, done: float, total: float | None, text: str) -> None:
        now_s = time.process_time()
        if text != self.text:
            self.text, self.text_s = text, now_s
        if now_s - self.begin_s >= ESTIMATE_S and self.total_s != self.total_s and total and 0 < done < total:
            self.total_s = now_s - self.begin_s + (now_s - self.text_s) / done * (total - done)


def tasks() -> dict[str, Callable[..., Any]]:
    """The measured work, by its command."""
    served, _ = make_scenario(ctx=16384, gpus=8, batch=4, model="llama-3.1-8b", cluster="h100-nvlink")
    two_nodes, _ = make_scenario(ctx=16384, gpus=16, model="llama-3.1-70b", cluster="2x8xh100")
    slow, _ = make_scenario(ctx=32768, gpus=8, link_bandwidth="300MB/s")
    return {
        "predictor build llama-3.1-70b 2x8xh100 --ctx 16k": lambda **more: make_predictor(two_nodes, **more),
        "predictor build llama-3.1-8b 8xh100 --ctx 16k --batch 4": lambda **more: make_predictor(served, **more),
        **dict(map(fleet, FLEETS)),
        "table build --gpus 2,4,8 --ctx 1k:32k:1k --link-bandwidth 300MB/s": (
            lambda **more: make_table(slow, (2, 4, 8), range(1024, 32769, 1024), **more)
        ),
    }


def fleet(case: tuple[str, str, dict[str, Any]]) -> tuple[str, Callable[..., Any]]:
    """A command that plans a fleet, and its work."""
    model, cluster, options = case
    options = {"slo_ttft": "2s", "replications": 2} | options | {"requests": f"synthetic:{options['requests']}"}
    scenario, _ = make_scenario(ctx=1, gpus=1, model=model, cluster=cluster)
    request = make_request(FleetArgs(**options), scenario)
    words = " ".join(
        f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}" for name, value in options.items()
    )
    return f"capacity {model} {cluster} {words}", partial(plan_capacity, scenario, request)


def ends(work: Callable[..., Any], budget_s: float) -> str:
    """Wall time of a command with a time budget."""
    begin_s, result = time.perf_counter(), ""
    try:
        work(pool=Pool(time_budget_s=budget_s))
    except InputError as error:
        result = f", {error.accepted.rpartition(': ')[2]}"
    return f"{budget_s:.0f} s: ends after {time.perf_counter() - begin_s:.1f} s{result}"


def main() -> None:
    """Measure, and write benchmarks/results/waits.md."""
    heads = ["command", "CPU time", f"its estimate after {ESTIMATE_S:g} s", "ratio", "budget: 70 % of the wall time"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, work in tasks().items():
        watch, begin_s, wall_s = Watch(), time.process_time(), time.perf_counter()
        work(on_progress=watch)
        took_s, wall_s = time.process_time() - begin_s, time.perf_counter() - wall_s
        ratio = f"{watch.total_s / took_s:.2f}"
        lines.append(f"| `{name}` | {took_s:.1f} s | {watch.total_s:.1f} s | {ratio} | {ends(work, 0.7 * wall_s)} |")
        print(lines[-1], flush=True)
    write_benchmark("waits", lines)


if __name__ == "__main__":
    main()
