"""Tile and wave quantization: at which chunk lengths a chunk's time rises by a step, so that chunks can end there."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from kvrsim.errors import InputError
from kvrsim.io.schema import NonNegative
from kvrsim.program import Array
from kvrsim.scenario import Scenario

_WINDOW = 41  # tokens, odd; a step is a rise above the median of those around it
_LEAST_SHARE = 0.001  # of the chunk's time; smaller steps count as part of the slope
_MOST_CHUNK = 2**17  # tokens; steps of longer chunks are too small to matter
_BLOCK = 2**12  # chunk lengths timed at once


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationSteps:
    """Step function of extra time by chunk length, from tile and wave quantization, over all layers."""

    chunk_lens: tuple[int, ...]  # ascending; the longest chunk before each step
    seconds: tuple[NonNegative, ...]  # extra time after each step, cumulative, without a prefix
    seconds_per_prefix_token: tuple[NonNegative, ...]  # what every token of prefix adds to it

    def __post_init__(self) -> None:
        lengths = list(self.chunk_lens)
        if sorted(set(lengths)) != lengths:
            raise InputError("chunk_lens", lengths, "rising whole numbers from 1")
        for key in ("seconds", "seconds_per_prefix_token"):
            values = list(getattr(self, key))
            if len(values) != len(lengths) or sorted(values) != values:
                raise InputError(key, values, "numbers that do not fall, as many as chunk_lens")

    def extra_s(self, chunk_len: int, prefix: float) -> float:
        """Extra time of a chunk, the sum of all steps below its length."""
        passed = bisect_left(self.chunk_lens, chunk_len)
        return self._after(passed, prefix)

    def longest(self, level: float, token_s: float, prefix: float) -> int:
        """The longest chunk c with c + extra_s(c) / token_s <= level; at least 1."""
        starts = range(1, len(self.chunk_lens) + 1)  # 1 + number of steps passed

        def level_after(number: int) -> float:
            return self.chunk_lens[number - 1] + 1 + self._after(number, prefix) / token_s

        passed = bisect_left(starts, True, key=lambda number: level_after(number) > level)
        most = int(level - self._after(passed, prefix) / token_s)
        return max(1, min(most, self.chunk_lens[passed]) if passed < len(self.chunk_lens) else most)

    def _after(self, passed: int, prefix: float) -> float:
        if passed == 0:
            return 0.0
        return self.seconds[passed - 1] + prefix * self.seconds_per_prefix_token[passed - 1]


def quantization_steps(scenario: Scenario) -> QuantizationSteps:
    """The steps of a chunk's device time on this scenario's GPU, up to the scenario's context.

    Attention's steps (tiles of queries) grow with the prefix; they are modelled as proportional to it.
    """
    context_len = scenario.request.context_len
    most = min(scenario.request.new_tokens, _MOST_CHUNK)
    alone, after = (_times_s(scenario, most, prefix) for prefix in (0.0, float(context_len)))
    steps, steps_after = _steps(alone), _steps(after)
    per_token = np.maximum(steps_after - steps, 0.0) / context_len
    large = steps + per_token * context_len / 2 > _LEAST_SHARE * (alone + after)[:-1] / 2
    at = np.nonzero(large)[0]
    return QuantizationSteps(
        chunk_lens=tuple(int(index) + 1 for index in at),
        seconds=_short(np.cumsum(steps[at])),
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


def _steps(times_s: Array) -> Array:
    """Rise from each token to the next, above the median rise around it."""
    rises = np.diff(times_s)
    if not len(rises):
        return rises
    around = sliding_window_view(np.pad(rises, _WINDOW // 2, mode="edge"), _WINDOW)
    return np.maximum(rises - np.median(around, axis=1), 0.0)


def _short(values: Array) -> tuple[float, ...]:
    """Nine digits, so that tables do not depend on the processor's rounding."""
    return tuple(float(f"{value:.9g}") for value in values)
