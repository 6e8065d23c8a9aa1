"""What does not fit in memory, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from kvrsim.units import format_bytes

if TYPE_CHECKING:
    from kvrsim.hardware.gpu import MemoryLimit
    from kvrsim.memory import RankMemory

MAX_IN_FULL = 4  # lines with every part
MAX_IN_SHORT = 12  # ranks with their total only


def limit_text(limit: MemoryLimit) -> str:
    """What a rank's peak is compared with, and the option that changes it."""
    return f"{limit.describe()} (--memory-fraction)"


def over_memory(memory: Sequence[RankMemory], limit_bytes: int) -> Iterator[str]:
    """Lines about the ranks whose peak is over the limit: largest parts first, like ranks together.

    Where that takes too many lines: the worst rank in full, the others by their total.
    """
    groups = _groups(memory, limit_bytes)
    if len(groups) <= MAX_IN_FULL:
        for ranks, held in groups:
            yield _in_full(ranks, held, limit_bytes)
        return
    worst = max(groups, key=lambda group: group[1].total)
    yield _in_full(worst[0], worst[1], limit_bytes)
    others = [group for group in groups if group is not worst]
    shown = ", ".join(f"{_name(ranks)} {format_bytes(held.total)}" for ranks, held in others[:MAX_IN_SHORT])
    left = sum(len(ranks) for ranks, _ in others[MAX_IN_SHORT:])
    yield f"also {shown}" + (f", and {left} more" if left else "")


def _groups(memory: Sequence[RankMemory], limit_bytes: int) -> list[tuple[list[int], RankMemory]]:
    """Neighbouring ranks over the limit that hold the same."""
    over = [rank for rank, held in enumerate(memory) if held.total > limit_bytes]
    grouped = groupby(over, key=lambda rank: _parts(memory[rank]))
    ranks = [list(group) for _, group in grouped]
    return [(group, memory[group[0]]) for group in ranks]


def _in_full(ranks: list[int], held: RankMemory, limit_bytes: int) -> str:
    verb = "needs" if len(ranks) == 1 else "need"
    need = f"{_name(ranks)} {verb} {format_bytes(held.total)} of {format_bytes(limit_bytes)}"
    return f"{need}: {', '.join(_parts(held))}"


def _name(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _parts(held: RankMemory) -> list[str]:
    """What is alive at the peak; of scores, activations and logits only the largest is."""
    moments = {"scores": held.scores, "activations": held.activations, "logits": held.logits}
    largest = max(moments, key=lambda name: moments[name])
    parts = {
        "weights": held.weights,
        "KV cache": held.kv_cache,
        "KV in flight": held.gathered,
        largest: moments[largest],
        "runtime": held.runtime,
    }
    ranked = sorted(parts.items(), key=lambda part: -part[1])
    return [f"{name} {format_bytes(size)}" for name, size in ranked if size]
