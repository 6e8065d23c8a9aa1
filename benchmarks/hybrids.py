"""Hybrid and other models: the cost of latents and states in a chain of ranks, and the gain by KV-Runahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np

import kvrsim
from kvrsim.compile import build_program, columns
from kvrsim.execution import execute as executed
from kvrsim.execution import place
from kvrsim.executors.run import run_program
from kvrsim.kernels.attention import LatentCost
from kvrsim.model.load import load_model
from kvrsim.model.mixers import Recurrence
from kvrsim.program import Compute, Op, Program, Recv, Send
from kvrsim.results.results import Plan
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import STRATEGIES
from kvrsim.units import format_seconds
from validate.report import write_benchmark

MODELS = {  # dtype with which a GPU of 141 GB holds the whole model, if there is one; None: the model's own
    "llama-3.1-70b": "fp8",
    "gpt-oss-120b": None,
    "deepseek-v3": None,
    "qwen3.5-35b-a3b": None,
    "qwen3.5-397b-a17b": "fp8",
    "nemotron-h-56b": "fp8",
}
CLUSTERS = ("h100-nvlink", "h200-nvlink")
CONTEXTS = ("4k", "16k", "32k", "64k", "128k")
COMPARED = ("kvr-s", "kvr-e", "tsp", "tp", "pp")
NUM_GPUS = 8


def expanded_prefix(cluster: str) -> Iterator[str]:
    """Yield a table for DeepSeek-V3: time to expand earlier ranks' latents on the last of eight ranks, even chunks."""
    yield "| context | queries of a rank | expanding the prefix, of the layer | attention expanded | absorbed |"
    yield "|---|---:|---:|---:|---:|"
    for ctx in CONTEXTS:
        scenario, _ = kvrsim.make_scenario(**asked("deepseek-v3", ctx, cluster))  # type: ignore[arg-type]
        costs = place(scenario, STRATEGIES["kvr-s"]).placed.layer_costs()[-1]
        mixing = costs.mixer
        assert isinstance(mixing, LatentCost)
        chunk = np.array([scenario.request.context_len / NUM_GPUS])
        prefix = (NUM_GPUS - 1) * chunk
        expand_s, mix_s = mixing.expand_s(prefix)[0], mixing.attention_s(chunk, prefix)[0]
        layer_s = costs.qkv_s(chunk)[0] + mix_s + costs.output_mlp_s(chunk)[0]
        absorbed_s = mixing.absorbed_s(chunk, prefix)[0]
        times = f"{expand_s / layer_s:.1%} | {format_seconds(mix_s)} | {format_seconds(absorbed_s)}"
        yield f"| {ctx} | {chunk[0]:.0f} | {times} |"


def compared(cluster: str) -> Iterator[str]:
    """Yield a table of the strategies' TTFTs on eight GPUs."""
    head = " | ".join(COMPARED)
    yield f"| model | context | {head} | fastest | over the next | searched over even chunks | fastest that fits |"
    yield f"|---|---:|{'---:|' * len(COMPARED)}---|---:|---:|---|"
    for name in MODELS:
        for ctx in CONTEXTS:
            plan = planned(name, ctx, cluster)
            times = {one.strategy: one for one in plan.strategies}
            ranked = sorted(times.values(), key=lambda one: one.ttft_s)
            cells = [cell(times[one].ttft_s, fits=times[one].fits) if one in times else "-" for one in COMPARED]
            gain = f"{times['kvr-e'].ttft_s / times['kvr-s'].ttft_s - 1:+.1%}"
            fitting = next((one.strategy for one in ranked if one.fits), "none")
            best = f"{ranked[0].strategy} | {ranked[1].ttft_s / ranked[0].ttft_s - 1:+.1%} | {gain} | {fitting}"
            yield f"| {name} | {ctx} | {' | '.join(cells)} | {best} |"


def cell(ttft_s: float, *, fits: bool) -> str:
    """Format milliseconds; in brackets if the memory is too small."""
    text = f"{1e3 * ttft_s:.4g}"
    return text if fits else f"({text})"


