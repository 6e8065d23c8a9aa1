"""How wide an interval has to be that rests on left-out prefills, beyond what the engine's terms explain.

Errors are those of rows of 512 tokens and more: below, the spread of the terms says more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from calibrate.prefills.fit import left_out_log_sd
from kvrsim.engine.engine import Engine, EngineFit
from kvrsim.profile.profile import DEVIATES_OF_80_PERCENT
from kvrsim.program import Array
from validate.serving.errors import ServingError, errors_of
from validate.serving.rows import ServingRow

_MANY = 10  # rows, from which on a quantile says more than a standard deviation


def without_width(engine: Engine, fit: EngineFit) -> Engine:
    """The engine with that fit, and intervals that its terms alone make."""
    side = 0.0 if fit.left_out == "engine" else None
    return replace(engine, fit=replace(fit, log_sd=0.0, shorter_log=side, longer_log=side))


def unexplained(bare: Sequence[ServingError], predicted_s: Sequence[float] | None = None, least: int = 1) -> Array:
    """log(measured / predicted) of each row beyond the end of an interval, by squares; 0 inside.

    bare: with the intervals of the terms alone. predicted_s: of each, instead of the errors' own. least: with fewer
    rows of 512 tokens and more, all rows count.
    """
    found, only_long = [], sum(not error.is_short for error in bare) >= least
    for index, error in enumerate(bare):
        if error.is_short and only_long:
            continue
        then_s = error.predicted_s if predicted_s is None else predicted_s[index]
        off = float(np.log(error.row.ttft_s / then_s))
        end = float(np.log((error.high_s if off > 0 else error.low_s) / error.predicted_s))
        found.append(np.sign(off) * np.sqrt(max(off**2 - end**2, 0.0)))
    return np.array(found)


def both_sides(off: Array) -> float:
    """Log standard deviation by which four of five rows lie inside; of a few rows, as far as so few can tell."""
    if len(off) >= _MANY:
        return float(np.quantile(np.abs(off), 0.8) / DEVIATES_OF_80_PERCENT)
    return left_out_log_sd(np.exp(off), np.ones_like(off))


def each_side(off: Array) -> tuple[float, float]:
    """What a tenth of the rows exceeds: log(predicted / measured), and log(measured / predicted)."""
    low, high = np.quantile(off, (0.1, 0.9))
    return max(0.0, -float(low)), max(0.0, float(high))


def inside(rows: Sequence[ServingRow], engine: Engine, predicted_s: Sequence[float]) -> list[bool]:
    """Whether each measurement lies in an interval as wide as the engine's around `predicted_s`."""
    found = []
    for error, then_s in zip(errors_of(rows, engine), predicted_s, strict=True):
        low, high = error.low_s / error.predicted_s, error.high_s / error.predicted_s
        found.append(low * then_s <= error.row.ttft_s <= high * then_s)
    return found
