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
from kvrsim.executors.chain import Chain
from kvrsim.executors.run import Run, Runner, run_partition
from kvrsim.memory import RankMemory, fits, largest_of_even_chunks, memory_of
from kvrsim.model.mixers import Recurrence
from kvrsim.notes import note
from kvrsim.once import once
from kvrsim.program import Program, computes_s, waited_s
from kvrsim.progress import OnProgress
from kvrsim.results.results import NotTried
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
from planner.search.minimise import Allowance
from planner.search.search import SearchResult, search
from planner.uncertainty.intervals import Interval, interval_of
from planner.uncertainty.sensitivities import Sensitivities, sensitivities

if TYPE_CHECKING:
    from kvrsim.results.results import Limit
    from kvrsim.results.timeline import Timeline

ROUGH = "rough"  # name of the method if the pieces were not searched
_MOST_GAIN = {"search": 0.1, "searched-pieces": 0.15}  # largest share of TTFT that a search is assumed to gain
_MOST_GAIN_OF_CHAIN = 0.001  # largest assumed gain of a search over a chain's analytical plan with a proven bound
# Modelled CPU seconds of one core of 2026, fitted by hand to plans of 8 to 1024 GPUs. benchmarks/defaults.py measures
# the CPU time of whole plans that follows from them.
_SECONDS_A_MESSAGE = 1.5e-4  # a message on a bus, where each one is simulated
_SECONDS_A_LINK = 1e-3  # a message of a chain on a bus, with the plan of its chunks
_SECONDS_A_PASS = 5e-5  # a piece in a stage of a pipeline on a bus, for all partitions of a batch; for each, a tenth
_SECONDS_A_PAIR = 5e-6  # a message between any two ranks
_SECONDS_A_ROUND = 4e-8  # a rank's part in a round of a ring or of an all-gather
_SECONDS_A_BLOCK = 6e-4  # a rank's operations in a kind of layer
_SECONDS_AN_EXCHANGE = 1.4e-5  # a pair of ranks that exchange tokens for their experts
_SECONDS_A_STAGE = 5e-4  # a rank of a pipeline
_SECONDS_A_PIPELINE_STEP = 1e-4  # a step of all stages, for all partitions of a round
_SECONDS_A_STEP = 1e-5  # a layer of a piece, in a pipeline that loads a cached prefix
_SEVERAL_KINDS = 15.0  # factor on the seconds of a pipeline whose layers differ
_SECONDS_A_LAYER = 2e-5  # a rank's layer with its messages, if layers differ
_SECONDS_A_SPREAD_LAYER = 1.3e-4  # the same, if ranks exchange tokens for their experts
_SECONDS_A_BALANCE = 1.2e-3  # a rank's chunk of balanced ones, for each kind of layer
_SIMULATIONS_OF_ERRORS = 5.0  # simulations that take as long as those of the sources of a prediction's error
_LEAST_GAIN = 0.02  # a rare strategy is tried if its estimate is shorter than the best TTFT by more than this share
_FAR = 1.5  # a strategy that takes long to simulate is tried if its estimate is at most this many times the best TTFT
_TOO_LONG = "one simulation takes longer than --search-budget allows"
_RARE = f"at most {100 * _LEAST_GAIN:.0f} % faster by an estimate; --strategies NAME tries them"
_OUTSIDE_ALL = "not among all; --strategies NAME tries them"
_SLOW = f"more than {_FAR:g} times as slow by an estimate; --strategies NAME tries them"
_TOO_LARGE = "they need more memory than a GPU may use"
_EQUAL_LAYERS = 8  # layers of one kind that are simulated until times advance steadily
FIRST_SHARE = 3.0  # share of the search budget for first simulations that take long
_CHEAP_S = 0.3  # strategies whose first simulation takes less are always compared
_CHEAP_ERRORS_S = 0.1  # sources of errors are simulated if all their simulations of a strategy take less


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
        work_s = sum(_work(self.execution, len(self.partition.chunk_lens)))
        return _SIMULATIONS_OF_ERRORS * work_s > _CHEAP_ERRORS_S

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
        """The execution with its best partition. warm_start: the best partition of KVR's chain."""
        choice = self.choose_partition(execution, warm_start)
        if isinstance(choice, Partition):
            return Candidate(execution=execution, partition=choice)
        with_layers = execution.by(choice.execution.strategy)
        return Candidate(execution=with_layers, partition=choice.partition, search=choice)

    def choose_partition(self, execution: Execution, warm_start: Partition | None = None) -> Partition | SearchResult:
        """The given partition, checked; else an even one, one from a table, or the result of a search.

        Raises InputError for a strategy without its table, and for a partition that does not fit.
        """
        partition = None if self.partition is None else _check_partition(self.partition, execution)
        if execution.strategy.partition_rule == "searched-pieces":
            return self._choose_pieces(execution, partition)
        if partition is not None:
            return partition
        match execution.strategy.partition_rule:
            case "pieces":
                from planner.search.pipeline import search_even_pieces

                return search_even_pieces(execution, self.on_progress)
            case "search":
                alone = execution.strategy.group_size == 1
                method = self.options.method
                return search(
                    execution,
                    method=method if alone or method == "analytical" else "auto",
                    stride=self.options.stride if alone else None,
                    warm_start=warm_start,
                    on_progress=self.on_progress,
                    allowance=self.allowance,
                )
            case "table":
                return self._look_up(execution)
        return Partition.even(execution.request.new_tokens, execution.cluster.num_gpus)

    def _choose_pieces(self, execution: Execution, given: Partition | None) -> SearchResult:
        """The given pieces, or searched ones, with the best layers of the stages for these pieces.

        The layers follow from the pieces alone, so the pieces of an answer give the same answer again.
        """
        from planner.search.pipeline import search_pipeline, with_step_time

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
    choice = Search(partition=partition).choose_partition(execution)
    return choice if isinstance(choice, Partition) else choice.partition


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
    limited = compared.limited and search.options.method == "auto"
    trial = _first_candidates(compared, search, limited=limited)
    unsearched = _search_the_likeliest(trial) if limited else ()
    groups = trial.not_tried.items() if trial.any_fits else ()
    not_tried = tuple(NotTried(strategies=tuple(names), why=why) for why, names in groups)
    return Comparison(trial.by_name, unsearched, not_tried)