@cache
def planned(name: str, ctx: str, cluster: str) -> Plan:
    """The plan on eight GPUs; strategies that do not fit are included."""
    return kvrsim.plan(**asked(name, ctx, cluster), strategies=list(COMPARED))  # type: ignore[arg-type]


def asked(name: str, ctx: str, cluster: str) -> dict[str, object]:
    """Arguments of the plan, without the strategies."""
    dtype = {} if MODELS[name] is None else {"dtype": MODELS[name]}
    return {"model": name, "ctx": ctx, "cluster": cluster, "gpus": NUM_GPUS, **dtype}


def states(cluster: str) -> Iterator[str]:
    """Yield a table of the cost of waiting for the state of the previous rank."""
    yield "| model | context | kvr-s, ms | with states at once | difference | scan s | message h | (p - 1)(s + h) |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    strategy = STRATEGIES["kvr-s"]
    for name in MODELS:
        if not any(isinstance(layer.mixer, Recurrence) for layer in load_model(name).layers):
            continue
        for ctx in CONTEXTS:
            plan = planned(name, ctx, cluster)
            found = next(one for one in plan.strategies if one.strategy == "kvr-s")
            scenario, _ = kvrsim.make_scenario(**asked(name, ctx, cluster))  # type: ignore[arg-type]
            placed = place(scenario, strategy).placed
            program = build_program(
                executed(placed, strategy), columns(Partition(chunk_lens=found.partition).chunk_lens)
            )
            whole_s, free_s = (run_program(one, placed.cluster)[-1][0] for one in (program, without_states(program)))
            scan_s, message_s = longest(program, placed)
            bound_s = (NUM_GPUS - 1) * (scan_s + message_s)
            times = (f"{1e3 * whole_s:.4g}", f"{1e3 * free_s:.4g}", f"{whole_s / free_s - 1:+.2%}")
            parts = tuple(map(format_seconds, (scan_s, message_s, bound_s)))
            yield f"| {name} | {ctx} | {' | '.join((*times, *parts))} |"


def without_states(program: Program) -> Program:
    """The same program, but no rank waits for a state."""

    def kept(op: Op) -> bool:
        return not (isinstance(op, Send | Recv) and op.payload == "state")

    layers = tuple(tuple(tuple(filter(kept, ops)) for ops in ranks) for ranks in program.layers)
    return replace(program, layers=layers)


def longest(program: Program, scenario: Scenario) -> tuple[float, float]:
    """Seconds of the longest scan, and of the longest message with a state."""
    ops = [op for ranks in program.layers for rank in ranks for op in rank]
    scan_s = max(float(op.device_s[0]) for op in ops if isinstance(op, Compute) and op.name == "scan")
    path = scenario.cluster.path(0, 1)
    sent = max(float(np.max(op.nbytes)) for op in ops if isinstance(op, Send) and op.payload == "state")
    return scan_s, float(path.busy_s(np.array(sent)) + path.latency_s)


def main() -> None:
    """Compute all tables, and write benchmarks/results/hybrids.md."""
    lines = [
        "All times are simulated.",
        "",
        "## Latent attention: expanded or absorbed",
        "",
        f"DeepSeek-V3, {CLUSTERS[-1]}, the last of eight ranks with even chunks:",
        "",
        *expanded_prefix(CLUSTERS[-1]),
    ]
    for cluster in CLUSTERS:
        lines += [
            "",
            f"## Eight GPUs, {cluster}: TTFT, ms",
            "",
            "In brackets: a GPU does not hold it. The last columns: by how much the fastest is ahead of the next, what",
            "searching the partition is worth over even chunks, and the fastest that fits.",
            "",
            *compared(cluster),
        ]
    lines += ["", f"## What waiting for states costs, {CLUSTERS[-1]}, kvr-s", "", *states(CLUSTERS[-1])]
    write_benchmark("hybrids", lines)


if __name__ == "__main__":
    main()
