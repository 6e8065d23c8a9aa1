"""fit_send_recv, fit_all_gather and fit_all_reduce: times of messages and collectives over a link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

import numpy as np

from calibrate.data import RING, Measurement, Some
from calibrate.fit.fit import (
    Fit,
    FitComparison,
    FitResult,
    Parameter,
    Rates,
    choose_knots,
    column,
    cross_validated_s,
    ranges_of,
    sources_of,
    to_digits,
)
from kvrsim.hardware import AllReduceRates, GatherRates, LinkSpec, MeasuredAllReduce
from kvrsim.kernels.profile import Gather
from kvrsim.program import Array

OWN_SHARE = 0.44  # GatherRates.own_share: from the slopes at 2, 4 and 8 ranks, equal on A100, H100 and H200
LARGE_BYTES = 2**21  # minimum bytes of the all-gathers for which the profile states its error
_LATENCY_SHARE = 0.9  # latency of all-reduces, as a share of the smallest all-reduce's time
_KNOT_ERROR = 0.01  # relative error below which a table of all-reduces needs no more knots


@dataclass(frozen=True, kw_only=True, slots=True)
class SendRates:
    """One message: the longer of latency_s + n / short_bytes_per_s and n / bandwidth_bytes_per_s."""

    bandwidth_bytes_per_s: float
    latency_s: float
    short_bytes_per_s: float  # rate of short messages, which take little longer than the latency

    def seconds(self, nbytes: Array) -> Array:
        """Seconds from the call to the last byte received."""
        return np.maximum(self.latency_s + nbytes / self.short_bytes_per_s, nbytes / self.bandwidth_bytes_per_s)


def fit_send_recv(rows: Sequence[Measurement], link: LinkSpec) -> FitResult[SendRates]:
    """Fit a latency and two rates to messages inside a node; the bandwidth is at most the datasheet's.

    `cross_validated` holds out a tenth of the sizes at a time.
    """
    messages = usable_link_rows(rows, "send_recv")
    nbytes = column(messages, "bytes")
    peak = link.bandwidth_bytes_per_s
    fit = Fit(
        label="",
        measured_s=column(messages, "median_s"),
        parameters=(
            Parameter(name="latency_s", start=1.5e-5, low=0.0, high=max(1e-2, 2 * link.latency_s)),
            Parameter(name="short_bytes_per_s", start=peak, low=1e-3 * peak, high=4 * peak),
            Parameter(name="bandwidth_bytes_per_s", start=0.75 * peak, low=1e-3 * peak, high=peak),
        ),
        make=lambda values: SendRates(**values),
        seconds=lambda rates, indices: rates.seconds(nbytes[indices]),
        starts=4,
    )
    return _fit_of(messages, fit.rates, fit.own, fit.left_out("sizes", nbytes.tolist()))


def fit_all_gather(rows: Sequence[Measurement], link: LinkSpec) -> FitResult[GatherRates]:
    """Fit GatherRates to the all-gathers of the fastest kernel inside a node, with rates at most the datasheet's.

    `cross_validated` holds out a tenth of the sizes at a time.
    """
    calls, why = _fastest(usable_link_rows(rows, "all_gather"))
    nbytes = column(calls, "bytes")
    ranks = column(calls, "ranks")
    peak = link.bandwidth_bytes_per_s
    latency_s = link.latency_s
    longest_s = max(1e-3, 10 * latency_s)

    def seconds(rates: GatherRates, indices: Some) -> Array:
        sizes = nbytes[indices]
        counts = ranks[indices]
        result = np.empty(len(indices))
        for count in np.unique(counts):
            same = counts == count
            result[same] = rates.seconds(sizes[same], int(count))
        return result

    fit = Fit(
        label="",
        measured_s=column(calls, "median_s"),
        parameters=(
            Parameter(name="launch_s", start=max(6e-6, 0.5 * latency_s), low=1e-9, high=longest_s),
            Parameter(name="hop_s", start=max(1.3e-6, 0.1 * latency_s), low=1e-10, high=longest_s),
            Parameter(name="small_bytes_per_s", start=0.25 * peak, low=1e-4 * peak, high=peak),
            Parameter(name="large_bytes_per_s", start=0.85 * peak, low=1e-3 * peak, high=peak),
            Parameter(name="setup_s", start=max(8e-6, 0.5 * latency_s), low=1e-9, high=longest_s),
        ),
        make=lambda values: GatherRates(**values, own_share=OWN_SHARE),
        seconds=seconds,
    )
    held_out = fit.left_out("sizes", nbytes.tolist()).from_size(nbytes, LARGE_BYTES, "bytes")
    return _fit_of(calls, fit.rates, fit.own, held_out, why=why, gathers=True)


def fit_all_reduce(rows: Sequence[Measurement]) -> FitResult[AllReduceRates]:
    """Make tables of the all-reduces inside a node: at each size the fastest kernel, as engines choose.

    If one of the kernels is a ring of sends, all sizes take the kernel that is faster at large sizes, as the runtime
    chooses. `cross_validated` holds out a tenth of the sizes at a time.
    """
    usable = usable_link_rows(rows, "all_reduce")
    has_ring = any(row.kernel.endswith(RING) for row in usable)
    why = ""
    if has_ring:
        usable, why = _fastest(usable)
    fastest: dict[tuple[int, int], Measurement] = {}
    for row in usable:
        key = row.ranks or 0, row.bytes or 0
        if key not in fastest or row.median_s < fastest[key].median_s:
            fastest[key] = row
    calls = [fastest[key] for key in sorted(fastest)]
    nbytes = column(calls, "bytes")
    ranks = column(calls, "ranks")
    seconds = column(calls, "median_s")

    def rates_of(indices: Some) -> AllReduceRates:
        tables = []
        for count in sorted(set(ranks[indices].tolist())):
            same = indices[ranks[indices] == count]
            tables.append(_table(int(count), nbytes[same], seconds[same]))
        return AllReduceRates(measured=tuple(tables))

    def predict(train: Some, test: Some) -> Array:
        rates = rates_of(train)
        return np.array([float(rates.seconds(nbytes[index], int(ranks[index]))) for index in test])

    all_calls = np.arange(len(calls))
    fitted = FitComparison(label="fitted", measured_s=seconds, predicted_s=predict(all_calls, all_calls))
    left_out_s = cross_validated_s(nbytes.tolist(), predict)
    held_out = FitComparison(label="sizes left out", measured_s=seconds, predicted_s=left_out_s)
    return _fit_of(calls, rates_of(all_calls), fitted, held_out, why=why, gathers=has_ring)


def _table(num_gpus: int, sizes: Array, seconds: Array) -> MeasuredAllReduce:
    times = np.minimum.accumulate(seconds[::-1])[::-1]  # seconds never fall with the size
    latency_s = to_digits(_LATENCY_SHARE * float(times[0]))
    knots = choose_knots(np.log(sizes), np.log(times - latency_s), most=len(times), error=_KNOT_ERROR)
    return MeasuredAllReduce(
        num_gpus=num_gpus,
        latency_s=latency_s,
        nbytes=tuple(int(size) for size in sizes[knots]),
        bytes_per_s=tuple(to_digits(float(rate)) for rate in sizes[knots] / (times[knots] - latency_s)),
    )


def _fit_of(
    rows: Sequence[Measurement],
    rates: Rates,
    fitted: FitComparison,
    held_out: FitComparison,
    *,
    why: str = "",
    gathers: bool = False,
) -> FitResult[Rates]:
    """Make the result. `why`: a note on the kernel; `gathers`: whether to note the algorithm of all-gathers."""
    gather: Gather | None = None
    if gathers:
        gather = "ring" if rows[0].kernel.endswith(RING) else "collective"
    return FitResult(
        rates=rates,
        source=sources_of(rows) + why,
        own=fitted,
        cross_validated=held_out,
        seen=ranges_of(rows, ("bytes", "ranks")),
        gather=gather,
    )


def usable_link_rows(rows: Sequence[Measurement], operation: str) -> list[Measurement]:
    """Single messages, or collectives, inside one node."""
    return [row for row in rows if row.operation == operation and row.nodes == 1 and row.messages == 1]


def _fastest(rows: Sequence[Measurement]) -> tuple[list[Measurement], str]:
    """The rows of the fastest kernel, and a note if there are several kernels.

    The fastest kernel is that at the largest common size, by the geometric mean over numbers of ranks; without a common
    size, the kernel with most rows is taken.
    """
    seconds: dict[str, dict[tuple[int, int], float]] = {}
    for row in rows:
        seconds.setdefault(row.kernel, {})[row.ranks or 0, row.bytes or 0] = row.median_s
    if len(seconds) < 2:
        return list(rows), ""
    common = set.intersection(*map(set, seconds.values()))
    largest = dict(sorted(common))  # largest common bytes by number of ranks
    if largest:
        mean_s = {name: geometric_mean(times[size] for size in largest.items()) for name, times in seconds.items()}
        kernel = min(sorted(mean_s), key=mean_s.__getitem__)
        why = "faster when large than"
    else:
        kernel = max(sorted(seconds), key=lambda name: len(seconds[name]))
        why = "measured more often than"
    others = ", ".join(sorted(set(seconds) - {kernel}))
    return [row for row in rows if row.kernel == kernel], f" ({kernel}, {why} {others})"
