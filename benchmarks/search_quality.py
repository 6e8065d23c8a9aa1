"""How good the found partitions are: against exhaustive search, the paper's full grid, random ones and the bound.

Arguments: how many settings on a bus and elsewhere a random descent is tried in.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import numpy as np
from _report import write

from kvrsim.request import Request
from kvrsim.scenario import Scenario
from kvrsim.setup import make_scenario
from kvrsim.strategies import STRATEGIES
from planner.evaluate import Evaluator
from planner.search.bound import lower_bound_s
from planner.search.search import search

KVR = STRATEGIES["kvr-s"]
_TELL = 0.001  # gains above this are printed
MODELS = ("llama-7b", "llama-7b-gqa8", "falcon-7b", "falcon-1b", "llama-30b", "qwen2.5-7b", "mistral-7b")


def settings(rng: np.random.Generator, count: int, ranks: tuple[int, int], *, few_layers: bool) -> Iterator[Scenario]:
    """Random models, lengths, links, profiles, cached prefixes; now and then very few layers."""
    for _ in range(count):
        num_ranks = int(rng.integers(ranks[0], ranks[1] + 1))
        scenario, _ = make_scenario(
            ctx=int(2 ** rng.uniform(8, 15)),
            gpus=num_ranks,
            model=str(rng.choice(MODELS)),
            profile=str(rng.choice(["a100-eager", "a100-flash", "roofline"])),
            link_bandwidth=float(10 ** rng.uniform(9.3, 11.7)),
            link_latency=float(10 ** rng.uniform(-6, -4)),
        )
        context_len = max(scenario.request.context_len, 16 * num_ranks)
        cached = int(rng.integers(0, context_len // 2)) if rng.random() < 0.25 else 0
        layers = scenario.model.layers
        if few_layers and rng.random() < 0.4:
            layers = layers[: int(rng.integers(1, 5))]
        yield _with(scenario, Request(context_len=context_len, cached_prefix=cached), layers)


def _with(scenario: Scenario, request: Request, layers: tuple) -> Scenario:  # type: ignore[type-arg]
    from dataclasses import replace

    model = replace(scenario.model, layers=layers, num_hidden_layers=len(layers))
    return replace(scenario, request=request, model=model)


def exhaustive(scenario: Scenario, stride: int) -> float:
    """TTFT of the best of all partitions with boundaries at multiples of the stride."""
    tokens, num_ranks = scenario.request.new_tokens, scenario.cluster.num_gpus
    cuts = range(stride, tokens, stride)
    rows = np.array(list(itertools.combinations(cuts, num_ranks - 1)), dtype=float)
    ends = np.pad(rows, ((0, 0), (1, 1)), constant_values=((0, 0), (0, tokens)))
    return float(Evaluator(scenario, KVR).ttft_s(np.diff(ends, axis=1)).min())


def against_exhaustive(count: int = 200) -> list[str]:
    """Found over best, at a stride of a 40th of the context or less."""
    rng = np.random.default_rng(1)
    ratios = []
    for scenario in settings(rng, count, (2, 4), few_layers=True):
        stride = max(1, scenario.request.new_tokens // 40)
        found = search(scenario, KVR, stride=stride)
        ratios.append(found.ttft_s / exhaustive(scenario, stride) - 1)
    worst, over = max(ratios), sum(ratio > 1e-3 for ratio in ratios)
    return [
        f"| exhaustive at the same stride, {count} settings of 2 to 4 GPUs | worst {worst:+.4%}, {over} over 0.1 % |",
    ]


def against_random(count: int = 200) -> list[str]:
    """Random partitions, perturbations of the winner, and the proven bound."""
    rng = np.random.default_rng(2)
    gains, moved, gaps, violations = [], [], [], 0
    for scenario in settings(rng, count, (2, 12), few_layers=True):
        tokens, num_ranks = scenario.request.new_tokens, scenario.cluster.num_gpus
        found = search(scenario, KVR)
        chunks = np.array(found.partition.chunk_lens, dtype=float)
        spread = rng.dirichlet(np.full(num_ranks, 3.0), size=400) * (tokens - num_ranks) + 1
        near = (chunks - 1) * np.exp(rng.normal(0, 0.03, size=(400, num_ranks)))
        near = 1 + near * ((tokens - num_ranks) / near.sum(axis=1, keepdims=True))
        evaluator = Evaluator(scenario, KVR)
        spread_s, near_s = evaluator.ttft_s(spread).min(), evaluator.ttft_s(near).min()
        bound_s = lower_bound_s(scenario, KVR, found.ttft_s)
        gains.append(found.ttft_s / spread_s - 1)
        moved.append(found.ttft_s / near_s - 1)
        gaps.append(found.ttft_s / bound_s - 1)
        violations += min(spread_s, near_s, found.ttft_s) < bound_s * (1 - 1e-12)
    return [
        f"| 400 random partitions each, {count} settings of 2 to 12 GPUs | the best gains {max(gains):+.3%} at most |",
        f"| 400 perturbations of the winner each | the best gains {max(moved):+.3%} at most |",
        f"| gap to the proven bound | median {np.median(gaps):.2%}, 90th percentile {np.percentile(gaps, 90):.2%} |",
        f"| partitions faster than the bound | {violations} |",
    ]


def any_setting(rng: np.random.Generator, topologies: tuple[str, ...]) -> Scenario:
    """A random model, length, number of GPUs, prefix and link, from 1 MB/s to 1 TB/s."""
    num_ranks = int(rng.integers(2, 9))
    scenario, _ = make_scenario(
        ctx=int(2 ** rng.uniform(9, 16)),
        gpus=num_ranks,
        model=str(rng.choice([*MODELS, "qwen3-30b-a3b"])),
        profile=str(rng.choice(["a100-eager", "a100-flash", "roofline"])),
        topology=str(rng.choice(topologies)),
        link_bandwidth=float(10 ** rng.uniform(6, 12)),
        link_latency=float(10 ** rng.uniform(-6, -4)),
    )
    context_len = scenario.request.context_len
    cached = int(rng.integers(0, context_len // 2)) if rng.random() < 0.25 else 0
    layers = scenario.model.layers
    if rng.random() < 0.3:
        layers = layers[: int(rng.integers(1, 5))]
    return _with(scenario, Request(context_len=context_len, cached_prefix=cached), layers)


def descended(scenario: Scenario, chunks: tuple[int, ...], rng: np.random.Generator, most: int = 2000) -> float:
    """The best TTFT of a random descent: from the chunks with half of the evaluations, from random ones with the rest.

    Each round tries 100 moves: some tokens of one rank go to another, or all chunks are scaled at random.
    """
    evaluator, tokens, ranks, best_s = Evaluator(scenario, KVR), sum(chunks), len(chunks), np.inf
    for begin in (np.array([chunks]), _whole(rng.dirichlet(np.full(ranks, 0.5), size=100), tokens)):
        times_s = evaluator.ttft_s(begin.astype(float))
        here, here_s = begin[times_s.argmin()], float(times_s.min())
        for _ in range(most // 200):
            rows = np.repeat(here[None], 100, axis=0)
            for row in rows[:70]:
                src, dst = rng.choice(ranks, size=2, replace=False)
                moved = int(row[src] ** rng.random()) if row[src] > 1 else 0
                row[src], row[dst] = row[src] - min(moved, row[src] - 1), row[dst] + min(moved, row[src] - 1)
            widths = 10.0 ** rng.uniform(-2.5, -0.5, size=(30, 1))
            rows[70:] = _whole(rows[70:] * np.exp(widths * rng.normal(size=(30, ranks))), tokens)
            times_s = evaluator.ttft_s(rows.astype(float))
            if times_s.min() < here_s:
                here, here_s = rows[times_s.argmin()], float(times_s.min())
        best_s = min(best_s, here_s)
    return float(best_s)


def _whole(shares, tokens: int):  # type: ignore[no-untyped-def]
    """Rows of whole chunks of at least a token that sum to the tokens."""
    ranks = shares.shape[1]
    ends = np.floor(np.cumsum(shares, axis=1) / shares.sum(axis=1, keepdims=True) * (tokens - ranks)).astype(np.int64)
    return np.diff(ends, axis=1, prepend=0) + 1


def against_descent(name: str, topologies: tuple[str, ...], count: int) -> list[str]:
    """What a random descent of 2,000 evaluations gains on the found partition."""
    rng = np.random.default_rng(3)
    gains = []
    for number in range(count):
        scenario = any_setting(rng, topologies)
        found = search(scenario, KVR)
        gains.append(found.ttft_s / descended(scenario, found.partition.chunk_lens, rng) - 1)
        if gains[-1] > _TELL:
            cluster, request = scenario.cluster, scenario.request
            about = f"{scenario.model.name}, {len(scenario.model.layers)} layers, {cluster.describe()}, {request}"
            print(f"{number}: {gains[-1]:.3%} on {about}: {found.partition.chunk_lens}", file=sys.stderr, flush=True)
    above = [f"{sum(gain > most for gain in gains)} above {most:.1%}" for most in (0.001, 0.005, 0.05)]
    text = f"it gains {max(gains):.2%} at most, {np.median(gains):.3%} in the median; {', '.join(above)}"
    return [
        f"| random descent of 2,000 evaluations, {count} settings {name} of 2 to 8 GPUs, 1 MB/s to 1 TB/s | {text} |"
    ]


def against_the_papers_grid() -> list[str]:
    """The full hierarchical grid, as published: 5^7 candidates a level for 8 GPUs."""
    lines = []
    for context_len in (8192, 12288, 16384):
        scenario, _ = make_scenario(ctx=context_len, gpus=8)
        auto, grid = search(scenario, KVR), search(scenario, KVR, method="grid")
        lines.append(
            f"| the paper's full grid, 8 GPUs, {context_len} tokens, {grid.report.evaluations} evaluations"
            f" in {grid.report.seconds:.1f} s | {auto.ttft_s / grid.ttft_s - 1:+.2%} with {auto.report.evaluations} |"
        )
    return lines


def main() -> None:
    """Measure, and write benchmarks/results/search_quality.md."""
    on_a_bus, elsewhere = map(int, sys.argv[1:3] or (200, 200))
    lines = ["| found partition against | its TTFT more or less |", "|---|---|"]
    lines += [*against_exhaustive(), *against_the_papers_grid(), *against_random()]
    lines += against_descent("on a bus", ("bus",), on_a_bus)
    lines += against_descent("elsewhere", ("switch", "chain"), elsewhere)
    write("search_quality", f"python benchmarks/search_quality.py {on_a_bus} {elsewhere}", lines)


if __name__ == "__main__":
    main()
