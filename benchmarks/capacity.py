"""Capacity planning: speed, and errors relative to theory and a full search; with --traces FOLDER, answers on traces.

FOLDER holds azure_2023_conv.csv, azure_2023_code.csv and mooncake_conversation.csv, in any format that
`kvrsim capacity` reads.
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvrsim.arguments import FleetArgs
from kvrsim.builder import make_scenario
from kvrsim.execution import place
from kvrsim.executors.run import run_partition
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES
from planner.candidates import partition_of
from planner.capacity.fleet import FleetLimits, GroupPool, GroupType, Overlap, Service, run_pool
from planner.capacity.plan import plan_capacity
from planner.capacity.request import CapacityRequest, Target, make_request
from planner.capacity.search import FleetFit, FleetSearch, FleetSimulator
from planner.capacity.times import GridPoints, ServiceTimes, StrategyPolicy, service_times
from planner.capacity.workload import RequestSource, Workload, read_trace
from planner.percentile import percentile_of
from planner.search.search import search
from validate.report import write_benchmark
from validate.results import spread

MILLION = 1_000_000
CHAINS = StrategyPolicy(names=("single", "tsp", "kvr-s"))
EAGER = {"model": "llama-7b", "profile": "a100-eager", "cluster": "a100-nvlink"}
FLASH = {"model": "llama-3-8b", "profile": "h100-flash", "cluster": "h100-nvlink"}
TRACES = {  # machine and target in seconds, by file
    "azure_2023_conv.csv": (EAGER, 1.0),
    "azure_2023_code.csv": (EAGER, 2.0),
    "mooncake_conversation.csv": (FLASH, 2.0),
}


def scenario(machine: dict[str, str], **lengths: int) -> Scenario:
    """The scenario of a machine such as EAGER."""
    return make_scenario(**{"ctx": 1024, "gpus": 8, **lengths}, **machine)[0]


def poisson(count: int, rate_per_s: float, seed: int) -> np.ndarray:
    """Arrival times of a Poisson process, in seconds."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate_per_s, count))


def a_million(repeats: int = 3) -> str:
    """Measure CPU seconds for a million requests on 14 groups at 86 % load."""
    arrival_s = poisson(MILLION, 1.0, seed=0)
    service = Service.plain(np.random.default_rng(1).exponential(12.0, MILLION))
    pool = GroupPool(arrival_s=arrival_s, service=service, replicas=14)
    taken: list[float] = []
    for _ in range(repeats):
        begin_s = time.process_time()
        run_pool(pool)
        taken.append(time.process_time() - begin_s)
    return f"| 1,000,000 requests, first come | {spread(taken)} s |"


def a_million_planned() -> str:
    """Measure CPU seconds of a whole plan, in a fresh process."""
    spec = f"synthetic:diurnal,rate=40,requests={MILLION},context=lognormal:2k:1,max=12k"
    options = ["--model", "llama-7b", "--cluster", "a100-nvlink"]
    options += [
        "--slo-ttft",
        "2s",
        "--replications",
        "1",
        "--max-gpus",
        "1024",
        "--strategies",
        "single,tsp,kvr-s",
        "--json",
    ]
    what = "`kvrsim capacity` on 1,000,000 synthetic requests, `single`, `tsp` and `kvr-s`, whole search"
    return f"| {what} | {answered_s(spec, options):.1f} s |"


def answered_s(requests: str, options: Sequence[str]) -> float:
    """CPU time of `kvrsim capacity` in a fresh process, in seconds; other programs on the machine do not change it."""
    command = [sys.executable, "-m", "kvrsim.cli.main", "capacity", "--requests", requests, *options]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def erlang_wait(groups: int, load: float) -> float:
    """Mean wait of M/M/c in seconds, with a service time of 1 s."""
    terms = [load**k / math.factorial(k) for k in range(groups)]
    last = load**groups / math.factorial(groups) * groups / (groups - load)
    return last / (sum(terms) + last) / (groups - load)


def crommelin_wait(groups: int, load: float) -> float:
    """Mean wait of M/D/c in seconds, with a service time of 1 s: Spitzer's sum for steps of 1 - Erlang(c)."""
    from scipy.stats import poisson as law

    k = np.arange(1, 3000)
    return float((law.sf(k * groups - 1, k * load) - groups / load * law.sf(k * groups, k * load)).sum())


