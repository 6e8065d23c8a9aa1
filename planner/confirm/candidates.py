"""What a confirmation measures: the strategies, partitions near the plan's, and which of them fit in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvrsim.errors import InputError
from kvrsim.memory import RankMemory
from kvrsim.runtime.plan import RUN_STRATEGIES
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import KVR_S, get_strategy
from kvrsim.units import format_bytes
from planner.candidates import Candidate, all_for, per_rank_scenario
from planner.confirm.hardware import Hardware, Mode, check_split
from planner.search.minimise import Evaluator, around, chunk_lens, chunks_between

NO_REFERENCE = "logits are not compared: a single process's prefill does not fit in memory"
STRATEGIES = ("single", "tsp", "kvr-e", "kvr-s")  # measured by default
REPLAYED = (*STRATEGIES, "kvr-b")  # what one device can replay rank by rank
_LOOKS_UP = "kvr-p"  # its partition is in a table, which is not read here
_APART = 1 / 16  # of the even chunk: partitions that differ by less have no significant difference in a measurement


def strategies_here(
    scenario: Scenario, names: Sequence[str] | None, mode: Mode, hardware: Hardware
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the strategies to measure, and notes on those that the machine or the model does not allow.

    names: "all" stands for every strategy that is planned and can be measured here, None for the paper's.
    Raises InputError for a strategy that cannot be measured here.
    """
    if scenario.cluster.num_gpus == 1:
        return ("single",), ()
    wanted = list(dict.fromkeys(STRATEGIES if names is None else names))
    allowed = [name for name in RUN_STRATEGIES if name != _LOOKS_UP and (mode == "ranks" or name in REPLAYED)]
    where = "what the runtime runs without a table" if mode == "ranks" else "what one device can replay in turn"
    for name in wanted:
        if name != "all":
            if name not in allowed:
                raise InputError("strategies", name, f"{where}: {', '.join(allowed)}, or all")
            _check_runs(scenario, name, hardware)
    if "all" not in wanted:
        return tuple(wanted), ()
    planned, notes = all_for(scenario)
    runnable, reasons = [], dict[str, list[str]]()
    for name in (strategy.name for strategy in planned):
        try:
            if name in allowed:
                _check_runs(scenario, name, hardware)
                runnable.append(name)
            else:
                reasons.setdefault(where, []).append(name)
        except InputError as error:
            reasons.setdefault(error.accepted, []).append(name)
    at = wanted.index("all")
    wanted[at : at + 1] = runnable
    left_out = (f"not measured: {', '.join(left)}: takes {reason}" for reason, left in reasons.items())
    return tuple(dict.fromkeys(wanted)), (*notes, *left_out)


def _check_runs(scenario: Scenario, name: str, hardware: Hardware) -> None:
    """Raise InputError where the planner or the runtime cannot run the strategy on this model and number of ranks."""
    strategy = get_strategy(name, "strategies")
    per_rank = per_rank_scenario(scenario, strategy)
    check_split(scenario, strategy)
    even = Partition.even(scenario.request.new_tokens, per_rank.cluster.num_gpus)
    candidate = Candidate(scenario=scenario, strategy=strategy, partition=even)
    hardware.choice(scenario).check(hardware.run_plan(candidate))


