"""Quality of found partitions, compared with exhaustive search, the paper's full grid, random partitions and the bound.

Arguments: numbers of settings for the random descents: on a bus, on other networks (with and without uneven GPUs and
links), and for pipelines. Settings run in one process per core.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.execution import execute as executed
from kvrsim.execution import place
from kvrsim.hardware import SlowGpu, SlowLink, UnevenCluster
from kvrsim.memory import fits, memory_of
from kvrsim.placement import PlacedScenario
from kvrsim.scenario import Partition, Request, Scenario
from kvrsim.strategies import STRATEGIES
from planner.processes import Pool, cores
from planner.search.bound import lower_bound_s
from planner.search.minimise import Evaluator
from planner.search.pipeline import PAGE, search_pipeline
from planner.search.search import SearchResult, search
from validate.report import write_benchmark

KVR, SEARCHED = STRATEGIES["kvr-s"], STRATEGIES["pp-s"]
_FRESH = 700_000  # number of the first setting; settings with smaller numbers were used in the design of the searches
_TELL = 0.001  # relative gain above which a setting is printed
_OTHERS = ("switch", "chain", "nodes")  # topologies other than a bus
MODELS = ("llama-7b", "llama-7b-gqa8", "falcon-7b", "falcon-1b", "llama-30b", "qwen2.5-7b", "mistral-7b")
MIXTURES = ("qwen3-30b-a3b", "mixtral-8x7b")
SEVERAL_KINDS = ("gemma-3-27b", "gpt-oss-20b", "qwen3-next-80b-a3b", "nemotron-3-nano-30b-a3b", "deepseek-v3")


def settings(rng: np.random.Generator, count: int, ranks: tuple[int, int], *, few_layers: bool) -> Iterator[Scenario]:
    """Yield scenarios with random models, lengths, links, profiles and cached prefixes; some have very few layers."""
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
    model = replace(scenario.model, layers=layers, num_hidden_layers=len(layers))
    return replace(scenario, request=request, model=model)


def exhaustive(scenario: Scenario, stride: int) -> float:
    """TTFT of the best of all partitions with boundaries at multiples of the stride."""
    tokens, num_ranks = scenario.request.new_tokens, scenario.cluster.num_gpus
    cuts = range(stride, tokens, stride)
    rows = np.array(list(itertools.combinations(cuts, num_ranks - 1)), dtype=float)
    ends = np.pad(rows, ((0, 0), (1, 1)), constant_values=((0, 0), (0, tokens)))
    return float(Evaluator(place(scenario, KVR)).ttft_s(np.diff(ends, axis=1)).min())


def above_exhaustive(scenario: Scenario) -> float:
    """Relative excess of the TTFT of a search over the best at the same stride, a 40th of the new tokens."""
    stride = max(1, scenario.request.new_tokens // 40)
    return search(place(scenario, KVR), stride=stride).ttft_s / exhaustive(scenario, stride) - 1


def against_exhaustive(pool: Pool, count: int = 60) -> list[str]:
    """Compare searches with exhaustive ones."""
    each = settings(np.random.default_rng(1), count, (2, 4), few_layers=True)
    ratios = _each(pool, above_exhaustive, [(one,) for one in each], "exhaustive search")
    worst, over = max(ratios), sum(ratio > 1e-3 for ratio in ratios)
    return [
        f"| exhaustive at the same stride, {count} settings of 2 to 4 GPUs | worst {worst:+.4%}, {over} over 0.1 % |"
    ]


class _Random(NamedTuple):
    """TTFT of a search relative to the best of 400 random partitions, to the best perturbation, and to the bound."""

    spread: float
    near: float
    bound: float
    violates: bool  # whether a partition is faster than the bound


def random_partitions(scenario: Scenario, number: int) -> _Random:
    """Compare the partition of a search with random ones, with perturbations of it, and with the proven bound."""
    rng = np.random.default_rng((2, number))
    tokens, num_ranks = scenario.request.new_tokens, scenario.cluster.num_gpus
    best = search(place(scenario, KVR))
    chunks = np.array(best.partition.chunk_lens, dtype=float)
    spread = rng.dirichlet(np.full(num_ranks, 3.0), size=400) * (tokens - num_ranks) + 1
    near = (chunks - 1) * np.exp(rng.normal(0, 0.03, size=(400, num_ranks)))
    near = 1 + near * ((tokens - num_ranks) / near.sum(axis=1, keepdims=True))
    evaluator = Evaluator(place(scenario, KVR))
    times_s = [best.ttft_s, *(float(evaluator.ttft_s(rows).min()) for rows in (spread, near))]
    bound_s = lower_bound_s(place(scenario, KVR), best.ttft_s)
    ratios = (best.ttft_s / other_s - 1 for other_s in (*times_s[1:], bound_s))
    return _Random(*ratios, min(times_s) < bound_s * (1 - 1e-12))


def against_random(pool: Pool, count: int = 60) -> list[str]:
    """Compare partitions of searches with random ones and perturbations of them, and with the proven bound."""
    each = settings(np.random.default_rng(2), count, (2, 12), few_layers=True)
    found = _each(pool, random_partitions, [(one, number) for number, one in enumerate(each)], "random partitions")
    gaps = [one.bound for one in found]
    return [
        f"| 400 random partitions each, {count} settings of 2 to 12 GPUs"
        f" | the best gains {max(one.spread for one in found):+.3%} at most |",
        f"| 400 perturbations of the winner each | the best gains {max(one.near for one in found):+.3%} at most |",
        f"| gap to the proven bound | median {np.median(gaps):.2%}, 90th percentile {np.percentile(gaps, 90):.2%} |",
        f"| partitions faster than the bound | {sum(one.violates for one in found)} |",
    ]


def _each(pool: Pool, call: Callable[..., Any], arguments: list[tuple[Any, ...]], what: str) -> list[Any]:
    """Results of the calls, in the order of the arguments; prints every 20th to standard error."""

    def report(done: float, total: float | None, what: str) -> None:
        if done % 20 == 0:
            print(f"{what}: {done:.0f} of {total:.0f}", file=sys.stderr, flush=True)

    return pool.run_in_order(call, arguments, what, report)


def any_setting(rng: np.random.Generator, topologies: tuple[str, ...]) -> Scenario:
    """A random scenario that KV-Runahead can be placed on: experts, for example, must divide over the GPUs."""
    while True:
        scenario = _random_setting(rng, topologies)
        try:
            place(scenario, KVR)
        except InputError:
            continue
        return scenario


def _random_setting(rng: np.random.Generator, topologies: tuple[str, ...]) -> Scenario:
    """A scenario with a random model, length, number of GPUs, prefix and link, from 1 MB/s to 1 TB/s.

    Three of ten settings have a few layers of the model, at random; at least two of a model with layers of several
    kinds.
    """
    num_ranks, topology = int(rng.integers(2, 9)), str(rng.choice(topologies))
    scenario, _ = make_scenario(
        ctx=int(2 ** rng.uniform(9, 16)),
        gpus=num_ranks,
        model=str(rng.choice(MODELS if rng.random() < 0.6 else MIXTURES + SEVERAL_KINDS)),
        profile=str(rng.choice(["a100-eager", "a100-flash", "roofline"])),
        topology="switch" if topology == "nodes" else topology,
        link_bandwidth=float(10 ** rng.uniform(6, 12)),
        link_latency=float(10 ** rng.uniform(-6, -4)),
    )
    if topology == "nodes":
        scenario = _in_nodes(scenario, int(rng.integers(1, num_ranks + 1)), float(10 ** rng.uniform(-3, 0)))
    context_len = scenario.request.context_len
    cached = int(rng.integers(0, context_len // 2)) if rng.random() < 0.25 else 0
    layers = scenario.model.layers
    if rng.random() < 0.3:
        count = int(rng.integers(2, 9) if scenario.model.name in SEVERAL_KINDS else rng.integers(1, 5))
        first = int(rng.integers(0, len(layers) - count))
        layers = layers[first : first + count]
    return _with(scenario, Request(context_len=context_len, cached_prefix=cached), layers)


def _uneven(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """The scenario with some GPUs up to 2 times slower, and some links between neighbours up to 32 times slower."""
    ranks = range(scenario.cluster.num_gpus)
    gpus = [SlowGpu(rank=rank, factor=float(2 ** rng.uniform(0, 1))) for rank in ranks if rng.random() < 0.3]
    links = [
        SlowLink(first=rank, second=rank + 1, factor=float(2 ** rng.uniform(0, 5)))
        for rank in ranks[:-1]
        if rng.random() < 0.3 and not scenario.cluster.shares_bandwidth
    ]
    return replace(scenario, cluster=UnevenCluster.of(scenario.cluster, gpus, links))


def _in_nodes(scenario: Scenario, gpus_per_node: int, share: float) -> Scenario:
    """The scenario with nodes of this number of GPUs, and a network whose bandwidth is a share of the links'."""
    link = scenario.cluster.link
    network = replace(link, name="network", bandwidth_bytes_per_s=share * link.bandwidth_bytes_per_s)
    cluster = replace(scenario.cluster, topology="nodes", gpus_per_node=gpus_per_node, network=network)
    return replace(scenario, cluster=cluster)


