"""Launches of KV-Runahead on the fork of vLLM that has it: weights for a range of contexts, with their regret.

The fork takes one list of weights per server and cuts every prompt in proportion to it. The best chunks change with the
length, so the weights are a compromise: those whose largest regret over the range is least. The regret at a length is
the TTFT with these weights divided by the TTFT with the best weights of that length.

kvrsim/data/runahead.json has the build that was read, its transports and the flags that it requires.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kvrsim.errors import InputError
from kvrsim.executors.access import execution_of
from kvrsim.executors.run import ttft_s
from kvrsim.hardware import SlowGpu, UnevenCluster
from kvrsim.io.schema import fields_to_json
from kvrsim.model.mixers import Attention, LatentAttention
from kvrsim.model.spec import ModelSpec
from kvrsim.noise import Noise
from kvrsim.program import Array
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import Strategy, get_strategy
from kvrsim.units import LengthRange
from planner.candidates import Candidate
from planner.deploy import longest_sequence
from planner.search.minimise import Boundaries, chunks_between, minimise, rounded
from planner.search.search import search

RUNAHEAD = "vllm-runahead"
_DATA = Path(__file__).parents[1] / "kvrsim" / "data" / "runahead.json"
_ROUNDS = 12  # rounds of the search for weights
_MOST_ORDERS = 64  # largest number of orders of the GPUs that are compared
_CHUNKS = (8192, 16384, 32768)  # tokens of a step with the transport page_pull


@dataclass(frozen=True, kw_only=True, slots=True)
class Regret:
    """What the weights lose at one context."""

    ctx: int  # tokens of the prompt
    partition: tuple[int, ...]  # tokens that the build gives to each chunk
    ttft_s: float  # with the weights of the launch
    best_ttft_s: float  # with the best weights of this context

    @property
    def ratio(self) -> float:
        """TTFT divided by the best one, at least 1."""
        return self.ttft_s / self.best_ttft_s


@dataclass(frozen=True, kw_only=True, slots=True)
class PagePull:
    """The longest prompt in steps of equal length with the transport page_pull, which sends pages of the KV cache."""

    chunk_tokens: int  # tokens of each step; the last one has the rest
    ttft_s: float  # sum of the steps, if the reads of earlier steps' pages are hidden behind the computation
    history_bytes: float  # bytes of pages of earlier steps that the first rank reads, which reads the most
    history_read_s: float  # seconds of these reads, by which the TTFT rises at most


@dataclass(frozen=True, kw_only=True, slots=True)
class RunaheadLaunch:
    """A launch of the fork for one strategy."""

    strategy: str
    transport: str
    weights: tuple[
        int, ...
    ]  # of the chunks in the order of the prompt; in blocks of the KV cache at the longest context
    ranks: tuple[int, ...]  # GPU of each chunk
    regret: tuple[Regret, ...]  # by context, ascending
    page_pull: tuple[PagePull, ...]  # empty: the longest prompt is no longer than a step
    others: dict[str, float]  # TTFT of the other strategies at the longest context, each with its weights for the range
    model: str  # the model's name for the engine
    max_len: int  # tokens of the longest sequence
    memory_fraction: float
    batch: int

    @property
    def config(self) -> dict[str, Any]:
        """The object that --additional-config takes."""
        partition: dict[str, Any] = {"weights": [float(weight) for weight in self.weights]}
        if self.ranks != tuple(range(len(self.ranks))):
            pairs = zip(self.weights, self.ranks, strict=True)
            partition = {"segments": [{"weight": float(weight), "pcp_rank": rank} for weight, rank in pairs]}
        return {"pcp_runahead": {"transport": self.transport, "partition": partition}}

    @property
    def args(self) -> tuple[str, str]:
        """The arguments that hold the plan."""
        return "--additional-config", json.dumps(self.config)

    @property
    def command(self) -> str:
        """The whole command, quoted for a shell."""
        sizes = {
            "--prefill-context-parallel-size": len(self.weights),
            "--max-num-batched-tokens": self.max_len * self.batch,
            "--max-num-seqs": self.batch,
            "--max-model-len": self.max_len,
            "--gpu-memory-utilization": f"{self.memory_fraction:g}",
        }
        words = ["vllm", "serve", self.model, *map(str, itertools.chain(*sizes.items())), *build()["flags"], *self.args]
        return shlex.join(words)

    def notes(self) -> Iterator[str]:
        """What the user must know in addition to the command."""
        content = build()
        repository, _, _ = content["sources"][0].partition("/blob/")
        yield f"the fork {repository}, {content['version']}, read on {content['looked_at']}"
        yield from content["notes"]
        if "/" not in self.model:
            yield f"{self.model} is kvrsim's name of the model: replace it by the name or path of your checkpoint"
        if self.ranks != tuple(range(len(self.ranks))):
            yield f"the chunks run on GPUs {', '.join(map(str, self.ranks))}, in the order of the prompt"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        content = fields_to_json(self)
        content["regret"] = [fields_to_json(row) | {"ratio": row.ratio} for row in self.regret]
        launch = {"engine": RUNAHEAD, "version": build()["version"], "command": self.command, "args": list(self.args)}
        return launch | {"files": {}, "notes": list(self.notes())} | content


@cache
def build() -> dict[str, Any]:
    """What is known about the fork."""
    content: dict[str, Any] = json.loads(_DATA.read_text("utf-8"))
    return content


def runahead_launch(
    scenario: Scenario,
    contexts: LengthRange,
    *,
    strategies: Sequence[str | Strategy] | None = None,
    noise: Noise | None = None,
    model: str,
) -> RunaheadLaunch:
    """The launch of the strategy that loses least against the fastest of each context, with weights for all contexts.

    strategies: those that are compared; None: tsp, kvr-s and kvr-direct. noise: GPUs that are slower than the others.
    Raises InputError where the build cannot run the model, the layout or the request.
    """
    names = [get_strategy(strategy).name for strategy in strategies or ("tsp", "kvr-s", "kvr-direct")]
    check(scenario, names)
    max_len = longest_sequence(scenario.model, contexts.last)
    lengths = _lengths(contexts)
    fits = []
    for name in names:
        fit = _Fit(scenario, get_strategy(name), lengths, _slow_gpus(scenario, noise))
        if fit.is_feasible:
            fits.append(fit)
    if not fits:
        accepted = f"a context that fits with all weights on each GPU, which {', '.join(names)} needs"
        raise InputError("ctx", contexts.last, accepted)
    fastest_s = np.min([fit.best_s for fit in fits], axis=0)

    def loss(fit: _Fit) -> float:
        return float(np.max(np.array([row.ttft_s for row in fit.regret]) / fastest_s))

    best = min(fits, key=loss)
    return RunaheadLaunch(
        strategy=best.strategy.name,
        transport=build()["transports"][best.strategy.name],
        weights=best.weights,
        ranks=best.ranks,
        regret=best.regret,
        page_pull=best.page_pull(best.weights),
        others={fit.strategy.name: fit.regret[-1].ttft_s for fit in fits if fit is not best},
        model=model,
        max_len=max_len,
        memory_fraction=scenario.memory_fraction,
        batch=scenario.request.batch,
    )


def check(scenario: Scenario, strategies: Sequence[str]) -> None:
    """Raise InputError for what the build cannot run, with its reason."""
    transports = build()["transports"]
    for name in strategies:
        if name not in transports:
            accepted = f"{', '.join(transports)} with --emit {RUNAHEAD}, not {name} ({_lacks(get_strategy(name))})"
            raise InputError("strategies", ",".join(strategies), accepted)
    if scenario.num_gpus < 2:
        raise InputError("gpus", scenario.num_gpus, f"at least 2 with --emit {RUNAHEAD}: a prompt is cut between GPUs")
    if scenario.request.cached_prefix:
        accepted = f"0 with --emit {RUNAHEAD}: the build has no prefix cache"
        raise InputError("cached_prefix", scenario.request.cached_prefix, accepted)
    if scenario.expert_parallel:
        raise InputError("expert_parallel", "yes", f"no with --emit {RUNAHEAD}: each GPU holds all experts (EP is off)")
    engine = scenario.engine
    if engine is not None and engine.launched_as not in (None, "vllm"):
        raise InputError("emit", RUNAHEAD, f"{engine.launched_as}, whose times --engine {engine.name} gives")
    unsupported = _unsupported_layers(scenario.model)
    if unsupported is not None:
        raise InputError(
            "model", scenario.model.name, f"attention over all tokens with --emit {RUNAHEAD}, not {unsupported}"
        )


def _lacks(strategy: Strategy) -> str:
    """The limit of the build that a strategy exceeds."""
    degrees = strategy.degrees
    if degrees.experts not in (None, "default"):
        return "expert parallelism is off"
    for size, title in ((degrees.tensor, "TP"), (degrees.pipeline, "PP"), (degrees.data, "DP")):
        if size != 1:
            return f"it runs with {title} = 1"
    return "it has no such transport"


def _unsupported_layers(model: ModelSpec) -> str | None:
    """The first kind of layer that the build does not run; None if it runs all."""
    for layer in model.layer_kinds:
        mixer = layer.mixer
        if mixer is not None and (mixer.is_sparse or not isinstance(mixer, Attention | LatentAttention)):
            return mixer.title
    return None


def _lengths(contexts: LengthRange) -> tuple[int, ...]:
    """The contexts that are compared: the ends of the range, and one per doubling between them."""
    lengths = {contexts.first, contexts.last}
    length = 2 * contexts.first
    while length < contexts.last:
        lengths.add(length)
        length *= 2
    return tuple(sorted(lengths))


def _slow_gpus(scenario: Scenario, noise: Noise | None) -> tuple[SlowGpu, ...]:
    """The GPUs that are slower than the others. Raises InputError for noise that weights cannot answer."""
    if noise is None:
        return ()
    if noise.is_random or noise.slow_links:
        raise InputError("noise", noise.name, f"slow-gpu:GPUxFACTOR alone with --emit {RUNAHEAD}")
    noise.place_on(scenario.cluster)
    return noise.slow_gpus


def cut(weights: Array, context_len: int) -> Array:
    """The chunks that the build gives to weights of shape (B, ranks): shares of the context by largest remainder."""
    shares = context_len * weights / weights.sum(axis=-1, keepdims=True)
    chunks = np.floor(shares)
    missing = context_len - chunks.sum(axis=-1).astype(np.int64)
    order = np.argsort(chunks - shares, axis=-1, kind="stable")
    place = np.argsort(order, axis=-1, kind="stable")
    return np.asarray(chunks + (place < missing[..., None]), dtype=float)


class _Fit:
    """The weights of one strategy."""

    def __init__(
        self, scenario: Scenario, strategy: Strategy, lengths: Sequence[int], slow_gpus: tuple[SlowGpu, ...]
    ) -> None:
        self.strategy = strategy
        self.lengths = lengths
        self.ranks = tuple(range(scenario.num_gpus))
        self.scenario = scenario
        if slow_gpus:
            self.ranks, self.scenario = self._order(scenario, slow_gpus)
        self.searched = [self._best(length) for length in lengths]
        self.best_s = [candidate.ttft_s for candidate in self.searched]

    @property
    def is_feasible(self) -> bool:
        """Whether the longest prompt fits in memory, with all experts on each GPU."""
        longest = self.searched[-1]
        return longest.fits and longest.execution.layout.expert_parallel == 1

    def _at(self, length: int, cached_prefix: int = 0) -> Scenario:
        request = replace(self.scenario.request, context_len=length, cached_prefix=cached_prefix)
        return replace(self.scenario, request=request)

    def _best(self, length: int) -> Candidate:
        """The best partition of a context; even chunks for strategies that have them."""
        scenario = self._at(length)
        execution = execution_of(scenario, self.strategy)
        partition = Partition.even(length, scenario.num_gpus)
        if self.strategy.partition_rule == "search":
            partition = search(execution).partition
        return Candidate(execution=execution, partition=partition)

    def _order(self, scenario: Scenario, slow_gpus: Sequence[SlowGpu]) -> tuple[tuple[int, ...], Scenario]:
        """The GPU of each chunk with which the middle context is fastest, and the scenario in this order."""
        factors = {gpu.rank: gpu.factor for gpu in slow_gpus}
        by_rank = [factors.get(rank, 1.0) for rank in range(scenario.num_gpus)]
        length = self.lengths[len(self.lengths) // 2]
        best: tuple[float, tuple[int, ...], Scenario] | None = None
        for speeds in _arrangements(by_rank):
            slow = [SlowGpu(rank=place, factor=factor) for place, factor in enumerate(speeds)]
            self.scenario = replace(scenario, cluster=UnevenCluster.of(scenario.cluster, slow, ()))
            seconds = self._best(length).ttft_s
            if best is None or seconds < best[0]:
                best = (seconds, _ranks_of(speeds, by_rank), self.scenario)
        assert best is not None
        return best[1], best[2]

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Weights with the least largest regret, in blocks of the KV cache at the longest context."""
        ranks = self.scenario.num_gpus
        if self.strategy.partition_rule != "search":
            return (1,) * ranks
        blocks = max(self.lengths[-1] // build()["block_tokens"], ranks)
        executions = [candidate.execution for candidate in self.searched]

        def largest_regret(boundaries: Boundaries, enough: float = float("inf"), /) -> Array:
            weights = chunks_between(boundaries, blocks).astype(float)
            ratios = []
            for length, execution, best_s in zip(self.lengths, executions, self.best_s, strict=True):
                ratios.append(ttft_s(execution, cut(weights, length)) / best_s)
            return np.asarray(np.max(ratios, axis=0))

        shares = [np.array(candidate.partition.chunk_lens) / length for candidate, length in self._pairs()]
        starts = [rounded(share * blocks, 1, blocks) for share in (*shares, np.mean(shares, axis=0))]
        start = min(starts, key=lambda row: float(largest_regret(row[None])[0]))
        boundaries, _ = minimise(start, blocks, 1, largest_regret, rounds=_ROUNDS)
        return tuple(int(weight) for weight in chunks_between(boundaries, blocks))

    def _pairs(self) -> Iterator[tuple[Candidate, int]]:
        return zip(self.searched, self.lengths, strict=True)

    @cached_property
    def regret(self) -> tuple[Regret, ...]:
        """What the weights lose at each context."""
        rows = []
        for candidate, length in self._pairs():
            chunks = cut(np.array([self.weights], dtype=float), length)
            seconds = float(ttft_s(candidate.execution, chunks)[0])
            partition = tuple(int(tokens) for tokens in chunks[0])
            best_s = min(seconds, candidate.ttft_s)
            rows.append(Regret(ctx=length, partition=partition, ttft_s=seconds, best_ttft_s=best_s))
        return tuple(rows)

    def page_pull(self, weights: Sequence[int]) -> tuple[PagePull, ...]:
        """The longest prompt in steps, each after a cached prefix that all GPUs hold.

        In a step, a rank reads the pages of earlier ranks, as with direct messages. Before it, it reads the pages of
        the preceding step that it lacks: those of later ranks. A page is read once.
        """
        longest = self.lengths[-1]
        strategy = get_strategy("kvr-direct")
        request = self.scenario.request
        token_bytes = self.scenario.model.kv_bytes_per_token(request.dtype_bytes) * request.batch
        path = self.scenario.cluster.path(1, 0)
        rows = []
        for chunk_tokens in _CHUNKS:
            if chunk_tokens >= longest:
                continue
            seconds = 0.0
            history_bytes = 0.0
            starts = range(0, longest, chunk_tokens)
            for start in starts:
                end = min(start + chunk_tokens, longest)
                if end - start < self.scenario.num_gpus * build()["block_tokens"]:
                    continue  # a rest of a few blocks
                execution = execution_of(self._at(end, cached_prefix=start), strategy)
                chunks = cut_in_blocks(weights, end - start)
                seconds += float(ttft_s(execution, np.array([chunks], dtype=float))[0])
                if end < longest:
                    history_bytes += token_bytes * sum(chunks[1:])
            reads_s = float(path.busy_s(np.array(history_bytes)))
            row = PagePull(
                chunk_tokens=chunk_tokens, ttft_s=seconds, history_bytes=history_bytes, history_read_s=reads_s
            )
            rows.append(row)
        return tuple(rows)


def cut_in_blocks(weights: Sequence[int], tokens: int) -> tuple[int, ...]:
    """The chunks of a step whose cuts are ends of blocks of the KV cache, nearest to the shares of the weights."""
    block = build()["block_tokens"]
    blocks = max(-(-tokens // block), len(weights))
    shares = np.array(weights, dtype=float) / sum(weights) * tokens / block
    ends = np.minimum(rounded(shares, 1, blocks) * block, tokens)
    return tuple(int(length) for length in np.diff([0, *ends, tokens]))


def _arrangements(factors: Sequence[float]) -> list[tuple[float, ...]]:
    """Distinct orders of the GPUs' factors: all if there are few, else the slow ones together at each place."""
    distinct = set[tuple[float, ...]]()
    slow = sorted((factor for factor in factors if factor != 1.0), reverse=True)
    places = itertools.permutations(range(len(factors)), len(slow))
    for chosen in itertools.islice(places, 100 * _MOST_ORDERS):
        row = [1.0] * len(factors)
        for place, factor in zip(chosen, slow, strict=True):
            row[place] = factor
        distinct.add(tuple(row))
        if len(distinct) > _MOST_ORDERS:
            break
    else:
        return sorted(distinct)
    fast = [1.0] * (len(factors) - len(slow))
    return [tuple(fast[:place] + slow + fast[place:]) for place in range(len(fast) + 1)]


def _ranks_of(speeds: Sequence[float], factors: Sequence[float]) -> tuple[int, ...]:
    """The GPU of each place: of the GPUs with the place's factor, the first that is not taken."""
    free = list(range(len(factors)))
    ranks = []
    for speed in speeds:
        rank = next(rank for rank in free if factors[rank] == speed)
        free.remove(rank)
        ranks.append(rank)
    return tuple(ranks)
