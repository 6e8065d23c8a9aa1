"""Shortfall: where no strategy fits in memory, how much is missing, and what would fit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change of the question after which a strategy fits."""

    change: str  # by options of the command line, such as "--gpus 16 --strategies pp"
    strategy: str
    num_gpus: int
    dtype: str
    memory_fraction: float
    peak_bytes: int  # of the GPU that needs the most


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortfall:
    """What the strategy that is the nearest to fitting lacks, and remedies."""

    strategy: str  # the nearest of those that were compared
    peak_bytes: int  # of its GPU that needs the most
    over_bytes: int  # more than the memory limit
    would_fit: tuple[Remedy, ...]  # nothing that was tried, if empty
