"""Fleets for traces: random parts of traces, models and options; each answer is checked against what it claims.

    python -m tests.fuzz.fuzz_traces --traces FOLDER --count 50 --seed 1

FOLDER has traces in any format that `kvrsim capacity` reads. Without it, traces of the same shapes are drawn: a chat,
short answers to long prompts, and long prompts with cached prefixes. Prints each question whose answer contradicts
itself, and ends with exit code 1 if there is any.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import kvrsim
from kvrsim.errors import InputError
from planner.capacity.result import CapacityPlan
from planner.capacity.workload import Workload, read_trace

MODELS = ("llama-2-7b", "llama-3.1-8b", "llama-3.1-70b", "mistral-7b", "mixtral-8x7b", "qwen3-30b-a3b")
CLUSTERS = ("a100-nvlink", "h100-nvlink", "l40s-pcie", "2x8xh100")
OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "slo_ttft": ("0.3s", "2s", "30s"),
    "percentile": (50, 90, 95, 99, 100),
    "strategies": (None, ("single", "tsp", "kvr-s"), ("tp",), ("tp", "pp"), ("single", "tp", "tp2+pp")),
    "group_sizes": ("1", "2", "1,2", "2,4", "1,8"),
    "tpot": (None, "10ms", "50ms"),
    "max_num_batched_tokens": (None, None, None, "2k", "8k"),
    "kv_transfer_bandwidth": (None, None, "10GB/s"),
    "price_per_gpu_hour": (None, 2.0),
    "objective": ("gpus",),
    "sure": (False, False, True),
    "max_gpus": (None, 8, 64),
    "uniform_only": (False, True),
    "rate_scale": (0.5, 1, 2),
    "dtype": (None, None, "fp8", "bf16"),
    "engine": (None, None, "vllm", "sglang"),
    "memory_fraction": (None, 0.6),
}


def drawn_traces(rng: np.random.Generator, count: int) -> dict[str, Workload]:
    """Traces of the shapes of public ones: chat, code, and conversations with long cached prefixes."""

    def lengths(median: float, sigma: float, most: int) -> np.ndarray[Any, Any]:
        return np.clip(rng.lognormal(np.log(median), sigma, count), 1, most).astype(np.int64)

    def workload(name: str, context: Any, cached: Any, output: Any) -> Workload:
        arrival_s = np.cumsum(rng.gamma(0.5, 0.6, count))
        return Workload(
            name=name,
            kind="csv",
            arrival_s=arrival_s - arrival_s[0],
            context_len=context,
            cached_prefix=np.minimum(cached, context - 1),
            output_tokens=output,
        )

    none = np.zeros(count, dtype=np.int64)
    long = lengths(7000, 1.2, 126_000)
    shares = rng.choice([0.0, 0.1, 0.5, 0.99], count)
    return {
        "chat": workload("chat", lengths(1000, 0.9, 14_000), none, lengths(200, 0.6, 1000)),
        "code": workload("code", lengths(2000, 0.8, 7400), none, lengths(15, 1.0, 2000)),
        "cached": workload("cached", long, (long * shares).astype(np.int64) // 512 * 512, lengths(300, 0.7, 2000)),
    }


def questions(rng: np.random.Generator, traces: Mapping[str, Workload], most: int) -> Iterator[dict[str, Any]]:
    """Random questions about parts of the traces with at most `most` requests."""
    while True:
        names = list(traces)
        trace = traces[names[rng.integers(len(names))]]
        count = min(len(trace), int(rng.integers(1, most + 1)))
        begin = int(rng.integers(0, len(trace) - count + 1))
        part = trace.select(slice(begin, begin + count))
        part = replace(part, arrival_s=part.arrival_s - part.arrival_s[0])
        question = {name: values[rng.integers(len(values))] for name, values in OPTIONS.items()}
        question |= {"model": str(rng.choice(MODELS)), "cluster": str(rng.choice(CLUSTERS))}
        yield {"requests": part} | {name: value for name, value in question.items() if value is not None}


def ask(question: Mapping[str, Any]) -> CapacityPlan:
    """The plan of a question; its requests become a data frame."""
    import pandas as pd

    requests: Workload = question["requests"]
    columns = {
        "arrival_s": requests.arrival_s,
        "context_tokens": requests.context_len,
        "cached_tokens": requests.cached_prefix,
        "output_tokens": requests.output_tokens,
    }
    return kvrsim.capacity(**dict(question) | {"requests": pd.DataFrame(columns)})


def contradictions(plan: CapacityPlan) -> Iterator[str]:
    """Claims of a plan that its own simulated requests, groups and prices contradict."""
    content = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    fleet, target = plan.first, plan.request.target
    if (content["answer"] is None) == plan.feasible:
        yield "answer and feasible differ"
    if fleet.runs:
        ttft_s = np.concatenate([run.ttft_s for run in fleet.runs])
        if not np.isclose(fleet.served_share, np.isfinite(ttft_s).mean()):
            yield f"served_share {fleet.served_share}, counted {np.isfinite(ttft_s).mean()}"
        in_time = int((ttft_s <= target.slo_s).sum())
        if plan.answer is not None and len(ttft_s) - in_time > target.most_late(len(ttft_s)):
            yield f"{in_time} of {len(ttft_s)} in time"
    if plan.answer is None:
        return
    if fleet.served_share < target.percentile / 100 - 1e-9:
        yield f"an answer that serves {fleet.served_share:.2%}"
    if plan.request.sure and not fleet.is_safe:
        yield "a sure answer that is not safe"
    if fleet.serving == "split" and (target.tpot_s is None) != (fleet.decode is None):
        yield "decoding is asked for and planned, or neither"
    groups = [*fleet.groups, *([fleet.decode] if fleet.decode else [])]
    gpus = sum(group.gpus_per_group * group.replicas for group in groups)
    if not gpus == fleet.total_gpus == content["answer"]["total_gpus"] <= plan.request.limits.max_gpus:
        yield f"{fleet.total_gpus} GPUs, counted {gpus}, allowed {plan.request.limits.max_gpus}"
    if fleet.total_cost_per_hour is not None and not np.isclose(fleet.total_cost_per_hour, 2.0 * gpus):
        yield f"{fleet.total_cost_per_hour} $/h, counted {2.0 * gpus}"
    if any(one.total_gpus < fleet.total_gpus for one in plan.alternatives):
        yield "a smaller alternative"
    for growth in plan.growth:
        if growth.num_gpus is not None and growth.num_gpus > plan.request.limits.max_gpus:
            yield f"{growth.times} times need {growth.num_gpus} GPUs, more than allowed"


def faults(question: Mapping[str, Any]) -> list[str]:
    """What is wrong with the answer to a question; a refusal that names the parameter is no fault."""
    try:
        plan = ask(question)
    except InputError:
        return []
    except Exception:
        return [traceback.format_exc()]
    return list(contradictions(plan))


def main() -> int:
    """Ask random questions and print those whose answers contradict themselves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder of traces; default: drawn ones")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=400, help="most requests of a question")
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    traces = drawn_traces(rng, 5000)
    if args.traces is not None:
        traces = {path.name: read_trace(str(path)) for path in sorted(args.traces.iterdir()) if path.is_file()}
    wrong = 0
    for number, question in zip(range(args.count), questions(rng, traces, args.requests), strict=False):
        found = faults(question)
        wrong += bool(found)
        shown = {name: value for name, value in question.items() if name != "requests"}
        trace = question["requests"]
        if found:
            print(f"{number}: {trace.name}, {len(trace)} requests, {shown}\n  " + "\n  ".join(found), flush=True)
    print(f"{args.count} questions, {wrong} with a fault")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
