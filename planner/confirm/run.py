"""One strategy's prefill, measured on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from kvrsim.errors import InputError
from kvrsim.interp import interquartile_range
from kvrsim.io.schema import fields_to_json
from kvrsim.results.question import Question
from kvrsim.results.results import stages_to_json
from kvrsim.results.timeline import Timeline
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import Strategy, get_strategy
from planner.candidates import Candidate, Search
from planner.confirm.candidates import NO_REFERENCE, MemoryBudget
from planner.confirm.hardware import Hardware, Reporter, check_split, is_busy

if TYPE_CHECKING:
    from kvrsim.runtime.measure import Difference, JobReport, Timing


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """Measured prefills of one strategy."""

    question: Question
    strategy: str
    num_gpus: int  # that the strategy uses
    partition: tuple[int, ...]
    layers: tuple[int, ...] | None  # of each stage of a pipeline, whose pieces `partition` holds
    query_blocks: tuple[int, ...] | None  # per rank, of the layer that has the most; None: attention is one call
    timing: Timing  # TTFT of each repetition, and cores that other processes kept busy
    predicted_s: float | None  # by the profile; None: without a profile
    difference: Difference | None  # from one process; None: not compared
    generated: tuple[tuple[int, ...], ...]  # tokens by prompt; empty where none were requested
    conditions: Mapping[str, str]
    all_gather: str | None  # of tsp and zigzag: a ring between neighbours, or the backend's collective
    warnings: tuple[str, ...]  # such as that other processes used the machine
    timeline: Timeline = field(repr=False, compare=False)  # of one more prefill

    @property
    def chunk_per_rank(self) -> bool:
        """Whether each rank has its own tokens: otherwise all of them pass through every rank."""
        return self.layers is None and get_strategy(self.strategy).group_size == 1

    @property
    def samples_s(self) -> tuple[float, ...]:
        """TTFT of each repetition."""
        return self.timing.ttft_s

    @property
    def ttft_s(self) -> float:
        """Median TTFT."""
        return median(self.samples_s)

    @property
    def iqr_s(self) -> float:
        """Interquartile range."""
        return interquartile_range(self.samples_s)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        difference = self.difference
        return {
            **self.question.measured_header(predicted=self.predicted_s is not None),
            **fields_to_json(self.question, "model", "attention", "dtype", "context_len"),
            **fields_to_json(self, "strategy", "num_gpus", "partition"),
            **stages_to_json(self.partition, self.layers),
            **({} if self.query_blocks is None else fields_to_json(self, "query_blocks")),
            "measured_ttft_s": self.ttft_s,
            "measured_iqr_s": self.iqr_s,
            "samples_s": list(self.samples_s),
            "other_cores": list(self.timing.other_cores),
            "predicted_ttft_s": self.predicted_s,
            "max_logit_error": difference and difference.logits,
            "largest_logit": difference and difference.logits_scale,
            "max_kv_cache_error": difference and difference.kv_cache,
            "all_gather": self.all_gather,
            "per_rank": [self._rank(rank) for rank in range(self.timeline.num_ranks)],
            **fields_to_json(self, "generated", "conditions", "warnings"),
        }

    def _rank(self, rank: int) -> dict[str, Any]:
        """Sum up one rank's part in one more prefill, its layers hooked."""
        compute_s, wait_s = (
            sum(span.duration_s for span in self.timeline.of(rank, kind)) for kind in ("compute", "wait")
        )
        sent = sum(span.nbytes or 0.0 for span in self.timeline.of(rank, "transfer"))
        return {"rank": rank, "compute_s": compute_s, "wait_s": wait_s, "sent_bytes": sent}


