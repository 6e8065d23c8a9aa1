"""One strategy with one partition, simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvrsim.errors import InputError
from kvrsim.executors.run import check_executor, run_partition
from kvrsim.memory import fits, memory_of
from kvrsim.partition import Partition
from kvrsim.program import Program, computes_s, loaded_bytes, sent_bytes, waited_s
from kvrsim.results.question import Question
from kvrsim.results.results import RankReport, SimResult
from kvrsim.results.stream import Prompts
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy, get_strategy, label_of
from kvrsim.strategies.pipeline import layers_of, tokens_of
from planner.access import access_notes, has_choice, placed_for, told_access
from planner.evaluate import Progress
from planner.partitions import settled
from planner.uncertainty.interval import interval, measured_coverage

# What only some simulations need is imported where they ask for it, for the sake of the start.
if TYPE_CHECKING:
    from kvrsim.noise import NoiseDraw
    from kvrsim.results.breakdown import Breakdown
    from kvrsim.results.stream import Arrivals
    from kvrsim.results.timeline import Timeline
    from planner.stream import Stream
    from planner.table.table import PartitionTable
    from planner.uncertainty.disturbed import Disturbance

MOST_SPANS = 200_000  # of a timeline of several requests; of more requests the first ones are shown


def run_simulation(
    scenario: Scenario,
    *,
    strategy: str | Strategy,
    partition: Sequence[int] | None = None,
    table: PartitionTable | None = None,
    executor: str | None = None,
    timeline: bool = False,
    with_breakdown: bool = False,
    disturbance: Disturbance | None = None,
    arrivals: Arrivals | Prompts | None = None,
    pack_tokens: int | None = None,
    seed: int = 0,
    warnings: Sequence[str] = (),
    on_progress: Progress | None = None,
) -> SimResult:
    """Simulate; without a partition, take the strategy's own (kvr-s searches first, kvr-p looks in the table).

    strategy: a name, "FILE.py:NAME" or a Strategy.

    executor: "batch" or "event"; None takes the event executor where a timeline or breakdown is wanted.
    Raises InputError for an unknown strategy or executor, or a partition that does not fit.
    disturbance: noise; the answer is its first sample's run, beside the distribution over all.
    arrivals: requests alike behind each other, Poisson gaps by the seed, or prompts of different lengths, of which the
        scenario's request is the one with the longest context; the answer is that of the scenario's request alone.
    pack_tokens: most new tokens of a step that prompts are packed into; None: they run behind each other.
    on_progress: called while a partition is searched.
    """
    chosen = get_strategy(strategy)
    about: dict[str, Any] = {
        "strategy": label_of(strategy),
        "partition": None if partition is None else list(partition),
    }
    if disturbance is not None:
        about |= {"noise": disturbance.noise.name, "samples": disturbance.num_samples}
    if isinstance(arrivals, Prompts):
        about |= {"requests": arrivals.arrivals, "pack_tokens": pack_tokens}
    elif arrivals is not None:
        about |= {"requests": arrivals.count, "every_s": arrivals.every_s, "poisson": arrivals.poisson}
        about |= {"pack_tokens": pack_tokens}
    asked = Question.of(scenario, seed=seed, **about)
    _check_stream(arrivals, pack_tokens, partition, disturbance)
    if disturbance is not None:
        disturbance.check(chosen)
        scenario = disturbance.fixed(scenario)
    placed = placed_for(scenario, chosen)
    draw = None if disturbance is None else disturbance.draw(placed)
    records = timeline or with_breakdown or draw is not None
    kind = check_executor(executor, records=records)
    chosen, cut = settled(placed, chosen, partition, table, on_progress)
    looks_up = partition is None and chosen.partition_rule == "table"
    quiet_s = None if draw is None else run_partition(placed, chosen, cut).ttft_s
    if disturbance is not None and quiet_s is not None:
        disturbance.check_length(quiet_s, placed.cluster.num_gpus)
    run = run_partition(placed, chosen, cut, executor=kind, timeline=records, draw=draw)
    program, finish_s, spans = run.program, run.finish_s, run.timeline
    stream = None if arrivals is None else _stream(scenario, placed, chosen, program, arrivals, pack_tokens, seed)
    sure = interval(placed, chosen, cut, finish_s[-1])
    own_s = computes_s(program)
    busy_s = own_s if draw is None or spans is None else [spans.computed_s(rank) for rank in range(len(finish_s))]
    memory = memory_of(placed, chosen, cut)
    return SimResult(
        question=asked,
        strategy=chosen.name,
        cluster=scenario.cluster,
        model=scenario.model.name,
        profile=scenario.profile_name,
        context_len=scenario.request.context_len,
        partition=cut.chunk_lens,
        executor=kind,
        ttft_s=finish_s[-1],
        ttft_low_s=sure.low_s,
        ttft_high_s=sure.high_s,
        per_rank=tuple(
            RankReport(
                rank=gpu,
                chunk_len=tokens_of(chosen, cut.chunk_lens, rank),
                compute_s=busy_s[rank],
                wait_s=waited_s(busy_s[rank], finish_s[rank]),
                sent_bytes=sent_bytes(program, rank),
                loaded_bytes=loaded_bytes(program, rank),
                memory=memory[gpu],
            )
            for gpu, rank in ((gpu, gpu // placed.gpus_per_rank) for gpu in range(placed.num_gpus))
        ),
        layers=layers_of(placed, chosen),
        prefix_access=told_access(placed, chosen),
        query_blocks=program.most_query_blocks,
        fits=fits(placed, memory),
        memory_limit=placed.memory_limit,
        interval_coverage=measured_coverage(scenario),
        interval_causes=sure.causes(),
        warnings=(
            *warnings,
            *access_notes({chosen.name: told_access(placed, chosen)}, had_choice=has_choice(scenario, chosen)),
            *(_table_notes(table, placed, chosen) if looks_up and table is not None else ()),
        ),
        timeline=_with_bases(placed, chosen, cut, _shown(stream, spans, noise=draw)) if timeline else None,
        breakdown=_broken_down(placed, chosen, cut, finish_s, spans) if with_breakdown and spans else None,
        noise=None if disturbance is None else disturbance.noise,
        noisy=None if disturbance is None else disturbance.distribution(placed, chosen, cut, quiet_s or finish_s[-1]),
        stream=None if stream is None else stream.run(computes_s, draw),
    )


def _table_notes(table: PartitionTable, scenario: Scenario, strategy: Strategy) -> tuple[str, ...]:
    from planner.table.lookup import notes_on_table

    return notes_on_table(table, scenario, strategy)


def _check_stream(
    arrivals: Arrivals | Prompts | None,
    pack_tokens: int | None,
    partition: Sequence[int] | None,
    disturbance: Disturbance | None,
) -> None:
    """InputError where the options for several prompts do not go together."""
    if isinstance(arrivals, Prompts) and partition is not None:
        raise InputError("partition", ",".join(map(str, partition)), "equal prompts, where `requests` has lengths")
    if pack_tokens is None:
        return
    if arrivals is None:
        raise InputError("pack_tokens", pack_tokens, "with `requests`")
    if disturbance is not None:
        raise InputError("pack_tokens", pack_tokens, "no `noise` beside it")


def _stream(
    scenario: Scenario,
    placed: Scenario,
    strategy: Strategy,
    program: Program,
    arrivals: Arrivals | Prompts,
    pack_tokens: int | None,
    seed: int,
) -> Stream:
    """placed: as the strategy sees the scenario; `program`: of the scenario's request alone."""
    from planner.stream import alike, of_lengths, packed

    request = scenario.request
    if isinstance(arrivals, Prompts):
        prompts = arrivals
    else:
        prompts = Prompts.alike(arrivals, seed, request.context_len, request.cached_prefix)
    if pack_tokens is not None:
        return packed(placed, strategy, prompts, pack_tokens)
    if prompts is arrivals:
        return of_lengths(scenario, strategy, prompts)
    return alike(program, placed.cluster, prompts)


def _shown(stream: Stream | None, first: Timeline | None, *, noise: NoiseDraw | None) -> Timeline | None:
    """The first request's timeline or, of several, that of as many as a picture and a trace can hold."""
    if stream is None or first is None:
        return first
    shown = stream.first(max(1, MOST_SPANS // max(1, len(first.spans))))
    return replace(shown.timeline(noise), gpus_per_rank=first.gpus_per_rank)


def _broken_down(
    placed: Scenario, strategy: Strategy, cut: Partition, finish_s: Sequence[float], spans: Timeline
) -> Breakdown:
    from planner.uncertainty.breakdown import breakdown

    return breakdown(placed, strategy, cut, finish_s, spans)


def _with_bases(placed: Scenario, strategy: Strategy, cut: Partition, shown: Timeline | None) -> Timeline | None:
    """How each span's seconds are known; of prompts of different lengths, by the longest."""
    if shown is None:
        return None
    from planner.uncertainty.bases import bases_of

    return replace(shown, bases=bases_of(placed, strategy, cut, shown))
