"""Robust planning: the partition whose mean or percentile of TTFT under noise is least."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrsim.executors.run import ttft_s
from kvrsim.noise import Noise, NoiseDraw, check_objective, objective_of
from kvrsim.partition import Partition
from kvrsim.program import Array
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from planner.search.neighbours import Boundaries, chunk_lens, chunks_between, rounded, unique_rows
from planner.search.refine import refine_frugally
from planner.search.search import default_stride
from planner.uncertainty.disturbed import FIRST_JUDGING_SAMPLE
from planner.uncertainty.noisy import check_length

PLANNING_SAMPLES = 64
_CHECKING_SAMPLES = 256
_ROUNDS = 24
_TOWARDS_EVEN = (0.0, 0.1, 0.25, 0.5, 1.0)
_LAST_SHARES = (0.9, 0.95, 1.05)  # of the last rank's chunk, which no other rank can wait for


@dataclass(frozen=True, kw_only=True, slots=True)
class RobustPlan:
    """A partition for a noise, beside the quiet one that it was started from."""

    objective: str  # one of kvrsim.choices.OBJECTIVES
    partition: Partition
    quiet_partition: Partition
    planned_s: float  # the objective over the planning samples
    quiet_planned_s: float  # the same of the quiet partition
    evaluations: int  # partitions simulated, each under every planning sample


def robust_plan(
    scenario: Scenario,
    strategy: Strategy,
    noise: Noise,
    quiet: Partition,
    *,
    objective: str,
    quiet_s: float,
    seed: int = 0,
    num_samples: int = PLANNING_SAMPLES,
) -> RobustPlan:
    """Improve the quiet partition under samples 0 .. num_samples - 1 of that seed, the same for all candidates.

    What these find must hold on others, which follow them, or the quiet partition stays. The scenario's cluster
    holds the fixed part of the noise. Judge the answer by samples from FIRST_JUDGING_SAMPLE on: those that chose it
    flatter it. Raises InputError for an unknown objective.
    """
    check_objective(objective)
    assert num_samples + _CHECKING_SAMPLES <= FIRST_JUDGING_SAMPLE
    check_length(noise, quiet_s, _CHECKING_SAMPLES, scenario.cluster.num_gpus)
    draw = NoiseDraw(noise, scenario.cluster.num_gpus, seed=seed, samples=range(num_samples))
    tokens = scenario.request.new_tokens

    evaluations = 0

    def evaluate(boundaries: Boundaries) -> Array:
        nonlocal evaluations
        evaluations += len(boundaries)
        chunks = chunks_between(boundaries, tokens).astype(float)
        return objective_of(ttft_s(scenario, strategy, chunks, draw=draw), objective)

    start = np.cumsum(quiet.chunk_lens)[:-1].astype(np.int64)
    quiet_planned_s = float(evaluate(start[None])[0])
    best, best_s = start, quiet_planned_s
    if len(quiet.chunk_lens) > 1 and noise.is_random:
        stride = default_stride(tokens, len(quiet.chunk_lens))
        seeds = _seeds(np.array(quiet.chunk_lens, dtype=float), stride, tokens)
        seeds_s = evaluate(seeds)
        for seed_boundaries in (start, seeds[int(seeds_s.argmin())]):
            found, found_s = refine_frugally(seed_boundaries, tokens, stride, evaluate, rounds=_ROUNDS)
            best, best_s = (found, found_s) if found_s < best_s else (best, best_s)
        checking = range(num_samples, num_samples + _CHECKING_SAMPLES)
        draw = NoiseDraw(noise, scenario.cluster.num_gpus, seed=seed, samples=checking)
        checked_s = evaluate(np.stack([start, best]))
        best, best_s = (start, quiet_planned_s) if checked_s[0] <= checked_s[1] else (best, best_s)
    return RobustPlan(
        objective=objective,
        partition=Partition(chunk_lens=chunk_lens(tuple(best.tolist()), tokens)),
        quiet_partition=quiet,
        planned_s=best_s,
        quiet_planned_s=quiet_planned_s,
        evaluations=evaluations,
    )


def _seeds(quiet: Array, stride: int, tokens: int) -> npt.NDArray[np.int64]:
    """The quiet plan, blends of it with even chunks, and with a little less or more for the last rank."""
    even = np.full_like(quiet, tokens / len(quiet))
    plans = [quiet + share * (even - quiet) for share in _TOWARDS_EVEN]
    for share in _LAST_SHARES:
        plan = quiet.copy()
        plan[-1] *= share
        plans.append(plan * (tokens / plan.sum()))
    return unique_rows([rounded(plan, stride, tokens) for plan in plans])
