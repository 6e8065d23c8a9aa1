"""Clock: how a device's rate falls from its burst to its sustained clock while it is under load."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvrsim.io.schema import PositiveShare
from kvrsim.program import Array

_STEPS = 60  # of Newton's method, which needs about five
_ENOUGH = 1e-12  # relative change of a step, after which it ends


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """After t seconds under load the rate is s + (1 - s) exp(-t / tau) of the burst clock's.

    A device starts at its highest clock; within tens of milliseconds the power limit lowers it. The rates of a profile
    that has a clock are those at the burst clock.
    """

    sustained_share: PositiveShare  # s: rate under long load over the rate of short bursts
    time_constant_s: float  # tau

    def stretched_s(self, busy_s: Array) -> Array:
        """Seconds that work of `busy_s` seconds at the burst clock takes from the beginning of the load.

        T with busy_s = s T + (1 - s) tau (1 - exp(-T / tau)). Any shape, values of at least 0; more work never takes
        less, and none takes less than busy_s. Newton's method from below: the work done is concave in T, so that no
        step goes too far.
        """
        share, tau = self.sustained_share, self.time_constant_s
        busy = np.asarray(busy_s, dtype=float)
        found = np.maximum(busy, (busy - (1 - share) * tau) / share)
        for _ in range(_STEPS):
            decay = np.exp(-found / tau)
            done = share * found - (1 - share) * tau * np.expm1(-found / tau)
            step = (busy - done) / (share + (1 - share) * decay)
            found = found + np.maximum(step, 0.0)
            if np.all(step <= _ENOUGH * found):
                break
        return np.asarray(found)
