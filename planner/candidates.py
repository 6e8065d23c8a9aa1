"""Candidate: a strategy with a partition for a scenario, and everything predicted for it.

A plan compares candidates; a simulation has a single candidate. Each prediction is computed once, on first use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np

from kvrsim.arguments import SearchArgs
from kvrsim.choices import PrefixAccess
from kvrsim.compile import columns, pipeline_computes_s, program_of
from kvrsim.errors import ABSENT, InputError
from kvrsim.execution import Execution
from kvrsim.executors.access import execution_of, prefix_accesses
from kvrsim.executors.run import Run, Runner, run_partition
from kvrsim.memory import RankMemory, fits, largest_of_even_chunks, memory_of
from kvrsim.model.mixers import Recurrence
from kvrsim.notes import note
from kvrsim.once import once
from kvrsim.program import Program, computes_s, waited_s
from kvrsim.progress import OnProgress
from kvrsim.results.results import NEAR, NotTried
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import (
    CHUNKED,
    KVR_S,
    STRATEGIES,
    Strategy,
    chain_like,
    get_strategy,
    label_of,
    names_in_all,
    names_with_spread_experts,
    rare_names,
)
from kvrsim.strategies.pipeline import context_ranks
from kvrsim.units import format_bytes
from planner.deploy_engines import deploy_engine, engines_with
from planner.estimate import estimate_s
from planner.search.minimise import MOST_GAIN, Allowance
from planner.search.search import SearchResult, search
from planner.uncertainty.intervals import Interval, interval_of
from planner.uncertainty.sensitivities import Sensitivities, sensitivities
from planner.work import first_s, has_many_errors, work_of

if TYPE_CHECKING:
    from kvrsim.results.results import Limit
    from kvrsim.results.timeline import Timeline

ROUGH = "rough"  # name of the method if the pieces were not searched
_FAR = 1.5  # a strategy that takes long to simulate is tried if its estimate is at most this many times the best TTFT
_TOO_LONG = "one simulation takes longer than --search-budget allows"
_RARE = f"at most {100 * (NEAR - 1):.0f} % faster by an estimate; --strategies NAME tries them"
_OUTSIDE_ALL = "not among all; --strategies NAME tries them"
_SLOW = f"more than {_FAR:g} times as slow by an estimate; --strategies NAME tries them"
_TOO_LARGE = "they need more memory than a GPU may use"
_CHEAP_S = 0.1  # modelled CPU seconds: strategies whose first simulation takes less are always compared


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An execution with its partition, and how the partition was found."""

    execution: Execution  # a searched pipeline has the layers of its stages
    partition: Partition
    search: SearchResult | None = field(default=None, compare=False)  # None: the partition was not searched

    @classmethod
    def of(cls, execution: Execution, partition: Sequence[int]) -> Self:
        """The candidate of a given partition, which is not checked."""
        return cls(execution=execution, partition=Partition(chunk_lens=tuple(partition)))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only the fields, without cached results."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @property
    def scenario(self) -> Scenario:
        """The question, with all GPUs that take part."""
        return self.execution.scenario

    @property
    def strategy(self) -> Strategy:
        """The strategy; a searched pipeline includes the layers of its stages."""
        return self.execution.strategy

    @property
    def program(self) -> Program:
        """The operations of all ranks."""
        return program_of(self.execution, self.partition)

    @cached_property
    def finish_s(self) -> tuple[float, ...]:
        """Finish time of each rank, seconds."""
        if self._result is not None and self._result.finish_s is not None:
            return self._result.finish_s
        chunks = np.array([self.partition.chunk_lens], dtype=float).T
        finish_s = Runner(self.execution).finish_s(chunks, program=lambda: self.program)
        return tuple(map(float, finish_s[:, 0]))

    @cached_property
    def ttft_s(self) -> float:
        """Time at which the last rank ends."""
        return self.finish_s[-1] if self._result is None else self._result.ttft_s

    @property
    def _result(self) -> SearchResult | None:
        """The search's result if it is about this scenario, strategy and partition."""
        search = self.search
        if search is None or search.execution.placed is not self.execution.placed:  # as with long steps
            return None
        is_same = search.partition == self.partition and search.execution.strategy == self.strategy
        return search if is_same else None

    @cached_property
    def ttft_without_communication_s(self) -> float:
        """TTFT of the same partition over links that take no time."""
        return ttft_of(self.execution.on(self.execution.placed.without_communication), self.partition)

    @property
    def exposed_comm_s(self) -> float:
        """TTFT minus that of the same partition with free links; estimated if simulations take long."""
        if not self.is_slow:
            return max(0.0, self.ttft_s - self.ttft_without_communication_s)
        free = self.execution.on(self.execution.placed.without_communication)
        return max(0.0, self.ttft_s * (1 - estimate_s(free) / estimate_s(self.execution)))

    @cached_property
    def compute_s(self) -> tuple[float, ...]:
        """Device time of each rank's own operations."""
        if not self.strategy.is_pipeline:
            return tuple(computes_s(self.program))
        return tuple(pipeline_computes_s(self.execution, columns(self.partition.chunk_lens)))

    @property
    def query_blocks(self) -> tuple[int, ...] | None:
        """Attention calls per rank, in the layer with the most calls; None if attention is never issued in blocks."""
        return None if self.strategy.query_blocks == (1,) else self.program.most_query_blocks

    @property
    def waits(self) -> tuple[float, ...]:
        """Idle seconds of each GPU before its finish time."""
        pairs = zip(self.compute_s, self.finish_s, strict=True)
        each_group = tuple(waited_s(*pair) for pair in pairs for _ in range(self.execution.placed.gpus_per_rank))
        return each_group * self.execution.placed.data_groups

    @property
    def memory(self) -> tuple[RankMemory, ...]:
        """Peak memory of every GPU."""
        return memory_of(self.execution, self.partition)

    @cached_property
    def fits(self) -> bool:
        """Whether every GPU's peak is within the memory limit."""
        return fits(self.execution.placed, self.memory)

    @cached_property
    def is_slow(self) -> bool:
        """Whether its errors and limits are estimated, because simulations of all their sources take long.

        Not on a bus: even chunks, which the estimate has, are far from the best ones there.
        """
        if self.execution.cluster.shares_bandwidth:
            return False
        return has_many_errors(self.execution, len(self.partition.chunk_lens))

    @cached_property
    def sensitivities(self) -> Sensitivities:
        """Changes of log TTFT by error source."""
        if self.is_slow:
            return self.estimated_sensitivities
        return sensitivities(self.execution, self.partition, ttft_s=self.ttft_s)

    @cached_property
    def estimated_sensitivities(self) -> Sensitivities:
        """The same without simulations."""
        return sensitivities(self.execution, self.partition, ttft_s=self.ttft_s, is_estimated=True)

    @cached_property
    def interval(self) -> Interval:
        """The 80 % prediction interval of TTFT."""
        known = vars(self).get("sensitivities")
        if known is None:
            known = sensitivities(
                self.execution, self.partition, for_differences=False, ttft_s=self.ttft_s, is_estimated=self.is_slow
            )
        return interval_of(known, self.ttft_s)

    @cached_property
    def limits(self) -> tuple[Limit, ...]:
        """The shares of the kinds of operations in the critical path, largest first."""
        from planner.limits import limits_of

        return limits_of(self.execution, self.partition, is_estimated=self.is_slow)

    @property
    def shares(self) -> dict[str, float]:
        """The share of the critical path by kind of operation, largest first."""
        return {one.operation: one.share for one in self.limits}

    @cached_property
    def _event_run(self) -> Run:
        return run_partition(self.execution, self.partition, timeline=True)

    @property
    def timeline_error(self) -> float:
        """Relative difference of the timeline's TTFT from `ttft_s`; on a bus, rounding errors can grow (law P2)."""
        return self._event_run.ttft_s / self.ttft_s - 1

    @cached_property
    def timeline(self) -> Timeline:
        """All spans, recorded by the event executor, with the basis of each span's seconds."""
        from planner.uncertainty.basis import bases_of

        run = self._event_run
        assert run.timeline is not None
        bases = bases_of(self.execution, self.partition, run.timeline)
        return replace(run.timeline, bases=bases, shares=self.shares)

    @property
    def prefix_access(self) -> PrefixAccess | None:
        """How ranks attend to a cached prefix on other GPUs; None: the prefix is on the GPUs that use it."""
        plan = self.execution.placed.prefix_access_plan
        each_stage_has_its_layers = self.strategy.is_pipeline and plan.source is None
        return None if plan.is_local or each_stage_has_its_layers else plan.access


