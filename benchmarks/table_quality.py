"""Quality of partitions from a lookup table (KVR-P) compared with searched ones (KVR-S), and seconds to build a table.

KVR-P has two lookups: the table's interpolation refined by simulations, and the table alone (examples/read_table.py).

TTFTs are simulated. The seconds of building are measured. Random lookups are kept in build/, so the command resumes
where it was stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.execution import place
from kvrsim.executors.access import execution_of
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES
from planner.processes import Pool, cores
from planner.search.minimise import Evaluator
from planner.search.search import search
from planner.table.build import make_table
from planner.table.table import PartitionTable, interpolated, look_up, refined_lookup
from validate.report import write_benchmark

KVR = STRATEGIES["kvr-s"]
LOOKUP = STRATEGIES["kvr-p"]
GPU_COUNTS = (2, 4, 8)
PRINTED = Path(__file__).parents[1] / "validate" / "data" / "kv_runahead_icml2024_figures.json"
WAYS = ("refined", "table alone", "nearest token")  # nearest token: the interpolated shares, rounded
KEPT = Path(__file__).parents[1] / "build" / "table_quality.jsonl"  # the random lookups so far
SETTINGS: dict[str, dict[str, str | float]] = {
    "a100-eager (default)": {},
    "a100-flash": {"profile": "a100-flash"},
    "h100-flash": {"cluster": "h100-nvlink"},
}


def at(scenario: Scenario, num_gpus: int, context_len: int) -> Scenario:
    """The scenario with another context and number of GPUs."""
    return replace(scenario.on_gpus(num_gpus), request=replace(scenario.request, context_len=context_len))


def plain(shares: Sequence[float], tokens: int) -> tuple[int, ...]:
    """Chunks with these shares, with boundaries at the nearest token."""
    ends = np.round(np.cumsum(shares)[:-1] * tokens).astype(int)
    return tuple(int(chunk) for chunk in np.diff([0, *ends, tokens]))


def looked_up(scenario: Scenario, table: PartitionTable, way: str) -> tuple[int, ...]:
    """KVR-P's chunks in one of WAYS."""
    num_gpus, context_len = scenario.cluster.num_gpus, scenario.request.context_len
    match way:
        case "refined":
            return refined_lookup(table, place(scenario, LOOKUP)).partition
        case "table alone":
            return look_up(table, num_gpus, context_len).partition
    return plain(interpolated(table, num_gpus, context_len, 0).shares, context_len)


def above_searched(
    scenario: Scenario, table: PartitionTable, searched_s: dict[int, float], way: str
) -> dict[int, float]:
    """Relative differences of KVR-P's TTFT from KVR-S's, by context."""
    above = {}
    for context_len, best_s in searched_s.items():
        here = at(scenario, scenario.cluster.num_gpus, context_len)
        ttft_s = Evaluator(place(here, KVR)).one(looked_up(here, table, way))
        above[context_len] = ttft_s / best_s - 1
    return above


def between_entries(name: str, options: dict[str, str | float], lengths: range, apart: int) -> list[str]:
    """Rows of a setting: mean and largest difference for each way, over contexts between entries."""
    scenario, _ = make_scenario(ctx=max(lengths), gpus=8, **options)  # type: ignore[arg-type]
    table = make_table(scenario, GPU_COUNTS, lengths[::apart])
    lines = []
    for num_gpus in GPU_COUNTS:
        inside = [length for index, length in enumerate(lengths) if index % apart]
        searched_s = {length: search(place(at(scenario, num_gpus, length), KVR)).ttft_s for length in inside}
        cells = []
        for way in WAYS:
            above = above_searched(scenario.on_gpus(num_gpus), table, searched_s, way)
            worst = max(above, key=above.__getitem__)
            cells.append(f"{np.mean(list(above.values())):+.2%}, {above[worst]:+.2%} ({worst})")
        every = lengths.step * apart
        lines.append(f"| {name} | {every} | {num_gpus} | {len(inside)} | {' | '.join(cells)} |")
    return lines


# -- random lookups: models, GPUs and engines

MODELS = (
    *("llama-7b", "llama-13b", "llama-30b", "falcon-7b", "mistral-7b", "llama-3.1-8b", "llama-3.1-70b"),
    *("qwen3-8b", "qwen3-30b-a3b", "mixtral-8x7b", "qwen2.5-7b", "gemma-2-9b", "phi-3-mini"),
)
CLUSTERS = (
    *("8xa100-80gb", "8xa100-40gb", "8xh100", "8xh200", "8xb200", "8xh20", "8xl40s", "a100-nvlink"),
    "a100-10gbs-bus",  # with at most MOST_ON_BUS GPUs: searches on a bus take longer
)
MOST_ON_BUS = 4
ENGINES = (None, "vllm", "sglang", "trtllm", "serving", "vllm@0.19", "hf-2023")
FIRST_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
LOOKUPS_PER_TABLE = 5
RANDOM_SEED = 1124
RANDOM_TABLES = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomLookup:
    """A lookup between two entries of a random table."""

    setting: str  # model, GPUs and engine
    num_entries: int  # entries of the table, from one length to twice this length
    context_len: int
    refined: float  # TTFT of the refined lookup divided by that of KVR-S, minus 1
    alone: float  # the same for the lookup from the table alone


