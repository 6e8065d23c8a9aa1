"""One strategy's prefill, measured on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from kvrsim.errors import ABSENT, InputError
from kvrsim.executors.access import execution_of
from kvrsim.io.schema import fields_to_json
from kvrsim.results.question import Question
from kvrsim.results.results import Answer, stages_to_json
from kvrsim.results.timeline import Timeline
from kvrsim.runtime.host import started_by_torchrun
from kvrsim.runtime.plan import GeneratedTokens, RunPlan, Timing, check_decoding, run_strategy
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy, get_strategy
from planner.candidates import Search
from planner.confirm.confirm import measured_here
from planner.confirm.hardware import CALIBRATE, Hardware, Reporter
from planner.confirm.result import LEAST_SCALE, Targets


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunResult(Answer):
    """The answer to `kvrsim run`: measured prefills of one strategy."""

    question: Question
    strategy: Strategy
    timing: Timing  # TTFT of each repetition, the generated tokens, and other measurements
    predicted_s: float | None  # TTFT predicted with the profile; None: no profile
    conditions: Mapping[str, str]
    warnings: tuple[str, ...]  # warnings, such as that other processes used the machine

    @property
    def plan(self) -> RunPlan:
        """The plan that the ranks ran."""
        return self.timing.plan

    @property
    def decoding(self) -> GeneratedTokens:
        """The generated tokens."""
        assert self.timing.decoding is not None
        return self.timing.decoding

    @property
    def tpot_s(self) -> float | None:
        """Median seconds between generated tokens; None for a single token."""
        steps_s = self.decoding.step_s
        return median(steps_s) if steps_s else None

    @property
    def kv_cache(self) -> str:
        """What holds the KV cache after the prefill, in words."""
        assert self.strategy.real_run is not None
        return self.strategy.real_run.cache

    @property
    def reasons(self) -> tuple[str, ...]:
        """One sentence for each result that differs from that of one process, if they were compared."""
        difference = self.timing.difference
        if difference is None:
            return ()
        reasons = []
        limit = Targets().logits_for(self.question.dtype) * max(difference.logits_scale, LEAST_SCALE)
        if not difference.logits <= limit:  # the negated comparison also reports NaN
            by = f"{difference.logits:.2g}, largest logit {difference.logits_scale:.2g}"
            reasons.append(f"logits differ from one process's by {by}")
        number = difference.first_unequal
        if number is not None:
            assert difference.margin is not None
            why = f"one process prefers its own by {difference.margin:.2g}"
            tie = ", less than rounding may change" if difference.margin <= limit else ""
            reasons.append(f"token {number + 1} is not that of one process, which {why}{tie}")
        return tuple(reasons)

    @property
    def timeline(self) -> Timeline:
        """Timeline of an additional prefill, with hooks in its layers."""
        assert self.timing.timeline is not None
        return self.timing.timeline

    @property
    def chunk_per_rank(self) -> bool:
        """Whether each rank has its own tokens; otherwise all tokens pass through every rank."""
        return self.plan.stage_layers is None and self.strategy.group_size == 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        timing = self.timing
        plan = self.plan
        difference = timing.difference
        blocks = {}
        if plan.query_blocks:
            blocks = {"query_blocks": list(map(max, plan.query_blocks))}
        all_gather = None
        if self.strategy.gathers_kv and self.num_gpus > 1:
            all_gather = plan.gather
        return {
            **self.question.measured_header(predicted=self.predicted_s is not None),
            **fields_to_json(self.question, "model", "attention", "dtype", "context_len"),
            "strategy": self.strategy.name,
            "num_gpus": self.num_gpus,
            "partition": list(plan.partition.chunk_lens),
            **stages_to_json(plan.partition.chunk_lens, plan.stage_layers),
            **blocks,
            "ttft_s": timing.median_s,
            "measured_ttft_s": timing.median_s,
            "measured_iqr_s": timing.iqr_s,
            "samples_s": list(timing.ttft_s),
            "predicted_ttft_s": self.predicted_s,
            "tpot_s": self.tpot_s,
            "tokens": list(self.decoding.tokens[0]),
            "tokens_equal": None if difference is None else difference.first_unequal is None,
            "kv_cache": self.kv_cache,
            "max_logit_error": difference and difference.logits,
            "largest_logit": difference and difference.logits_scale,
            "reasons": list(self.reasons),
            "all_gather": all_gather,
            "per_rank": [self._rank(rank) for rank in range(self.timeline.num_ranks)],
            **fields_to_json(self, "conditions", "warnings"),
        }

    def _rank(self, rank: int) -> dict[str, Any]:
        """Return one rank's compute, wait and sent bytes in the additional prefill with hooks."""
        compute_s = sum(span.duration_s for span in self.timeline.of(rank, "compute"))
        wait_s = sum(span.duration_s for span in self.timeline.of(rank, "wait"))
        sent = sum(span.nbytes or 0.0 for span in self.timeline.of(rank, "transfer"))
        return {"rank": rank, "compute_s": compute_s, "wait_s": wait_s, "sent_bytes": sent}


def run_here(
    scenario: Scenario,
    hardware: Hardware,
    *,
    strategy: str,
    partition: Sequence[int] | None = None,
    check_logits: bool = False,
    warnings: Sequence[str] = (),
    reporter: Reporter | None = None,
) -> RunResult:
    """Measure one strategy's prefill on as many ranks as the scenario has GPUs.

    Raises InputError for a strategy that the runtime cannot run, for a machine that cannot run the strategy or lacks
    memory, or for kvr-s without partition and profile; RankError where a rank fails.
    """
    check_decoding(run_strategy(strategy), hardware.output_tokens)
    chosen = get_strategy(strategy)
    scenario = hardware.runnable(scenario, needs_profile=False)
    _check_partition_rule(chosen, partition, has_profile=scenario.profile is not None)
    candidate = Search(partition=partition).candidate(execution_of(scenario, chosen))
    hardware.check(candidate)
    num_gpus = scenario.cluster.num_gpus
    if chosen.partition_rule == "whole":
        num_gpus = 1
    if not started_by_torchrun():  # torchrun has started one rank per GPU, some of which may stay idle
        scenario = scenario.on_gpus(num_gpus)
    candidate = replace(candidate, execution=replace(candidate.execution, scenario=scenario))
    timings, conditions, notes = measured_here(
        {strategy: candidate}, hardware, "ranks", notes=warnings, check=check_logits, reporter=reporter
    )
    return RunResult(
        question=Question.of(scenario.on_gpus(num_gpus), seed=hardware.seed, strategy=strategy),
        strategy=chosen,
        timing=timings[strategy],
        predicted_s=None if scenario.profile is None else candidate.ttft_s,
        conditions=conditions,
        warnings=notes,
    )


def _check_partition_rule(strategy: Strategy, partition: Sequence[int] | None, *, has_profile: bool) -> None:
    """Raise InputError where nothing gives the strategy its partition: neither the user nor a search by a profile."""
    rule = strategy.partition_rule
    if rule == "table" and partition is None:
        raise InputError("partition", ABSENT, f"a partition: run does not read the table of {strategy.name}")
    searches = rule == "searched-pieces" or (partition is None and rule in ("search", "pieces"))
    if searches and not has_profile:
        raise InputError("profile", ABSENT, f"a profile of this machine, or `partition`; {CALIBRATE}")