def ttft_of(execution: Execution, partition: Partition) -> float:
    """TTFT of one partition."""
    return run_partition(execution, partition).ttft_s


def prefix_access_notes(candidates: Sequence[Candidate]) -> list[str]:
    """Notes on how each strategy's ranks attend to a cached prefix that is not on all GPUs; empty if there are none."""
    meanings = {"whole": "each rank loads all that it needs", "pass-kv": "its shares go to all ranks"}
    meanings["pass-q"] = "queries go to its shares, and results return"
    names = {way: [one.strategy.name for one in candidates if one.prefix_access == way] for way in meanings}
    ways = [f"{way} ({meaning}) in {', '.join(names[way])}" for way, meaning in meanings.items() if names[way]]
    had_choice = any(len(prefix_accesses(one.execution)) > 1 for one in candidates)
    return [note("prefix access, chosen" if had_choice else "prefix access", ways="; ".join(ways))] if ways else []


# -- the partition of a strategy


class PartitionLookup(Protocol):
    """A table of partitions, such as planner.table.table.PartitionTable."""

    def partition_for(self, execution: Execution, /) -> Partition:
        """The partition of a scenario, for a strategy that uses the table."""

    def notes_for(self, execution: Execution, /) -> tuple[str, ...]:
        """Notes on differences between the table and the scenario, for a strategy that uses the table."""


