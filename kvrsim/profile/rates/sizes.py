"""MeasuredSizes: how far calls of some sizes were measured to be from a form, as MeasuredShape says it of products."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvrsim.errors import InputError
from kvrsim.program import Array

_ROUNDING = 1e-9  # relative


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSizes:
    """Measured over formula time by the size of a call; such as of score matrices that no longer fit a cache.

    Between the sizes on log scales, beyond them as at the outermost. size * factor does not fall, so that a time that
    rises at least in proportion to size does not fall either once it is multiplied by its factor.
    """

    sizes: tuple[float, ...]  # rising
    factors: tuple[float, ...]  # measured over formula time

    def __post_init__(self) -> None:
        sizes = list(self.sizes)
        if not sizes or len(sizes) != len(self.factors) or sorted(set(sizes)) != sizes:
            raise InputError("sizes", sizes, "rising numbers above 0, as many as factors")
        seconds = np.array(sizes) * np.array(self.factors)
        if (np.diff(seconds) < -_ROUNDING * seconds[1:]).any():
            raise InputError("factors", self.factors, "factors that fall no faster than sizes rise")

    def factor(self, size: Array) -> Array:
        """Of calls of that size."""
        at = np.log(np.maximum(size, 1e-300))
        return np.asarray(np.exp(np.interp(at, np.log(self.sizes), np.log(self.factors))))

    def least_factor(self, size: Array) -> Array:
        """The least of that size and all larger ones."""
        larger = np.append(np.minimum.accumulate(self.factors[::-1])[::-1], np.inf)
        return np.asarray(np.minimum(self.factor(size), larger[np.searchsorted(self.sizes, size)]))