def random_lookups(seed: int, num_tables: int, num_known: int = 0) -> Iterator[RandomLookup]:
    """Yield LOOKUPS_PER_TABLE lookups in each of the random tables, without the first `num_known` lookups."""
    rng = random.Random(seed)
    tables = 0
    while tables < num_tables:
        model, cluster, engine = rng.choice(MODELS), rng.choice(CLUSTERS), rng.choice(ENGINES)
        num_gpus = rng.choice((2, 3, 4, 8))
        if cluster == "a100-10gbs-bus":
            num_gpus = min(num_gpus, MOST_ON_BUS)
        first, num_entries = rng.choice(FIRST_LENGTHS), rng.choice((2, 5))
        try:
            scenario, _ = make_scenario(model=model, cluster=cluster, engine=engine, gpus=num_gpus, ctx=2 * first)
            execution_of(scenario, KVR)
        except InputError:  # the GPU lacks the model's type, or the experts do not divide over the GPUs
            continue
        tables += 1
        lengths = [round(first * 2 ** (index / (num_entries - 1))) for index in range(num_entries)]
        between = [length for length in range(first + 1, 2 * first) if length not in lengths]
        contexts = rng.sample(between, LOOKUPS_PER_TABLE)
        num_known_here = min(num_known, LOOKUPS_PER_TABLE)
        num_known -= num_known_here
        if num_known_here == LOOKUPS_PER_TABLE:
            continue
        table = make_table(scenario, (num_gpus,), lengths)
        for context_len in contexts[num_known_here:]:
            here = execution_of(at(scenario, num_gpus, context_len), KVR).placed
            best_s = search(place(here, KVR)).ttft_s
            ttft_s = {way: Evaluator(place(here, KVR)).one(looked_up(here, table, way)) for way in WAYS[:2]}
            yield RandomLookup(
                setting=f"{model}, {num_gpus} GPUs of {cluster}, {engine or 'the default engine'}",
                num_entries=num_entries,
                context_len=context_len,
                refined=ttft_s["refined"] / best_s - 1,
                alone=ttft_s["table alone"] / best_s - 1,
            )


def kept_lookups() -> list[RandomLookup]:
    """All random lookups; those of an interrupted run are not computed again."""
    KEPT.parent.mkdir(exist_ok=True)
    lines = KEPT.read_text("utf-8").splitlines() if KEPT.exists() else []
    lookups = [RandomLookup(**json.loads(line)) for line in lines]
    with KEPT.open("a", encoding="utf-8") as file:
        for lookup in random_lookups(RANDOM_SEED, RANDOM_TABLES, len(lookups)):
            lookups.append(lookup)
            file.write(json.dumps(asdict(lookup)) + "\n")
            file.flush()
    return lookups


def at_random() -> list[str]:
    """Rows of the random lookups."""
    lookups = kept_lookups()
    lines = []
    for num_entries in (2, 5):
        for way in ("refined", "alone"):
            above = np.array([getattr(lookup, way) for lookup in lookups if lookup.num_entries == num_entries])
            name = "refined" if way == "refined" else "table alone"
            shares = f"{np.mean(above <= 0.01):.1%} | {np.mean(above > 0.03):.1%}"
            spread = f"{np.quantile(above, 0.99):.2%} | {above.max():.2%}"
            lines.append(f"| {num_entries} | {name} | {len(above)} | {shares} | {spread} |")
    worst = max(lookups, key=lambda lookup: lookup.refined)
    lines += ["", f"The worst refined lookup: {worst.setting}, at {worst.context_len} tokens."]
    return lines


def printed_partition() -> list[str]:
    """Compare the paper's 10k partition on four GPUs, interpolated from 8k and 12k, with our interpolation."""
    shown = next(row for row in json.loads(PRINTED.read_text())["partitions"] if row["num_gpus"] == 4)
    scenario, _ = make_scenario(ctx=12288, gpus=4)
    table = make_table(scenario, (4,), (8192, 12288))
    found = look_up(table, 4, shown["context_len"])
    here = np.array(interpolated(table, 4, found.context_len, 0).shares)
    away = here - np.array(shown["shares"])
    ttft = Evaluator(place(at(scenario, 4, found.context_len), KVR)).ttft_s
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
            best_s = {context_len: search(place(at(scenario, num_gpus, context_len), KVR)).ttft_s}
            for way in WAYS[:2]:
                above = above_searched(scenario.on_gpus(num_gpus), table, best_s, way)
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
    lines = ["## Random lookups", ""]
    lines += [f"{len(MODELS)} models, {len(CLUSTERS)} kinds of GPUs and links, {len(ENGINES)} engines (one is none),"]
    lines += ["2 to 8 GPUs, contexts of 1k to 128k. TTFT of KVR-P above that of KVR-S's own search, simulated."]
    lines += ["", "| entries per doubling | lookup | lookups | at most 1 % above | more than 3 % above | p99 | worst |"]
    lines += ["|---|---|---|---|---|---|---|", *at_random(), ""]
    lines += ["## Between entries", ""]
    lines += ["TTFT of KVR-P above that of KVR-S's own search, simulated: mean, and worst (at). Columns: lookup."]
    lines += ["", f"| setting | entries every | GPUs | contexts | {' | '.join(WAYS)} |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, options in SETTINGS.items():
        lines += between_entries(name, options, range(4096, 32769, 1024), 4)
    lines += ["", "## The printed partition", "", *printed_partition()]
    lines += ["", "## Beyond entries", "", "A table of 4k to 16k by 4k; KVR-P above KVR-S, simulated.", ""]
    heads = [f"{num_gpus} GPUs, {way}" for num_gpus in GPU_COUNTS for way in WAYS[:2]]
    lines += [f"| context | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|", *beyond_entries()]
    lines += ["", "## Building", "", "{2, 4, 8} GPUs, 1k to 32k by 1k: 96 entries, measured here.", ""]
    lines += ["| who works | processes | wall clock | CPU of the first process | sha256 |", "|---|---|---|---|---|"]
    write_benchmark("table_quality", [*lines, *building()])


if __name__ == "__main__":
    main()