def _first_candidates(compared: ComparedStrategies, search: Search, *, limited: bool) -> _Trial:
    """A candidate of each strategy, rough if limited; and strategies that could fit and are not tried.

    If limited, strategies whose first simulation takes long, and the rare ones, are tried only where an estimate says
    that they could be among the fastest, those with the shortest estimate first.
    """
    trial = _Trial(compared, search, limited)
    long = list[Execution]()
    for execution in compared.executions:
        if limited and first_s(execution) > _CHEAP_S:
            long.append(execution)
        else:
            trial.run(execution)
    if limited:
        trial.run_the_likely(long, _FAR, _SLOW)
        if trial.any_fits:
            trial.run_the_likely(compared.rare, 1 - _LEAST_GAIN, _RARE)
    else:
        for execution in compared.rare:
            trial.leave_out(execution, _OUTSIDE_ALL)
    if not trial.any_fits:
        for execution in filter(could_fit, compared.rare):
            trial.run(execution)
    if not trial.any_fits and limited and compared.misfits:
        trial.run(compared.misfits[0])  # the nearest of those that cannot fit
    return trial


class _Trial:
    """The first candidate of one strategy after another, and the strategies that are left out."""

    def __init__(self, compared: ComparedStrategies, search: Search, limited: bool) -> None:
        self.compared = compared
        self.search = search
        self.limited = limited
        self.by_name: dict[str, Candidate] = {}
        self.not_tried: dict[str, list[str]] = {}  # names of strategies, by the reason
        self.left_s = FIRST_SHARE * search.options.search_budget  # for simulations that take long
        self.for_searches_s = search.options.search_budget

    @property
    def any_fits(self) -> bool:
        """Whether any candidate fits in memory."""
        return any(one.fits for one in self.by_name.values())

    def run(self, execution: Execution) -> None:
        """Make the strategy's candidate."""
        strategy = execution.strategy
        by_name = self.by_name
        is_rough = self.limited and strategy.partition_rule in _MOST_GAIN
        if strategy.name == KVR_S.name and first_s(execution) <= _CHEAP_S and self.for_searches_s > 0:
            is_rough = False
        if is_rough:
            by_name[strategy.name] = _rough(execution, by_name)
        elif self.limited and strategy.name == KVR_S.name:
            by_name[strategy.name] = self._searched_chain(execution)
        else:
            by_name[strategy.name] = self.search.candidate(execution, _chain(by_name, strategy))
        if self.search.on_candidate is not None:
            self.search.on_candidate(by_name[strategy.name])
        if self.search.on_progress is not None:
            number = max(len(by_name), len(self.compared.executions))
            self.search.on_progress(len(by_name), None, f"{strategy.name} ({len(by_name)} of {number})")

    def _searched_chain(self, execution: Execution) -> Candidate:
        """The candidate of KVR's chain, whose search may take half of the budget."""
        work = _work(execution, execution.cluster.num_gpus)
        half_s = self.for_searches_s / 2
        allowance = Allowance(left_s=half_s, each_s=work.partition_s, program_s=work.program_s)
        candidate = replace(self.search, allowance=allowance).candidate(execution)
        self.for_searches_s -= half_s - allowance.left_s
        return candidate

    def run_within_budget(self, execution: Execution) -> None:
        """Make the candidate, at the expense of the budget."""
        self.left_s -= first_s(execution)
        self.run(execution)

    def has_time_for(self, execution: Execution, *, is_needed: bool = False) -> bool:
        """Whether the budget allows the first simulation; if not, the strategy is left out.

        is_needed: whether the budget does not count, as long as nothing fits.
        """
        if first_s(execution) <= self.left_s or is_needed or not self.any_fits:
            return True
        self.leave_out(execution, _TOO_LONG)
        return False

    def leave_out(self, execution: Execution, why: str) -> None:
        """Leave out a strategy that could fit."""
        self.not_tried.setdefault(why, []).append(execution.strategy.name)

    def run_the_likely(self, executions: Sequence[Execution], most: float, why: str) -> None:
        """Make the candidates whose estimate is at most `most` times the TTFT to beat, within the budget.

        why: the reason for which the others are left out.
        """
        has_engine = _engine_has(self.compared, self.search.engine)
        by_strategy = {execution.strategy.name: execution for execution in executions}
        likely_s = {name: _likely_s(execution, self.by_name) for name, execution in by_strategy.items()}
        rare_names = {execution.strategy.name for execution in self.compared.rare}
        left = sorted(by_strategy, key=likely_s.__getitem__)
        while left:
            to_beat_s = {has: _to_beat_s(has, self.by_name, has_engine) for has in (False, True)}
            # The likeliest first; as long as the engine has none that fits, those that it has.
            name = min(left, key=lambda name: likely_s[name] / to_beat_s[has_engine[name]])
            left.remove(name)
            execution = by_strategy[name]
            is_rare = name in rare_names
            rival_s = to_beat_s[has_engine[name]]
            if likely_s[name] > most * rival_s:
                self.leave_out(execution, why)
            elif is_rare and not could_fit(execution):
                self.leave_out(execution, _TOO_LARGE)
            elif self.has_time_for(execution, is_needed=rival_s == math.inf):
                self.run_within_budget(execution)
                if is_rare and not self.by_name[name].fits:
                    del self.by_name[name]
                    self.leave_out(execution, _TOO_LARGE)


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


