"""TtftPredictor: TTFTs over new tokens, cached prefix and batch; it is read and written as versioned JSON.

docs/how-to/predictor.md describes the file for programs that read it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from kvrsim.errors import InputError, check_whole
from kvrsim.io.schema import JsonObject, Whole, fields_to_json, to_json
from planner.grid import GridFile

Seconds = tuple[tuple[tuple[float, ...], ...], ...]  # [batch][cached prefix][new tokens]
Around = list[tuple[int, float]]  # (index, weight) of the grid points


@dataclass(frozen=True, kw_only=True, slots=True)
class TtftEstimate:
    """A TTFT interpolated from the grid, and its strategy."""

    ttft_s: float
    ttft_low_s: float  # lower end of the 80 % interval
    ttft_high_s: float
    strategy: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return fields_to_json(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyTimes:
    """One strategy's TTFTs at every point."""

    strategy: str
    most_new_tokens: tuple[tuple[Whole, ...], ...]  # [batch][cached prefix]: most that fit in memory; 0: none
    ttft_s: Seconds
    ttft_low_s: Seconds
    ttft_high_s: Seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class TtftPredictor(GridFile):
    """A grid of simulated prefills, and the question that it answers."""

    file_format: ClassVar[str] = "kvrsim ttft predictor"
    command: ClassVar[str] = "kvrsim predictor build"
    rows: ClassVar[str] = "strategies"

    kvrsim_version: str  # kvrsim version that built the predictor
    longest_context: int  # tokens, cached prefix and new ones together
    new_tokens: tuple[int, ...]  # grid points in ascending order, like the two fields below
    cached_prefix: tuple[Whole, ...]
    batch: tuple[int, ...]
    strategies: tuple[StrategyTimes, ...]
    question: Mapping[str, Any] = field(default_factory=dict)  # question of the longest prefill

    def __post_init__(self) -> None:
        for key in ("new_tokens", "cached_prefix", "batch"):
            points = list(getattr(self, key))
            if not points or sorted(set(points)) != points:
                raise InputError(key, points, "rising whole numbers, at least one")
        if not self.strategies:
            raise InputError("strategies", "none", "at least one strategy")
        sizes = (len(self.batch), len(self.cached_prefix), len(self.new_tokens))
        shapes = {"most_new_tokens": sizes[:2], "ttft_s": sizes, "ttft_low_s": sizes, "ttft_high_s": sizes}
        for index, times in enumerate(self.strategies):
            for key, shape in shapes.items():
                if not _has_shape(getattr(times, key), shape):
                    text = " x ".join(map(str, shape))
                    raise InputError(f"strategies[{index}].{key}", "another shape", f"an array of {text} numbers")

    def predict(self, *, ctx: int, cached_prefix: int = 0, batch: int = 1) -> TtftEstimate:
        """TTFT of the fastest strategy that fits, by linear interpolation between eight grid points around the prefill.

        ctx: tokens of the whole context. cached_prefix: leading tokens whose K and V are cached. batch: sequences.
        Raises InputError for a parameter outside the grid, or if no strategy fits in memory.
        """
        check_whole("batch", batch, self.batch[0], self.batch[-1], ", the range of the predictor")
        check_whole("ctx", ctx, self.new_tokens[0], self.longest_context, ", the range of the predictor")
        most = min(self.cached_prefix[-1], ctx - self.new_tokens[0])
        check_whole("cached_prefix", cached_prefix, 0, most, ", the range of the predictor")
        new = ctx - cached_prefix
        if new > self.new_tokens[-1]:
            raise InputError("ctx", ctx, f"at most {self.new_tokens[-1]} tokens that are not cached")
        rows = _around(self.batch, batch)
        columns = _around(self.cached_prefix, cached_prefix)
        places = [(*pair, _around(self.new_tokens, new)) for pair in product(rows, columns)]
        most_new = [self._most(times, rows, columns, batch) for times in self.strategies]
        fitting = [times for times, most in zip(self.strategies, most_new, strict=True) if new <= most]
        if not fitting:
            most = cached_prefix + int(max(most_new))
            raise InputError("ctx", ctx, f"at most {most} tokens: more do not fit in the GPUs' memory")
        best = min(fitting, key=lambda times: _mean(times.ttft_s, places))
        return TtftEstimate(
            ttft_s=_mean(best.ttft_s, places),
            ttft_low_s=_mean(best.ttft_low_s, places),
            ttft_high_s=_mean(best.ttft_high_s, places),
            strategy=best.strategy,
        )

    def _most(self, times: StrategyTimes, rows: Around, columns: Around, batch: int) -> float:
        """The most new tokens per sequence that fit; the total over the batch is nearly linear in prefix and batch."""
        total = 0.0
        for (row, weight), (column, share) in product(rows, columns):
            total += weight * share * self.batch[row] * times.most_new_tokens[row][column]
        return total / batch

    @classmethod
    def plain_fields(cls, data: JsonObject) -> dict[str, Any]:
        """The question, which may have further keys than those that a lookup shows."""
        question = data.child("question")
        question.text("model")
        question.integer("num_gpus")
        question.text("profile")
        question.text("engine")
        question.child("cluster").text("name")
        return {"question": to_json(question.fields)}


def load_predictor(path: str | Path, argument: str = "predictor") -> TtftPredictor:
    """Read a file that `kvrsim predictor build` has written; InputError names the argument, file and key."""
    return TtftPredictor.load(path, argument)


def _around(points: Sequence[int], value: int) -> Around:
    """The grid points around a value, and their weights. An import of numpy would take longer than a lookup."""
    low = bisect_right(points, value) - 1
    if points[low] == value:
        return [(low, 1.0)]
    share = (value - points[low]) / (points[low + 1] - points[low])
    return [(low, 1 - share), (low + 1, share)]


def _mean(seconds: Seconds, places: Sequence[tuple[tuple[int, float], tuple[int, float], Around]]) -> float:
    mean_s = 0.0
    for (row, weight), (column, share), points in places:
        times = seconds[row][column]
        for point, part in points:
            mean_s += weight * share * part * times[point]
    return mean_s


def _has_shape(values: Any, shape: Sequence[int]) -> bool:
    if not shape:
        return True
    return len(values) == shape[0] and all(_has_shape(value, shape[1:]) for value in values)
