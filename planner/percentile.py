"""Percentiles of TTFTs, for promises and fleets."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike


def percentile_of(values: ArrayLike, percent: float) -> float:
    """The least value that `percent` percent of all values do not exceed; not interpolated: values may be infinite."""
    array = np.asarray(values, dtype=float)
    rank = max(1, math.ceil(percent / 100 * array.size - 1e-9)) - 1
    return float(np.partition(array, rank)[rank])
