"""KVR-P: a partition from a table, interpolated between the two nearest lengths and rounded to tiles.

The paper interpolates each rank's share of the context (section 5). Shares are not smooth in length, because a
chunk's time rises in steps of a tile or a wave of tiles (planner/table/quantization.py). An entry therefore holds for
each rank its level, the chunk length that the rank could afford if quantization were smoothed out, and the cost of a
token. Both are smooth in length. Interpolated, they give the longest chunk that each rank can afford, and a common
shift in time makes the chunks sum to the context. Chunks then end at steps, as searched ones do.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvrsim.errors import InputError
from kvrsim.partition import Partition
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from planner.table.quantization import QuantizationSteps
from planner.table.table import PartitionTable, TableEntry

Source = Literal["exact", "interpolated", "extrapolated"]
_HALVINGS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class LookedUp:
    """A looked-up partition."""

    num_gpus: int
    context_len: int  # tokens, cached prefix included
    fractions: tuple[float, ...]  # each rank's share of the new tokens, before rounding
    partition: tuple[int, ...]  # new tokens a rank
    source: Source
    between: tuple[int, ...]  # contexts of the entries used, one or two
    warnings: tuple[str, ...]


def look_up(
    table: PartitionTable,
    num_gpus: int,
    context_len: int,
    *,
    multiple: int | None = None,
    cached_prefix: int | None = None,
) -> LookedUp:
    """The partition for a context; at an entry's context, the entry's own.

    multiple: all chunks but the last are multiples of it, in tokens. cached_prefix: overrides the table's.
    Beyond the last entry, shares are extrapolated linearly in 1 / context, as the share of attention in a layer's time;
    below the first entry, its shares are used. Raises InputError for a number of GPUs that is not in the table, a
    context with fewer new tokens than GPUs, or a multiple that is too large.
    """
    entries = table.of(num_gpus)
    cached = table.setting.cached_prefix if cached_prefix is None else cached_prefix
    tokens = context_len - cached
    if tokens < num_gpus:
        least = num_gpus + cached
        raise InputError("ctx", context_len, f"a context of at least {least} tokens, one new token a GPU")
    low, high = _neighbours(entries, context_len)
    source: Source = "exact" if low is high else "interpolated"
    if not low.context_len <= context_len <= high.context_len:
        source = "extrapolated"
    lengths = (low.context_len, high.context_len)
    weight = _weight(*lengths, context_len)
    fractions = _between(low.fractions, high.fractions, weight)
    if source == "exact" and cached == table.setting.cached_prefix:
        partition = low.partition
    else:
        levels = [share * tokens for share in _between(low.levels, high.levels, weight)]
        token_s = _between(low.token_s, high.token_s, _linear_weight(*lengths, context_len))
        partition = to_steps(fractions, levels, token_s, table.steps, tokens, cached)
    if multiple is not None:
        partition = to_multiples(partition, multiple)
    return LookedUp(
        num_gpus=num_gpus,
        context_len=context_len,
        fractions=fractions if weight <= 1 else tuple(share / math.fsum(fractions) for share in fractions),
        partition=partition,
        source=source,
        between=tuple(sorted({low.context_len, high.context_len})),
        warnings=_warnings(entries, context_len, source),
    )


def partition_from(table: PartitionTable, scenario: Scenario) -> Partition:
    """KVR-P's partition of a scenario; raises InputError as look_up does."""
    request = scenario.request
    found = look_up(table, scenario.cluster.num_gpus, request.context_len, cached_prefix=request.cached_prefix)
    return Partition(chunk_lens=found.partition)


def notes_on_table(table: PartitionTable, scenario: Scenario, strategy: Strategy) -> tuple[str, ...]:
    """Notes where the table has another setting than the strategy's scenario, or its contexts do not reach it."""
    others = table.setting.differences(scenario, strategy.looks_up)
    notes = [f"{strategy.name}: the table was made for another setting: {'; '.join(others)}"] if others else []
    request = scenario.request
    found = look_up(table, scenario.cluster.num_gpus, request.context_len, cached_prefix=request.cached_prefix)
    return (*notes, *(f"{strategy.name}: {warning}" for warning in found.warnings))


