"""Prompts one behind the other on a chain of this machine's ranks, beside what the simulator says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from kvrsim.errors import InputError
from kvrsim.io.schema import fields_to_json
from kvrsim.results.quartiles import interquartile_range
from kvrsim.results.question import Question
from kvrsim.results.stream import Arrivals, Prompts, StreamResult
from kvrsim.scenario import Scenario
from planner.confirm.confirm import OnNote
from planner.confirm.hardware import Hardware, gpu_notes
from planner.confirm.run import planned
from planner.simulate import run_simulation

if TYPE_CHECKING:
    from kvrsim.runtime.prompts.run import PromptsReport, RankPrompts
    from kvrsim.runtime.ranks.transport import OnProgress

CHAINS = ("single", "kvr-e", "kvr-s", "kvr-p")  # strategies whose ranks need no barrier between prompts
_PATIENCE_S = 100.0  # without a profile the length of a prefill is unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPrompts:
    """Equal prompts as they were run on ranks."""

    question: Question
    strategy: str
    model: str
    attention: str
    dtype: str
    num_gpus: int
    context_len: int
    partition: tuple[int, ...]
    measured: StreamResult  # of the repetition with the median throughput
    throughputs_per_s: tuple[float, ...]  # of each repetition
    predicted: StreamResult | None  # by the profile; None: there is none
    logits_error: float | None  # largest difference of any prompt's from a single process's; None: not compared
    logits_scale: float | None
    conditions: Mapping[str, str]
    warnings: tuple[str, ...]

    @property
    def throughput_error(self) -> float | None:
        """Of the prediction, relative to what was measured."""
        return None if self.predicted is None else self.predicted.throughput_per_s / self.measured.throughput_per_s - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **self.question.measured_header(predicted=self.predicted is not None),
            **fields_to_json(self, "strategy", "model", "attention", "dtype", "num_gpus", "context_len", "partition"),
            "measured": self.measured.to_dict(),
            "throughputs_per_s": list(self.throughputs_per_s),
            "throughput_iqr_per_s": interquartile_range(self.throughputs_per_s),
            "predicted": None if self.predicted is None else self.predicted.to_dict(),
            "throughput_error": self.throughput_error,
            "max_logit_error": self.logits_error,
            "largest_logit": self.logits_scale,
            **fields_to_json(self, "conditions", "warnings"),
        }


def run_prompts_here(
    scenario: Scenario,
    hardware: Hardware,
    *,
    arrivals: Arrivals,
    strategy: str,
    partition: Sequence[int] | None = None,
    check_logits: bool = False,
    warnings: Sequence[str] = (),
    on_note: OnNote | None = None,
    on_progress: OnProgress | None = None,
) -> MeasuredPrompts:
    """Measure equal prompts on as many ranks as the scenario has GPUs.

    Raises InputError as run_here, and for a strategy that is no chain; RankError where a rank fails.
    """
    if strategy not in CHAINS:
        raise InputError("requests", arrivals.count, f"with {strategy} one prefill; several with {', '.join(CHAINS)}")
    scenario = hardware.placed(scenario)
    placed, plan = planned(scenario, hardware, strategy, partition)
    request, predicted = scenario.request, None
    longest_s = _PATIENCE_S
    if scenario.profile is not None:
        found = run_simulation(
            scenario, strategy=strategy, partition=plan.partition.chunk_lens, arrivals=arrivals, seed=hardware.seed
        )
        predicted, longest_s = found.stream, found.ttft_s
    prompts = Prompts.alike(arrivals, hardware.seed, request.context_len, request.cached_prefix)
    from kvrsim.runtime.prompts.run import run_prompts
    from kvrsim.runtime.ranks.launch import launch, started_by_torchrun

    notes = (*warnings, *gpu_notes(hardware.device))
    for note in notes if on_note is not None else ():
        on_note(note)  # type: ignore[misc]
    job = hardware.job(placed, (plan,), check=check_logits)
    ranks = (scenario if started_by_torchrun() else placed).cluster.num_gpus
    rounds = hardware.repeats + hardware.warmups
    all_s = rounds * (prompts.arrivals_s[-1] + (1 + arrivals.count) * longest_s)
    how = hardware.launch(ranks, longest_s + _longest_gap_s(prompts.arrivals_s), all_s)
    report: PromptsReport = launch(run_prompts, job, prompts.arrivals_s, how=how, on_progress=on_progress)[-1]
    streams = [_stream(ranks_of, prompts) for ranks_of in report.repeats]
    throughputs = tuple(stream.throughput_per_s for stream in streams)
    middle = median(throughputs)
    return MeasuredPrompts(
        question=Question.of(scenario, seed=hardware.seed, strategy=strategy, requests=arrivals.count),
        strategy=strategy,
        model=scenario.model.name,
        attention=scenario.kernel,
        dtype=request.dtype,
        num_gpus=placed.cluster.num_gpus,
        context_len=request.context_len,
        partition=plan.partition.chunk_lens,
        measured=min(streams, key=lambda stream: abs(stream.throughput_per_s - middle)),
        throughputs_per_s=throughputs,
        predicted=predicted,
        logits_error=report.logits_error,
        logits_scale=report.logits_scale,
        conditions=report.conditions,
        warnings=notes,
    )


def _longest_gap_s(arrivals_s: Sequence[float]) -> float:
    """For which a rank may wait for a message because nothing has arrived."""
    return max((later - time_s for time_s, later in pairwise(arrivals_s)), default=0.0)


def _stream(ranks: Sequence[RankPrompts], prompts: Prompts) -> StreamResult:
    """One repetition in the simulator's terms."""
    times_s, count = prompts.arrivals_s, len(prompts.arrivals_s)
    end_s = max(rank.end_s[-1] for rank in ranks)
    busy_s = tuple(
        (sum(end - begin for begin, end in zip(rank.begin_s, rank.end_s, strict=True)) - rank.waited_s) / count
        for rank in ranks
    )
    return StreamResult(
        arrivals=prompts.arrivals,
        arrivals_s=times_s,
        context_lens=prompts.context_lens,
        queue_s=tuple(begin - time_s for begin, time_s in zip(ranks[0].begin_s, times_s, strict=True)),
        ttft_s=tuple(end - time_s for end, time_s in zip(ranks[-1].end_s, times_s, strict=True)),
        throughput_per_s=count / end_s,
        steady_per_s=None,
        busy_s=busy_s,
        utilisation=tuple(one * count / end_s for one in busy_s),
    )
