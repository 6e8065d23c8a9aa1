"""The page of fleets: `python -m validate.capacity ROWS.csv SETTINGS.csv --configs FOLDER`.

It scores the queue of steps against published load curves and queueing theory, and answers of `kvrsim capacity`
against a search of all smaller fleets. ROWS.csv holds benchmark runs of engines with several users, SETTINGS.csv the
settings of calibrate/engines. kvrsim ships neither.
"""

from __future__ import annotations

import csv
import itertools
import math
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import kvrsim
from calibrate.engines.settings import model_folder
from kvrsim.arguments import FleetArgs
from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.execution import place
from kvrsim.program import Array
from kvrsim.strategies import get_strategy
from planner.capacity.fleet import GpuGroup, GroupPool, Service, run_pool
from planner.capacity.request import make_request
from planner.capacity.search import FleetSimulator
from planner.capacity.serving import StepRequests, run_steps
from planner.capacity.steps import BUDGET, StepTimes
from planner.capacity.times import StrategyPolicy, service_times
from planner.capacity.transfer import cache_bytes
from validate.report import RESULTS, fill, numbers_table, run_command, write_page

PAGE = RESULTS / "capacity.md"
MILLION = 1_000_000
PROMPTS_PER_USER = 10  # as the benchmarks send
SETTING = ("system", "engine", "precision", "nominal_isl", "osl")  # columns that a run and its setting share
# Steps of decoding for which SGLang's launch scripts for B200 let the scheduler wait for prompts, beyond the step that
# runs: half of --scheduler-recv-interval, which is 10, and 30 from 16 users on.
POLL_STEPS = {True: 15, False: 5}
# A question whose smaller fleets can all be simulated.
SMALL: dict[str, Any] = {
    **{"requests": "synthetic:poisson,rate=25,requests=800,context=lognormal:2k:0.7,max=16k,output=lognormal:200:0.5"},
    **{"slo_ttft": "1s", "tpot": "25ms", "replications": 1, "group_sizes": "1,2", "uniform_only": True},
}
ON: dict[str, Any] = {"model": "llama-3.1-8b", "cluster": "8xh100", "engine": "vllm"}


@dataclass(frozen=True, kw_only=True)
class LoadRun:
    """A published run of closed-loop users, and its simulation."""

    engine: str
    model: str
    prompt_tokens: int  # the longest prompt
    users: int
    measured_ttft_s: float  # mean over the prompts
    measured_tpot_s: float
    ttft_s: float
    tpot_s: float

    @cached_property
    def ttft_error(self) -> float:
        """Relative error of the mean TTFT."""
        return self.ttft_s / self.measured_ttft_s - 1

    @cached_property
    def tpot_error(self) -> float:
        """Relative error of the mean TPOT."""
        return self.tpot_s / self.measured_tpot_s - 1


def load_runs(rows: Path, settings: Path, configs: Path) -> Iterator[LoadRun]:
    """Simulate each run of users that share GPUs for prefill and decoding and whose setting is known."""
    with rows.open() as file:
        runs = [row for row in csv.DictReader(file) if row["mode"] == "agg"]
    with settings.open() as file, tempfile.TemporaryDirectory() as folder:
        for setting in csv.DictReader(file):
            mine = [row for row in runs if _is_of(row, setting)]
            if mine:
                model = model_folder(Path(folder), configs, setting["config"])
                yield from _simulated(mine, setting, model)


def _is_of(row: Mapping[str, str], setting: Mapping[str, str]) -> bool:
    """Whether a run has this setting."""
    names = {"engine": "backend", "nominal_isl": "isl"}
    if any(row[names.get(name, name)] != setting[name] for name in SETTING):
        return False
    degrees = [int(float(row[name] or 0)) for name in ("tp_size", "moe_ep_size", "pp_size", "attention_dp_size")]
    if degrees[0] != int(setting["tp"]) or max(1, degrees[1]) != int(setting["moe_ep"]) or max(degrees[2:]) > 1:
        return False
    versions = {row["backend_version"], setting["engine_version"]} - {""}
    return len(versions) <= 1 and setting["model"].split("-")[0].lower() in row["model_path"].lower()


