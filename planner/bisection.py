"""The largest number that still does: prompts, tokens or sequences that fit, or that are in time."""

from __future__ import annotations

from collections.abc import Callable


def largest(does: Callable[[int], bool], most: int) -> int:
    """The largest of 1 to `most` for which `does` holds, where it holds for all smaller ones too; 0: for none."""
    if does(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if does(middle) else (low, middle)
    return low
