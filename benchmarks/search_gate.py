"""The searches of two checkouts on the same random questions: `python benchmarks/search_gate.py OLD_CHECKOUT`.

Every question is a strategy on a random scenario: models of all kinds, 1 to 64 GPUs, links from 100 MB/s to 500 GB/s,
uneven GPUs and links, buses. Both checkouts answer as `kvrsim simulate` does, without a limit of their work. The page
compares the TTFTs of the partitions that they find, and the processor time of each search. Each checkout runs in a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.executors.access import execution_of
from kvrsim.hardware import SlowGpu, SlowLink, UnevenCluster
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from planner.candidates import Search

SEED = 20261124
NUM_QUESTIONS = 60
MEDIAN_TARGET = 0.003  # largest median loss of TTFT
WORST_TARGET = 0.03  # largest loss of one question
NUM_WORST = 5  # questions that the page names

DENSE = ("llama-7b", "llama-3-8b", "falcon-7b", "qwen2.5-7b", "mistral-7b", "llama-3-70b")
MIXTURES = ("qwen3-30b-a3b", "mixtral-8x7b")
SEVERAL_KINDS = ("gemma-3-27b", "gpt-oss-20b", "qwen3-next-80b-a3b", "deepseek-v3")
PROFILES = ("a100-eager", "a100-flash", "h100-flash")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Random questions that are alike."""

    title: str
    strategies: tuple[str, ...]
    models: tuple[str, ...]
    most_gpus: int  # numbers of GPUs are powers of two or random, up to this one
    topologies: tuple[str, ...] = ("switch", "chain")
    tokens: tuple[int, int] = (2048, 131072)  # shortest and longest context
    share: int = 1  # how many of twelve questions are of this kind


KINDS = (
    Kind(title="chain", strategies=("kvr-s", "kvr-b"), models=DENSE, most_gpus=64, share=3),
    Kind(
        title="chain, other layers",
        strategies=("kvr-s", "kvr-b", "kvr-direct"),
        models=MIXTURES + SEVERAL_KINDS,
        most_gpus=8,
    ),
    Kind(
        title="chain on a bus", strategies=("kvr-s", "kvr-b"), models=DENSE, most_gpus=8, topologies=("bus",), share=2
    ),
    Kind(title="chain of groups", strategies=("tp2+kvr-s", "tp4+kvr-s"), models=DENSE + MIXTURES, most_gpus=16),
    Kind(title="pipeline", strategies=("pp-s",), models=DENSE, most_gpus=16, share=3),
    Kind(title="pipeline, other layers", strategies=("pp-s",), models=MIXTURES + SEVERAL_KINDS, most_gpus=8),
    Kind(title="pipeline of groups", strategies=("tp2+pp-s", "tp4+pp-s"), models=DENSE + MIXTURES, most_gpus=16),
)


def question(seed: int, number: int) -> tuple[Kind, Scenario, str]:
    """The kind, the scenario and the name of the strategy of a question."""
    shares = [kind for kind in KINDS for _ in range(kind.share)]
    kind = shares[number % len(shares)]
    rng = np.random.default_rng((seed, number))
    while True:
        scenario, strategy = _drawn(kind, rng)
        try:
            execution_of(scenario, get_strategy(strategy))
        except InputError:  # groups that the model's heads do not divide into, or more stages than layers
            continue
        return kind, scenario, strategy


