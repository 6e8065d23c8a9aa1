"""Simulation of one strategy with one partition."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvrsim.executors.run import check_executor, run_partition
from kvrsim.program import loaded_bytes, sent_bytes, waited_s
from kvrsim.results.question import Question
from kvrsim.results.results import RankReport, SimResult
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy, get_strategy, label_of
from kvrsim.strategies.pipeline import layers_of, tokens_of
from planner.candidates import Candidate, Search, prefix_access_notes
from planner.uncertainty.intervals import coverage_notes_of, interval_of, layout_notes, measured_coverage

if TYPE_CHECKING:
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
    even = scenario
    if disturbance is not None:
        disturbance.check(asked)
        scenario = disturbance.with_fixed_part(scenario)
    candidate = search.candidate(scenario, asked)
    execution = candidate.execution
    partition = candidate.partition
    draw = None if disturbance is None else disturbance.draw(execution.placed)
    records = bool(record) or draw is not None
    kind = check_executor(executor, records=records)
    finish_s = candidate.finish_s
    spans = None
    noisy = None
    table = None
    if disturbance is not None:
        disturbance.check_length(candidate.ttft_s, execution.cluster.num_gpus)
        even_s = (candidate if disturbance.is_even else search.candidate(even, candidate.strategy)).ttft_s
        noisy = disturbance.distribution(
            execution, partition, candidate.ttft_s, even_s=even_s, on_progress=search.on_progress
        )
    if kind == "event":
        run = run_partition(execution, partition, executor=kind, timeline=records, draw=draw)
        finish_s = run.finish_s
        spans = run.timeline
    compute_s = candidate.compute_s
    if draw is not None and spans is not None:
        compute_s = tuple(spans.computed_s(rank) for rank in range(len(finish_s)))
    interval = interval_of(candidate.sensitivities, finish_s[-1])
    if spans is not None and record:
        from planner.uncertainty.basis import bases_of, breakdown

        table = breakdown(execution, partition, finish_s, spans) if "breakdown" in record else None
        bases = bases_of(execution, partition, spans)
        shares = candidate.shares if draw is None else {}
        spans = replace(spans, bases=bases, shares=shares) if "timeline" in record else None
    table_notes: tuple[str, ...] = ()
    if search.partition is None and candidate.strategy.partition_rule == "table" and search.table is not None:
        table_notes = search.table.notes_for(execution)
    return SimResult(
        question=Question.of(scenario, seed=seed, **_options(strategy, search, disturbance)),
        strategy=candidate.strategy.name,
        partition=partition.chunk_lens,
        executor=kind,
        ttft_s=finish_s[-1],
        ttft_low_s=interval.low_s,
        ttft_high_s=interval.high_s,
        memory=candidate.memory,
        fits=candidate.fits,
        per_rank=tuple(_reports(candidate, compute_s, finish_s)),
        layers=layers_of(execution.placed, execution.strategy),
        prefix_access=candidate.prefix_access,
        query_blocks=candidate.query_blocks,
        interval_coverage=measured_coverage(scenario),
        interval_causes=interval.causes(),
        warnings=(
            *warnings,
            *coverage_notes_of(scenario),
            *layout_notes(execution),
            *prefix_access_notes([candidate]),
            *table_notes,
        ),
        timeline=spans if "timeline" in record else None,
        breakdown=table,
        noise=None if disturbance is None else disturbance.noise,
        noisy=noisy,
    )


def _reports(one: Candidate, compute_s: Sequence[float], finish_s: Sequence[float]) -> Iterator[RankReport]:
    """One report per GPU; compute_s and finish_s have one value per rank."""
    for gpu in range(one.execution.placed.num_gpus):
        rank = gpu // one.execution.placed.gpus_per_rank
        yield RankReport(
            rank=gpu,
            chunk_len=tokens_of(one.strategy, one.partition.chunk_lens, rank),
            compute_s=compute_s[rank],
            wait_s=waited_s(compute_s[rank], finish_s[rank]),
            sent_bytes=sent_bytes(one.program, rank),
            loaded_bytes=loaded_bytes(one.program, rank),
            memory=one.memory[gpu],
        )


def _options(strategy: str | Strategy, search: Search, disturbance: Disturbance | None) -> dict[str, Any]:
    partition = None if search.partition is None else list(search.partition)
    noise = {} if disturbance is None else {"noise": disturbance.noise.name, "samples": disturbance.num_samples}
    return {"strategy": label_of(strategy), "partition": partition} | noise
