"""The candidates of a confirmation: the baselines, partitions near the plan's, and which of them fit in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvrsim.compile import for_strategy
from kvrsim.errors import InputError
from kvrsim.memory import RankMemory, memory_of
from kvrsim.results.results import Plan
from kvrsim.runtime.plan import RUN_STRATEGIES
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import KVR_S, Strategy, get_strategy
from kvrsim.units import format_bytes
from planner.candidates import all_for
from planner.confirm.hardware import check_split, run_plan
from planner.confirm.result import Mode
from planner.search.minimise import Evaluator, around, chunk_lens, chunks_between

if TYPE_CHECKING:
    from kvrsim.runtime.measure import ModelChoice

NO_REFERENCE = "logits are not compared: a single process's prefill does not fit in memory"
_SEARCHED = KVR_S.name  # the strategy whose partition is searched, and whose other partitions are candidates
_APART = 1 / 16  # of the even chunk: partitions that differ by less have no significant difference in a measurement


STRATEGIES = ("single", "tsp", "kvr-e", "kvr-s")  # compared where nobody says which
REPLAYED = (*STRATEGIES, "kvr-b")  # what one device can replay rank by rank
_LOOKS_UP = "kvr-p"  # its partition in a table, which is not read here


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """The strategies whose candidates are measured."""

    names: tuple[str, ...]
    notes: tuple[str, ...] = ()  # on those that the machine or the model does not allow


def compared(scenario: Scenario, asked: Sequence[str] | None, mode: Mode, choice: ModelChoice) -> Compared:
    """Those asked for; "all" stands for every one that is planned and can be measured here, None for the paper's.

    choice: the model as the ranks load it. Raises InputError for a strategy that cannot be measured here.
    """
    if scenario.cluster.num_gpus == 1:
        return Compared(names=("single",))
    names = list(dict.fromkeys(STRATEGIES if asked is None else asked))
    allowed = [name for name in RUN_STRATEGIES if name != _LOOKS_UP and (mode == "ranks" or name in REPLAYED)]
    where = "what the runtime runs without a table" if mode == "ranks" else "what one device can replay in turn"
    for name in [one for one in names if one != "all"]:
        if name not in allowed:
            raise InputError("strategies", name, f"{where}: {', '.join(allowed)}, or all")
        _check_runs(scenario, name, choice)
    notes: list[str] = []
    if "all" in names:
        planned, why = all_for(scenario)
        found, reasons = [], dict[str, list[str]]()
        for name in (one.name for one in planned):
            if reason := _why_not(scenario, name, choice) if name in allowed else where:
                reasons.setdefault(reason, []).append(name)
            else:
                found.append(name)
        at = names.index("all")
        names[at : at + 1] = found
        notes = [*why, *(f"not measured: {', '.join(left)}: takes {reason}" for reason, left in reasons.items())]
    return Compared(names=tuple(dict.fromkeys(names)), notes=tuple(notes))


def _why_not(scenario: Scenario, name: str, choice: ModelChoice) -> str | None:
    """What the strategy takes that is not here; None: it can be measured."""
    try:
        _check_runs(scenario, name, choice)
    except InputError as error:
        return error.accepted
    return None


def _check_runs(scenario: Scenario, name: str, choice: ModelChoice) -> None:
    """Raise InputError where the planner or the runtime cannot run the strategy on this model and so many ranks."""
    strategy = get_strategy(name, "strategies")
    placed = for_strategy(scenario, strategy)
    check_split(scenario, strategy)
    even = Partition.even(scenario.request.new_tokens, placed.cluster.num_gpus)
    choice.check(run_plan(scenario, name, even, "ring"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """One candidate: its own name, the registered strategy that runs it, and its partition."""

    strategy: str  # the candidate's name, distinct: the strategy's, or "kvr-s #2" for the second best partition
    run_as: str  # the registered strategy
    partition: Partition
    layers: tuple[int, ...] | None = None  # of each stage of a pipeline, whose pieces `partition` holds

    @property
    def as_run(self) -> Strategy:
        """The strategy with all that was chosen for it but the partition; stages are part of its name."""
        strategy = get_strategy(self.run_as)
        if self.layers is None:
            return strategy
        name = f"{strategy.name}-of-{'-'.join(map(str, self.layers))}"
        return replace(strategy, name=name, stage_layers=self.layers, partition_rule="pieces")


def candidates_of(scenario: Scenario, plan: Plan, top: int) -> list[Named]:
    """The plan's strategies, then the top - 1 best partitions that differ from them and from each other."""
    named = [
        Named(
            strategy=result.strategy,
            run_as=result.strategy,
            partition=Partition(chunk_lens=result.partition),
            layers=result.layers,
        )
        for result in plan.strategies
    ]
    searched = next((one.partition for one in named if one.run_as == _SEARCHED), None)
    if searched is None or top < 2 or scenario.cluster.num_gpus < 2:
        return named
    taken = [one.partition.boundaries for one in named if one.run_as.startswith("kvr")]
    further = _further(scenario, searched, taken, top - 1)
    return named + [
        Named(strategy=f"{_SEARCHED} #{number}", run_as=_SEARCHED, partition=partition)
        for number, partition in enumerate(further, start=2)
    ]


