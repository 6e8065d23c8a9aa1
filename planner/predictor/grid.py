"""TtftPredictor: TTFTs over new tokens, cached prefix and batch; versioned JSON in and out.

docs/how-to/predictor.md describes the file for programs that read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from kvrsim.errors import InputError
from kvrsim.interp import cell
from kvrsim.io.files import write_atomically
from kvrsim.io.schema import JsonObject, Whole, fields_to_json, read, to_json

SCHEMA_VERSION = 1
FORMAT = "kvrsim ttft predictor"
Seconds = tuple[tuple[tuple[float, ...], ...], ...]  # by batch, cached prefix and new tokens
Around = list[tuple[int, float]]  # indices of knots and their weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A TTFT that was looked up."""

    ttft_s: float
    ttft_low_s: float  # of the 80 % interval
    ttft_high_s: float
    strategy: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return fields_to_json(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyTimes:
    """One strategy's TTFTs at every knot."""

    strategy: str
    most_new_tokens: tuple[tuple[Whole, ...], ...]  # that fit in memory, by batch and cached prefix; 0: none
    ttft_s: Seconds
    ttft_low_s: Seconds
    ttft_high_s: Seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class TtftPredictor:
    """A grid of simulated prefills, and the question that it answers."""

    kvrsim_version: str  # that built it
    longest_context: int  # tokens, cached prefix and new ones together
    new_tokens: tuple[int, ...]  # knots, rising, as are those below
    cached_prefix: tuple[Whole, ...]
    batch: tuple[int, ...]
    strategies: tuple[StrategyTimes, ...]
    question: Mapping[str, Any] = field(default_factory=dict)  # the longest prefill: what all share is as in it

    def __post_init__(self) -> None:
        for key in ("new_tokens", "cached_prefix", "batch"):
            knots = list(getattr(self, key))
            if not knots or sorted(set(knots)) != knots:
                raise InputError(key, knots, "rising whole numbers, at least one")
        if not self.strategies:
            raise InputError("strategies", "none", "at least one strategy")
        sizes = (len(self.batch), len(self.cached_prefix), len(self.new_tokens))
        for index, one in enumerate(self.strategies):
            for key in ("most_new_tokens", "ttft_s", "ttft_low_s", "ttft_high_s"):
                least = sizes[:2] if key == "most_new_tokens" else sizes
                if not _has_shape(getattr(one, key), least):
                    shape = " x ".join(map(str, least))
                    raise InputError(f"strategies[{index}].{key}", "another shape", f"an array of {shape} numbers")

    def predict(self, *, ctx: int, cached_prefix: int = 0, batch: int = 1) -> Prediction:
        """TTFT of the fastest strategy that fits, interpolated linearly between the eight knots around a prefill.

        ctx: tokens of the whole context. cached_prefix: leading tokens whose K and V are cached. batch: sequences.
        Raises InputError naming the parameter outside the grid, or where no strategy fits in memory.
        """
        _check("batch", batch, self.batch[0], self.batch[-1])
        _check("ctx", ctx, self.new_tokens[0], self.longest_context)
        _check("cached_prefix", cached_prefix, 0, min(self.cached_prefix[-1], ctx - self.new_tokens[0]))
        new = ctx - cached_prefix
        if new > self.new_tokens[-1]:
            raise InputError("ctx", ctx, f"at most {self.new_tokens[-1]} tokens that are not cached")
        rows, columns = _around(self.batch, batch), _around(self.cached_prefix, cached_prefix)
        places = [(*pair, _around(self.new_tokens, new)) for pair in product(rows, columns)]
        fitting = [one for one in self.strategies if new <= self._most(one, rows, columns, batch)]
        if not fitting:
            most = int(max(self._most(one, rows, columns, batch) for one in self.strategies))
            raise InputError("ctx", ctx, f"at most {cached_prefix + most} tokens: more do not fit in the GPUs' memory")
        best = min(fitting, key=lambda one: _mean(one.ttft_s, places))
        return Prediction(
            ttft_s=_mean(best.ttft_s, places),
            ttft_low_s=_mean(best.ttft_low_s, places),
            ttft_high_s=_mean(best.ttft_high_s, places),
            strategy=best.strategy,
        )

    def _most(self, one: StrategyTimes, rows: Around, columns: Around, batch: int) -> float:
        """The most new tokens that fit: those of all sequences together are about linear in prefix and batch."""
        together = (
            weight * share * self.batch[row] * one.most_new_tokens[row][column]
            for (row, weight), (column, share) in product(rows, columns)
        )
        return sum(together) / batch

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"format": FORMAT, "schema_version": SCHEMA_VERSION, **fields_to_json(self)}

    def to_json(self) -> str:
        """The file's text: a line for each key, and for each strategy."""
        content = self.to_dict()
        strategies = ",\n".join("    " + json.dumps(one, allow_nan=False) for one in content.pop("strategies"))
        head = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
        return f'{{\n{head},\n  "strategies": [\n{strategies}\n  ]\n}}\n'

    def write(self, path: str | Path, argument: str = "output") -> None:
        """Write the JSON, whole or not at all."""
        write_atomically(path, self.to_json().encode(), argument=argument)

    @classmethod
    def read(cls, data: JsonObject) -> TtftPredictor:
        """Check a predictor; InputError names the key."""
        if data.fields.get("format") != FORMAT:
            raise data.error("format", f"{FORMAT}, as kvrsim predictor build writes it")
        if data.fields.get("schema_version") != SCHEMA_VERSION:
            raise data.error("schema_version", str(SCHEMA_VERSION))
        question = to_json(data.child("question").fields)
        return read(cls, data.without("format", "schema_version", "question"), question=question)


def load_predictor(path: str | Path, argument: str = "predictor") -> TtftPredictor:
    """Read a file that `kvrsim predictor build` has written; InputError names the argument, file and key."""
    return TtftPredictor.read(JsonObject.read(Path(path), argument))


def _around(knots: Sequence[int], value: int) -> Around:
    """The knots around a value and their weights; those that weigh nothing are left out."""
    low, share = cell(value, knots)
    return [(int(index), float(part)) for index, part in ((low, 1 - share), (low + 1, share)) if part > 0]


def _mean(seconds: Seconds, places: Sequence[tuple[tuple[int, float], tuple[int, float], Around]]) -> float:
    return sum(
        weight * share * part * seconds[row][column][knot]
        for (row, weight), (column, share), knots in places
        for knot, part in knots
    )


def _check(argument: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InputError(argument, value, f"a whole number from {least} to {most}, the range of the predictor")


def _has_shape(values: Any, shape: Sequence[int]) -> bool:
    if not shape:
        return True
    return len(values) == shape[0] and all(_has_shape(value, shape[1:]) for value in values)
