"""Confidence intervals of a percentile of TTFT.

The estimate is the percentile of all requests. Synthetic requests have independent replications: the interval is
Student's t over their percentiles, extended to hold the estimate. A trace was recorded once: its segments are
resampled with replacement (a block bootstrap), so the interval says how much the percentile depends on the segments
of this trace. It does not cover other days, and queues at the ends of a segment stay as they
were simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrsim.interp import percentile_of
from kvrsim.program import Array

LEVEL = 0.95
_BLOCKS, _LEAST_IN_BLOCK, _DRAWS, _THRESHOLDS = 40, 25, 400, 2000
MEANING_OF_TRACE = "95 % CI by block bootstrap over segments of this trace; it covers no other days"
MEANING_OF_DRAWN = "95 % CI by Student's t over the percentiles of independent replications"


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A percentile of TTFT and its confidence interval."""

    value_s: float
    low_s: float | None  # None: unknown, for a short trace or where requests are never served
    high_s: float | None
    meaning: str


def of_trace(ttft_s: Array, percentile: float, seed: int) -> Interval:
    """Block bootstrap; requests are in order of arrival."""
    value_s = percentile_of(ttft_s, percentile)
    blocks = min(_BLOCKS, len(ttft_s) // _LEAST_IN_BLOCK)
    if blocks < 8 or not math.isfinite(value_s):
        return Interval(value_s=value_s, low_s=None, high_s=None, meaning=MEANING_OF_TRACE)
    ordered = np.sort(ttft_s)
    spaced = np.linspace(0, len(ordered) - 1, _THRESHOLDS).astype(np.int64)
    thresholds = np.unique(np.concatenate([ordered[spaced], ordered[-_THRESHOLDS:]]))
    counts = [np.searchsorted(np.sort(block), thresholds, side="right") for block in np.array_split(ttft_s, blocks)]
    drawn = np.random.default_rng(seed).multinomial(blocks, np.full(blocks, 1 / blocks), size=_DRAWS)
    within = drawn @ np.array(counts, dtype=float)
    sizes = drawn @ np.array([len(block) for block in np.array_split(ttft_s, blocks)], dtype=float)
    reached = (within >= np.ceil(percentile / 100 * sizes - 1e-9)[:, None]).argmax(axis=1)
    low, high = np.quantile(thresholds[reached], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf")
    ends = (float(low), float(high) if math.isfinite(high) else None)
    return Interval(value_s=value_s, low_s=min(ends[0], value_s), high_s=ends[1], meaning=MEANING_OF_TRACE)


def of_replications(ttft_s: Sequence[Array], percentile: float) -> Interval:
    """Student's t; one array a replication."""
    values = np.array([percentile_of(one, percentile) for one in ttft_s])
    value_s = percentile_of(np.concatenate(ttft_s), percentile)
    if len(values) < 2 or not np.isfinite(values).all():
        return Interval(value_s=value_s, low_s=None, high_s=None, meaning=MEANING_OF_DRAWN)
    from scipy.stats import t as student

    half_s = float(student.ppf((1 + LEVEL) / 2, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))
    mean_s = float(values.mean())
    low_s, high_s = max(0.0, min(mean_s - half_s, value_s)), max(mean_s + half_s, value_s)
    return Interval(value_s=value_s, low_s=low_s, high_s=high_s, meaning=MEANING_OF_DRAWN)