def _further(scenario: Scenario, center: Partition, taken: Sequence[tuple[int, ...]], count: int) -> list[Partition]:
    """The fastest partitions by prediction, each at least _APART from all before it."""
    tokens, ranks = center.num_tokens, len(center.chunk_lens)
    apart = max(1, round(tokens / ranks * _APART))
    rows = around(np.array(center.boundaries[1:-1]), apart, tokens)
    if not len(rows):
        return []
    ttft_s = Evaluator(scenario, KVR_S).ttft_s(chunks_between(rows, tokens).astype(float))
    known = [np.array(one[1:-1]) for one in taken]
    found: list[Partition] = []
    for index in np.argsort(ttft_s, kind="stable"):
        row = rows[index]
        if len(found) < count and all(np.abs(row - other).max() >= apart for other in known):
            known.append(row)
            found.append(Partition(chunk_lens=chunk_lens(row.tolist(), tokens)))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Memory that ranks share, of a GPU or of the host."""

    limit_bytes: float  # usable by all of them
    num_ranks: int  # that share it, those without a chunk included
    on_gpu: bool

    @classmethod
    def of(cls, scenario: Scenario, device: str, num_devices: int, mode: Mode) -> Room:
        """A GPU's memory, or this host's, times the scenario's memory fraction."""
        num_ranks = 1 if mode == "virtual" else scenario.cluster.num_gpus
        if device == "cuda":
            shared_by = -(-num_ranks // max(1, num_devices))
            return cls(limit_bytes=scenario.memory_limit.nbytes, num_ranks=shared_by, on_gpu=True)
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(limit_bytes=scenario.memory_fraction * host_bytes, num_ranks=num_ranks, on_gpu=False)

    def needed_bytes(self, scenario: Scenario, named: Named, mode: Mode) -> int:
        """Peak of a candidate's ranks that share the memory; all candidates use the same KV buffers and weights."""
        strategy = named.as_run
        in_parts = strategy.pipeline is not None or strategy.group_size is None  # of the model
        placed = for_strategy(scenario, strategy) if in_parts else scenario.on_gpus(len(named.partition.chunk_lens))
        whole = scenario.model.weight_bytes(scenario.request.dtype_bytes)  # parts are views of it
        ranks = [replace(rank, weights=whole) for rank in memory_of(placed, strategy, named.partition)]
        if mode == "virtual":  # one device replays every rank, on the K and V of the whole context
            kv_cache = max(rank.kv_cache for rank in ranks)
            return max(self._peak(replace(rank, kv_cache=kv_cache, gathered=0)) for rank in ranks)
        idle = replace(ranks[0], kv_cache=0, gathered=0, activations=0, scores=0, logits=0)
        everyone = [*ranks, *[idle] * (scenario.cluster.num_gpus - len(ranks))]
        return sum(sorted(map(self._peak, everyone))[-self.num_ranks :])

    def _peak(self, rank: RankMemory) -> int:
        """Peak of one rank; only a GPU holds a CUDA context."""
        return rank.total if self.on_gpu else rank.total - rank.runtime

    @property
    def name(self) -> str:
        """For people."""
        return f"{format_bytes(self.limit_bytes)} that may be used of {'a GPU' if self.on_gpu else 'this host'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitting:
    """The candidates that can be measured."""

    candidates: tuple[Named, ...]
    reference: bool  # whether a single process can compute the logits to compare with
    notes: tuple[str, ...]  # on candidates that are left out


def fitting(scenario: Scenario, candidates: Sequence[Named], room: Room, mode: Mode) -> Fitting:
    """The candidates that fit in memory; raises InputError naming `ctx` where none does."""
    needed = {one.strategy: room.needed_bytes(scenario, one, mode) for one in candidates}
    kept = tuple(one for one in candidates if needed[one.strategy] <= room.limit_bytes)
    if not kept:
        least = min(needed, key=lambda name: needed[name])
        accepted = f"a context that fits: {least} takes {format_bytes(needed[least])} of {room.name}"
        raise InputError("ctx", scenario.request.context_len, accepted)
    alone = next((needed[one.strategy] for one in candidates if one.run_as == "single"), 0)
    return Fitting(
        candidates=kept,
        reference=alone <= room.limit_bytes,
        notes=tuple(_notes(candidates, needed, alone, room)),
    )


def _notes(candidates: Sequence[Named], needed: dict[str, int], alone: int, room: Room) -> Iterator[str]:
    out = [one.strategy for one in candidates if needed[one.strategy] > room.limit_bytes]
    if out:
        shown = ", ".join(f"{name} ({format_bytes(needed[name])})" for name in out)
        yield f"not measured, because it does not fit in the {room.name}: {shown}"
    if alone > room.limit_bytes:
        yield NO_REFERENCE
