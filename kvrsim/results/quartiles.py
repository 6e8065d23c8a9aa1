"""Quartiles of repeated measurements, and how precisely they determine the median."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

QUARTILE_RANGE_SD = 1.349  # interquartile range of a normal distribution, in standard deviations
_MEDIAN_SD = 1.25  # standard error of the median of n normal values, in standard deviations / sqrt(n)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile of at least one value."""
    first, middle, third = np.percentile(values, (25, 50, 75))
    return float(first), float(middle), float(third)


def interquartile_range(values: Sequence[float]) -> float:
    """Third quartile minus first quartile; 0 for a single value."""
    first, _, third = quartiles(values)
    return third - first


def median_error(values: Sequence[float]) -> float:
    """Standard error of the median, estimated from the interquartile range."""
    return _MEDIAN_SD / QUARTILE_RANGE_SD * interquartile_range(values) / math.sqrt(len(values))