def descended(scenario: Scenario, chunks: tuple[int, ...], rng: np.random.Generator, most: int = 2000) -> float:
    """The best TTFT of two random descents: from the chunks, and from the best of 100 random partitions.

    Each round tries 100 moves in both descents: some tokens of a rank go to another rank, or all chunks are scaled at
    random.
    """
    evaluator, tokens, ranks = Evaluator(place(scenario, KVR)), sum(chunks), len(chunks)
    seeds = np.concatenate([[chunks], _whole(rng.dirichlet(np.full(ranks, 0.5), size=100), tokens)])
    times_s = evaluator.ttft_s(seeds.astype(float))
    places = [0, 1 + int(times_s[1:].argmin())]
    here, here_s = seeds[places], times_s[places]
    for _ in range(most // 200):
        rows = np.concatenate([_moved(one, rng, tokens) for one in here])
        times_s = evaluator.ttft_s(rows.astype(float)).reshape(2, -1)
        best = times_s.argmin(axis=1)
        better = times_s.min(axis=1) < here_s
        here = np.where(better[:, None], rows.reshape(2, -1, ranks)[[0, 1], best], here)
        here_s = np.minimum(times_s.min(axis=1), here_s)
    return float(here_s.min())


def _moved(chunks, rng: np.random.Generator, tokens: int):  # type: ignore[no-untyped-def]
    """100 random variations of this partition, shape (100, ranks)."""
    ranks = len(chunks)
    rows, index = np.repeat(chunks[None], 100, axis=0), np.arange(70)
    src = rng.integers(ranks, size=70)
    dst = (src + rng.integers(1, ranks, size=70)) % ranks
    moved = np.minimum((rows[index, src] ** rng.random(70)).astype(np.int64), rows[index, src] - 1)
    rows[index, src] -= moved
    rows[index, dst] += moved
    widths = 10.0 ** rng.uniform(-2.5, -0.5, size=(30, 1))
    rows[70:] = _whole(rows[70:] * np.exp(widths * rng.normal(size=(30, ranks))), tokens)
    return rows


def _whole(shares, tokens: int):  # type: ignore[no-untyped-def]
    """Convert rows of shares to rows of whole chunks: each has at least one token, and the sum is `tokens`."""
    ranks = shares.shape[1]
    ends = np.floor(np.cumsum(shares, axis=1) / shares.sum(axis=1, keepdims=True) * (tokens - ranks)).astype(np.int64)
    ends[:, -1] = tokens - ranks  # exact even if the sum of the shares is rounded down
    return np.diff(ends, axis=1, prepend=0) + 1


def descent_gain(topologies: tuple[str, ...], is_uneven: bool, number: int) -> float:
    """The gain in a random setting; number: its seed."""
    rng = np.random.default_rng((3, int(is_uneven), number))
    scenario = any_setting(rng, topologies)
    if is_uneven:
        scenario = _uneven(scenario, rng)
    best = search(place(scenario, KVR))
    gain = best.ttft_s / descended(scenario, best.partition.chunk_lens, rng) - 1
    return _reported(number, gain, best)


def pipeline_gain(number: int) -> float:
    """The gain in a random setting with uneven GPUs and links, for searched pieces and stages."""
    scenario, rng = pipeline_setting(number)
    best = search_pipeline(executed(scenario, SEARCHED))
    gain = best.ttft_s / descended_pipeline(scenario, best, rng, PAGE) - 1
    return _reported(number, gain, best)


def pipeline_setting(number: int) -> tuple[PlacedScenario, np.random.Generator]:
    """A random scenario of a pipeline on uneven GPUs and links, and the generator that drew it."""
    rng = np.random.default_rng((4, number))
    scenario = any_setting(rng, _OTHERS)
    scenario = scenario.on_gpus(min(scenario.cluster.num_gpus, len(scenario.model.layers)))
    return place(_uneven(scenario, rng), SEARCHED).placed, rng


def _reported(number: int, gain: float, best: SearchResult) -> float:
    """The gain; a large one is printed to standard error with its setting."""
    if gain > _TELL:
        scenario = best.execution.placed
        about = f"{scenario.model.name}, {len(scenario.model.layers)} layers, {scenario.cluster.describe()}"
        plan = f"{best.partition.chunk_lens} {best.strategy.stage_layers or ''}"
        print(f"{number}: {gain:.3%} on {about}, {scenario.request}: {plan}", file=sys.stderr, flush=True)
    return gain


def _gains(gains: list[float]) -> str:
    above = [f"{sum(gain > most for gain in gains)} above {most:.1%}" for most in (0.001, 0.005, 0.05)]
    return f"it gains {max(gains):.2%} at most, {np.median(gains):.3%} in the median; {', '.join(above)}"


def against_descent(pool: Pool, name: str, topologies: tuple[str, ...], count: int) -> list[str]:
    """Gains of random descents of 2,000 evaluations over partitions of searches."""
    calls = [(topologies, "uneven" in name, number) for number in range(_FRESH, _FRESH + count)]
    text = _gains(_each(pool, descent_gain, calls, f"descents {name}"))
    return [
        f"| random descent of 2,000 evaluations, {count} settings {name} of 2 to 8 GPUs, 1 MB/s to 1 TB/s | {text} |"
    ]


def pipelines_against_descent(pool: Pool, count: int) -> list[str]:
    """Gains of random descents over searched pieces and stages, with uneven GPUs and links."""
    found = _each(pool, pipeline_gain, [(number,) for number in range(_FRESH, _FRESH + count)], "descents of pipelines")
    return [
        f"| random descent of 2,000 evaluations from pieces and stages of `pp-s`, {count} settings of uneven GPUs and"
        f" links | {_gains(found)} |"
    ]


def descended_pipeline(scenario: PlacedScenario, found: SearchResult, rng: np.random.Generator, page: int) -> float:
    """The best TTFT of a random descent of 2,000 evaluations over pieces of whole pages and layers that fit in memory.

    Each round moves tokens between the pieces. Every second round also splits or joins pieces, or moves layers.
    """
    pages = scenario.request.new_tokens // page
    rest = scenario.request.new_tokens - page * pages  # the last piece gets these tokens
    pieces, layers = np.array(found.partition.chunk_lens), np.array(found.strategy.stage_layers or (), dtype=np.int64)
    pieces, best_s = np.append(pieces[:-1], pieces[-1] - rest) // page, found.ttft_s
    for number in range(80):
        rows, other = pieces[None], layers.copy()
        if number % 4 == 1 and len(layers) > 1:
            other = _with_layer_moved(layers, rng)
        elif number % 4 == 3 and pages > 1:
            rows = _with_piece_more_or_less(pieces, rng)[None]
        if len(rows[0]) > 1:
            rows = np.concatenate([rows, _moved(rows[0], rng, pages)[rng.permutation(100)[:24]]])
        lens = page * rows
        lens[:, -1] += rest
        strategy = replace(found.strategy, stage_layers=tuple(map(int, other)))
        execution = executed(scenario, strategy)
        times_s = Evaluator(execution).ttft_s(lens.astype(float))
        for index in times_s.argsort():
            if times_s[index] >= best_s:
                break
            partition = Partition(chunk_lens=tuple(map(int, lens[index])))
            if fits(scenario, memory_of(execution, partition)):
                pieces = rows[index]
                layers = other
                best_s = float(times_s[index])
                break
    return best_s


def _with_layer_moved(layers, rng: np.random.Generator):  # type: ignore[no-untyped-def]
    """Move some layers from one stage to another."""
    moved = layers.copy()
    src = int(rng.integers(len(layers)))
    dst = (src + 1 if src == 0 else src - 1) if rng.random() < 0.5 else int(rng.integers(len(layers)))
    count = min(int(2 ** rng.uniform(0, 4)), layers[src] - 1)
    moved[src] -= count
    moved[dst] += count
    return moved


def _with_piece_more_or_less(pieces, rng: np.random.Generator):  # type: ignore[no-untyped-def]
    """Split a piece into two, or join a piece with the next one."""
    at = int(rng.integers(len(pieces)))
    if pieces[at] > 1 and (rng.random() < 0.5 or len(pieces) == 1):
        first = int(rng.integers(1, pieces[at]))
        return np.concatenate([pieces[:at], [first, pieces[at] - first], pieces[at + 1 :]])
    at = min(at, len(pieces) - 2)
    if at < 0:
        return pieces
    return np.concatenate([pieces[:at], [pieces[at] + pieces[at + 1]], pieces[at + 2 :]])


def against_the_papers_grid() -> list[str]:
    """Compare with the full hierarchical grid of the paper: 5^7 candidates per level for 8 GPUs."""
    lines = []
    for context_len in (8192, 12288, 16384):
        scenario, _ = make_scenario(ctx=context_len, gpus=8)
        auto, grid = search(place(scenario, KVR)), search(place(scenario, KVR), method="grid")
        lines.append(
            f"| the paper's full grid, 8 GPUs, {context_len} tokens, {grid.report.evaluations} evaluations"
            f" in {grid.report.seconds:.1f} s | {auto.ttft_s / grid.ttft_s - 1:+.2%} with {auto.report.evaluations} |"
        )
    return lines


def main() -> None:
    """Measure, and write benchmarks/results/search_quality.md."""
    on_a_bus, elsewhere, pipelines = map(int, sys.argv[1:4] or (20, 60, 40))
    lines = ["| partition of the search against | its TTFT more or less |", "|---|---|"]
    with Pool(jobs=cores()) as pool:
        lines += [*against_exhaustive(pool), *against_the_papers_grid(), *against_random(pool)]
        lines += against_descent(pool, "on a bus, some GPUs uneven,", ("bus",), on_a_bus)
        lines += against_descent(pool, "elsewhere", _OTHERS, elsewhere // 2)
        lines += against_descent(pool, "elsewhere, uneven GPUs and links,", _OTHERS, elsewhere // 2)
        lines += pipelines_against_descent(pool, pipelines)
    given = " ".join(["python benchmarks/search_quality.py", *sys.argv[1:]]) if sys.argv[1:] else None
    write_benchmark("search_quality", lines, given)


if __name__ == "__main__":
    main()