def theory(seeds: int = 4, count: int = 500_000) -> list[str]:
    """Relative errors of simulated mean waits, compared with theory."""
    lines = []
    for groups, share in ((1, 0.7), (4, 0.7), (8, 0.8), (20, 0.8)):
        load = groups * share
        for name, expected, constant in (
            (f"M/M/{groups}", erlang_wait(groups, load), False),
            (f"M/D/{groups}", crommelin_wait(groups, load), True),
        ):
            errors = []
            for seed in range(seeds):
                arrival_s = poisson(count, load, seed)
                drawn = np.random.default_rng(100 + seed).exponential(1.0, count)
                service = Service.plain(np.ones(count) if constant else drawn)
                run = run_pool(GroupPool(arrival_s=arrival_s, service=service, replicas=groups))
                errors.append((run.begin_s - arrival_s)[count // 10 :].mean() / expected - 1)
            low, high = min(errors), max(errors)
            lines.append(f"| {name} at {share:.0%} load | {np.mean(errors):+.2%} ({low:+.2%} to {high:+.2%}) |")
    return lines


def times_against_search(count: int = 40) -> list[str]:
    """Compare interpolated service times with the best of a full search of `single`, `tsp` and `kvr-s`."""
    lines = []
    rng = np.random.default_rng(0)
    for machine in (EAGER, FLASH):
        times = ServiceTimes(scenario(machine), GridPoints.up_to(65536, 65536), CHAINS)
        for gpus in (1, 2, 4, 8):
            errors = []
            for number in range(count):
                new, cached = int(2 ** rng.uniform(5, 16)), int(2 ** rng.uniform(5, 16)) if number % 2 else 0
                seconds = times.seconds(GroupType(gpus), np.array([new]), np.array([cached]))[0]
                if math.isfinite(seconds):
                    errors.append(seconds / best_s(machine, gpus, new, cached) - 1)
            shown = f"median {np.median(np.abs(errors)):.2%}, mean {np.mean(np.abs(errors)):.2%}"
            lines.append(
                f"| {machine['profile']}, {gpus} GPUs, {len(errors)} lengths | {shown},"
                f" {min(errors):+.1%} to {max(errors):+.1%} |"
            )
    return lines


def best_s(machine: dict[str, str], gpus: int, new: int, cached: int) -> float:
    """TTFT of the best strategy, with a full search of KVR-S."""
    asked = scenario(machine, ctx=new + cached, cached_prefix=cached, gpus=gpus)
    found = [search(place(asked, STRATEGIES["kvr-s"])).ttft_s] if gpus > 1 else []
    for name, count in (("single", 1), ("tsp", gpus)):
        placed, strategy = asked.on_gpus(count), STRATEGIES[name]
        found.append(run_partition(place(placed, strategy), partition_of(place(placed, strategy), None)).ttft_s)
    return min(found)


def answers(folder: Path) -> list[str]:
    """Answers and CPU seconds of the command on each trace, in fresh processes."""
    lines = ["| trace | machine | target | answer | CPU |", "|---|---|---|---|---|"]
    for name, (machine, slo_s) in TRACES.items():
        options = [f"--{key}={value}" for key, value in machine.items()] + ["--slo-ttft", f"{slo_s:g}s"]
        options += ["--strategies", "single,tsp,kvr-s", "--json"]
        cpu_s = [answered_s(str(folder / name), options) for _ in range(3)]
        fit = searched(machine, str(folder / name), slo_s)[0]
        shown = f"{machine['model']}, {machine['profile']}"
        lines.append(f"| {name} | {shown} | 99 % in {slo_s:g} s | {described(fit)} | {spread(cpu_s)} s |")
    return lines


def searched(machine: dict[str, str], requests: str, slo_s: float) -> list[FleetFit]:
    """All designs that meet the target, best first."""
    request: CapacityRequest = make_request(FleetArgs(requests=requests, slo_ttft=slo_s), scenario(machine))
    workload = request.source.workload(0)
    times = cached_times(machine, requests)
    finder = FleetSearch(FleetSimulator(request, [workload], times))
    return finder.mixed(finder.fits(finder.uniform(finder.types)))


_TIMES: dict[str, ServiceTimes] = {}


def cached_times(machine: dict[str, str], requests: str) -> ServiceTimes:
    """Service times of a trace, computed once."""
    if requests not in _TIMES:
        _TIMES[requests] = service_times(scenario(machine), [read_trace(requests)], CHAINS)
    return _TIMES[requests]


def described(fit: FleetFit) -> str:
    """Format the number of GPUs and the groups of a design."""
    groups = " + ".join(
        f"{group.replicas} × {group.type.gpus}" + ("" if len(fit.fleet) == 1 else f" (to {group.most_new})")
        for group in fit.fleet
    )
    return f"{fit.cost:.0f}: {groups}"


def mixed_against_uniform(folder: Path) -> list[str]:
    """Fewest GPUs of uniform and of mixed fleets on the Mooncake trace, at several rates and targets."""
    path = str(folder / "mooncake_conversation.csv")
    lines = ["| requests | target | uniform | best | less |", "|---|---|---|---|---|"]
    for rate_scale, percentile, slo_s in (
        *((1.0, 99.0, slo) for slo in (1.0, 2.0, 4.0)),
        *((5.0, 99.0, slo) for slo in (1.0, 2.0, 4.0)),
        (20.0, 99.0, 2.0),
    ):
        asked = {"requests": path, "slo_ttft": slo_s, "rate_scale": rate_scale, "percentile": percentile}
        on = scenario(FLASH)
        found = [
            plan_capacity(on, make_request(FleetArgs(**asked, uniform_only=only), on), CHAINS).answer
            for only in (True, False)
        ]
        cells = [f"{one.num_gpus}: {one.describe()}" if one else "none" for one in found]
        uniform, best = found
        cells.append(f"{1 - best.num_gpus / uniform.num_gpus:.0%}" if uniform and best else "")
        lines.append(f"| {rate_scale:g} × | {percentile:g} % in {slo_s:g} s | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def early_ranks(folder: Path) -> list[str]:
    """The gain if early ranks of a chain start the next prompt, in the smallest uniform fleets."""
    path = str(folder / "mooncake_conversation.csv")
    source = RequestSource.of(path, rate_scale=20.0)
    workload = source.workload(0)
    times = cached_times(FLASH, path)
    lines = [
        "| groups | 99th percentile, early ranks free early | 99th percentile, group held whole |",
        "|---|---|---|",
    ]
    request = CapacityRequest(source=source, target=Target(slo_s=2.0, percentile=99.0), limits=FleetLimits())
    finder = FleetSearch(FleetSimulator(request, [workload], times))
    for fit in finder.fits([design for design in finder.uniform(finder.types) if design[0].type.gpus > 1]):
        (group,) = fit.design
        service = times.service(group.type, workload)
        shown = early(service, workload, group.replicas), held(service, workload, group.replicas)
        lines.append(f"| {described(fit)} | {shown[0]:.3f} s | {shown[1]:.3f} s |")
    return lines


def early(service: Service, workload: Workload, replicas: int) -> float:
    """99th percentile of TTFT if ranks become free early."""
    run = run_pool(GroupPool(arrival_s=workload.arrival_s, service=service, replicas=replicas))
    return percentile_of(run.end_s - workload.arrival_s, 99)


def held(service: Service, workload: Workload, replicas: int) -> float:
    """99th percentile of TTFT if all ranks are busy until the first token."""
    whole = replace(service, overlap=Overlap.whole(), length_class=0 * service.length_class, strategies=("whole",))
    return early(whole, workload, replicas)


def main() -> None:
    """Measure, and write benchmarks/results/capacity_queues.md, or capacity_traces.md with --traces."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder of the public traces")
    folder = parser.parse_args().traces
    if folder is None:
        lines = [
            "| how fast | CPU seconds, median (smallest to largest) |",
            "|---|---|",
            a_million(),
            a_million_planned(),
        ]
        lines += [
            "",
            "| mean wait against theory, 4 seeds of 500,000 | mean (smallest to largest) |",
            "|---|---|",
            *theory(),
        ]
        lines += [
            "",
            "| service time against a full search | absolute difference |",
            "|---|---|",
            *times_against_search(),
        ]
        write_benchmark("capacity_queues", lines)
        return
    lines = [
        *answers(folder),
        "",
        "Mixed against uniform fleets, Mooncake trace, llama-3-8b on H100s, `single`, `tsp` and `kvr-s`, GPUs:",
        "",
    ]
    lines += [
        *mixed_against_uniform(folder),
        "",
        "Early ranks (Mooncake trace, 20 times the requests, 99 % in 2 s):",
        "",
        *early_ranks(folder),
    ]
    write_benchmark("capacity_traces", lines)


if __name__ == "__main__":
    main()
