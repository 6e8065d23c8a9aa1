"""How sure a predicted TTFT is, and whether one is really shorter than another.

Where a profile was fitted to whole TTFTs, its own errors on models left out of the fit say it. Where it was fitted
operation by operation, each operation's errors on rows left out are carried through the simulation (see moves.py).
Causes are independent of each other, so their moves are added by squares, on each side of the prediction apart: some
causes can only make a prefill longer. What moves all products and attention together is a cause of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvrsim.engine import SHORT_TOKENS
from kvrsim.kernels.profile import DEVIATES_OF_80_PERCENT
from kvrsim.partition import Partition
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from planner.uncertainty.causes import compared_whole
from planner.uncertainty.moves import Move, Moves, moves


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Low and high of a TTFT, and what makes it wide."""

    low_s: float
    high_s: float
    moves: Mapping[str, Move]  # by cause: of log TTFT, at the ends of the 80 % interval of that cause alone

    def causes(self) -> dict[str, tuple[float, float]]:
        """The same as relative changes of TTFT, the widest cause first."""
        ranked = sorted(self.moves.items(), key=lambda item: item[1].low - item[1].high)
        return {name: (math.expm1(move.low), math.expm1(move.high)) for name, move in ranked}


def interval(scenario: Scenario, strategy: Strategy, partition: Partition, ttft_s: float) -> Interval:
    """The 80 % interval of a predicted TTFT.

    scenario: as the strategy sees it (see for_strategy).
    """
    return interval_of(moves(scenario, strategy, partition), ttft_s)


def measured_coverage(scenario: Scenario) -> float | None:
    """Share of held-out TTFTs that such intervals held; None where nobody checked it."""
    residual, request = compared_whole(scenario), scenario.request
    if residual is not None:
        return residual.coverage
    fit = None if scenario.engine is None else scenario.engine.fit
    if fit is None:
        return None
    is_short = request.batch * request.new_tokens < SHORT_TOKENS
    return fit.short_coverage if is_short and fit.short_coverage is not None else fit.coverage


def interval_of(found: Moves, ttft_s: float) -> Interval:
    """The 80 % interval of a predicted TTFT that moves like that."""
    squares: dict[str, tuple[float, float]] = {}
    for cause, move in found.of.items():
        name = cause if isinstance(cause, str) else cause.kind
        below, above = squares.get(name, (0.0, 0.0))
        squares[name] = below + min(0.0, *move) ** 2, above + max(0.0, *move) ** 2
    below, above = (math.sqrt(sum(side)) for side in zip(*squares.values(), strict=True)) if squares else (0.0, 0.0)
    return Interval(
        low_s=ttft_s * math.exp(-below),
        high_s=ttft_s * math.exp(above),
        moves={name: Move(0.0 - math.sqrt(low), math.sqrt(high)) for name, (low, high) in squares.items()},
    )


def tied(faster: Moves, slower: Moves, faster_s: float, slower_s: float) -> bool:
    """Whether the 80 % interval of log(slower / faster) holds 0: errors that both share cancel.

    faster_s, slower_s: predicted, or another measure of the two that moves like their TTFT, seconds.
    """
    squares = (DEVIATES_OF_80_PERCENT * max(faster.apart_log_sd, slower.apart_log_sd)) ** 2
    still = Move(0.0, 0.0)
    ours_by, theirs_by = ({**one.of, **one.between} for one in (faster, slower))
    for cause in {**ours_by, **theirs_by}:
        ours, theirs = ours_by.get(cause, still), theirs_by.get(cause, still)
        squares += min(0.0, theirs.low - ours.low, theirs.high - ours.high) ** 2
    return math.log(slower_s / faster_s) <= math.sqrt(squares)