def _warnings(entries: Sequence[TableEntry], context_len: int, source: Source) -> tuple[str, ...]:
    if source != "extrapolated":
        return ()
    least, most = entries[0].context_len, entries[-1].context_len
    gpus = entries[0].num_gpus
    return (f"extrapolated: the table's contexts for {gpus} GPUs are {least} to {most}, not {context_len}",)


def _neighbours(entries: Sequence[TableEntry], context_len: int) -> tuple[TableEntry, TableEntry]:
    """The entries around a context; twice the same at an entry and before the first.

    Beyond the last, it and the last one of at most half its length: closer ones differ by quantization only.
    """
    lengths = [entry.context_len for entry in entries]
    upper = bisect_left(lengths, context_len)
    if upper == len(entries):
        half = bisect_right(lengths, lengths[-1] // 2)
        return entries[half - 1 if half else -1], entries[-1]
    if upper == 0 or lengths[upper] == context_len:
        return entries[upper], entries[upper]
    return entries[upper - 1], entries[upper]


def _weight(low: int, high: int, context_len: int) -> float:
    """Weight of the upper entry; beyond it, linear in 1 / context and at most 2."""
    if low < high < context_len:
        return (1 / low - 1 / context_len) / (1 / low - 1 / high)
    return _linear_weight(low, high, context_len)


def _linear_weight(low: int, high: int, context_len: int) -> float:
    return (context_len - low) / (high - low) if low < high else 0.0


def _between(low: Sequence[float], high: Sequence[float], weight: float) -> tuple[float, ...]:
    """Linear interpolation, clamped to the two; extrapolated, at least half of the upper."""
    pairs = zip(low, high, strict=True)
    if weight > 1:
        return tuple(max(b / 2, a + weight * (b - a)) for a, b in pairs)
    return tuple(min(max(a, b), max(min(a, b), a + weight * (b - a))) for a, b in pairs)


def to_steps(
    fractions: Sequence[float],
    levels: Sequence[float],
    token_s: Sequence[float],
    steps: QuantizationSteps,
    num_tokens: int,
    cached_prefix: int = 0,
) -> tuple[int, ...]:
    """Chunks that sum to the tokens: the longest that each rank's level allows, after a common shift in time.

    levels: in tokens. token_s: seconds of a token. fractions: shares of the tokens, which give each chunk's prefix.
    """
    prefixes = [cached_prefix + math.fsum(fractions[:rank]) * num_tokens for rank in range(len(fractions))]

    def chunks(shift_s: float) -> list[int]:
        ranks = zip(levels, token_s, prefixes, strict=True)
        return [steps.longest(level + shift_s / cost, cost, prefix) for level, cost, prefix in ranks]

    most = max(cost * (level + num_tokens) for level, cost in zip(levels, token_s, strict=True))
    low, high = -most, most
    while sum(chunks(high)) < num_tokens:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(chunks(middle)) >= num_tokens else (middle, high)
    found, least = chunks(high), chunks(low)
    for rank in range(len(found)):  # several ranks may reach a step at the same shift
        found[rank] -= max(0, min(sum(found) - num_tokens, found[rank] - least[rank]))
    return tuple(found)


def to_multiples(chunk_lens: Sequence[int], multiple: int) -> tuple[int, ...]:
    """The nearest chunks that are multiples of a number of tokens, all but the last; none is empty."""
    others, total = len(chunk_lens) - 1, sum(chunk_lens)
    most = max(1, (total - 1) // max(1, others))
    if not 1 <= multiple <= most:
        raise InputError("multiple", multiple, f"a whole number from 1 to {most}")
    exact = [chunk / multiple for chunk in chunk_lens[:-1]]
    units = min(round(sum(exact)), (total - 1) // multiple)
    found = [max(1, math.floor(share)) for share in exact]
    order = sorted(range(others), key=lambda rank: (found[rank] - exact[rank], rank))
    for rank in order[: max(0, units - sum(found))]:
        found[rank] += 1
    while sum(found) > units and max(found) > 1:
        found[found.index(max(found))] -= 1
    return (*(unit * multiple for unit in found), total - multiple * sum(found))