def _engine_has(compared: ComparedStrategies, engine: ForEngine | None) -> dict[str, bool]:
    """Whether the engine has a strategy (without an engine: whether any has), by the strategy's name."""
    has = engine.has if engine else engines_with
    return {one.strategy.name: bool(has(one)) for one in (*compared.executions, *compared.rare)}


def _to_beat_s(of_engine: bool, by_name: dict[str, Candidate], has_engine: dict[str, bool]) -> float:
    """The least TTFT that fits, of all strategies or of those that the engine has; infinite if there is none."""
    rivals = [name for name in by_name if has_engine.get(name, False) or not of_engine]
    return min((by_name[name].ttft_s for name in rivals if by_name[name].fits), default=math.inf)


def _search_the_likeliest(trial: _Trial) -> tuple[str, ...]:
    """Search strategies that could be the best, the likeliest first; return those that the budget leaves unsearched."""
    compared = trial.compared
    search = trial.search
    by_name = trial.by_name
    left_s = trial.for_searches_s
    unsearched = list[str]()
    executions = {one.strategy.name: one for one in (*compared.executions, *compared.rare)}
    has_engine = _engine_has(compared, search.engine)
    for one in sorted((one for one in by_name.values() if is_rough(one) and one.fits), key=_least_s):
        to_beat_s = _to_beat_s(has_engine[one.strategy.name], by_name, has_engine)
        if _least_s(one) > to_beat_s:
            continue
        if left_s <= 0:
            unsearched.append(one.strategy.name)
            continue
        execution = executions[one.strategy.name]
        strategy = execution.strategy
        work = _work(one.execution, len(one.partition.chunk_lens))
        if work.program_s > left_s:
            unsearched.append(one.strategy.name)
            continue
        allowance = Allowance(left_s=left_s / 2, each_s=work.partition_s, program_s=work.program_s, to_beat_s=to_beat_s)
        candidate = replace(search, allowance=allowance).candidate(execution, _chain(by_name, strategy))
        assert candidate.search is not None
        left_s -= left_s / 2 - allowance.left_s
        if candidate.fits and candidate.ttft_s <= one.ttft_s:
            by_name[strategy.name] = candidate
            if search.on_candidate is not None:
                search.on_candidate(candidate)
    return tuple(unsearched)