class ForEngine(NamedTuple):
    """The serving engine that a comparison is for."""

    name: str
    only: bool = False  # whether only strategies of this engine are compared

    def has(self, execution: Execution) -> bool:
        """Whether the engine has the strategy on these GPUs."""
        return deploy_engine(self.name).has(execution)


@dataclass(frozen=True, kw_only=True)
class Search:
    """Options, limits and callbacks for the choice of a strategy's partition."""

    partition: Sequence[int] | None = None  # tokens of each chunk or piece; None: the strategy's own
    options: SearchArgs = field(default_factory=SearchArgs)  # search options; `table` takes the place of theirs
    table: PartitionLookup | None = None  # table of partitions, read from its file
    on_progress: OnProgress | None = None
    on_candidate: Callable[[Candidate], object] | None = None  # called with each new best of a strategy
    allowance: Allowance | None = None  # limit of the work of one search; None: no limit
    engine: ForEngine | None = None  # only this engine's strategies count as deployable; None: those of any engine
    cluster_gpus: int | None = None  # GPUs of the whole cluster; None: those that take part

    def candidate(self, execution: Execution, warm_start: Partition | None = None) -> Candidate:
        """The execution with the given partition, checked; else an even one, one from a table, or a searched one.

        warm_start: the best partition of KVR's chain. Raises InputError for a strategy without its table, and for a
        partition that does not fit.
        """
        partition = None if self.partition is None else _check_partition(self.partition, execution)
        rule = execution.strategy.partition_rule
        if rule == "searched-pieces":
            found = self._pieces(execution, partition)
        elif partition is not None:
            return Candidate(execution=execution, partition=partition)
        elif rule == "pieces":
            found = self._even_pieces(execution)
        elif rule == "search":
            found = self._chunks(execution, warm_start)
        elif rule == "table":
            return Candidate(execution=execution, partition=self._look_up(execution))
        else:
            even = Partition.even(execution.request.new_tokens, execution.cluster.num_gpus)
            return Candidate(execution=execution, partition=even)
        with_layers = execution.by(found.strategy)
        return Candidate(execution=with_layers, partition=found.partition, search=found)

    def _chunks(self, execution: Execution, warm_start: Partition | None) -> SearchResult:
        """Searched chunks. Ranks of several GPUs have no grid search and no stride of the user's."""
        method = self.options.method
        stride = self.options.stride
        if execution.strategy.group_size != 1:
            stride = None
            if method == "grid":
                method = "auto"
        return search(
            execution,
            method=method,
            stride=stride,
            warm_start=warm_start,
            on_progress=self.on_progress,
            allowance=self.allowance,
        )

    def _even_pieces(self, execution: Execution) -> SearchResult:
        """The best number of even pieces."""
        from planner.search.pipeline import search_even_pieces  # imported only for pipelines

        return search_even_pieces(execution, self.on_progress)

    def _pieces(self, execution: Execution, given: Partition | None) -> SearchResult:
        """The given pieces, or searched ones, with the best layers of the stages for these pieces.

        The layers follow from the pieces alone, so the pieces of an answer give the same answer again.
        """
        from planner.search.pipeline import search_pipeline, with_step_time  # imported only for pipelines

        execution = with_step_time(execution, "mean")
        if given is not None:
            return search_pipeline(execution, pieces=given, on_progress=self.on_progress)
        found = search_pipeline(
            execution, stride=self.options.stride, on_progress=self.on_progress, allowance=self.allowance
        )
        again = search_pipeline(execution, pieces=found.partition)
        report = replace(
            found.report,
            evaluations=found.report.evaluations + again.report.evaluations,
            seconds=found.report.seconds + again.report.seconds,
        )
        return replace(again, report=report)

    def _look_up(self, execution: Execution) -> Partition:
        if self.table is None:
            accepted = f"a file of kvrsim table build, where {execution.strategy.name} looks its chunks up"
            raise InputError("table", ABSENT, accepted)
        return self.table.partition_for(execution)


