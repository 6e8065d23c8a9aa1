"""TTFT with a cached prefix, by the placement of its K and V and by strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import kvrsim
from kvrsim.choices import PrefixAccess
from kvrsim.execution import execute as executed
from kvrsim.executors.access import execution_of
from kvrsim.executors.run import run_partition
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from kvrsim.units import format_tokens
from planner.candidates import partition_of
from validate.report import write_benchmark

ABOUT: dict[str, Any] = {"model": "llama-3-8b", "cluster": "h100-nvlink", "gpus": 8}
PREFIX = 2**17
NEW_TOKENS = (512, 1024, 2048, 4096, 8192)
NAMES = ("kvr-s", "tsp", "zigzag", "ring", "zigzag-ring", "ulysses", "tp")
MARKS: dict[PrefixAccess | None, str] = {"pass-kv": " KV", "pass-q": " Q"}
PLACES = ("all", "sharded", "host", "remote:50GB/s", "remote:5GB/s")


def scenario_of(new_tokens: int, **about: Any) -> Scenario:
    """The scenario of a prompt with this number of tokens after the prefix."""
    return kvrsim.make_scenario(ctx=PREFIX + new_tokens, cached_prefix=PREFIX, **(ABOUT | about))[0]


def ttft_ms(scenario: Scenario, name: str) -> tuple[float, PrefixAccess | None]:
    """TTFT in ms with the strategy's own partition, and how its ranks attend to the prefix."""
    strategy = get_strategy(name)
    placed = execution_of(scenario, strategy).placed
    cut = partition_of(executed(placed, strategy))
    return 1e3 * run_partition(executed(placed, strategy), cut).ttft_s, placed.prefix_access


def by_place(new_tokens: int) -> Iterator[str]:
    """Yield a table with one row per strategy and one column per placement."""
    yield f"| {format_tokens(new_tokens)} new tokens | " + " | ".join(PLACES) + " |"
    yield "|---" * (len(PLACES) + 1) + "|"
    best = dict.fromkeys(PLACES, np.inf)
    for name in NAMES:
        cells = []
        for place in PLACES:
            try:
                found_ms, access = ttft_ms(scenario_of(new_tokens, prefix_placement=place), name)
            except kvrsim.InputError:
                cells.append("-")
                continue
            best[place] = min(best[place], found_ms)
            cells.append(f"{found_ms:.1f}{MARKS.get(access, '')}")
        yield f"| {name} | " + " | ".join(cells) + " |"
    whole, _ = kvrsim.make_scenario(ctx=PREFIX + new_tokens, **ABOUT)
    again_ms = ttft_ms(whole, "kvr-s")[0]
    yield ""
    slowest_ms = best[PLACES[-1]]
    yield f"Prefix computed again (kvr-s): {again_ms:.0f} ms, {again_ms / slowest_ms:.1f} times the slowest load."


def main() -> None:
    """Write benchmarks/results/prefixes.md, with one table per number of new tokens."""
    lines = [
        "Llama-3-8B on 8 H100 with NVLink, a cached prefix of 128k tokens (16 GiB of K and V), profile h100-flash with",
        "engine serving. All times are simulated; none of moving a prefix was measured.",
        "",
        "## TTFT by placement, ms",
        "",
        "KV: each rank has a share of the prefix, which goes to all ranks. Q: queries go to the shares (pass-q).",
        "Else each rank has, or loads, all that it needs. -: the strategy has no use for the placement.",
    ]
    for new_tokens in NEW_TOKENS:
        lines += ["", *by_place(new_tokens)]
    write_benchmark("prefixes", lines)


if __name__ == "__main__":
    main()
