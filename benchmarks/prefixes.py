"""Cached prefixes: TTFT by where their K and V lie and by strategy, and when queries go round instead of K and V."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from _report import write

import kvrsim
from kvrsim.choices import PrefixAccess
from kvrsim.executors.run import run_partition
from kvrsim.kernels.prefix import PrefixPlacement
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES, get_strategy
from kvrsim.units import format_tokens
from planner.access import placed_for
from planner.partitions import partition_of

ABOUT: dict[str, Any] = {"model": "llama-3-8b", "cluster": "h100-nvlink", "gpus": 8}
PREFIX = 2**17
NEW_TOKENS = (512, 1024, 2048, 4096, 8192)
NAMES = ("kvr-s", "tsp", "zigzag", "ring", "zigzag-ring", "ulysses", "tp")
PLACES = ("all", "sharded", "layers", "host", "remote:50GB/s", "remote:5GB/s")
BANDWIDTHS = (50e9, 100e9, 200e9, 355e9)


def scenario_of(new_tokens: int, **about: Any) -> Scenario:
    """A prompt of so many tokens behind the prefix."""
    return kvrsim.make_scenario(ctx=PREFIX + new_tokens, cached_prefix=PREFIX, **(ABOUT | about))[0]


def ttft_ms(scenario: Scenario, name: str) -> tuple[float, PrefixAccess | None]:
    """With the strategy's own partition, and how its ranks attend to the prefix."""
    strategy = get_strategy(name)
    placed = placed_for(scenario, strategy)
    cut = partition_of(placed, strategy)
    return 1e3 * run_partition(placed, strategy, cut).ttft_s, placed.prefix_access


def by_place(new_tokens: int) -> Iterator[str]:
    """One row a strategy, one column a placement."""
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
            told = {"pass-kv": " KV", "pass-q": " Q"}.get(str(access), "")
            cells.append(f"{found_ms:.1f}{told}")
        yield f"| {name} | " + " | ".join(cells) + " |"
    whole, _ = kvrsim.make_scenario(ctx=PREFIX + new_tokens, **ABOUT)
    again_ms = ttft_ms(whole, "kvr-s")[0]
    yield ""
    slowest_ms = best[PLACES[-1]]
    yield f"Prefix computed again (kvr-s): {again_ms:.0f} ms, {again_ms / slowest_ms:.1f} times the slowest load."


def access_ms(scenario: Scenario, access: PrefixAccess) -> float:
    """Ring attention with even chunks and that way to the prefix."""
    strategy = STRATEGIES["ring"]
    placed = replace(scenario, prefix_placement=PrefixPlacement(place="sharded"), prefix_access=access)
    return 1e3 * run_partition(placed, strategy, partition_of(placed, strategy)).ttft_s


def crossover(about: dict[str, Any], most: int = 2**16) -> int | None:
    """New tokens from which on passing K and V is as fast as passing queries; None: not up to `most`."""

    def kv_wins(new_tokens: int) -> bool:
        scenario = scenario_of(new_tokens, **about)
        return access_ms(scenario, "pass-kv") <= access_ms(scenario, "pass-q")

    low, high = 64, most
    if not kv_wins(high):
        return None
    while high - low > 64:
        middle = (low + high) // 128 * 64
        low, high = (low, middle) if kv_wins(middle) else (middle, high)
    return high


def inequality(flops_per_s: float, bytes_per_s: float) -> tuple[float, float]:
    """The paper's thresholds in new tokens: without and with the exchange of results (Algorithms 1 and 5)."""
    model = scenario_of(512).model
    ratio, ranks, width = model.num_key_value_heads / model.num_attention_heads, 8, 2
    hidden = ranks * flops_per_s * ratio * width / (2 * bytes_per_s)
    tokens = np.arange(64, 2**17)
    misses = tokens / (tokens + PREFIX)
    passes_kv = misses >= 2 * ratio - 4 * tokens * bytes_per_s / (ranks * flops_per_s * width)
    exchanged = float(tokens[passes_kv.argmax()]) if passes_kv.any() else np.inf
    missed = 2 * ratio / (1 - 2 * ratio) * PREFIX
    return min(hidden, missed), exchanged


def attention_flops(about: dict[str, Any], new_tokens: int = 4096) -> float:
    """FLOP/s that the profile's kernel reaches on a rank's queries and one rank's share of the prefix."""
    scenario = scenario_of(new_tokens, **about)
    (costs,) = scenario.layer_costs()
    mixer = scenario.model.layers[0].mixer
    chunk, keys = np.array([new_tokens / 8]), np.array([PREFIX / 8])
    one = costs.block_attention_s(chunk, keys, keys, keys) - costs.merge_s(chunk)
    return float(4 * mixer.num_attention_heads * mixer.head_dim * (chunk * keys / one)[0])  # type: ignore[union-attr]


def crossovers() -> Iterator[str]:
    """Simulated, by a profile and by the datasheet's roofline, beside the paper's inequalities."""
    yield "| costs | bandwidth, GB/s | attention, TFLOP/s | simulated | hidden K, V | with the results' exchange |"
    yield "|---|---|---|---|---|---|"
    for profile in ("roofline", "h100-flash"):
        for rate in BANDWIDTHS:
            about = {"profile": profile, "link_bandwidth": rate, "engine": "none", "link_latency": "0us"}
            if profile == "roofline":
                about.pop("engine")
            flops = attention_flops(about)
            hidden, exchanged = inequality(flops, rate)
            found = crossover(about)
            shown = "none up to 64k" if found is None else str(found)
            yield (f"| {profile} | {rate / 1e9:.0f} | {flops / 1e12:.0f} | {shown} | {hidden:.0f} | {exchanged:.0f} |")


def main() -> None:
    """All tables."""
    lines = [
        "Llama-3-8B on 8 H100 with NVLink, a cached prefix of 128k tokens (16 GiB of K and V), profile h100-flash with",
        "engine serving. All times are simulated; none of moving a prefix was measured.",
        "",
        "## TTFT by placement, ms",
        "",
        "KV: each rank has a share of the prefix, which goes to all ranks (pass-KV). Q: the queries go to the shares",
        "(pass-Q). Neither: each rank has, or loads, all that it needs. -: the strategy has no use for the placement.",
    ]
    for new_tokens in NEW_TOKENS:
        lines += ["", *by_place(new_tokens)]
    lines += [
        "",
        "## From how many new tokens on K and V should go round",
        "",
        "Ring attention, sharded prefix, links without latency. The paper (arXiv:2411.01783) passes K and V from",
        "N C e N_KV / (2 N_H BW) new tokens on, where attention hides them (Algorithm 1), or, with the exchange of",
        "results counted, from T / (T + P) = 2 N_KV / N_H - 4 T BW / (N C e) on (Algorithm 5). C is what the costs",
        "reach in attention of 512 queries to 16k keys, BW the bandwidth, e two bytes.",
        "",
        *crossovers(),
    ]
    write("prefixes", "python benchmarks/prefixes.py", lines)


if __name__ == "__main__":
    main()