def _simulated(runs: Sequence[Mapping[str, str]], setting: Mapping[str, str], model: Path) -> Iterator[LoadRun]:
    tp = int(setting["tp"])
    longest = int(setting["nominal_isl"])
    outputs = int(setting["osl"])
    mean = int(setting["context_tokens"])
    dtype = "fp8" if setting["precision"] == "fp8" else None
    try:
        scenario, _ = make_scenario(
            ctx=mean,
            gpus=tp,
            model=str(model),
            cluster=setting["cluster"],
            dtype=dtype,
            expert_parallel=int(setting["moe_ep"]) > 1,
            engine=setting["engine"],
        )
        execution = place(scenario, get_strategy("single" if tp == 1 else "tp"))
        times = StepTimes.of(execution, BUDGET, 2 * (longest + outputs), mean + outputs // 2)
    except InputError:  # GPUs and models that kvrsim does not place
        return
    shortest = 2 * mean / longest - 1  # prompts are uniform between this share of the longest and the longest
    for run in runs:
        users = int(float(run["concurrency"]))
        count = PROMPTS_PER_USER * users
        rng = np.random.default_rng(0)
        new_tokens = np.rint(longest * rng.uniform(shortest, 1, count)).astype(np.int64)
        output_tokens = np.rint(outputs * rng.uniform(shortest, 1, count)).astype(np.int64)
        requests = StepRequests(
            arrival_s=np.zeros(count),
            new_tokens=new_tokens,
            cached_prefix=np.zeros_like(new_tokens),
            decode_steps=output_tokens - 1,
            cache_bytes=cache_bytes(execution.placed.share, new_tokens + output_tokens, scenario.request.dtype_bytes),
        )
        served = run_steps(requests, times, 1, users=users)
        sent_s = np.concatenate([np.zeros(users), np.sort(served.last_s)[: count - users]])
        tpot_s = float(served.tpot_s(requests).mean())
        polled_s = 0.0
        if setting["engine"] == "sglang" and "b200" in setting["system"]:
            polled_s = POLL_STEPS[users >= 16] * tpot_s
        yield LoadRun(
            engine=setting["engine"],
            model=setting["model"],
            prompt_tokens=longest,
            users=users,
            measured_ttft_s=float(run["silicon_ttft_ms"]) / 1e3,
            measured_tpot_s=float(run["silicon_tpot_ms"]) / 1e3,
            ttft_s=float((served.first_s - sent_s).mean()) + polled_s,
            tpot_s=tpot_s,
        )


def curve_table(runs: Sequence[LoadRun]) -> list[str]:
    """Errors of mean TTFT and TPOT by users, engine, prompt and model."""
    groups: dict[str, list[LoadRun]] = {"all": list(runs)}
    for run in runs:
        for title in (f"{run.users} users", run.engine, f"prompts up to {run.prompt_tokens}", run.model):
            groups.setdefault(title, []).append(run)
    lines = []
    for title, group in groups.items():
        if len(group) < len(runs) / 100:
            continue
        ttft = np.array([run.ttft_error for run in group])
        tpot = np.array([run.tpot_error for run in group])
        cells = [np.median(ttft), np.median(np.abs(ttft)), np.median(tpot), np.median(np.abs(tpot))]
        lines.append((title, len(group), *(f"{100 * value:+.1f}%" for value in cells)))
    return numbers_table(("runs", "number", "TTFT: median", "median error", "TPOT: median", "median error"), lines)


def theory_table() -> list[str]:
    """Mean waits of one prompt per step against the M/D/1 queue, and of one queue of groups against M/M/k."""
    rng = np.random.default_rng(0)
    count = 200_000
    rows = []
    times = _made_times()
    service_s = times.mixed_s([(64, 0)], 1, 0, 0)
    for load in (0.5, 0.7, 0.9):
        requests = _equal_requests(np.cumsum(rng.exponential(service_s / load, count)))
        wait = float((run_steps(requests, times, 1).begin_s - requests.arrival_s).mean()) / service_s
        rows.append((f"M/D/1, load {load:g}", *_cells(wait, load / (2 * (1 - load)))))
    for groups, load in ((2, 0.7), (4, 0.8)):
        arrival_s = np.cumsum(rng.exponential(1 / (load * groups), count))
        service = Service.plain(rng.exponential(1.0, count))
        run = run_pool(GroupPool(arrival_s=arrival_s, service=service, replicas=groups))
        wait = float((run.begin_s - arrival_s).mean())
        rows.append((f"M/M/{groups}, load {load:g}", *_cells(wait, erlang_wait(groups, load))))
    return numbers_table(("queue", "theory", "simulated", "error"), rows)


def _cells(wait: float, theory: float) -> tuple[str, str, str]:
    return f"{theory:.3f}", f"{wait:.3f}", f"{wait / theory - 1:+.1%}"


def erlang_wait(groups: int, load: float) -> float:
    """Mean wait of the M/M/k queue over the mean service time."""
    offered = groups * load
    terms = [offered**number / math.factorial(number) for number in range(groups)]
    last = offered**groups / math.factorial(groups) / (1 - load)
    return last / (sum(terms) + last) / (groups * (1 - load))


def _made_times() -> StepTimes:
    """Steps of one prompt of 64 tokens."""
    scenario, _ = make_scenario(ctx=64, gpus=1, model=ON["model"], cluster=ON["cluster"], engine="none")
    times = StepTimes.of(place(scenario, get_strategy("single")), 64, 64)
    return StepTimes(**{name: getattr(times, name) for name in StepTimes.__slots__} | {"most_sequences": 1})


def _equal_requests(arrival_s: Array) -> StepRequests:
    count = len(arrival_s)
    zeros = np.zeros(count, dtype=np.int64)
    return StepRequests(
        arrival_s=arrival_s,
        new_tokens=np.full(count, 64),
        cached_prefix=zeros,
        decode_steps=zeros,
        cache_bytes=np.zeros(count),
    )


def speed_table() -> list[str]:
    """CPU seconds of simulations of a million requests and of a search."""
    rng = np.random.default_rng(0)
    arrival_s = np.cumsum(rng.exponential(1 / 500, MILLION))
    pool = GroupPool(arrival_s=arrival_s, service=Service.plain(rng.exponential(0.1, MILLION)), replicas=60)
    begin_s = time.process_time()
    run_pool(pool)
    rows = [("one simulation, 1,000,000 requests, prompts one by one", f"{time.process_time() - begin_s:.1f}")]
    scenario, _ = make_scenario(ctx=1, gpus=1, **ON)
    times = StepTimes.of(place(scenario, get_strategy("single")), BUDGET, 2**15)
    new_tokens = np.clip(rng.lognormal(7, 0.8, MILLION), 1, 16_000).astype(np.int64)
    decode_steps = np.clip(rng.lognormal(5.3, 0.7, MILLION), 1, 4000).astype(np.int64)
    requests = StepRequests(
        arrival_s=arrival_s,
        new_tokens=new_tokens,
        cached_prefix=np.zeros_like(new_tokens),
        decode_steps=decode_steps,
        cache_bytes=131_072.0 * (new_tokens + decode_steps).astype(float),
    )
    begin_s = time.process_time()
    run_steps(requests, times, 60)
    rows.append(("one simulation, 1,000,000 requests, 60 groups in steps", f"{time.process_time() - begin_s:.1f}"))
    for number, title in ((5_000, "5,000"), (20_000, "20,000")):
        text = f"synthetic:poisson,rate=40,requests={number},context=lognormal:2k:0.8,max=16k,output=lognormal:200:0.7"
        begin_s = time.process_time()
        kvrsim.capacity(**ON, requests=text, slo_ttft="2s", tpot="30ms", replications=1)
        seconds = f"{time.process_time() - begin_s:.1f}"
        rows.append((f"whole answer, {title} requests: both ways to serve, 4 sizes, growth to 3 times", seconds))
    return numbers_table(("work", "CPU seconds"), rows)


def brute_force() -> tuple[list[str], str]:
    """All fleets with fewer GPUs than the answer, the fewest late requests of each kind, and the answer in words."""
    plan = kvrsim.capacity(**ON, **SMALL)
    answer = plan.answer
    assert answer is not None
    scenario, _ = make_scenario(ctx=1, gpus=1, **ON)
    request = make_request(FleetArgs(**SMALL), scenario)
    workloads = request.workloads()
    simulator = FleetSimulator(request, workloads, service_times(scenario, workloads, StrategyPolicy()))
    longest = max(int(workload.new_tokens.max()) for workload in workloads)
    rows = []
    for size in request.limits.sizes:
        together = simulator.times.colocated(size)
        types = [*simulator.times.types(size), *([together] if together else [])]
        for group, replicas in itertools.product(types, range(1, answer.total_gpus)):
            if size * replicas >= answer.total_gpus:
                continue
            fleet = (GpuGroup(type=group, least_new=1, most_new=longest, replicas=replicas),)
            found = simulator.answer(fleet)
            meets = found.meets and found.no_decode is None and found.total_gpus < answer.total_gpus
            kind = "same GPUs" if group.colocated else f"prefill ({group.weights})"
            rows.append(
                (f"{replicas} × {size}", kind, f"{found.in_time:.2%}", found.total_gpus, "yes" if meets else "no")
            )
    heads = ("groups", "for", "in time", "GPUs with decoding", "meets with fewer GPUs")
    return numbers_table(heads, rows), f"{answer.total_gpus} GPUs ({answer.serving}: {answer.describe()})"


def growth_table() -> list[str]:
    """Growth of an answer, and the same question asked with more requests."""
    plan = kvrsim.capacity(**ON, **SMALL)
    rows = []
    for growth in plan.growth:
        again = kvrsim.capacity(**ON, **SMALL, rate_scale=growth.times)
        gpus = None if again.answer is None else again.answer.total_gpus
        rows.append((f"{growth.times:g}", growth.num_gpus, gpus))
    return numbers_table(("times the requests", "GPUs, growth of the answer", "GPUs, asked again"), rows)


def page(runs: Sequence[LoadRun]) -> list[str]:
    """Markdown lines of docs/results/capacity.md."""
    fleets, answer = brute_force()
    ttft = np.array([run.ttft_error for run in runs])
    tpot = np.array([run.tpot_error for run in runs])
    return fill(
        "capacity",
        count=len(runs),
        median=f"{np.median(np.abs(ttft)):.1%}",
        tpot=f"{100 * np.median(tpot):+.1f} %",
        tpot_size=f"{np.median(np.abs(tpot)):.1%}",
        curves=curve_table(runs),
        theory=theory_table(),
        speed=speed_table(),
        fleets=fleets,
        answer=answer,
        growth=growth_table(),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = ArgumentParser(prog="python -m validate.capacity", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("rows", type=Path, metavar="ROWS.csv")
    parser.add_argument("settings", type=Path, metavar="SETTINGS.csv")
    parser.add_argument("--configs", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args(arguments)
    runs = list(load_runs(options.rows, options.settings, options.configs))
    write_page(PAGE, page(runs))
    print(f"{PAGE}: {len(runs)} runs")


if __name__ == "__main__":
    sys.exit(run_command(main))