def partition_of(execution: Execution, partition: Sequence[int] | None = None) -> Partition:
    """The given partition, checked, or the strategy's own; see Search."""
    return Search(partition=partition).candidate(execution).partition


def _check_partition(partition: Sequence[int], execution: Execution) -> Partition:
    tokens = execution.request.new_tokens
    ranks = execution.cluster.num_gpus
    if not execution.strategy.is_pipeline:
        return Partition.of(partition, num_tokens=tokens, num_ranks=ranks)
    result = Partition.of(partition, num_tokens=tokens, num_ranks=len(partition))
    if min(partition) < (context := context_ranks(execution.strategy)):
        text = ",".join(map(str, partition))
        raise InputError("partition", text, f"pieces of at least {context} tokens, one per context rank")
    return result


# -- strategies to compare


class ComparedStrategies(NamedTuple):
    """The executions that a plan compares: a strategy each, on the GPUs of the question."""

    executions: tuple[Execution, ...]
    limited: bool = False  # whether the search budget limits the comparison
    notes: tuple[str, ...] = ()  # notes on strategies that the machine or the model does not allow
    misfits: tuple[Execution, ...] = ()  # executions that cannot fit in memory, least excess first
    rare: tuple[Execution, ...] = ()  # executions that are compared only if no other one fits

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The strategies of the executions."""
        return tuple(execution.strategy for execution in self.executions)

    @property
    def not_compared(self) -> tuple[str, ...]:
        """Names of the strategies that cannot fit in memory, least excess first."""
        return tuple(execution.strategy.name for execution in self.misfits)


def strategies_to_compare(
    scenario: Scenario, names: Sequence[str | Strategy] | None, *, noisy: bool = False, engine: ForEngine | None = None
) -> ComparedStrategies:
    """Strategies by name; None and "all" mean every strategy that runs here and could fit in memory.

    noisy: keep only strategies whose ranks are single GPUs with all layers; noise is defined for these.
    Raises InputError for an empty list, for two strategies of one name, for a named strategy that cannot run here, or
    if the only engine has none of them.
    """
    if names is not None and not names:
        raise InputError("strategies", "", "at least one of " + ", ".join(STRATEGIES))
    only = engine if engine is not None and engine.only else None
    if names is not None and "all" not in names:
        requested = tuple(execution_of(scenario, strategy) for strategy in distinct(names))
        if only is not None:
            requested = tuple(filter(only.has, requested))
            if not requested:
                has = ", ".join(one.strategy.name for one in all_for(scenario)[0] if only.has(one))
                title = deploy_engine(only.name).title
                raise InputError("strategies", ",".join(map(label_of, names)), f"what {title} has here: {has}")
        return ComparedStrategies(executions=requested)
    alone = scenario.cluster.num_gpus == 1
    allowed, notes = _allowed(scenario, ("single", CHUNKED)) if alone else all_for(scenario)
    rare = () if alone else rare_for(scenario)

    def is_meant(execution: Execution) -> bool:
        strategy = execution.strategy
        if noisy and (strategy.group_size != 1 or strategy.is_pipeline):
            return False
        return only is None or only.has(execution)

    allowed = tuple(filter(is_meant, allowed))
    rare = tuple(filter(is_meant, rare))
    if only is not None:
        notes = ()
    limit_bytes = scenario.memory_limit.nbytes
    if not any(map(could_fit, allowed)):  # nothing fits is said only of all strategies
        allowed = (*allowed, *rare)
        rare = ()
    misfits = sorted((one for one in allowed if not could_fit(one)), key=least_bytes)
    if misfits:
        nearest = misfits[0]
        named = [execution.strategy.name for execution in misfits]
        few = " and ".join(named) if len(named) < 3 else f"{len(named)} strategies"
        which = "it" if len(named) == 1 else f"the nearest, {nearest.strategy.name},"
        needs = format_bytes(least_bytes(nearest))
        notes = (*notes, note("cannot fit", names=few, nearest=which, least=needs, limit=format_bytes(limit_bytes)))
    if len(misfits) == len(allowed):
        misfits = misfits[1:]  # none fits: compare the smallest
    left_out = {execution.strategy.name for execution in misfits}
    compared = [one.strategy for one in allowed if one.strategy.name not in left_out]
    added = [name for name in names or () if name != "all"]
    executions = tuple(execution_of(scenario, strategy) for strategy in distinct((*compared, *added)))
    names_compared = {execution.strategy.name for execution in executions}
    others = tuple(one for one in rare if one.strategy.name not in names_compared)
    return ComparedStrategies(
        executions=executions, limited=names is None, notes=notes, misfits=tuple(misfits), rare=others
    )


class Comparison(NamedTuple):
    """The best candidate of each strategy, and strategies for which the search budget was too small."""

    by_name: dict[str, Candidate]
    unsearched: tuple[str, ...] = ()  # strategies that could be the best but were not searched, likeliest first
    not_tried: tuple[NotTried, ...] = ()  # strategies that could fit and were not compared


def search_all(compared: ComparedStrategies, search: Search) -> Comparison:
    """Search each strategy's best partition; strategies near KVR's chain start at the chain's partition.

    If `compared.limited`, every partition is rough at first: even pieces, or the chain's analytical plan. Then the
    strategies that could be the best, or the best that engines have, are searched, the likeliest first, until the
    budget is spent. kvr-s is always searched, within half of the budget, unless a simulation takes long. Strategies
    whose first simulation takes long come last, and only within the budget. The budget counts modelled work, not
    measured time, so that a busy machine finds the same result.

    While nothing fits, the budget does not count: all strategies are tried, the rare ones as well.
    """
    trial = _Trial(compared, search)
    trial.run_all()
    unsearched = trial.search_the_likeliest()
    groups = trial.not_tried.items() if trial.any_fits else ()
    not_tried = tuple(NotTried(strategies=tuple(names), why=why) for why, names in groups)
    return Comparison(trial.by_name, unsearched, not_tried)


class _Trial:
    """The first candidate of one strategy after another, the searches after it, and strategies that are left out."""

    def __init__(self, compared: ComparedStrategies, search: Search) -> None:
        self.compared = compared
        self.search = search
        self.limited = compared.limited and search.options.method == "auto"
        self.by_name: dict[str, Candidate] = {}
        self.not_tried: dict[str, list[str]] = {}  # names of strategies, by the reason
        self.too_long = list[Execution]()  # likely ones, whose first simulation takes longer than the budget allows
        self.left_for_long_s = search.options.search_budget  # for first simulations that take long
        self.left_for_searches_s = search.options.search_budget

    def run_all(self) -> None:
        """Make a candidate of each strategy; if limited, of those that could be among the fastest.

        If limited, strategies whose first simulation takes long, and the rare ones, are tried only where an estimate
        says that they could be among the fastest, those with the shortest estimate first.
        """
        long = list[Execution]()
        for execution in self.compared.executions:
            if self.limited and first_s(execution) > _CHEAP_S:
                long.append(execution)
            else:
                self.run(execution)
        if not self.limited:
            for execution in self.compared.rare:
                self.leave_out(execution, _OUTSIDE_ALL)
        else:
            self.run_the_likely(long, _FAR, _SLOW)
            self.run_the_needed()
            if self.any_fits:
                self.run_the_likely(self.compared.rare, 1 / NEAR, _RARE)
        if not self.any_fits:
            for execution in filter(could_fit, self.compared.rare):
                self.run(execution)
        if not self.any_fits and self.limited and self.compared.misfits:
            self.run(self.compared.misfits[0])  # the nearest of those that cannot fit
        for execution in self.too_long:
            self.leave_out(execution, _TOO_LONG)

    @property
    def any_fits(self) -> bool:
        """Whether any candidate fits in memory."""
        return any(one.fits for one in self.by_name.values())

    @cached_property
    def has_engine(self) -> dict[str, bool]:
        """Whether the engine has a strategy (without an engine: whether any has), by the strategy's name."""
        engine = self.search.engine
        has = engine.has if engine else engines_with
        return {one.strategy.name: bool(has(one)) for one in (*self.compared.executions, *self.compared.rare)}

    def to_beat_s(self, *, of_engine: bool) -> float:
        """The least TTFT that fits, of all strategies or of those that the engine has; infinite if there is none."""
        rivals = [name for name in self.by_name if self.has_engine.get(name, False) or not of_engine]
        return min((self.by_name[name].ttft_s for name in rivals if self.by_name[name].fits), default=math.inf)

    def run(self, execution: Execution) -> None:
        """Make the strategy's candidate."""
        strategy = execution.strategy
        is_searched = strategy.partition_rule in ("search", "searched-pieces")
        is_fast = first_s(execution) <= _CHEAP_S and not execution.cluster.shares_bandwidth
        if not self.limited or not is_searched:
            candidate = self.search.candidate(execution, self.partition_of_chain(strategy))
        elif strategy.name == KVR_S.name and self.left_for_searches_s > 0 and is_fast:
            candidate = self.searched(execution)
        else:
            candidate = _rough(execution, self.by_name)
        self.by_name[strategy.name] = candidate
        if self.search.on_candidate is not None:
            self.search.on_candidate(candidate)
        if self.search.on_progress is not None:
            done = len(self.by_name)
            number = max(done, len(self.compared.executions))
            self.search.on_progress(done, None, f"{strategy.name} ({done} of {number})")

    def searched(self, execution: Execution, to_beat_s: float = math.inf) -> Candidate:
        """The candidate with a searched partition; the search may take half of the budget that is left."""
        half_s = self.left_for_searches_s / 2
        allowance = Allowance(left_s=half_s, to_beat_s=to_beat_s)
        limited = replace(self.search, allowance=allowance)
        candidate = limited.candidate(execution, self.partition_of_chain(execution.strategy))
        self.left_for_searches_s -= half_s - allowance.left_s
        return candidate

    def partition_of_chain(self, strategy: Strategy) -> Partition | None:
        """The partition of KVR's chain over the same ranks, if the chain is compared; else None."""
        chain = self.by_name.get(chain_like(strategy).name)
        if chain is None or chain.search is None:
            return None
        return chain.partition

    def leave_out(self, execution: Execution, why: str) -> None:
        """Leave out a strategy that could fit."""
        self.not_tried.setdefault(why, []).append(execution.strategy.name)

    def run_the_likely(self, executions: Sequence[Execution], most: float, why: str) -> None:
        """Make the candidates whose estimate is at most `most` times the TTFT to beat, within the budget.

        why: the reason for which the others are left out.
        """
        by_strategy = {execution.strategy.name: execution for execution in executions}
        likely_s = {name: _likely_s(execution, self.by_name) for name, execution in by_strategy.items()}
        rare_names = {execution.strategy.name for execution in self.compared.rare}
        left = sorted(by_strategy, key=likely_s.__getitem__)
        while left:
            to_beat_s = {of_engine: self.to_beat_s(of_engine=of_engine) for of_engine in (False, True)}
            # The likeliest first; as long as the engine has none that fits, those that it has.
            name = min(left, key=lambda name: likely_s[name] / to_beat_s[self.has_engine[name]])
            left.remove(name)
            execution = by_strategy[name]
            is_rare = name in rare_names
            if likely_s[name] > most * to_beat_s[self.has_engine[name]]:
                self.leave_out(execution, why)
            elif is_rare and not could_fit(execution):
                self.leave_out(execution, _TOO_LARGE)
            elif first_s(execution) > self.left_for_long_s:
                self.too_long.append(execution)
            else:
                self.left_for_long_s -= first_s(execution)
                self.run(execution)
                if is_rare and not self.by_name[name].fits:
                    del self.by_name[name]
                    self.leave_out(execution, _TOO_LARGE)

    def run_the_needed(self) -> None:
        """Make candidates at any expense until one fits, and one that the engine has; those that take least first."""
        for of_engine in (False, True):
            for execution in sorted(self.too_long, key=first_s):
                is_rival = self.has_engine[execution.strategy.name] or not of_engine
                if is_rival and self.to_beat_s(of_engine=of_engine) == math.inf:
                    self.too_long.remove(execution)
                    self.run(execution)

    def search_the_likeliest(self) -> tuple[str, ...]:
        """Search strategies that could be the best, the likeliest first; return those that the budget leaves out."""
        if not self.limited:
            return ()
        unsearched = list[str]()
        executions = {one.strategy.name: one for one in (*self.compared.executions, *self.compared.rare)}
        rough = [one for one in self.by_name.values() if is_rough(one) and one.fits]
        for one in sorted(rough, key=_least_s):
            name = one.strategy.name
            to_beat_s = self.to_beat_s(of_engine=self.has_engine[name])
            if _least_s(one) > to_beat_s:
                continue
            if self.left_for_searches_s <= work_of(one.execution, len(one.partition.chunk_lens)).program_s:
                unsearched.append(name)
                continue
            candidate = self.searched(executions[name], to_beat_s)
            if candidate.fits and candidate.ttft_s <= one.ttft_s:
                self.by_name[name] = candidate
                if self.search.on_candidate is not None:
                    self.search.on_candidate(candidate)
        return tuple(unsearched)


