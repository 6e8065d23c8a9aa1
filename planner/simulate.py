"""Simulation of one strategy with one partition."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from kvrsim.attention_map import AttentionMap, PaperCounts
from kvrsim.choices import Executor
from kvrsim.errors import InputError
from kvrsim.execution import place
from kvrsim.executors.access import execution_of
from kvrsim.executors.run import check_executor, run_partition
from kvrsim.model.mixers import Attention
from kvrsim.program import loaded_bytes, sent_bytes, waited_s
from kvrsim.results.question import Question
from kvrsim.results.results import RankReport, SimResult
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import STRATEGIES, Strategy, get_strategy, label_of
from kvrsim.strategies.pipeline import tokens_of
from planner.candidates import Candidate, Search, prefix_access_notes
from planner.uncertainty.intervals import coverage_notes_of, interval_of, layout_notes, measured_coverage, width_notes

if TYPE_CHECKING:
    from kvrsim.noise import Distribution, NoiseDraw
    from kvrsim.progress import OnProgress
    from kvrsim.results.timeline import Breakdown, Timeline
    from planner.uncertainty.noise import Disturbance

RECORDS = ("timeline", "breakdown")


def run_simulation(
    scenario: Scenario,
    *,
    strategy: str | Strategy,
    search: Search | None = None,
    executor: str | None = None,
    record: Collection[str] = (),
    disturbance: Disturbance | None = None,
    warnings: Collection[str] = (),
    seed: int = 0,
) -> SimResult:
    """Simulate a strategy, with the partition of `search` or its own (kvr-s searches it, kvr-p looks it up).

    strategy: a name, "FILE.py:NAME" or a Strategy.
    executor: "batch" or "event"; None: the event executor if spans or a sample of noise are recorded.
    record: additional parts of the result, from RECORDS.
    disturbance: noise; the answer is the run of the first sample; `noisy` is the distribution of all samples.
    seed: recorded in the question; a disturbance has its own seed.

    Raises InputError for an unknown strategy or executor, or a partition that does not fit.
    """
    search = search or Search()
    asked = get_strategy(strategy)
    quiet = scenario
    if disturbance is not None:
        disturbance.check(asked)
        scenario = disturbance.with_fixed_part(scenario)
    candidate = search.candidate(execution_of(scenario, asked))
    execution = candidate.execution
    noise = None
    noisy = None
    draw = None
    if disturbance is not None:
        noise = disturbance.noise
        draw = disturbance.draw(execution.placed)
    kind = check_executor(executor, records=bool(record) or draw is not None)
    if disturbance is not None:
        undisturbed = candidate
        if not disturbance.is_even:
            undisturbed = search.candidate(execution_of(quiet, candidate.strategy))
        noisy = _noisy(disturbance, candidate, undisturbed, search.on_progress)
    run = _Simulated.of(candidate, kind, record, draw)
    interval = interval_of(candidate.sensitivities, run.finish_s[-1])
    return SimResult(
        question=Question.of(scenario, seed=seed, **_options(strategy, search, disturbance)),
        strategy=candidate.strategy.name,
        partition=candidate.partition.chunk_lens,
        executor=kind,
        ttft_s=run.finish_s[-1],
        ttft_low_s=interval.low_s,
        ttft_high_s=interval.high_s,
        memory=candidate.memory,
        fits=candidate.fits,
        per_rank=tuple(_reports(candidate, run)),
        layers=execution.stage_layers,
        prefix_access=candidate.prefix_access,
        query_blocks=candidate.query_blocks,
        interval_coverage=measured_coverage(scenario),
        interval_causes=interval.causes(),
        warnings=(
            *warnings,
            *coverage_notes_of(scenario),
            *layout_notes(execution),
            *width_notes(execution, interval),
            *prefix_access_notes([candidate]),
            *_table_notes(candidate, search),
        ),
        timeline=run.timeline,
        breakdown=run.breakdown,
        noise=noise,
        noisy=noisy,
    )


def with_counts(result: SimResult, scenario: Scenario) -> SimResult:
    """The result with the KV-Runahead paper's counts.

    Raises InputError for a strategy, a cached prefix or a model whose attention the paper does not count.
    """
    request = scenario.request
    if request.cached_prefix:
        raise InputError("cached_prefix", request.cached_prefix, "0 with `explain`: the paper counts whole prompts")
    for layer in scenario.model.layer_kinds:
        mixer = layer.mixer
        if not isinstance(mixer, Attention) or mixer.is_sparse or mixer.reach is not None:
            accepted = "a model whose layers attend to all tokens, as the paper counts them"
            raise InputError("explain", scenario.model.name, accepted)
    strategy = get_strategy(result.strategy)
    attention = AttentionMap.of(strategy, result.partition, result.query_blocks)
    single = place(scenario.on_gpus(1), STRATEGIES["single"])
    single_s = run_partition(single, Partition(chunk_lens=(request.new_tokens,))).ttft_s
    counts = PaperCounts(strategy=result.strategy, attention=attention, single_s=single_s)
    return replace(result, counts=counts)


class _Simulated(NamedTuple):
    """One run of a candidate; of noise, its first sample."""

    finish_s: Sequence[float]  # finish time of each rank
    compute_s: Sequence[float]  # time in which each rank computes
    timeline: Timeline | None  # only where it is recorded
    breakdown: Breakdown | None

    @classmethod
    def of(cls, candidate: Candidate, executor: Executor, record: Collection[str], draw: NoiseDraw | None) -> Self:
        """Run a candidate; record: parts of the result, from RECORDS."""
        if executor != "event":
            return cls(candidate.finish_s, candidate.compute_s, None, None)
        execution = candidate.execution
        partition = candidate.partition
        records = bool(record) or draw is not None
        run = run_partition(execution, partition, executor=executor, timeline=records, draw=draw)
        spans = run.timeline
        if spans is None:
            return cls(run.finish_s, candidate.compute_s, None, None)
        compute_s: Sequence[float] = candidate.compute_s
        if draw is not None:
            compute_s = [spans.computed_s(rank) for rank in range(len(run.finish_s))]
        table = None
        timeline = None
        if "breakdown" in record:
            from planner.uncertainty.basis import breakdown

            table = breakdown(execution, partition, run.finish_s, spans)
        if "timeline" in record:
            from planner.uncertainty.basis import bases_of

            timeline = replace(spans, bases=bases_of(execution, partition, spans), shares={})
            if draw is None:
                timeline = replace(timeline, shares=candidate.shares)
        return cls(run.finish_s, compute_s, timeline, table)


def _noisy(
    disturbance: Disturbance, candidate: Candidate, undisturbed: Candidate, on_progress: OnProgress | None
) -> Distribution:
    """The distribution of all samples of noise."""
    execution = candidate.execution
    disturbance.check_length(candidate.ttft_s, execution.cluster.num_gpus)
    return disturbance.distribution(
        execution, candidate.partition, candidate.ttft_s, even_s=undisturbed.ttft_s, on_progress=on_progress
    )


def _table_notes(candidate: Candidate, search: Search) -> tuple[str, ...]:
    """Notes on the table in which a partition was looked up; none if it was not."""
    if search.partition is not None or search.table is None or candidate.strategy.partition_rule != "table":
        return ()
    return search.table.notes_for(candidate.execution)


def _reports(candidate: Candidate, run: _Simulated) -> Iterator[RankReport]:
    """One report per GPU."""
    placed = candidate.execution.placed
    for gpu in range(placed.num_gpus):
        rank = gpu // placed.gpus_per_rank
        yield RankReport(
            rank=gpu,
            chunk_len=tokens_of(candidate.strategy, candidate.partition.chunk_lens, rank),
            compute_s=run.compute_s[rank],
            wait_s=waited_s(run.compute_s[rank], run.finish_s[rank]),
            sent_bytes=sent_bytes(candidate.program, rank),
            loaded_bytes=loaded_bytes(candidate.program, rank),
            memory=candidate.memory[gpu],
        )


def _options(strategy: str | Strategy, search: Search, disturbance: Disturbance | None) -> dict[str, Any]:
    options: dict[str, Any] = {"strategy": label_of(strategy), "partition": None}
    if search.partition is not None:
        options["partition"] = list(search.partition)
    if disturbance is not None:
        options |= {"noise": disturbance.noise.name, "samples": disturbance.num_samples}
    return options
