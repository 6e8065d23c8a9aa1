"""What does not fit in memory, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvrsim.units import format_bytes

if TYPE_CHECKING:
    from kvrsim.memory import RankMemory

MAX_RANKS = 8  # told one by one


def over_memory(memory: Sequence[RankMemory], limit_bytes: int) -> Iterator[str]:
    """A line a rank whose peak is over the limit, with its largest parts first."""
    over = [(rank, held) for rank, held in enumerate(memory) if held.total > limit_bytes]
    for rank, held in over[:MAX_RANKS]:
        need = f"rank {rank} needs {format_bytes(held.total)} of {format_bytes(limit_bytes)}"
        yield f"{need}: {', '.join(_parts(held))}"
    if len(over) > MAX_RANKS:
        yield f"and {len(over) - MAX_RANKS} more ranks are over"


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