def _likely_s(execution: Execution, by_name: dict[str, Candidate]) -> float:
    """Estimated TTFT in seconds of a strategy before its simulation.

    Strategies near KVR's chain have the work of the chain: blocks of queries change it by their ratio, and other
    messages gain at most the time of all messages.
    """
    strategy = execution.strategy
    chain = by_name.get(chain_like(strategy).name)
    is_kin = strategy.near_chain or strategy.layer == KVR_S.layer
    if chain is None or not is_kin:
        return estimate_s(execution)
    if not strategy.chains and strategy.near_chain:
        return chain.ttft_without_communication_s
    return chain.ttft_s * min(1.0, estimate_s(execution) / estimate_s(chain.execution))


def _least_s(one: Candidate) -> float:
    """The least TTFT that a search is assumed to find: the rough partition's TTFT minus the largest expected gain.

    On a shared bus, rough chunks are far from the best ones.
    """
    rough_s = one.ttft_s
    if one.strategy.partition_rule == "search" and one.execution.cluster.shares_bandwidth:
        rough_s = estimate_s(one.execution)
    return rough_s * (1 - MOST_GAIN)


def _rough(execution: Execution, by_name: dict[str, Candidate]) -> Candidate:
    """The candidate before a search: the analytical plan; of a pipeline, even pieces with the best layers of stages."""
    strategy = execution.strategy
    chain = by_name.get(chain_like(strategy).name)
    if strategy.chains and chain is not None:  # this strategy may split attention calls where that is faster
        alike = _unsearched(replace(chain, execution=execution))
        if alike.ttft_s >= chain.ttft_s:
            return alike
    if strategy.partition_rule == "search":
        return Search(options=SearchArgs(method="analytical")).candidate(execution)
    even = get_strategy(replace(strategy.degrees, pieces="even").name)
    known = by_name.get(even.name) or Search().candidate(execution_of(execution.scenario, even))
    return _unsearched(Search(partition=known.partition.chunk_lens).candidate(execution))


