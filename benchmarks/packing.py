"""What packing prompts into steps gains: simulated streams on one group, and fleets.

With --traces FOLDER, which holds azure_2023_conv.csv (in any format that `kvrsim capacity` reads), fleets for that
trace too, and how long `capacity` takes for llama-3-70b.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from _report import write

from kvrsim.builder import make_scenario
from kvrsim.interp import percentile_of
from kvrsim.results.stream import Prompts
from planner.capacity.fleet.fast import run_pool
from planner.capacity.fleet.layouts import Choice
from planner.capacity.fleet.packed_times import PackedTimes
from planner.capacity.fleet.pool import Pool
from planner.capacity.fleet.times import ServiceTimes
from planner.capacity.plan import plan_capacity
from planner.capacity.request import make_request
from planner.capacity.workloads.source import Source
from planner.capacity.workloads.workload import Workload
from planner.prompts import parse_prompts
from planner.simulate import run_simulation

MACHINE = {"model": "llama-3-8b", "profile": "h100-flash", "cluster": "h100-nvlink"}
GROUPS = (("single", 1), ("tp", 2), ("pp", 2))
MIXED = "synthetic:poisson,rate=150,requests=2500,context=lognormal:700:1.1,max=16k"
SHORT = "synthetic:poisson,rate=500,requests=3000,context=lognormal:150:0.8,max=2k"
BUDGETS = ("2k", "8k")
FEW = "synthetic:poisson,rate=30,requests=60,context=lognormal:700:1.1,max=16k"
TRACE = "azure_2023_conv.csv"


def simulated() -> Iterator[str]:
    """The same 60 prompts on one group, all there from the start, so that throughput counts; and fleets' loops."""
    yield "| group | packing | TTFT mean | requests/s | steps | prompts a step | fleet's loop: mean TTFT off by |"
    yield "|---|---|---|---|---|---|---|"
    drawn = parse_prompts(FEW, None, 0)
    assert isinstance(drawn, Prompts)
    scenario, _ = make_scenario(ctx=max(drawn.context_lens), gpus=8, **MACHINE)  # type: ignore[arg-type]
    for strategy, gpus in GROUPS:
        for tokens in (None, 2048, 8192):
            placed = scenario.on_gpus(gpus)
            stream = run_simulation(placed, strategy=strategy, arrivals=drawn, pack_tokens=tokens).stream
            assert stream is not None
            packed = stream.packed
            steps = "" if packed is None else f"{packed.steps} | {packed.mean_prompts:.1f}"
            off = float(np.mean(fleet_ttft_s(strategy, gpus, drawn, tokens)) / np.mean(stream.ttft_s) - 1)
            yield (
                f"| {strategy} on {gpus} | {tokens or 'none'} | {np.mean(stream.ttft_s):.3f} s"
                f" | {stream.steady_per_s or stream.throughput_per_s:.1f} | {steps or ' | '} | {off:+.1%} |"
            )


def fleet_ttft_s(strategy: str, gpus: int, prompts: Prompts, tokens: int | None) -> np.ndarray:
    """TTFT of each prompt on one such group of a fleet."""
    context, cached = np.array(prompts.context_lens), np.array(prompts.cached_prefix)
    workload = Workload(
        name="drawn",
        kind="synthetic",
        arrival_s=np.array(prompts.arrivals_s),
        context_len=context,
        cached_prefix=cached,
        output_tokens=np.ones_like(context),
    )
    scenario, _ = make_scenario(ctx=1, gpus=1, **MACHINE)  # type: ignore[arg-type]
    choice = Choice(asked=(strategy,), packs=tokens is not None)
    if tokens is None:
        times: ServiceTimes = ServiceTimes.for_workloads(scenario, [workload], choice=choice)
    else:
        times = PackedTimes(scenario, int(workload.new_tokens.max()), 0, choice, tokens)
    kind = times.kinds(gpus)[0]
    service = times.service(gpus, workload, None, kind.weights)
    return run_pool(Pool(arrival_s=workload.arrival_s, service=service, replicas=1)).end_s - workload.arrival_s


def fleets(requests: str, slo_s: float, **options: str) -> Iterator[str]:
    """GPUs needed and the 99th percentile, by group, with and without packing."""
    yield "| group | packing | GPUs | p50 | p99 | utilised | seconds |"
    yield "|---|---|---|---|---|---|---|"
    scenario, _ = make_scenario(ctx=1, gpus=1, **MACHINE)  # type: ignore[arg-type]
    for strategy, gpus in GROUPS:
        for tokens in (None, *BUDGETS):
            about = {"group_sizes": str(gpus), "uniform_only": True, "replications": 1, "pack_tokens": tokens}
            request = make_request(requests=requests, slo_ttft=slo_s, **about | options)  # type: ignore[arg-type]
            begin_s = time.perf_counter()
            plan = plan_capacity(scenario, request, strategies=[strategy])
            took_s, found = time.perf_counter() - begin_s, plan.answer
            name = f"| {strategy} on {gpus} | {tokens or 'none'} |"
            if found is None or found.curves is None:
                yield f"{name} none meets the target | | | | {took_s:.1f} |"
                continue
            p50_s, p99_s = (percentile_of(found.curves.ttft_s, share) for share in (50, 99))
            yield (
                f"{name} {found.num_gpus} | {1e3 * p50_s:.0f} ms | {1e3 * p99_s:.0f} ms"
                f" | {found.utilisation:.0%} | {took_s:.1f} |"
            )


def large(path: Path) -> Iterator[str]:
    """How long a 70B model's fleet takes to find."""
    yield "| packing | groups | answer | p99 | seconds on a shared machine | CPU seconds |"
    yield "|---|---|---|---|---|---|"
    scenario, _ = make_scenario(ctx=1, gpus=1, model="llama-3-70b", profile="h100-flash", cluster="h100-nvlink")
    for tokens in (None, "8k"):
        request = make_request(requests=str(path), slo_ttft=2.0, pack_tokens=tokens)
        begin_s, cpu_s = time.perf_counter(), time.process_time()
        plan = plan_capacity(scenario, request)
        took_s, cpu_s, found = time.perf_counter() - begin_s, time.process_time() - cpu_s, plan.answer
        answer = "none | " if found is None else f"{found.describe()} | {found.target.value_s:.2f} s"
        yield f"| {tokens or 'none'} | 1, 2, 4, 8 | {answer} | {took_s:.1f} | {cpu_s:.1f} |"


def described(requests: str) -> str:
    """The workload in words."""
    return Source.of(requests).workload(0).describe()


def main(arguments: Sequence[str] | None = None) -> None:
    """Write benchmarks/results/packing.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path)
    traces = parser.parse_args(arguments).traces
    lines = ["llama-3-8b on H100s, engine `serving`.", "", f"## One group: {described(FEW)}", "", *simulated(), ""]
    for title, requests in (("Mixed lengths", MIXED), ("Short prompts", SHORT)):
        lines += [f"## {title}: {described(requests)}, 99 % within 1 s", "", *fleets(requests, 1.0), ""]
    if traces is not None:
        path = traces / TRACE
        lines += [f"## {TRACE}, 10 times its requests, 99 % within 1 s", ""]
        lines += [*fleets(str(path), 1.0, rate_scale="10"), ""]
        lines += [f"## llama-3-70b, {TRACE}: {described(str(path))}, 99 % within 2 s", "", *large(path), ""]
    command = "python benchmarks/packing.py" + ("" if traces is None else " --traces FOLDER")
    write("packing", command, lines)


if __name__ == "__main__":
    main()
