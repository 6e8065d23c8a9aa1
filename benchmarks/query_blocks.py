"""KV-Runahead in query blocks: TTFT, memory and numbers of blocks, beside KVR-S, zigzag and every choice there is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from _report import write

from kvrsim.builder import make_scenario
from kvrsim.executors.run import run_partition
from kvrsim.memory import memory_of
from kvrsim.program import Op
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import STRATEGIES, Step, Strategy
from planner.search.bound import lower_bound_s
from planner.search.search import SearchResult, search

KVR_B, ZIGZAG = STRATEGIES["kvr-b"], STRATEGIES["zigzag"]
FIXED = (1, 2, 4, 8)
EACH = (1, 2, 4, 8, 16)  # tried on every rank by itself


def in_blocks(*counts: int) -> Strategy:
    """KVR-B with a choice of so many blocks."""
    return replace(KVR_B, name="in-blocks", query_blocks=counts)


def found_in(scenario: Scenario, strategy: Strategy) -> tuple[SearchResult, str]:
    """The best partition, and the number of blocks of each rank."""
    found = search(scenario, strategy)
    blocks = run_partition(scenario, strategy, found.partition).program.most_query_blocks or ()
    return found, ", ".join(map(str, blocks))


def peak(scenario: Scenario, strategy: Strategy, partition: Partition) -> str:
    """Of the rank that needs most."""
    return f"{max(rank.total for rank in memory_of(scenario, strategy, partition)) / 2**30:.1f} GiB"


def row(model: str, gpus: int, cluster: str | None = None) -> str:
    """One setting: each number of blocks with chunks searched for it, then any number a rank."""
    scenario, _ = make_scenario(ctx="16k", gpus=gpus, model=model, cluster=cluster)
    times = [search(scenario, in_blocks(count)).ttft_s for count in FIXED]
    found, blocks = found_in(scenario, KVR_B)
    whole = search(scenario, STRATEGIES["kvr-s"])
    gap = found.ttft_s / lower_bound_s(scenario, KVR_B, found.ttft_s) - 1
    even = Partition.even(scenario.request.new_tokens, gpus)
    zigzag_s = run_partition(scenario, ZIGZAG, even).ttft_s
    cells = [f"{seconds:.3f} s" for seconds in (*times, found.ttft_s)]
    said = [model, str(gpus), *cells, blocks, f"{whole.ttft_s / found.ttft_s - 1:+.1%}", f"{gap:.1%}"]
    peaks = [peak(scenario, STRATEGIES["kvr-s"], whole.partition), peak(scenario, KVR_B, found.partition)]
    return f"| {' | '.join([*said, f'{zigzag_s:.3f} s', *peaks])} |"


def of_each(counts: tuple[int, ...]) -> Strategy:
    """So many blocks on each rank."""

    def layer(step: Step, rank: int) -> list[Op]:
        return list(KVR_B.layer(replace(step, query_blocks=(counts[rank],)), rank))

    return replace(in_blocks(1), name="each", layer=layer)


def loss(model: str, gpus: int, ctx: str, cluster: str | None = None) -> str:
    """The search against every number on every rank, each with chunks searched for it, and one number for all."""
    scenario, _ = make_scenario(ctx=ctx, gpus=gpus, model=model, cluster=cluster)
    found, blocks = found_in(scenario, replace(KVR_B, query_blocks=EACH))
    alone_s = min(search(scenario, in_blocks(count)).ttft_s for count in EACH)
    tried = {counts: search(scenario, of_each(counts)).ttft_s for counts in product(EACH, repeat=gpus)}
    best = min(tried, key=lambda counts: tried[counts])
    shown = ", ".join(map(str, best))
    return (
        f"| {model} | {gpus} | {ctx} | {len(tried)} | {tried[best]:.4f} s ({shown}) | {found.ttft_s:.4f} s ({blocks}) |"
        f" {found.ttft_s / tried[best] - 1:+.2%} | {alone_s / tried[best] - 1:+.2%} |"
    )


def main() -> None:
    """Simulate, and write benchmarks/results/query_blocks.md."""
    head = "| model | GPUs | 1 block | 2 | 4 | 8 | `kvr-b` | its blocks, by rank | over `kvr-s` | gap to the bound |"
    head += " `zigzag` | peak, `kvr-s` | peak, `kvr-b` |"
    rule = "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    lines = ["16,384 tokens, TTFT in the simulator. 1, 2, 4 and 8 blocks: on every rank, with chunks searched for it."]
    lines += ["`kvr-b`: any number a rank. Peak: memory of the rank that needs most.", ""]
    lines += ["## Eager attention, 8 A100 over NVLink (the default machine)", "", head, rule]
    lines += [row(model, gpus) for model in ("llama-7b", "falcon-7b") for gpus in (2, 4, 8)]
    lines += [
        "",
        "## Flash attention, H100 over NVLink",
        "",
        "The kernel skips the masked half by itself.",
        "",
        head,
        rule,
    ]
    lines += [row(model, gpus, "h100-nvlink") for model in ("llama-7b", "falcon-7b") for gpus in (2, 4, 8)]
    lines += [
        "",
        "## Against every choice",
        "",
        f"Every number of {EACH} on every rank, with chunks searched for each.",
    ]
    lines += ["", "| model | GPUs | tokens | choices | best choice | `kvr-b` | longer | one number for all ranks |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for model in ("llama-7b", "falcon-7b"):
        lines += [loss(model, 2, ctx) for ctx in ("2k", "4k", "16k")] + [loss(model, 3, "8k")]
    write("query_blocks", "python benchmarks/query_blocks.py", lines)


if __name__ == "__main__":
    main()