def _unsearched(one: Candidate) -> Candidate:
    """The candidate, whose report says that its partition was not searched."""
    assert one.search is not None
    report = replace(one.search.report, method=ROUGH)
    return replace(one, search=replace(one.search, report=report))


def is_rough(one: Candidate) -> bool:
    """Whether the candidate's partition could be searched, but was not."""
    return one.search is not None and one.search.report.method in ("analytical", ROUGH)


def could_fit(execution: Execution) -> bool:
    """Whether some partition could fit in the memory of every GPU."""
    return least_bytes(execution) <= execution.scenario.memory_limit.nbytes


@once
def least_bytes(execution: Execution) -> int:
    """A lower bound over all partitions: bytes on the GPU that needs the most.

    Exact for even chunks. For searched chunks: weights and cache. For pipelines: the memory with short pieces; for
    searched pipelines, the mean of weights and cache over the stages, because layers may move between stages.
    """
    strategy = execution.strategy
    if strategy.is_pipeline:
        from planner.search.pipeline import piece_numbers  # imported only for pipelines

        number = max(piece_numbers(execution), default=1)
        memory = memory_of(execution, Partition.even(execution.request.new_tokens, max(1, number)))
        if strategy.partition_rule == "searched-pieces":
            return sum(rank.weights + rank.kv_cache + rank.runtime for rank in memory) // len(memory)
        return max(rank.total for rank in memory)
    like = execution
    if strategy.near_chain:  # such a strategy holds the weights and cache of KVR's chain, which has fewer messages
        like = execution.by(chain_like(strategy))
    ranks = largest_of_even_chunks(like)
    if strategy.partition_rule == "search":
        return max(rank.weights + rank.kv_cache + rank.runtime for rank in ranks)
    return max(rank.total for rank in ranks)


