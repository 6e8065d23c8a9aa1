"""Strategies: context parallelism beside NVIDIA's predictions, hybrids ranked on two nodes, maps, many ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from _report import write

import kvrsim
from kvrsim.compile import build_program, for_strategy
from kvrsim.executors.batch import run_batch
from kvrsim.executors.event import EventSimulation
from kvrsim.executors.run import run_partition
from kvrsim.program import AllGather, Compute
from kvrsim.results.results import Plan
from kvrsim.scenario import Partition
from kvrsim.strategies import STRATEGIES, get_strategy
from kvrsim.units import format_tokens

KERNELS = {"model": "llama-2-7b", "profile": "a100-flash", "engine": "none"}  # theirs have no engine either
PREDICTED = Path(__file__).parent / "data" / "aiconfigurator_cp.json"
PARTS = ("products", "attention", "all_gather", "elementwise")
NODES = {"cluster": "h100-2x8-ndr400", "model": "llama-3-70b", "gpus": 16}


def context_parallel() -> Iterator[str]:
    """Zigzag of Llama-2-7B on profile a100-flash, part by part, beside aiconfigurator's own predictions."""
    yield "| GPUs | context | kvrsim, ms | aiconfigurator, ms | | products | attention | all-gather | element-wise |"
    yield "|---|---|---|---|---|---|---|---|---|"
    errors = []
    for row in json.loads(PREDICTED.read_text("utf-8"))["rows"]:
        parts, ttft_s = zigzag_parts(row["num_gpus"], row["context_len"])
        errors.append(1e3 * ttft_s / row["ttft_ms"] - 1)
        cells = [f"{1e3 * parts[part]:.1f} / {row[f'{part}_ms']:.1f}" for part in PARTS]
        times = f"{1e3 * ttft_s:.1f} | {row['ttft_ms']:.1f} | {errors[-1]:+.1%}"
        yield f"| {row['num_gpus']} | {format_tokens(row['context_len'])} | {times} | {' | '.join(cells)} |"
    yield ""
    mean, most = np.mean(np.abs(errors)), max(errors, key=abs)
    yield f"Mean absolute difference {mean:.1%}, largest {most:+.1%}."


def zigzag_parts(num_gpus: int, context_len: int) -> tuple[dict[str, float], float]:
    """Seconds by kind of operation on the last rank, and TTFT."""
    scenario, _ = kvrsim.make_scenario(ctx=context_len, gpus=num_gpus, **KERNELS)
    strategy, cut = get_strategy("zigzag"), Partition.even(context_len, num_gpus)
    run = run_partition(scenario, strategy, cut)
    quiet = scenario.without_communication()
    ops = [op for _, op in run.program.ops(num_gpus - 1) if isinstance(op, Compute)]
    attention_s = sum(op.device_s.item() for op in ops if "attention" in op.name)
    gathers_s = run.ttft_s - run_partition(quiet, strategy, cut).ttft_s
    assert any(isinstance(op, AllGather) for _, op in run.program.ops(0))
    elementwise_s = sum(op.device_s.item() for op in ops) - attention_s - products_s(num_gpus, context_len)
    parts = {"attention": attention_s, "all_gather": gathers_s, "elementwise": elementwise_s}
    return parts | {"products": products_s(num_gpus, context_len)}, run.ttft_s


def products_s(num_gpus: int, context_len: int) -> float:
    """Of the last rank's chunk, from the breakdown of the event executor's run."""
    run = kvrsim.simulate(strategy="zigzag", ctx=context_len, gpus=num_gpus, breakdown=True, **KERNELS)
    assert run.breakdown is not None
    return sum(row.seconds for row in run.breakdown.rows if row.kind == "gemm" and row.rank == num_gpus - 1)


