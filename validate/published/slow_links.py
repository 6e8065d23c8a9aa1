"""The paper's columns at 10 and 1 GB/s under every reading: `python -m validate.published.slow_links`.

GPU-direct is off there, and the paper says neither how transfers cross the host nor which partition it
used. Readings: links of their own or one bus; messages that hold the compute streams (as at 300 GB/s) or
that overlap; even partitions, searched ones, or those searched at 300 GB/s. Rewrites docs/results/slow_links.md.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from kvrsim.builder import make_scenario
from kvrsim.executors.run import run_partition
from kvrsim.io.files import write_atomically
from kvrsim.kernels.profile import CalibrationProfile, SendStyle, load_profile
from kvrsim.partition import Partition
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from planner.search.search import search
from planner.simulate import run_simulation
from validate.published.rows import Row, read_rows

PAGE = Path(__file__).parents[2] / "docs" / "results" / "slow_links.md"
Network = Literal["bus", "switch"]
_NETWORKS: tuple[Network, ...] = ("bus", "switch")
_PARTITIONS = ("even", "searched", "of 300 GB/s")
_FACTORS = (0.7, 1.0, 1.3, 1.6, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0)  # of the bandwidth that the paper names
_GROWTHS = (0.8, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0)  # of a chunk over the one before
_BANDWIDTH = {"10GB/s": 10e9, "1GB/s": 1e9}
_SENDS: tuple[SendStyle, ...] = ("rendezvous", "overlap")
# Printed in the caption of the paper's Fig. 8 for 4 GPUs and 10 GB/s: TSP's TTFT over KVR's.
PRINTED_SPEEDUPS = "1.55 and 1.79"


def scenario_of(row: Row, profile: CalibrationProfile, network: Network, factor: float = 1.0) -> Scenario:
    """A row at 10 or 1 GB/s, or so many times as much, on that network."""
    return make_scenario(
        ctx=row.context_len,
        gpus=row.num_gpus,
        model=row.model,
        profile=profile,
        topology=network,
        link_bandwidth=_BANDWIDTH[row.link] * factor,
        link_latency=10e-6,
    )[0]


def _fast(row: Row, profile: CalibrationProfile) -> Scenario:
    """The row over NVLink."""
    return make_scenario(ctx=row.context_len, gpus=row.num_gpus, model=row.model, profile=profile)[0]


def main() -> None:
    """Simulate every row under every reading and write the page."""
    ten, one = ([row for row in read_rows() if row.link == link] for link in _BANDWIDTH)
    write_atomically(PAGE, _page(_readings(ten), _readings(one), least_error(one)).encode(), argument="page")
    print(PAGE.read_text())


def _readings(rows: list[Row]) -> list[str]:
    """A table: one line a reading."""
    base = load_profile("a100-eager")
    table: dict[str, list[float]] = {}
    speedups: dict[str, list[float]] = {}
    fast = {row: search(_fast(row, base), get_strategy("kvr-s")).partition.chunk_lens for row in rows}
    for network, sends, partition in itertools.product(_NETWORKS, _SENDS, _PARTITIONS):
        profile = replace(base, links=replace(base.links, sends=sends, sends_over_bus=sends))
        where = "one bus" if network == "bus" else "own links"
        how = f"{where}, {'held' if sends == 'rendezvous' else 'overlapped'}, {partition}"
        scenarios = [scenario_of(row, profile, network) for row in rows]
        table[how] = [
            run_simulation(
                scenario,
                strategy="kvr-e" if partition == "even" else "kvr-s",
                partition=fast[row] if partition == "of 300 GB/s" else None,
            ).ttft_s
            for row, scenario in zip(rows, scenarios, strict=True)
        ]
        speedups[how] = [
            run_simulation(scenario, strategy="tsp").ttft_s / ttft_s
            for row, scenario, ttft_s in zip(rows, scenarios, table[how], strict=True)
            if row.num_gpus == 4 and row.context_len in (8192, 12288)
        ]
    return _table(rows, table, speedups)


def _table(rows: list[Row], table: dict[str, list[float]], speedups: dict[str, list[float]]) -> list[str]:
    printed = PRINTED_SPEEDUPS if rows[0].link == "10GB/s" else "-"
    reported = np.array([row.ttft_s for row in rows])
    cases = [f"{row.num_gpus} x {row.context_len // 1024}k" for row in rows]
    lines = [
        "| reading | " + " | ".join(cases) + " | median error | mean error | TSP over KVR, 4 x 8k and 12k |",
        "|---" * (len(rows) + 4) + "|",
        "| **printed** | " + " | ".join(f"{value:g}" for value in reported) + f" | | | {printed} |",
    ]
    errors = {how: np.abs(np.array(values) / reported - 1) for how, values in table.items()}
    for how, values in table.items():
        ratios = " and ".join(f"{ratio:.2f}" for ratio in speedups[how])
        lines.append(
            f"| {how} | "
            + " | ".join(f"{value:.2f}" for value in values)
            + f" | {np.median(errors[how]):.1%} | {errors[how].mean():.1%} | {ratios} |"
        )
    return lines


def least_error(rows: list[Row]) -> float:
    """Mean absolute error of the best network, bandwidth and growth of the chunks for these rows together."""
    base, strategy = load_profile("a100-eager"), get_strategy("kvr-e")
    reported = np.array([row.ttft_s for row in rows])
    found = []
    for network, sends, factor in itertools.product(_NETWORKS, _SENDS, _FACTORS):
        profile = replace(base, links=replace(base.links, sends=sends, sends_over_bus=sends))
        scenarios = [scenario_of(row, profile, network, factor) for row in rows]
        for growth in _GROWTHS:
            partitions = [_growing(row.context_len, row.num_gpus, growth) for row in rows]
            pairs = zip(scenarios, partitions, strict=True)
            ttft_s = [run_partition(scenario, strategy, partition).ttft_s for scenario, partition in pairs]
            found.append(float(np.abs(np.array(ttft_s) / reported - 1).mean()))
    return min(found)


def _growing(tokens: int, ranks: int, growth: float) -> Partition:
    """Each chunk so many times as long as the one before."""
    shares = growth ** np.arange(ranks)
    ends = np.round(tokens * np.cumsum(shares) / shares.sum()).astype(int)
    return Partition(chunk_lens=tuple(int(chunk) for chunk in np.diff(ends, prepend=0)))


def _page(ten: list[str], one: list[str], least: float) -> str:
    lines = [
        "# The paper's columns at 10 and 1 GB/s",
        "",
        "Regenerated by `python -m validate.published.slow_links`. TTFT of Llama 7B in seconds, GPUs x context;",
        "profile `a100-eager`, which was not fitted to these rows. The paper turned the CUDA-direct link off for these",
        "networks. It prints one KVR time per row and does not name the partition.",
        "",
        "## 10 GB/s",
        "",
        *ten,
        "",
        "We read these rows as *one bus, overlapped, even*: transfers staged through the host leave the GPUs' streams",
        "alone, and a searched partition would not be slower on 4 GPUs than on 2, as the printed one is at 2k. No",
        "constant is fitted to these rows, but this reading is the best of the twelve above on these very rows: its",
        "error is that of a choice, not of a test.",
        "",
        "What stays unexplained: two GPUs are up to 11 % slower than printed at long contexts, and a bus makes TSP 2.5",
        "times as slow as KVR where the paper prints 1.55 and 1.79. Links of their own come nearer to those two and",
        "are far off for KVR on four GPUs: the machine's network was neither, quite.",
        "",
        "## 1 GB/s",
        "",
        *one,
        "",
        "Even chunks are impossible here: at 1 GB/s their messages alone would take longer than the printed TTFTs.",
        "We read these rows as *one bus, overlapped, searched*, which is what kvrsim would plan for such a link. It",
        "agrees with two GPUs within 12 %, except at 4k, where the paper prints 0.84 s, more than its 0.65 s on one",
        "GPU. No reading explains four GPUs up to 8k: the printed TTFTs are longer than those on two GPUs, although a",
        "partition whose first chunks are tiny would be as fast as on two. The partitions of the paper were not the",
        "best ones there, and it does not print them. Other cuts do not help: with chunks that grow by a constant",
        "factor, and that factor, the network and its bandwidth all fitted to these ten rows, the mean error is still",
        f"{least:.0%}. So nothing is fitted to them, and their errors are stated as they are.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
