"""The candidates of a confirmation: strategies, and partitions near the plan's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvrsim.errors import InputError
from kvrsim.runtime.plan import RUN_STRATEGIES
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import KVR_S, get_strategy
from planner.candidates import Candidate, all_for, per_rank_scenario
from planner.confirm.hardware import Hardware, Mode
from planner.search.minimise import Evaluator, around, chunks_between

STRATEGIES = ("single", "tsp", "kvr-e", "kvr-s")  # measured by default
REPLAYED = (*STRATEGIES, "kvr-b")  # strategies that one device can replay rank by rank
_LOOKS_UP = "kvr-p"  # strategy with a partition from a table, which is not read here
_APART = 1 / 16  # share of the even chunk; a measurement cannot distinguish partitions that differ by less


def strategies_here(
    scenario: Scenario, names: Sequence[str] | None, mode: Mode, hardware: Hardware
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the strategies to measure, and notes on those that the machine or the model does not allow.

    names: "all" means every strategy that is planned and can be measured here; None means the paper's strategies.
    Raises InputError for a strategy that cannot be measured here.
    """
    if scenario.cluster.num_gpus == 1:
        return ("single",), ()
    wanted = list(dict.fromkeys(STRATEGIES if names is None else names))
    allowed = [name for name in RUN_STRATEGIES if name != _LOOKS_UP and (mode == "ranks" or name in REPLAYED)]
    where = "what the runtime runs without a table" if mode == "ranks" else "what one device can replay in turn"

    def check(name: str) -> None:
        """Raise InputError where planner or runtime cannot run a strategy on this model and number of ranks."""
        if name not in allowed:
            raise InputError("strategies", name, f"{where}: {', '.join(allowed)}, or all")
        strategy = get_strategy(name, "strategies")
        even = Partition.even(scenario.request.new_tokens, per_rank_scenario(scenario, strategy).cluster.num_gpus)
        hardware.check(Candidate(scenario=scenario, strategy=strategy, partition=even))

    for name in wanted:
        if name != "all":
            check(name)
    if "all" not in wanted:
        return tuple(wanted), ()
    planned, notes = all_for(scenario)
    runnable, reasons = [], dict[str, list[str]]()
    for strategy in planned:
        try:
            check(strategy.name)
            runnable.append(strategy.name)
        except InputError as error:
            reasons.setdefault(error.accepted, []).append(strategy.name)
    at = wanted.index("all")
    wanted[at : at + 1] = runnable
    left_out = (f"not measured: {', '.join(left)} (accepted: {reason})" for reason, left in reasons.items())
    return tuple(dict.fromkeys(wanted)), (*notes, *left_out)


def partitions_around(scenario: Scenario, center: Sequence[int], stride: int) -> list[tuple[tuple[int, ...], float]]:
    """Return partitions with boundaries up to two strides from the centre's, and their predicted TTFTs, sorted."""
    tokens = sum(center)
    rows = chunks_between(around(np.cumsum(center)[:-1], stride, tokens), tokens)
    ttft_s = Evaluator(scenario, KVR_S).ttft_s(rows.astype(float)) if len(rows) else rows
    return [(tuple(rows[index].tolist()), float(ttft_s[index])) for index in np.argsort(ttft_s, kind="stable")]


def further_candidates(kvr_s: Candidate, others: Sequence[Candidate], count: int) -> dict[str, Candidate]:
    """Return, by name, the partitions with the least predicted TTFT that differ from the others and from each other."""
    center = kvr_s.partition
    if count < 1 or len(center.chunk_lens) < 2:
        return {}
    apart = max(1, round(center.num_tokens / len(center.chunk_lens) * _APART))
    known = [np.array(one.partition.boundaries) for one in others if one.strategy.name.startswith("kvr")]
    further: dict[str, Candidate] = {}
    for chunks, _ in partitions_around(kvr_s.scenario, center.chunk_lens, apart):
        partition = Partition(chunk_lens=chunks)
        boundaries = np.array(partition.boundaries)
        if len(further) < count and all(np.abs(boundaries - other).max() >= apart for other in known):
            known.append(boundaries)
            further[f"{KVR_S.name} #{len(further) + 2}"] = replace(kvr_s, partition=partition, search=None)
    return further