def run_here(
    scenario: Scenario,
    hardware: Hardware,
    *,
    strategy: str,
    partition: Sequence[int] | None = None,
    check_logits: bool = False,
    generate: int = 0,
    warnings: Sequence[str] = (),
    reporter: Reporter | None = None,
) -> RunResult:
    """Measure on as many ranks as the scenario has GPUs. generate: tokens to decode on the last rank, greedily.

    Raises InputError for a strategy that the runtime cannot run, where the machine cannot run it, or where kvr-s has
    neither partition nor profile; RankError where a rank fails.
    """
    from kvrsim.runtime.measure import run_job
    from kvrsim.runtime.plan import run_strategy
    from kvrsim.runtime.ranks import launch, started_by_torchrun

    reporter = reporter or Reporter()
    run_strategy(strategy)
    chosen = get_strategy(strategy)
    candidate = _candidate(scenario, hardware, chosen, partition, generate)
    scenario = candidate.scenario
    plan = hardware.run_plan(candidate)
    hardware.choice(scenario).check(plan)
    num_gpus = 1 if chosen.partition_rule == "whole" else scenario.cluster.num_gpus
    num_ranks = scenario.cluster.num_gpus if started_by_torchrun() else num_gpus  # under torchrun, all that it started
    predicted_s = None if scenario.profile is None else candidate.ttft_s
    notes = (*warnings, *hardware.notes())
    if check_logits and scenario.profile is not None and not reference_fits(candidate, hardware):
        check_logits, notes = False, (*notes, NO_REFERENCE)
    for note in notes:
        reporter.note(note)
    job = replace(hardware.job(scenario, (plan,), check=check_logits), generate=generate)
    how = hardware.launch(num_ranks, predicted_s, hardware.repeats + hardware.warmups + 8)
    report: JobReport = launch(run_job, job, how=how, on_progress=reporter.progress)[-1]
    timing = report.bench.timings[0]
    return RunResult(
        question=Question.of(scenario, seed=hardware.seed, strategy=strategy),
        strategy=strategy,
        num_gpus=num_gpus,
        partition=candidate.partition.chunk_lens,
        layers=plan.stage_layers,
        query_blocks=tuple(map(max, plan.query_blocks)) or None,
        timing=timing,
        predicted_s=predicted_s,
        difference=next(iter(report.differences), None),
        generated=report.generated,
        conditions=report.bench.conditions,
        all_gather=plan.gather if plan.strategy in ("tsp", "zigzag") and num_ranks > 1 else None,
        warnings=(*notes, *busy_notes(timing)),
        timeline=report.bench.timelines[0],
    )


def _candidate(
    scenario: Scenario, hardware: Hardware, strategy: Strategy, partition: Sequence[int] | None, generate: int
) -> Candidate:
    """Return the strategy with its partition; raise InputError as `run_here`."""
    rule = strategy.partition_rule
    if rule == "whole" and scenario.cluster.num_gpus > 1 and partition is not None:
        raise InputError("partition", ",".join(map(str, partition)), "nothing for single, which one rank runs")
    if rule == "table" and partition is None:
        raise InputError("partition", "nothing", f"a partition: run does not read the table of {strategy.name}")
    scenario = hardware.runnable(scenario, needs_profile=False)
    check_split(scenario, strategy, generate=generate)
    searches = rule == "searched-pieces" or (partition is None and rule in ("search", "pieces"))
    if searches and scenario.profile is None:
        accepted = "a profile of this machine, or `partition`; kvrsim calibrate all makes one"
        raise InputError("profile", "nothing", accepted)
    return Search(partition=partition).candidate(scenario, strategy)


def reference_fits(candidate: Candidate, hardware: Hardware) -> bool:
    """Whether one process, whose logits are compared, has memory for the whole context."""
    scenario = candidate.scenario
    whole = Partition(chunk_lens=(scenario.request.new_tokens,))
    reference = Candidate(scenario=scenario, strategy=get_strategy("single"), partition=whole)
    return MemoryBudget.of(scenario, hardware, "ranks").fits(reference)


def busy_notes(timing: Timing) -> tuple[str, ...]:
    """Return a note where other processes used the machine during prefills, which are counted anyway."""
    pairs = zip(timing.ttft_s, timing.other_cores, strict=True)
    busy = [cores for ttft_s, cores in pairs if cores is not None and is_busy(ttft_s, cores)]
    if not busy:
        return ()
    during = f"{len(busy)} of {len(timing.ttft_s)} prefills"
    return (f"other processes used the machine in {during} ({median(busy):.1f} cores); TTFT may be too long",)
