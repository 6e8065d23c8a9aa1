"""Interpolation on a grid, and quartiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def log_interp(x: ArrayLike, grid: ArrayLike, values: ArrayLike) -> Floats:
    """Interpolate on an ascending grid, linear in the logarithms of both; beyond the grid, its nearest value holds."""
    return np.asarray(np.exp(np.interp(np.log(x), np.log(grid), np.log(values))))


def cell(x: ArrayLike, grid: ArrayLike) -> tuple[NDArray[np.intp], Floats]:
    """Index of the grid point below each x, and the share of the way from there to the next point.

    The grid is ascending. Beyond its ends the outermost cell is extended: shares are below 0 or above 1.
    On a grid of one point all shares are 0.
    """
    points = np.asarray(grid, dtype=float)
    at = np.asarray(x, dtype=float)
    low = np.clip(np.searchsorted(points, at, side="right") - 1, 0, max(0, len(points) - 2))
    if len(points) == 1:
        return low, np.zeros(at.shape)
    return low, (at - points[low]) / (points[low + 1] - points[low])


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