def distinct(names: Iterable[str | Strategy]) -> tuple[Strategy, ...]:
    """The strategies without duplicates, in the order given; raises InputError if two different ones have one name."""
    by_name: dict[str, Strategy] = {}
    for one in names:
        strategy = get_strategy(one, "strategies")
        if by_name.setdefault(strategy.name, strategy) != strategy and strategy.group_size == 1:
            raise InputError("strategies", strategy.name, "strategies with a name each")
    return tuple(by_name.values())


def _any_name(_: str) -> bool:
    return True


def all_for(
    scenario: Scenario, is_meant: Callable[[str], bool] = _any_name
) -> tuple[tuple[Execution, ...], tuple[str, ...]]:
    """Every strategy that runs here without a table, hybrids included; and a note on those that do not run.

    Layouts that spread experts as engines do are included if some engine has them. is_meant: whether a strategy of this
    name is considered.
    """
    num_gpus = scenario.cluster.num_gpus
    per_node = scenario.cluster.gpus_per_node
    names = names_in_all(num_gpus, per_node, has_states=_has_states(scenario))
    executions, notes = _allowed(scenario, tuple(filter(is_meant, names)))
    if not _is_mixture(scenario):
        return executions, notes
    spread, _ = _allowed(scenario, tuple(filter(is_meant, names_with_spread_experts(num_gpus, per_node))))
    return (*executions, *filter(engines_with, spread)), notes


