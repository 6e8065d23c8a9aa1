"""Which candidates fit in the memory of the machine that is to run them, and what to say of the others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvrsim.errors import InputError
from kvrsim.memory import RankMemory, memory_of
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from kvrsim.units import format_bytes
from planner.confirm.candidates import Named
from planner.confirm.result import Mode

NO_REFERENCE = "logits are not compared: one process's prefill does not fit in memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Memory that ranks share: a GPU's, or the host's."""

    limit_bytes: float  # that they may use together
    num_ranks: int  # that are on it, those without a chunk included
    on_gpu: bool

    @classmethod
    def of(cls, scenario: Scenario, device: str, num_devices: int, mode: Mode) -> Room:
        """A GPU as the scenario has it, or the memory of this host, as much of it as the scenario lets be used."""
        num_ranks = 1 if mode == "virtual" else scenario.cluster.num_gpus
        if device == "cuda":
            shared_by = -(-num_ranks // max(1, num_devices))
            return cls(limit_bytes=scenario.memory_limit.nbytes, num_ranks=shared_by, on_gpu=True)
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(limit_bytes=scenario.memory_fraction * host_bytes, num_ranks=num_ranks, on_gpu=False)

    def needed_bytes(self, scenario: Scenario, named: Named, mode: Mode) -> int:
        """Peak of a candidate's ranks that are on it together; KV buffers are shared by all candidates."""
        ranks = memory_of(
            scenario.on_gpus(len(named.partition.chunk_lens)), get_strategy(named.run_as), named.partition
        )
        if mode == "virtual":  # one device replays every rank, on the K and V of the whole context
            kv_cache = max(rank.kv_cache for rank in ranks)
            return max(self._peak(replace(rank, kv_cache=kv_cache, gathered=0)) for rank in ranks)
        idle = replace(ranks[0], kv_cache=0, gathered=0, activations=0, scores=0, logits=0)
        everyone = [*ranks, *[idle] * (scenario.cluster.num_gpus - len(ranks))]
        return sum(sorted(map(self._peak, everyone))[-self.num_ranks :])

    def _peak(self, rank: RankMemory) -> int:
        """Of one rank; the context of CUDA is a GPU's."""
        return rank.total if self.on_gpu else rank.total - rank.runtime

    @property
    def name(self) -> str:
        """For people."""
        return f"{format_bytes(self.limit_bytes)} that may be used of {'a GPU' if self.on_gpu else 'this host'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitting:
    """What can be measured."""

    candidates: tuple[Named, ...]
    reference: bool  # whether one process can compute the logits that the candidates' are compared with
    notes: tuple[str, ...]  # on what is left out


def fitting(scenario: Scenario, candidates: Sequence[Named], room: Room, mode: Mode) -> Fitting:
    """The candidates that fit in memory; raises InputError naming `ctx` where none does."""
    needed = {one.strategy: room.needed_bytes(scenario, one, mode) for one in candidates}
    kept = tuple(one for one in candidates if needed[one.strategy] <= room.limit_bytes)
    if not kept:
        least = min(needed, key=lambda name: needed[name])
        accepted = f"a context that fits: {least} takes {format_bytes(needed[least])} of {room.name}"
        raise InputError("ctx", scenario.request.context_len, accepted)
    alone = next((needed[one.strategy] for one in candidates if one.run_as == "single"), 0)
    return Fitting(
        candidates=kept,
        reference=alone <= room.limit_bytes,
        notes=tuple(_notes(candidates, needed, alone, room)),
    )


def _notes(candidates: Sequence[Named], needed: dict[str, int], alone: int, room: Room) -> Iterator[str]:
    out = [one.strategy for one in candidates if needed[one.strategy] > room.limit_bytes]
    if out:
        shown = ", ".join(f"{name} ({format_bytes(needed[name])})" for name in out)
        yield f"not measured, because it does not fit in the {room.name}: {shown}"
    if alone > room.limit_bytes:
        yield NO_REFERENCE