def further_candidates(kvr_s: Candidate, others: Sequence[Candidate], count: int) -> dict[str, Candidate]:
    """Return by name the fastest partitions by prediction that differ from the candidates' and from each other."""
    scenario, center = kvr_s.scenario, kvr_s.partition
    if count < 1 or scenario.cluster.num_gpus < 2:
        return {}
    tokens, ranks = center.num_tokens, len(center.chunk_lens)
    apart = max(1, round(tokens / ranks * _APART))
    rows = around(np.array(center.boundaries[1:-1]), apart, tokens)
    if not len(rows):
        return {}
    ttft_s = Evaluator(scenario, KVR_S).ttft_s(chunks_between(rows, tokens).astype(float))
    known = [np.array(one.partition.boundaries[1:-1]) for one in others if one.strategy.name.startswith("kvr")]
    further: dict[str, Candidate] = {}
    for index in np.argsort(ttft_s, kind="stable"):
        row = rows[index]
        if len(further) < count and all(np.abs(row - other).max() >= apart for other in known):
            known.append(row)
            partition = Partition(chunk_lens=chunk_lens(row.tolist(), tokens))
            further[f"{KVR_S.name} #{len(further) + 2}"] = replace(kvr_s, partition=partition, search=None)
    return further


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
    """Memory that ranks share, of a GPU or of this host."""

    limit_bytes: float  # usable by all of them
    num_ranks: int  # that share it, those without a chunk included
    on_gpu: bool
    mode: Mode

    @classmethod
    def of(cls, scenario: Scenario, hardware: Hardware, mode: Mode) -> MemoryBudget:
        """Return a GPU's memory, or this host's, times the scenario's memory fraction."""
        num_ranks = 1 if mode == "virtual" else scenario.cluster.num_gpus
        if hardware.device == "cuda":
            limit, num_ranks = float(scenario.memory_limit.nbytes), -(-num_ranks // max(1, hardware.devices))
        else:
            limit = scenario.memory_fraction * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(limit_bytes=limit, num_ranks=num_ranks, on_gpu=hardware.device == "cuda", mode=mode)

    def needed_bytes(self, candidate: Candidate) -> int:
        """Return the peak of a candidate's ranks that share the memory; all candidates use the same KV buffers."""
        scenario = candidate.scenario
        weights = scenario.model.weight_bytes(scenario.request.dtype_bytes)  # parts of the model are views of it
        ranks = [replace(rank, weights=weights) for rank in candidate.memory]
        if self.mode == "virtual":  # one device replays every rank, on the K and V of the whole context
            kv_cache = max(rank.kv_cache for rank in ranks)
            return max(self._peak(replace(rank, kv_cache=kv_cache, gathered=0)) for rank in ranks)
        idle = replace(ranks[0], kv_cache=0, gathered=0, activations=0, scores=0, logits=0)
        everyone = [*ranks, *[idle] * (scenario.cluster.num_gpus - len(ranks))]
        return sum(sorted(map(self._peak, everyone))[-self.num_ranks :])

    def _peak(self, rank: RankMemory) -> int:
        """Only a GPU holds a CUDA context."""
        return rank.total if self.on_gpu else rank.total - rank.runtime

    def fits(self, candidate: Candidate) -> bool:
        """Whether a candidate can be measured."""
        return self.needed_bytes(candidate) <= self.limit_bytes

    @property
    def name(self) -> str:
        """The budget as text."""
        return f"{format_bytes(self.limit_bytes)} that may be used of {'a GPU' if self.on_gpu else 'this host'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Feasible:
    """The candidates that can be measured."""

    candidates: dict[str, Candidate]
    reference: bool  # whether a single process can compute the logits to compare with
    notes: tuple[str, ...]  # on candidates that are left out

    @classmethod
    def of(cls, candidates: dict[str, Candidate], budget: MemoryBudget) -> Feasible:
        """Return the candidates that fit in memory; raise InputError naming `ctx` where none does."""
        needed = {name: budget.needed_bytes(one) for name, one in candidates.items()}
        fit = {name: one for name, one in candidates.items() if needed[name] <= budget.limit_bytes}
        if not fit:
            least = min(needed, key=lambda name: needed[name])
            context_len = candidates[least].scenario.request.context_len
            accepted = f"a context that fits: {least} takes {format_bytes(needed[least])} of {budget.name}"
            raise InputError("ctx", context_len, accepted)
        reference, notes = needed.get("single", 0) <= budget.limit_bytes, []
        if len(fit) < len(candidates):
            names = ", ".join(f"{name} ({format_bytes(needed[name])})" for name in candidates if name not in fit)
            notes.append(f"not measured, because it does not fit in the {budget.name}: {names}")
        if not reference:
            notes.append(NO_REFERENCE)
        return cls(candidates=fit, reference=reference, notes=tuple(notes))