def _least_s(one: Candidate) -> float:
    """The least TTFT that a search is assumed to find: the rough partition's TTFT minus the largest expected gain.

    On a shared bus, rough chunks are far from the best ones.
    """
    if one.strategy.partition_rule == "search" and one.execution.cluster.shares_bandwidth:
        from planner.search.bus import plan_on_a_bus  # not imported at every start

        return plan_on_a_bus(one.execution)[1] * (1 - _MOST_GAIN["search"])
    proven = one.strategy.chains and one.execution.placed.chain_is_proven  # the analytical plan is then nearly the best
    return one.ttft_s * (1 - (_MOST_GAIN_OF_CHAIN if proven else _MOST_GAIN[one.strategy.partition_rule]))


def _chain(by_name: dict[str, Candidate], strategy: Strategy) -> Partition | None:
    """The partition of KVR's chain over the same ranks, if the chain is compared; else None."""
    chain = by_name.get(chain_like(strategy).name)
    return None if chain is None or chain.search is None else chain.partition


def _rough(execution: Execution, by_name: dict[str, Candidate]) -> Candidate:
    """The candidate before a search: the analytical plan; of a pipeline, even pieces with the best layers of stages."""
    strategy = execution.strategy
    chain = by_name.get(chain_like(strategy).name)
    if strategy.chains and chain is not None:  # this strategy may split attention calls where that is faster
        assert chain.search is not None
        of_chain = replace(chain.search.report, method=ROUGH, evaluations=0)
        alike = replace(chain, execution=execution, search=replace(chain.search, report=of_chain))
        if alike.ttft_s >= chain.ttft_s:
            return alike
    if strategy.partition_rule == "search":
        return Search(options=SearchArgs(method="analytical")).candidate(execution)
    even = get_strategy(replace(strategy.degrees, pieces="even").name)
    pieces = (by_name.get(even.name) or Search().candidate(execution_of(execution.scenario, even))).partition
    unsearched = Search(partition=pieces.chunk_lens).candidate(execution)
    assert unsearched.search is not None
    report = replace(unsearched.search.report, method=ROUGH)
    return replace(unsearched, search=replace(unsearched.search, report=report))


def is_rough(one: Candidate) -> bool:
    """Whether the candidate's partition could be searched, but was not."""
    return one.search is not None and one.search.report.method in ("analytical", ROUGH)


class _Work(NamedTuple):
    """Modelled CPU seconds of simulations on one core of 2026."""

    program_s: float  # for each batch of partitions, which share a program
    partition_s: float  # for each partition of a batch


