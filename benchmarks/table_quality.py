"""Quality of partitions from a lookup table (KVR-P) compared with searched ones (KVR-S), and seconds to build a table.

TTFTs are simulated. The seconds of building are measured.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvrsim.builder import make_scenario
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import STRATEGIES
from planner.processes import Pool, cores
from planner.search.minimise import Evaluator
from planner.search.search import search
from planner.table.build import make_table
from planner.table.table import PartitionTable, look_up
from validate.report import write_benchmark

KVR = STRATEGIES["kvr-s"]
GPU_COUNTS = (2, 4, 8)
PRINTED = Path(__file__).parents[1] / "validate" / "data" / "kv_runahead_icml2024_figures.json"
ROUNDINGS = (None, 1)  # None: boundaries at steps of the cost, as in KVR-P; 1: boundaries at the nearest token
SETTINGS: dict[str, dict[str, str | float]] = {
    "a100-eager (default)": {},
    "a100-eager at 10 GB/s": {"link_bandwidth": 1e10},
    "a100-flash": {"profile": "a100-flash"},
    "h100-flash": {"cluster": "h100-nvlink"},
    "falcon-7b, a100-eager": {"model": "falcon-7b"},
}


def at(scenario: Scenario, num_gpus: int, context_len: int) -> Scenario:
    """The scenario with another context and number of GPUs."""
    return replace(scenario.on_gpus(num_gpus), request=replace(scenario.request, context_len=context_len))


def plain(shares: Sequence[float], tokens: int) -> tuple[int, ...]:
    """Chunks with these shares, with boundaries at the nearest token."""
    ends = np.round(np.cumsum(shares)[:-1] * tokens).astype(int)
    return tuple(int(chunk) for chunk in np.diff([0, *ends, tokens]))


def looked_up(table: PartitionTable, num_gpus: int, context_len: int, rounding: int | None) -> tuple[int, ...]:
    """KVR-P's chunks with one of ROUNDINGS."""
    found = look_up(table, num_gpus, context_len)
    return plain(found.fractions, context_len) if rounding == 1 else found.partition


def above_searched(
    scenario: Scenario, table: PartitionTable, num_gpus: int, searched_s: dict[int, float], rounding: int | None
) -> dict[int, float]:
    """Relative differences of KVR-P's TTFT from KVR-S's, by context."""
    found = {}
    for context_len, best_s in searched_s.items():
        cut = Partition(chunk_lens=looked_up(table, num_gpus, context_len, rounding))
        ttft_s = Evaluator(at(scenario, num_gpus, context_len), KVR).one(cut.chunk_lens)
        found[context_len] = ttft_s / best_s - 1
    return found


def between_entries(name: str, options: dict[str, str | float], lengths: range, apart: int) -> list[str]:
    """Rows of a setting: mean and largest difference for each rounding, over contexts between entries."""
    scenario, _ = make_scenario(ctx=max(lengths), gpus=8, **options)  # type: ignore[arg-type]
    table = make_table(scenario, GPU_COUNTS, lengths[::apart])
    lines = []
    for num_gpus in GPU_COUNTS:
        inside = [length for index, length in enumerate(lengths) if index % apart]
        searched_s = {length: search(at(scenario, num_gpus, length), KVR).ttft_s for length in inside}
        cells = []
        for rounding in ROUNDINGS:
            above = above_searched(scenario, table, num_gpus, searched_s, rounding)
            worst = max(above, key=above.__getitem__)
            cells.append(f"{np.mean(list(above.values())):+.2%}, {above[worst]:+.2%} ({worst})")
        every = lengths.step * apart
        lines.append(f"| {name} | {every} | {num_gpus} | {len(inside)} | {' | '.join(cells)} |")
    return lines