def ranked(ctx: str) -> Iterator[str]:
    """All strategies and hybrids on two nodes."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    plan: Plan = kvrsim.plan(ctx=ctx, strategies=["all"], **NODES)  # type: ignore[arg-type]
    took = f"{time.perf_counter() - begin_s:.1f} s, of which {time.process_time() - begin_cpu_s:.1f} s on a CPU"
    yield f"{len(plan.strategies)} strategies at {ctx}, in {took}:"
    yield ""
    yield "| | strategy | TTFT, s | low to high | exposed communication, s | largest GPU, GB | fits in 80 GB |"
    yield "|---|---|---|---|---|---|---|"
    for place, one in enumerate(plan.strategies, start=1):
        peak = max(memory.total for memory in one.memory) / 1e9
        interval = f"{one.ttft_low_s:.3g} to {one.ttft_high_s:.3g}"
        fits = "yes" if one.fits else "no"
        cells = one.strategy, f"{one.ttft_s:.3g}", interval, f"{one.exposed_comm_s:.3g}", f"{peak:.0f}", fits
        yield f"| {place} | {' | '.join(cells)} |"


def many_ranks() -> Iterator[str]:
    """Nodes of eight H100: 10M tokens on 1024 GPUs, even chunks, one program built and run."""
    yield "| strategy | GPUs | context | simulated TTFT, s | CPU seconds |"
    yield "|---|---|---|---|---|"
    for num_gpus, ctx in ((128, "1m"), (1024, "10m")):
        scenario, _ = kvrsim.make_scenario(**NODES | {"ctx": ctx, "gpus": num_gpus})  # type: ignore[arg-type]
        for name in ("kvr-e", "ring", "striped", "zigzag", "tp8+kvr-e", "tp8+ring", "tp8+zigzag"):
            strategy = get_strategy(name)
            placed = for_strategy(scenario, strategy)
            cut = Partition.even(placed.request.new_tokens, placed.cluster.num_gpus)
            begin_s = time.process_time()
            ttft_s = run_partition(placed, strategy, cut).ttft_s
            yield f"| {name} | {num_gpus} | {ctx} | {ttft_s:.4g} | {time.process_time() - begin_s:.2f} |"


def agreement(names: Sequence[str]) -> Iterator[str]:
    """The batch executor against the event executor, every rank."""
    most = 0.0
    for name in names:
        for profile in ("a100-eager", "a100-flash", "roofline"):
            strategy = get_strategy(name)
            scenario, _ = kvrsim.make_scenario(ctx=6001, gpus=8, model="llama-2-7b", profile=profile)
            placed = for_strategy(scenario, strategy)
            cut = Partition.even(6001, 5 if strategy.pipeline else placed.cluster.num_gpus)
            program = build_program(placed, strategy, [np.array([float(chunk)]) for chunk in cut.chunk_lens])
            event = np.array(EventSimulation(program, placed.cluster, record=False).finish_s)
            most = max(most, float(np.abs(run_batch(program, placed.cluster)[:, 0] / event - 1).max()))
    yield f"{len(names)} strategies x 3 profiles, 8 GPUs, 6001 tokens: at most {most:.1e} of a rank's time apart."


def maps() -> Iterator[str]:
    """Break-even lengths of Llama-3-8B over one GPU."""
    begin_s = time.process_time()
    bandwidths = ["1GB/s", "10GB/s", "100GB/s", "400GB/s"]
    found = kvrsim.map_strategies(
        ctx="512:64k:x2",
        gpus="2,4,8",
        link_bandwidths=bandwidths,
        model="llama-3-8b",
        cluster="h100-nvlink",
        strategies=["tsp", "kvr-s", "zigzag", "striped", "tp", "pp"],
    )
    yield f"{len(found.points)} points in {time.process_time() - begin_s:.1f} CPU seconds."
    yield ""
    yield "| links | GPUs | fastest at 1k, 8k, 64k | faster than one GPU from (tokens) |"
    yield "|---|---|---|---|"
    even = [one for one in found.break_evens() if one.over == "single"]
    for bandwidth in found.bandwidths:
        for num_gpus in found.gpu_counts:
            best = [
                f"{one.strategy} {one.speedup_over_single:.2f}x" if one.pays else "one GPU"
                for one in found.winners()
                if (one.link_bandwidth_bytes_per_s, one.num_gpus if one.pays else num_gpus) == (bandwidth, num_gpus)
                and one.context_len in (1024, 8192, 65536)
            ]
            here = [one for one in even if (one.link_bandwidth_bytes_per_s, one.num_gpus) == (bandwidth, num_gpus)]
            lengths = ", ".join(f"{one.strategy} {length(one.context_len, one.known)}" for one in here)
            yield f"| {bandwidth / 1e9:g} GB/s | {num_gpus} | {', '.join(best)} | {lengths} |"


def length(context_len: int | None, known: str) -> str:
    """A break-even length in short."""
    if context_len is None:
        return "never"
    return str(context_len) if known == "interpolated" else f"<= {context_len}"


def main() -> None:
    """Run all, and write benchmarks/results/strategies.md."""
    names = [name for name in STRATEGIES if name not in ("single", "kvr-p")]
    lines = [
        "All times but those said to be a CPU's are simulated; nothing was tuned to any figure here.",
        "",
        "## Context parallelism beside aiconfigurator",
        "",
        "Llama-2-7B, FP16, `zigzag` on profile a100-flash, against NVIDIA's aiconfigurator-core 0.12.0 (a100_sxm,",
        "sglang), whose predictions are in benchmarks/data/aiconfigurator_cp.json. Both are sums of kernels; neither",
        "was measured whole. Parts: kvrsim / theirs, ms.",
        "",
        *context_parallel(),
        "",
        *WHY,
        "",
        "## Two nodes of eight H100, 400 Gb/s a GPU between them, Llama-3-70B",
        "",
        *ranked("128k"),
        "",
        *ranked("1m"),
        "",
        "## Break-even lengths, Llama-3-8B on H100 with links of so much bandwidth",
        "",
        *maps(),
        "",
        "## Many ranks, Llama-3-70B",
        "",
        *many_ranks(),
        "",
        "## Both executors",
        "",
        *agreement([*names, "tp2+kvr-s", "tp4+ring", "tp2+zigzag", "tp2+pp"]),
    ]
    write("strategies", "python benchmarks/strategies.py", lines)


WHY = [
    "Why they differ; parts err more than sums, since they err in opposite directions:",
    "",
    "- Products (-8 to +4 %): both rest on NVIDIA's rows of sglang, so this is no independent test. kvrsim rounds to",
    "  whole tiles, theirs interpolates.",
    "- Attention (-6 to +45 %): theirs is two calls looked up; kvrsim's goes by tiles and waves, and calls with a",
    "  prefix were not among the rows that the profile was fitted to. Worst for late pieces just above a wave: 512",
    "  queries of 32 heads are 256 tiles of 64 on 216 slots (8 GPUs at 8k), so a second wave is nearly empty.",
    "- All-gather (-12 to +4 %): the same NCCL measurements, by two segments here, looked up there.",
    "- Element-wise (1.4 to 1.7 times theirs): rotary embedding and both residuals are counted here, two norms and the",
    "  activation there. The host's clock is hidden at all of these sizes.",
]


if __name__ == "__main__":
    main()