def _drawn(kind: Kind, rng: np.random.Generator) -> tuple[Scenario, str]:
    strategy = str(rng.choice(kind.strategies))
    group = get_strategy(strategy).group_size
    most_ranks = kind.most_gpus // group
    ranks = int(2 ** rng.integers(1, most_ranks.bit_length()))
    if rng.random() < 0.4:
        ranks = int(rng.integers(1, most_ranks + 1))
    scenario, _ = make_scenario(
        ctx=int(2 ** rng.uniform(*np.log2(kind.tokens))),
        gpus=ranks * group,
        model=str(rng.choice(kind.models)),
        profile=str(rng.choice(PROFILES)),
        topology=str(rng.choice(kind.topologies)),
        link_bandwidth=float(10 ** rng.uniform(8, 11.7)),
        link_latency=float(10 ** rng.uniform(-6, -4)),
        engine=str(rng.choice(["none", "serving"])),
    )
    if rng.random() < 0.25:
        cached = int(rng.integers(0, scenario.request.context_len // 2))
        scenario = replace(scenario, request=replace(scenario.request, cached_prefix=cached))
    if rng.random() < 0.4 and group == 1:
        scenario = _uneven(scenario, rng)
    return scenario, strategy


def _uneven(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """The scenario with some GPUs up to 2 times slower, and some links between neighbours up to 8 times slower."""
    ranks = range(scenario.cluster.num_gpus)
    gpus = [SlowGpu(rank=rank, factor=float(2 ** rng.uniform(0, 1))) for rank in ranks if rng.random() < 0.3]
    links = []
    if not scenario.cluster.shares_bandwidth:
        links = [
            SlowLink(first=rank, second=rank + 1, factor=float(2 ** rng.uniform(0, 3)))
            for rank in ranks[:-1]
            if rng.random() < 0.3
        ]
    return replace(scenario, cluster=UnevenCluster.of(scenario.cluster, gpus, links))


def answer(seed: int, number: int) -> dict[str, Any]:
    """The searched TTFT of a question, and the processor time of the search."""
    kind, scenario, strategy = question(seed, number)
    begin_s = time.process_time()
    found = Search().candidate(execution_of(scenario, get_strategy(strategy)))
    search_s = time.process_time() - begin_s
    assert found.search is not None
    machine, *slower = scenario.cluster.describe().split("; ")
    uneven = " with slower GPUs or links" if slower else ""
    text = f"{strategy}, {scenario.model.name}, {machine}{uneven}, {scenario.request.context_len} tokens"
    return {
        "number": number,
        "kind": kind.title,
        "question": text,
        "ttft_s": found.ttft_s,
        "search_s": search_s,
        "evaluations": found.search.report.evaluations,
        "partition": list(found.partition.chunk_lens),
    }


def answers_of(checkout: Path, seed: int, count: int) -> list[dict[str, Any]]:
    """The answers of a checkout, from a process whose modules are the checkout's."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, str(Path(__file__).resolve()), "--seed", str(seed), "--count", str(count)]
    done = subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def page(seed: int, old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of the page."""
    losses = [after["ttft_s"] / before["ttft_s"] - 1 for before, after in zip(old, new, strict=True)]
    of_kind = defaultdict[str, list[int]](list)
    for index, before in enumerate(old):
        of_kind[before["kind"]].append(index)
    of_kind["all"] = list(range(len(old)))
    lines = [
        f"{len(old)} random questions, seed {seed}. Loss: how much longer the TTFT of the new search is.",
        f"Targets: at most {MEDIAN_TARGET:.1%} in the median, {WORST_TARGET:.0%} at worst, and no more processor time.",
        "",
        "| questions | number | median loss | worst loss | best gain | old search | new search |",
        "|---|---|---|---|---|---|---|",
    ]
    for title, indices in of_kind.items():
        picked = [losses[index] for index in indices]
        old_s = sum(old[index]["search_s"] for index in indices)
        new_s = sum(new[index]["search_s"] for index in indices)
        lines.append(
            f"| {title} | {len(indices)} | {statistics.median(picked):+.3%} | {max(picked):+.2%} | {min(picked):+.2%} |"
            f" {old_s:.1f} s | {new_s:.1f} s |"
        )
    lines += ["", "The largest losses:", ""]
    by_loss = sorted(range(len(old)), key=losses.__getitem__, reverse=True)
    for index in by_loss[:NUM_WORST]:
        lines.append(f"- {losses[index]:+.2%}: {new[index]['question']}")
    return lines


def main() -> None:
    """Compare with an old checkout and write benchmarks/results/search_gate.md; without one, print the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", type=Path, help="checkout to compare with; without it, answers are printed")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=NUM_QUESTIONS, help="number of questions")
    asked = parser.parse_args()
    if asked.old is None:
        for number in range(asked.count):
            print(json.dumps(answer(asked.seed, number)), flush=True)
        return
    from validate.report import write_benchmark

    old = answers_of(asked.old.resolve(), asked.seed, asked.count)
    new = answers_of(Path(__file__).resolve().parents[1], asked.seed, asked.count)
    write_benchmark("search_gate", page(asked.seed, old, new))


if __name__ == "__main__":
    main()
