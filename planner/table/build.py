"""Build a PartitionTable: search each entry separately, in several processes, then compare it with its neighbours.

If many partitions are nearly equally fast, a search may end at any of them. Of the partitions within 0.1 % of the best
TTFT, an entry takes the one nearest to the balanced plan, so that entries can be interpolated. If even chunks are
within 2 % of the best, for example because the host is the bottleneck, profiles cannot distinguish partitions, and the
gain of the search is lost at the next length. In this case the tolerance is 1.5 %. With a journal next to the table's
file, an interrupted build can resume.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from kvrsim.errors import InputError
from kvrsim.execution import Execution
from kvrsim.executors.access import execution_of
from kvrsim.io.journal import Journal
from kvrsim.io.schema import JsonObject, NonNegative, Whole, read, to_json
from kvrsim.memory import fits, memory_of
from kvrsim.once import once
from kvrsim.program import Array
from kvrsim.progress import OnProgress
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import KVR_S, STRATEGIES, Strategy, chain_like, searched_strategy
from kvrsim.units import check_places
from kvrsim.version import __version__
from planner.candidates import ttft_of
from planner.processes import Pool
from planner.search.balance import ChainWork, balanced_chunks
from planner.search.bound import lower_bound_s
from planner.search.minimise import Evaluator, chunks_between, to_grid, unique_rows
from planner.search.search import search
from planner.table.table import (
    Interpolated,
    PartitionTable,
    QuantizationSteps,
    TableEntry,
    TableSetting,
    quantization_steps,
    whole_chunks,
)
from planner.uncertainty.intervals import interval_of
from planner.uncertainty.sensitivities import sensitivities

# relative differences in TTFT within which partitions count as equal
_AS_FAST = 0.001
_AS_FAST_IF_EVEN_IS = 0.015
_EVEN_IS_AS_FAST = 0.02  # relative excess TTFT of even chunks up to which profiles cannot distinguish partitions
_BLENDS = 64  # number of blends of two partitions
_NEAR = 0.25  # the cost of a token is a mean over chunk lengths that differ by up to this share
_DRAFTS_SHARE = 0.8  # share of a time budget for the searches; the comparisons with neighbours follow
_INSIDE = 1e-3  # tokens between a level and the jump that the level must not reach


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """The search result of one entry."""

    num_gpus: int
    context_len: int
    partition: tuple[int, ...]
    ttft_s: float
    lower_bound_s: NonNegative | None  # None: unknown, because the strategy is no chain of KV-Runahead
    balanced: tuple[Whole, ...]  # chunks of the analytical plan

    @property
    def key(self) -> tuple[int, int]:
        """Number of GPUs and context length."""
        return self.num_gpus, self.context_len


def draft_of(execution: Execution) -> Draft:
    """The search result of one entry, which depends only on the execution."""
    result = search(execution)
    chain = chain_like(execution.strategy)
    lower_s = result.lower_bound_s
    if lower_s is None and execution.strategy.chains and execution.placed.chain_is_proven:
        lower_s = lower_bound_s(execution, result.ttft_s)
    balanced = (
        result.balanced if execution.strategy == chain else None
    )  # computed already, if the strategy is its own chain
    if balanced is None:
        balanced = balanced_chunks(execution.by(chain))
    draft = Draft(
        num_gpus=execution.cluster.num_gpus,
        context_len=execution.request.context_len,
        partition=result.partition.chunk_lens,
        ttft_s=result.ttft_s,
        lower_bound_s=lower_s,
        balanced=whole_chunks(balanced, execution.request.new_tokens),
    )
    return _nearest_to_balanced(execution, draft, [draft.partition])


def entry_of(
    execution: Execution, draft: Draft, around: tuple[Draft, Draft] | None, steps: QuantizationSteps
) -> TableEntry:
    """The entry with its draft's partition, or with a partition interpolated from its neighbours if that is better."""
    if around is not None and draft.num_gpus > 1:
        interpolated = _interpolate(execution, around, steps)
        draft = _nearest_to_balanced(execution, draft, [draft.partition, interpolated])
    partition = Partition(chunk_lens=draft.partition)
    interval = interval_of(sensitivities(execution, partition), draft.ttft_s)
    levels, token_s = levels_of(execution, draft.partition, steps)
    return TableEntry(
        num_gpus=draft.num_gpus,
        context_len=draft.context_len,
        partition=draft.partition,
        ttft_s=draft.ttft_s,
        ttft_low_s=interval.low_s,
        ttft_high_s=interval.high_s,
        speedup_over_tsp=_even_ttft_s(execution.by(STRATEGIES["tsp"])) / draft.ttft_s,
        speedup_over_even=_even_ttft_s(execution) / draft.ttft_s,
        gap=None if draft.lower_bound_s is None else max(0.0, draft.ttft_s / draft.lower_bound_s - 1),
        fits=fits(execution.placed, memory_of(execution, partition)),
        levels=tuple(float(f"{level / sum(draft.partition):.12g}") for level in levels),
        token_s=tuple(float(f"{seconds:.9g}") for seconds in token_s),
    )