def _work(execution: Execution, pieces: int) -> _Work:
    """The modelled work of a strategy's simulations; pieces: their number, for pipelines."""
    ranks = execution.cluster.num_gpus
    layers = execution.placed.share.num_hidden_layers
    if execution.cluster.shares_bandwidth and _only_passes(execution):
        batch_s = _SECONDS_A_PASS * ranks * pieces
        return _Work(batch_s, batch_s / 10)
    if execution.cluster.shares_bandwidth:
        messages = layers * ranks * (1 if execution.strategy.chains else ranks)
        seconds = _SECONDS_A_LINK if execution.strategy.chains else _SECONDS_A_MESSAGE
        return _Work(seconds * messages, 3e-7 * messages)
    if execution.strategy.is_pipeline:
        if execution.placed.prefix_access_plan.source is not None:  # loads of a cached prefix: one program per layout
            return _Work(_SECONDS_A_STAGE * ranks, _SECONDS_A_STEP * layers * (pieces + ranks))
        partition_s = _SECONDS_A_PIPELINE_STEP * (pieces + ranks) / min(max(4096 // pieces, 48), 192)
        if len(execution.placed.share.layer_kinds) > 1:
            partition_s *= _SEVERAL_KINDS
        return _Work(_SECONDS_A_STAGE * ranks, partition_s)
    kinds = len(execution.placed.share.layer_kinds)
    if execution.strategy.partition_rule != "search" and not execution.strategy.chains:
        rounds = min(layers, _EQUAL_LAYERS) if kinds == 1 else layers
        pair_s = _SECONDS_A_ROUND * rounds
        if not execution.placed.chain_is_proven:
            pair_s += _SECONDS_AN_EXCHANGE
        return _Work(pair_s * ranks * ranks + _SECONDS_A_BLOCK * kinds * ranks, 0.0)
    if Chain.suits(execution, execution.cluster):
        return _Work(0.0, 1e-6 * ranks)
    of_layers = _Work((_SECONDS_A_LAYER * layers + _SECONDS_A_BLOCK * kinds) * ranks, 8e-6 * ranks)
    if not execution.placed.chain_is_proven:
        of_layers = _Work(_SECONDS_A_SPREAD_LAYER * layers * ranks, 8e-6 * ranks)
    if execution.strategy.chains:
        return of_layers
    attending = sum(
        not isinstance(layer.mixer, Recurrence) for layer in execution.placed.share.layers if layer.mixer is not None
    )
    pairs = attending * ranks * ranks
    return _Work(of_layers.program_s + _SECONDS_A_PAIR * pairs, of_layers.partition_s + 2e-8 * pairs)


def _only_passes(execution: Execution) -> bool:
    """Whether all messages are those that a stage of a pipeline sends to the next one."""
    return execution.strategy.is_pipeline and context_ranks(execution.strategy) == 1


@once
def first_s(execution: Execution) -> float:
    """Modelled CPU seconds of the first simulation of a strategy; of a pipeline, of all its numbers of even pieces."""
    ranks = execution.cluster.num_gpus
    pieces = min(execution.request.new_tokens, ranks)
    work = _work(execution, pieces)
    is_bus = execution.cluster.shares_bandwidth
    if execution.strategy.partition_rule == "search" and not execution.strategy.near_chain and not is_bus:
        return sum(work) + _SECONDS_A_BALANCE * ranks * len(execution.placed.share.layer_kinds)
    if not execution.strategy.is_pipeline or (is_bus and not _only_passes(execution)):
        return sum(work)
    if is_bus:
        from planner.search.pipeline import piece_numbers  # imported only for pipelines

        numbers = piece_numbers(execution)
        if execution.strategy.partition_rule == "searched-pieces":  # begins with the best number of even pieces
            return _SECONDS_A_PASS * ranks * max(numbers)
        return _SECONDS_A_PASS * ranks * sum(numbers)
    steps = 2 * pieces + ranks * pieces.bit_length()  # of all numbers of pieces: 1, 2, 4, ...
    kinds = _SEVERAL_KINDS if len(execution.placed.share.layer_kinds) > 1 else 1.0
    return max(sum(work), _SECONDS_A_PIPELINE_STEP * kinds * steps)


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