def printed_partition() -> list[str]:
    """Compare the paper's 10k partition on four GPUs, interpolated from 8k and 12k, with our interpolation."""
    shown = next(row for row in json.loads(PRINTED.read_text())["partitions"] if row["num_gpus"] == 4)
    scenario, _ = make_scenario(ctx=12288, gpus=4)
    found = look_up(make_table(scenario, (4,), (8192, 12288)), 4, shown["context_len"])
    here = np.array(found.fractions)
    away = here - np.array(shown["shares"])
    ttft = Evaluator(at(scenario, 4, found.context_len), KVR).ttft_s
    rows = np.array([found.partition, plain(shown["shares"], found.context_len)], dtype=float)
    ours_s, printed_s = ttft(rows)
    return [
        f"Printed: {shown['printed_as']} of 10k, four GPUs, llama-7b ({shown['place']}).",
        f"Interpolated here from entries at 8k and 12k: [{', '.join(f'{share:.3f}' for share in here)}]; the largest",
        f"difference is {np.abs(away).max():.3f} of the context. Simulated, the printed partition takes",
        f"{printed_s:.4f} s, the one looked up {ours_s:.4f} s.",
    ]


def beyond_entries() -> list[str]:
    """Differences of KVR-P from KVR-S at contexts outside the table's range."""
    scenario, _ = make_scenario(ctx=16384, gpus=8)
    table = make_table(scenario, GPU_COUNTS, range(4096, 16385, 4096))
    lines = []
    for context_len in (2048, 3072, 24576, 32768, 65536):
        cells = []
        for num_gpus in GPU_COUNTS:
            best_s = search(at(scenario, num_gpus, context_len), KVR).ttft_s
            above = above_searched(scenario, table, num_gpus, {context_len: best_s}, None)
            cells.append(f"{above[context_len]:+.2%}")
        lines.append(f"| {context_len} | {' | '.join(cells)} |")
    return lines


def building() -> list[str]:
    """Measure seconds to build 96 entries, and compare the tables that different workers write."""
    scenario, _ = make_scenario(ctx=32768, gpus=8)
    lines, texts = [], set()
    pools = [Pool(jobs=1), Pool(jobs=cores()), Pool(jobs=cores()), Pool(jobs=cores(), backend="dask")]
    for pool in pools:
        begin_s, own_s = time.perf_counter(), time.process_time()
        try:
            with pool:
                text = make_table(scenario, GPU_COUNTS, range(1024, 32769, 1024), pool=pool).to_json()
        except Exception as error:  # for a missing package, the error is shown in the table
            lines.append(f"| {pool.backend} | {pool.jobs} | {error} | | |")
            continue
        wall_s, own_s = time.perf_counter() - begin_s, time.process_time() - own_s
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        who = "this process" if pool.is_here else pool.backend
        lines.append(f"| {who} | {pool.jobs} | {wall_s:.1f} s | {own_s:.1f} s | {digest} |")
        texts.add(text)
    busy = f"Processes that wanted a core meanwhile, on average (these and others'): {os.getloadavg()[0]:.1f}."
    return [*lines, "", f"{len(texts)} different file{'s' * (len(texts) != 1)}. {busy}"]


def main() -> None:
    """Measure, and write benchmarks/results/table_quality.md."""
    lines = ["## Between entries", ""]
    lines += ["TTFT of KVR-P above that of KVR-S's own search, simulated: mean, and worst (at). Columns: rounding."]
    lines += ["", "| setting | entries every | GPUs | contexts | to jumps (default) | nearest token |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, options in SETTINGS.items():
        lines += between_entries(name, options, range(4096, 32769, 512), 8)
    lines += between_entries("a100-eager (default)", {}, range(1024, 16385, 256), 4)
    lines += ["", "## The printed partition", "", *printed_partition()]
    lines += ["", "## Beyond entries", "", "A table of 4k to 16k by 4k; KVR-P above KVR-S, simulated.", ""]
    lines += ["| context | 2 GPUs | 4 GPUs | 8 GPUs |", "|---|---|---|---|", *beyond_entries()]
    lines += ["", "## Building", "", "{2, 4, 8} GPUs, 1k to 32k by 1k: 96 entries, measured here.", ""]
    lines += ["| who works | processes | wall clock | CPU of the first process | sha256 |", "|---|---|---|---|---|"]
    write_benchmark("table_quality", [*lines, *building()])


if __name__ == "__main__":
    main()