def _has_states(scenario: Scenario) -> bool:
    """Whether some layers pass a state from token to token."""
    return any(isinstance(layer.mixer, Recurrence) for layer in scenario.model.layer_kinds)


def _is_mixture(scenario: Scenario) -> bool:
    return any(layer.num_experts for layer in scenario.model.layer_kinds)


def rare_for(scenario: Scenario, is_meant: Callable[[str], bool] = _any_name) -> tuple[Execution, ...]:
    """Strategies outside `all` that run here without a table: hybrids and layouts that are rarely the fastest.

    is_meant: whether a strategy of this name is considered.
    """
    known = {execution.layout for execution in all_for(scenario, is_meant)[0]}
    names = filter(is_meant, rare_names(scenario.num_gpus, is_mixture=_is_mixture(scenario)))
    allowed, _ = _allowed(scenario, tuple(names))
    return tuple(execution for execution in allowed if execution.layout not in known)


def _allowed(scenario: Scenario, names: Sequence[str]) -> tuple[tuple[Execution, ...], tuple[str, ...]]:
    """The named strategies that need no table and that machine and model allow; and notes on the others."""
    allowed = list[Execution]()
    reasons = dict[str, list[str]]()
    for strategy in distinct(names):
        if strategy.partition_rule == "table":
            continue
        try:
            allowed.append(execution_of(scenario, strategy))
        except InputError as error:
            reasons.setdefault(error.accepted, []).append(strategy.name)
    notes = (note("not compared", names=", ".join(names), accepted=accepted) for accepted, names in reasons.items())
    return tuple(allowed), tuple(notes)
