"""One strategy's prefill, measured on the machine that is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from kvrsim.compile import for_strategy
from kvrsim.errors import InputError
from kvrsim.interp import interquartile_range
from kvrsim.io.schema import fields_to_json
from kvrsim.results.question import Question
from kvrsim.results.results import stages_to_json
from kvrsim.results.timeline import Timeline
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import Strategy, get_strategy
from kvrsim.strategies.pipeline import layers_of
from planner.candidates import Search, choose_partition
from planner.confirm.candidates import NO_REFERENCE, Named, Room
from planner.confirm.confirm import OnNote, check, is_busy
from planner.confirm.hardware import Hardware, check_split, devices_of, gather_of, gpu_notes, run_plan
from planner.simulate import run_simulation

if TYPE_CHECKING:
    from kvrsim.runtime.measure import Timing
    from kvrsim.runtime.plan import RunPlan
    from kvrsim.runtime.ranks import OnProgress

_PATIENCE_S = 600.0  # without a profile the length of a prefill is unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """Measured prefills of one strategy."""

    question: Question
    strategy: str
    model: str
    attention: str
    dtype: str
    num_gpus: int
    context_len: int
    partition: tuple[int, ...]
    layers: tuple[int, ...] | None  # of each stage of a pipeline, whose pieces `partition` holds
    query_blocks: tuple[int, ...] | None  # a rank, of the layer that has the most; None: attention is one call
    samples_s: tuple[float, ...]  # TTFT of each repetition
    other_cores: tuple[float | None, ...]  # cores that other processes kept busy in each; None: unknown
    predicted_s: float | None  # by the profile; None: there is none
    logits_error: float | None  # largest difference from a single process's; None: not compared
    logits_scale: float | None
    kv_cache_error: float | None
    generated: tuple[tuple[int, ...], ...]  # tokens by prompt; empty where none were requested
    conditions: Mapping[str, str]
    all_gather: (
        str | None
    )  # of tsp and zigzag: a ring between neighbours, or the backend's collective; None: there is none
    warnings: tuple[str, ...]  # such as that other processes used the machine
    timeline: Timeline = field(repr=False, compare=False)  # of one more prefill

    @property
    def chunk_a_rank(self) -> bool:
        """Whether each rank has tokens of its own: else all of them pass through every rank."""
        return self.layers is None and get_strategy(self.strategy).group_size == 1

    @property
    def ttft_s(self) -> float:
        """Median TTFT."""
        return median(self.samples_s)

    @property
    def iqr_s(self) -> float:
        """Interquartile range."""
        return interquartile_range(self.samples_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **self.question.measured_header(predicted=self.predicted_s is not None),
            **fields_to_json(self, "strategy", "model", "attention", "dtype", "num_gpus", "context_len", "partition"),
            **stages_to_json(self.partition, self.layers),
            **({} if self.query_blocks is None else fields_to_json(self, "query_blocks")),
            "measured_ttft_s": self.ttft_s,
            "measured_iqr_s": self.iqr_s,
            **fields_to_json(self, "samples_s", "other_cores"),
            "predicted_ttft_s": self.predicted_s,
            "max_logit_error": self.logits_error,
            "largest_logit": self.logits_scale,
            "max_kv_cache_error": self.kv_cache_error,
            "all_gather": self.all_gather,
            "per_rank": [self._rank(rank) for rank in range(self.timeline.num_ranks)],
            **fields_to_json(self, "generated", "conditions", "warnings"),
        }

    def _rank(self, rank: int) -> dict[str, Any]:
        """Of one more prefill, its layers hooked."""
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
    on_note: OnNote | None = None,
    on_progress: OnProgress | None = None,
) -> RunResult:
    """Measure on as many ranks as the scenario has GPUs.

    Raises InputError for a strategy that the runtime cannot run, where the machine cannot run it, or where kvr-s has
    neither partition nor profile; RankError where a rank fails.
    """
    scenario = hardware.placed(scenario)
    placed, plan = planned(scenario, hardware, strategy, partition, generate=generate)
    cut, predicted_s = plan.partition, None
    if scenario.profile is not None:
        predicted_s = run_simulation(scenario, strategy=strategy, search=Search(partition=cut.chunk_lens)).ttft_s
    from kvrsim.runtime.measure import JobReport, run_job
    from kvrsim.runtime.ranks import launch, started_by_torchrun

    longest_s = _PATIENCE_S / 6 if predicted_s is None else predicted_s
    count = hardware.repeats + hardware.warmups + 8
    notes = (*warnings, *gpu_notes(hardware.device))
    if check_logits and scenario.profile is not None and not _reference_fits(placed, hardware):
        check_logits, notes = False, (*notes, NO_REFERENCE)
    job = hardware.job(placed, (plan,), generate=generate, check=check_logits)
    ranks = (scenario if started_by_torchrun() else placed).cluster.num_gpus  # under torchrun, all there are
    how = hardware.launch(ranks, longest_s, count * longest_s)
    if on_note is not None:
        for note in notes:
            on_note(note)
    report: JobReport = launch(run_job, job, how=how, on_progress=on_progress)[-1]
    timing, difference = report.bench.timings[0], next(iter(report.differences), None)
    return RunResult(
        question=Question.of(scenario, seed=hardware.seed, strategy=strategy),
        strategy=strategy,
        model=scenario.model.name,
        attention=scenario.kernel,
        dtype=scenario.request.dtype,
        num_gpus=placed.cluster.num_gpus,
        context_len=scenario.request.context_len,
        partition=cut.chunk_lens,
        layers=plan.stage_layers,
        query_blocks=tuple(map(max, plan.query_blocks)) or None,
        samples_s=timing.ttft_s,
        other_cores=timing.other_cores,
        predicted_s=predicted_s,
        logits_error=None if difference is None else difference.logits,
        logits_scale=None if difference is None else difference.logits_scale,
        kv_cache_error=None if difference is None else difference.kv_cache,
        generated=report.generated,
        conditions=report.bench.conditions,
        all_gather=plan.gather if plan.strategy in ("tsp", "zigzag") and ranks > 1 else None,
        warnings=(*notes, *_busy_notes(timing)),
        timeline=report.bench.timelines[0],
    )


def planned(
    scenario: Scenario, hardware: Hardware, strategy: str, partition: Sequence[int] | None, *, generate: int = 0
) -> tuple[Scenario, RunPlan]:
    """The scenario on the GPUs that the strategy uses, and what their ranks do; raises InputError as `run_here`.

    scenario: as the hardware places it.
    """
    from kvrsim.runtime.plan import run_strategy

    run_strategy(strategy)
    chosen = get_strategy(strategy)
    alone = chosen.partition_rule == "whole"
    placed = scenario.on_gpus(1) if alone else scenario
    if alone and scenario.cluster.num_gpus > 1 and partition is not None:
        raise InputError("partition", ",".join(map(str, partition)), "nothing for single, which one rank runs")
    if chosen.partition_rule == "table" and partition is None:
        raise InputError("partition", "nothing", f"a partition: run does not read the table of {strategy}")
    check(placed, hardware, needs_profile=False)
    split = for_strategy(scenario, chosen)
    check_split(scenario, chosen, generate=generate)
    if _searches(chosen, partition) and scenario.profile is None:
        raise InputError(
            "profile", "nothing", "a profile of this machine, or `partition`; kvrsim calibrate all makes one"
        )
    settled_as, cut = choose_partition(split, chosen, partition)
    gather = gather_of(scenario.profile, emulated=hardware.emulated, strategy=strategy)
    plan = run_plan(placed, strategy, cut, gather, layers_of(split, settled_as))
    hardware.choice(placed).check(plan)
    return placed, plan


def _searches(strategy: Strategy, partition: Sequence[int] | None) -> bool:
    """Whether the times of this machine decide what is run."""
    rule = strategy.partition_rule
    return rule == "searched-pieces" or (partition is None and rule in ("search", "pieces"))


def _reference_fits(scenario: Scenario, hardware: Hardware) -> bool:
    """Whether one process, whose logits are compared, has room for the whole context."""
    whole = Partition(chunk_lens=(scenario.request.new_tokens,))
    reference = Named(strategy="single", run_as="single", partition=whole)
    room = Room.of(scenario, hardware.device, devices_of(hardware), "ranks")
    return room.needed_bytes(scenario, reference, "ranks") <= room.limit_bytes


def _busy_notes(timing: Timing) -> tuple[str, ...]:
    """A note where other processes used the machine during prefills, which are counted anyway."""
    pairs = zip(timing.ttft_s, timing.other_cores, strict=True)
    busy = [cores for ttft_s, cores in pairs if cores is not None and is_busy(ttft_s, cores)]
    if not busy:
        return ()
    during = f"{len(busy)} of {len(timing.ttft_s)} prefills"
    return (f"other processes used the machine in {during} ({median(busy):.1f} cores); TTFT may be too long",)
