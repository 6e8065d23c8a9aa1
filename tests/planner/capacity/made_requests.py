"""Workloads made of columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from planner.capacity.workload import Workload


def made(
    gaps_s: npt.NDArray[np.float64], context_len: npt.ArrayLike, cached_prefix: npt.ArrayLike = 0, output: int = 1
) -> Workload:
    """Requests with these gaps between arrivals, the first one at 0 s."""
    count = len(gaps_s) + 1
    return Workload(
        name="made",
        kind="csv",
        arrival_s=np.cumsum([0.0, *gaps_s]),
        context_len=np.broadcast_to(context_len, count),
        cached_prefix=np.broadcast_to(cached_prefix, count),
        output_tokens=np.full(count, output),
    )
