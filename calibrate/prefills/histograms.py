"""Histograms in the text format of Prometheus, which engines serve at /metrics, and their quantiles."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from kvrsim.errors import InputError

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+([^\s#]+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SUFFIXES = ("_bucket", "_sum", "_count")
_MODEL_LABELS = ("model_name", "model", "served_model_name")


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """Counts of a quantity by bucket."""

    bounds: tuple[float, ...]  # upper ends of the buckets, ascending; the last one may be infinite
    counts: tuple[float, ...]  # observations up to each bound, so they do not fall
    total: float  # sum of all observations

    @property
    def count(self) -> float:
        """Number of observations."""
        return self.counts[-1]

    @property
    def mean(self) -> float:
        """Mean of all observations."""
        return self.total / self.count

    def bucket(self, share: float) -> tuple[float, float]:
        """The ends of the bucket with the quantile."""
        rank = share * self.count
        place = next(place for place, count in enumerate(self.counts) if count >= rank and count > 0)
        low = self.bounds[place - 1] if place else 0.0
        return low, self.bounds[place]

    def quantile(self, share: float) -> float:
        """The quantile, linear inside its bucket, as by histogram_quantile of Prometheus."""
        low, high = self.bucket(share)
        if math.isinf(high):
            return low
        place = self.bounds.index(high)
        below = self.counts[place - 1] if place else 0.0
        inside = self.counts[place] - below
        return low + (high - low) * (share * self.count - below) / inside


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """One scrape: its histograms, its counters, and the model that the labels name."""

    histograms: Mapping[str, Histogram]  # by name without its engine, such as time_to_first_token_seconds
    counters: Mapping[str, float]  # sums over all labels, by name without its engine
    model: str | None


def is_metrics(head: str) -> bool:
    """Whether the beginning of a text is that of a scrape."""
    lines = [line for line in head.splitlines() if line.strip()]
    return bool(lines) and (lines[0].startswith(("# HELP ", "# TYPE ")) or _bucket_name(lines[0]) is not None)


def _bucket_name(line: str) -> str | None:
    match = _SAMPLE.match(line)
    if match is None or 'le="' not in (match[2] or ""):
        return None
    return match[1]


def read_metrics(text: str, where: str) -> Metrics:
    """Read a scrape. Series with different labels, such as those of several engines, are added.

    Raises InputError naming `where` for a number that is none, and for series of several models.
    """
    buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    sums: dict[str, float] = defaultdict(float)
    models = set()
    for number, line in enumerate(text.splitlines(), start=1):
        match = _SAMPLE.match(line)
        if line.startswith("#") or match is None:
            continue
        name = match[1].rpartition(":")[2]
        labels = dict(_LABEL.findall(match[2] or ""))
        value = _number(match[3], f"{where}, line {number}")
        models |= {labels[label] for label in _MODEL_LABELS if label in labels}
        if "le" in labels and name.endswith("_bucket"):
            buckets[name.removesuffix("_bucket")][_number(labels["le"], f"{where}, line {number}")] += value
        else:
            sums[name] += value
    if len(models) > 1:
        raise InputError(
            where, ", ".join(sorted(models)), "the metrics of one model: leave out the lines of the others"
        )
    histograms = {}
    for name, by_bound in buckets.items():
        bounds = tuple(sorted(by_bound))
        counts = tuple(by_bound[bound] for bound in bounds)
        if counts[-1] > 0 and all(first <= second for first, second in pairwise(counts)):
            histograms[name] = Histogram(bounds=bounds, counts=counts, total=sums.get(f"{name}_sum", math.nan))
    counters = {name: value for name, value in sums.items() if not name.endswith(_SUFFIXES)}
    return Metrics(histograms=histograms, counters=counters, model=next(iter(models), None))


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(where, text, "a number") from None
