"""Grid: times that were measured at points of a grid of sizes, and between them; gemm_grid, attention_grid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from calibrate.data.measurement import Measurement

_LEAST_STEP = 2.0  # past the end of a grid, the slope is that between sizes at least so many times apart


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Seconds, and the sizes in which they were not measured."""

    seconds: float
    between: frozenset[str] = frozenset()  # interpolated
    beyond: frozenset[str] = frozenset()  # extrapolated

    @classmethod
    def total(cls, parts: Iterable[Reading | None]) -> Reading | None:
        """All of them one after another; None where one is missing."""
        known = list(parts)
        found = [part for part in known if part is not None]
        return reduce(cls._plus, found) if found and len(found) == len(known) else None

    def _plus(self, other: Reading) -> Reading:
        return Reading(
            seconds=self.seconds + other.seconds,
            between=self.between | other.between,
            beyond=self.beyond | other.beyond,
        )

    def times(self, count: int) -> Reading:
        """The same so many times."""
        return Reading(seconds=count * self.seconds, between=self.between, beyond=self.beyond)

    @property
    def how(self) -> str:
        """In words."""
        parts = []
        if self.between:
            parts.append(f"between {', '.join(sorted(self.between))}")
        if self.beyond:
            parts.append(f"beyond {', '.join(sorted(self.beyond))}")
        return "; ".join(parts) or "measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Times by sizes; linear in the logarithms of both between points, one size after another."""

    names: tuple[str, ...]  # of the sizes
    points: Mapping[tuple[int, ...], float]  # seconds, median of what was measured there
    tree: Mapping[int, Any]  # the same, nested: by the first size, the second, ..., seconds

    @classmethod
    def of(cls, names: tuple[str, ...], rows: Iterable[tuple[tuple[int | None, ...], float]]) -> Grid:
        """From sizes and seconds in any order; rows that lack a size are passed over."""
        found: dict[tuple[int, ...], list[float]] = {}
        for sizes, seconds in rows:
            whole = tuple(size for size in sizes if size is not None)
            if len(whole) == len(names):
                found.setdefault(whole, []).append(seconds)
        points = {sizes: float(np.median(seconds)) for sizes, seconds in found.items()}
        tree: dict[int, Any] = {}
        for sizes, median_s in points.items():
            branch = tree
            for size in sizes[:-1]:
                branch = branch.setdefault(size, {})
            branch[sizes[-1]] = median_s
        return cls(names=names, points=points, tree=tree)

    def at(self, *sizes: int) -> Reading | None:
        """None where the grid has a single other value of one of the sizes."""
        return _read(self.tree, self.names, sizes)


def _read(tree: Mapping[int, Any], names: Sequence[str], sizes: Sequence[int]) -> Reading | None:
    name, size = names[0], sizes[0]
    ends = _ends(sorted(tree), size)
    found = [_branch(tree[end], names[1:], sizes[1:]) for end in ends]
    parts = [part for part in found if part is not None]
    if len(parts) < max(1, len(ends)):
        return None
    if len(parts) == 1:
        return parts[0]
    low, high = parts
    share = math.log(size / ends[0]) / math.log(ends[1] / ends[0])
    outside = frozenset((name,)) if not 0 <= share <= 1 else frozenset[str]()
    return Reading(
        seconds=math.exp((1 - share) * math.log(low.seconds) + share * math.log(high.seconds)),
        between=low.between | high.between | (frozenset((name,)) - outside),
        beyond=low.beyond | high.beyond | outside,
    )


def _branch(found: Any, names: Sequence[str], sizes: Sequence[int]) -> Reading | None:
    return _read(found, names, sizes) if names else Reading(seconds=found)


def _ends(known: Sequence[int], size: int) -> tuple[int, ...]:
    """The size itself, or the two that lead to it; none where there are no two."""
    if size in known:
        return (size,)
    below, above = [end for end in known if end < size], [end for end in known if end > size]
    if below and above:
        return below[-1], above[0]
    if below:
        return next(((end, below[-1]) for end in reversed(below) if end * _LEAST_STEP <= below[-1]), ())
    return next(((above[0], end) for end in above if end >= _LEAST_STEP * above[0]), ())


def gemm_grid(rows: Iterable[Measurement]) -> Grid:
    """By in_features, out_features (the widths of a matrix) and tokens, in half precision."""
    return Grid.of(
        ("widths", "widths", "tokens"),
        (
            ((row.in_features, row.out_features, row.tokens), row.median_s)
            for row in rows
            if row.operation == "gemm" and row.dtype in ("fp16", "bf16")
        ),
    )


def attention_grid(rows: Iterable[Measurement]) -> Grid:
    """Of one sequence without a prefix, by heads, width of a head, KV heads and chunk."""
    return Grid.of(
        ("heads", "head widths", "KV heads", "chunks"),
        (
            ((row.num_attention_heads, row.head_dim, row.num_key_value_heads, row.chunk), row.median_s)
            for row in rows
            if row.operation == "attention" and row.batch == 1 and row.prefix == 0
        ),
    )