def levels_of(
    execution: Execution, partition: tuple[int, ...], steps: QuantizationSteps
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Levels (tokens) and the cost of a token (seconds) of each rank; see planner/table/table.py.

    A rank whose chunk ends at a jump of the cost finishes before the busiest rank. The level of this rank is between
    its chunk and the level that the next token needs. For other strategies than chains, token costs are those of KVR's
    chain, and the spare time is 0, because it is not known which rank waits for which.
    """
    chain = ChainWork(execution.by(chain_like(execution.strategy)))
    chunks = np.array(partition, dtype=float)
    prefixes = execution.request.cached_prefix + np.cumsum(chunks) - chunks
    low = np.maximum(1.0, np.floor((1 - _NEAR) * chunks))
    high = np.floor((1 + _NEAR) * chunks) + 1.0
    trials = np.stack([chunks, low, high], axis=1)
    busy_s, low_s, high_s = chain.work(range(chain.num_ranks), trials, prefixes[:, None]).busy_s.T

    def extra_s(lengths: Array) -> Array:
        return np.array([steps.extra_s(length, prefix) for length, prefix in zip(lengths, prefixes, strict=True)])

    rise_s = high_s - low_s - (extra_s(high) - extra_s(low))
    costs = np.maximum(rise_s / (high - low), 1e-3 * busy_s / chunks)
    least = chunks + extra_s(chunks) / costs
    beyond = chunks + 1 + extra_s(chunks + 1) / costs
    spare_s = busy_s.max() - busy_s if execution.strategy.chains else 0.0
    levels = np.maximum(least, np.minimum(least + spare_s / costs, beyond - _INSIDE))
    return tuple(levels.tolist()), tuple(costs.tolist())


def _interpolate(execution: Execution, around: tuple[Draft, Draft], steps: QuantizationSteps) -> tuple[int, ...]:
    """The partition that a lookup interpolates from two neighbouring lengths."""
    lengths = [draft.context_len for draft in around]
    tokens = execution.request.new_tokens
    cached = execution.request.cached_prefix
    weight = (execution.request.context_len - lengths[0]) / (lengths[1] - lengths[0])
    rows = []
    for draft in around:
        request = replace(execution.request, context_len=draft.context_len)
        total = sum(draft.partition)
        levels, token_s = levels_of(execution.with_request(request), draft.partition, steps)
        rows.append(np.array([np.array(draft.partition) / total, np.array(levels) / total, token_s]))
    fractions, shares, token_s = (1 - weight) * rows[0] + weight * rows[1]
    values = Interpolated(
        tokens=tokens,
        cached_prefix=cached,
        shares=tuple(fractions.tolist()),
        levels=tuple((shares * tokens).tolist()),
        token_s=tuple(token_s.tolist()),
    )
    return values.partition(steps)


def _nearest_to_balanced(execution: Execution, draft: Draft, partitions: list[tuple[int, ...]]) -> Draft:
    """The draft with the partition nearest to the balanced one, among blends that are about as fast as the best."""
    if draft.num_gpus == 1:
        return draft
    balanced = np.array(draft.balanced, dtype=float)
    tokens = sum(draft.balanced)
    shares = np.linspace(0.0, 1.0, _BLENDS + 1)[:, None]
    blends = np.concatenate([balanced + shares * (np.array(partition) - balanced) for partition in partitions])
    rows = unique_rows(chunks_between(to_grid(np.cumsum(blends, axis=1)[:, :-1], 1, tokens), tokens))
    enough_s = (1 + _AS_FAST_IF_EVEN_IS) * draft.ttft_s  # slower rows are not chosen
    ttft_s = Evaluator(execution).ttft_s(rows.astype(float), enough_s)
    distance = np.abs(rows - balanced).max(axis=1)
    best_s = min(draft.ttft_s, float(ttft_s.min()))
    even_is_as_fast = _even_ttft_s(execution) <= (1 + _EVEN_IS_AS_FAST) * best_s
    tolerance = _AS_FAST_IF_EVEN_IS if even_is_as_fast else _AS_FAST
    fast = np.nonzero(ttft_s <= (1 + tolerance) * best_s)[0]
    best = fast[np.lexsort((ttft_s[fast], distance[fast]))[0]]
    return replace(draft, partition=tuple(int(chunk) for chunk in rows[best]), ttft_s=float(ttft_s[best]))


@once
def _even_ttft_s(execution: Execution) -> float:
    """The strategy's TTFT with even chunks."""
    even = Partition.even(execution.request.new_tokens, execution.cluster.num_gpus)
    return ttft_of(execution_of(execution.placed, execution.strategy), even)


def make_table(
    scenario: Scenario,
    gpu_counts: Sequence[int],
    context_lens: Sequence[int],
    *,
    strategy: str | Strategy = KVR_S,
    pool: Pool | None = None,
    journal: Journal | None = None,
    on_progress: OnProgress | None = None,
) -> PartitionTable:
    """The table for these numbers of GPUs and contexts, which replace those of the scenario.

    strategy: the strategy whose partitions are searched; a name, "FILE.py:NAME" or a Strategy.
    Entries are searched separately, so that the result does not depend on their order or on the process. Each entry is
    then compared with the interpolation of its neighbours. pool: processes that search; None: this process.
    journal: drafts of an interrupted build, to which new drafts are appended. If the pool's time budget ends, the table
    has the complete entries. Raises InputError if there are none, and for more GPUs than tokens.
    """
    pool = pool or Pool()
    own = searched_strategy(strategy)
    executions = _executions(scenario, own, gpu_counts, context_lens)
    drafts = {} if journal is None else {one.key: one for one in _drafts_of(journal) if one.key in executions}
    missing = [key for key in executions if key not in drafts]
    random.Random(0).shuffle(missing)  # so that finished and remaining entries take equally long on average
    for draft in pool.run(draft_of, [(executions[key],) for key in missing], share=_DRAFTS_SHARE):
        drafts[draft.key] = draft
        if journal is not None:
            journal.append(to_json(draft))
        if on_progress is not None:
            on_progress(len(drafts), len(executions), "entries")
    if not drafts:
        raise InputError("time_budget", f"{pool.time_budget_s:g}s", "a longer time: no entry is complete")
    steps = quantization_steps(executions[max(executions)].placed)
    around = _neighbours(drafts)
    work = [(executions[key], drafts[key], around[key], steps) for key in executions if key in drafts]
    entries = pool.run_in_order(entry_of, work, "comparisons with neighbours", on_progress)
    setting = TableSetting.of(scenario, own.name)
    return PartitionTable(setting=setting, kvrsim_version=__version__, steps=steps, entries=tuple(entries))


def table_journal(output: str, scenario: Scenario, strategy: str | Strategy) -> Journal:
    """The journal of a table build, next to the table's file."""
    about = {"kvrsim": __version__} | to_json(TableSetting.of(scenario, searched_strategy(strategy).name))
    return Journal(Path(f"{output}.partial"), about)


def _drafts_of(journal: Journal) -> list[Draft]:
    """The drafts that an interrupted build has searched; raises InputError for an invalid line."""
    return [read(Draft, JsonObject(fields=line, where=f"output {journal.path}")) for line in journal.results]


def _executions(
    scenario: Scenario, strategy: Strategy, gpu_counts: Sequence[int], context_lens: Sequence[int]
) -> dict[tuple[int, int], Execution]:
    """The execution of each entry, by number of GPUs and context."""
    check_places("ctx", context_lens, gpu_counts)
    most = max(gpu_counts)
    least = min(context_lens) - scenario.request.cached_prefix
    if most > least:
        raise InputError("gpus", most, f"at most one GPU per new token, here {least}")

    executions = {}
    for gpus, length in product(sorted(set(gpu_counts)), sorted(set(context_lens))):
        asked = replace(scenario.on_gpus(gpus), request=replace(scenario.request, context_len=length))
        executions[gpus, length] = execution_of(asked, strategy)
    return executions


def _neighbours(drafts: dict[tuple[int, int], Draft]) -> dict[tuple[int, int], tuple[Draft, Draft] | None]:
    """The drafts of the next shorter and next longer context, for each entry; None for the shortest and the longest."""
    keys = sorted(drafts)
    neighbours: dict[tuple[int, int], tuple[Draft, Draft] | None] = dict.fromkeys(keys)
    for before, key, after in zip(keys, keys[1:], keys[2:], strict=False):
        if before[0] == after[0]:
            neighbours[key] = drafts[before], drafts[after]
    return neighbours
