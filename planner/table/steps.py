"""ChunkSteps: where a chunk's time jumps by a tile or a wave of tiles, so that a table can be rounded to them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from kvrsim.errors import InputError
from kvrsim.io.schema import NonNegative
from kvrsim.program import Array
from kvrsim.scenario import Scenario

_WINDOW = 41  # tokens, odd: a jump is a rise that stands out from those around it
_LEAST_SHARE = 0.001  # of the chunk's time, below which a jump counts as part of the slope
_MOST_CHUNK = 2**17  # tokens, beyond which jumps are not looked for: they are too small to matter
_BLOCK = 2**12  # chunk lengths timed at once


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkSteps:
    """A staircase: past chunk_lens[i] tokens a chunk takes the jumps up to the i-th longer, all layers together."""

    chunk_lens: tuple[int, ...]  # rising; the longest chunk before each jump
    seconds: tuple[NonNegative, ...]  # of this jump and all before it, for a chunk without a prefix
    seconds_per_prefix_token: tuple[NonNegative, ...]  # the same, more for every token of prefix

    def __post_init__(self) -> None:
        lengths = list(self.chunk_lens)
        if sorted(set(lengths)) != lengths:
            raise InputError("chunk_lens", lengths, "rising whole numbers from 1")
        for key in ("seconds", "seconds_per_prefix_token"):
            values = list(getattr(self, key))
            if len(values) != len(lengths) or sorted(values) != values:
                raise InputError(key, values, "numbers that do not fall, as many as chunk_lens")

    def jumps_s(self, chunk_len: int, prefix: float) -> float:
        """What all jumps below that chunk length cost, seconds."""
        passed = bisect_left(self.chunk_lens, chunk_len)
        return self._after(passed, prefix)

    def longest(self, level: float, token_s: float, prefix: float) -> int:
        """The longest chunk c with c + jumps_s(c) / token_s at most `level`, at least 1."""
        starts = range(1, len(self.chunk_lens) + 1)  # 1 + how many jumps have been passed

        def level_after(number: int) -> float:
            return self.chunk_lens[number - 1] + 1 + self._after(number, prefix) / token_s

        passed = bisect_left(starts, True, key=lambda number: level_after(number) > level)
        most = int(level - self._after(passed, prefix) / token_s)
        return max(1, min(most, self.chunk_lens[passed]) if passed < len(self.chunk_lens) else most)

    def _after(self, passed: int, prefix: float) -> float:
        if passed == 0:
            return 0.0
        return self.seconds[passed - 1] + prefix * self.seconds_per_prefix_token[passed - 1]


def chunk_steps(scenario: Scenario) -> ChunkSteps:
    """The jumps of a chunk's device time on this scenario's GPU, up to the scenario's context.

    Attention's jumps (tiles of queries) grow with the prefix; they are taken to do so in proportion.
    """
    context_len = scenario.request.context_len
    most = min(scenario.request.new_tokens, _MOST_CHUNK)
    alone, after = (_times_s(scenario, most, prefix) for prefix in (0.0, float(context_len)))
    jumps, jumps_after = _jumps(alone), _jumps(after)
    per_token = np.maximum(jumps_after - jumps, 0.0) / context_len
    large = jumps + per_token * context_len / 2 > _LEAST_SHARE * (alone + after)[:-1] / 2
    at = np.nonzero(large)[0]
    return ChunkSteps(
        chunk_lens=tuple(int(index) + 1 for index in at),
        seconds=_short(np.cumsum(jumps[at])),
        seconds_per_prefix_token=_short(np.cumsum(per_token[at])),
    )


def _times_s(scenario: Scenario, most: int, prefix: float) -> Array:
    """Device seconds of all layers for chunks of 1, 2, ... `most` tokens behind a prefix."""
    lengths = np.arange(1.0, most + 1.0)
    counts = np.bincount(scenario.model.layer_kind_index)
    parts = []
    for first in range(0, most, _BLOCK):
        chunk = lengths[first : first + _BLOCK]
        start, total = np.full_like(chunk, prefix), np.zeros_like(chunk)
        for count, costs in zip(counts, scenario.layer_costs(), strict=True):
            layer = costs.qkv_s(chunk) + costs.append_s(chunk, start)
            total += count * (layer + costs.attention_s(chunk, start) + costs.output_mlp_s(chunk))
        parts.append(total)
    return np.concatenate(parts)


def _jumps(times_s: Array) -> Array:
    """By how much each rise from one token to the next stands out from the median of those around it."""
    rises = np.diff(times_s)
    if not len(rises):
        return rises
    around = sliding_window_view(np.pad(rises, _WINDOW // 2, mode="edge"), _WINDOW)
    return np.maximum(rises - np.median(around, axis=1), 0.0)


def _short(values: Array) -> tuple[float, ...]:
    """Nine digits: what a table says does not hang on the last bits of a processor."""
    return tuple(float(f"{value:.9g}") for value in values)
