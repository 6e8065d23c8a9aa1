"""MeasuredSizes: how far calls of some sizes were measured to be from a form, as MeasuredShape says it of products."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvrsim.io.json_text import JsonObject
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

    @classmethod
    def read(cls, data: JsonObject) -> MeasuredSizes:
        """Check the keys of a profile's attention.*.measured section."""
        data.only(cls.__slots__)
        sizes, factors = data.numbers("sizes"), data.numbers("factors")
        if not sizes or len(sizes) != len(factors) or sorted(set(sizes)) != sizes:
            raise data.error("sizes", "rising numbers above 0, as many as factors")
        seconds = np.array(sizes) * np.array(factors)
        if (np.diff(seconds) < -_ROUNDING * seconds[1:]).any():
            raise data.error("factors", "factors that fall no faster than sizes rise")
        return cls(sizes=tuple(sizes), factors=tuple(factors))

    @classmethod
    def of(cls, data: JsonObject, key: str) -> MeasuredSizes | None:
        """Those under a key; None where there is none."""
        return cls.read(data.child(key)) if data.has(key) else None

    def factor(self, size: Array) -> Array:
        """Of calls of that size."""
        at = np.log(np.maximum(size, 1e-300))
        return np.asarray(np.exp(np.interp(at, np.log(self.sizes), np.log(self.factors))))

    def least_factor(self, size: Array) -> Array:
        """The least of that size and all larger ones."""
        larger = np.append(np.minimum.accumulate(self.factors[::-1])[::-1], np.inf)
        return np.asarray(np.minimum(self.factor(size), larger[np.searchsorted(self.sizes, size)]))
