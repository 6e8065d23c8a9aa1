"""RunPlan: what all ranks do in one prefill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from kvrsim.errors import InputError
from kvrsim.partition import Partition
from kvrsim.profile.profile import Gather  # at run time, too: plans travel between ranks, read by their annotations

if TYPE_CHECKING:
    from kvrsim.runtime.geometry import Geometry
    from kvrsim.runtime.kept.layers import KeptTokens

RunStrategy = Literal["single", "tsp", "kvr"]
# What the runtime runs: a registered strategy's name, and how ranks run it. All others are refused.
RUN_STRATEGIES: Mapping[str, RunStrategy] = MappingProxyType(
    {"single": "single", "tsp": "tsp", "kvr-e": "kvr", "kvr-s": "kvr", "kvr-p": "kvr"}
)


def run_strategy(name: str, argument: str = "strategy") -> RunStrategy:
    """How ranks run a strategy; raises InputError, naming `argument`, for one that the runtime cannot run."""
    if name not in RUN_STRATEGIES:
        raise InputError(argument, name, f"what the runtime runs: {', '.join(RUN_STRATEGIES)}")
    return RUN_STRATEGIES[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """A strategy with its partition; the last chunk is the last rank's, which gives the first token."""

    strategy: RunStrategy
    partition: Partition
    batch: int = 1  # prompts of equal length
    tsp_keys: Literal["dense", "truncated"] = "dense"  # whether a chunk is also scored against later tokens
    gather: Gather = "ring"  # TSP's all-gather: between neighbours, or the backend's own
    receives_ahead: int | None = 1  # layers for which KVR posts receives before it comes to them; None: all

    def __post_init__(self) -> None:
        if self.strategy == "single" and len(self.partition.chunk_lens) != 1:
            raise InputError("partition", _shown(self.partition), "one chunk for one GPU")
        if self.batch < 1:
            raise InputError("batch", self.batch, "at least 1 prompt")
        if self.receives_ahead is not None and self.receives_ahead < 1:
            raise InputError("receives_ahead", self.receives_ahead, "at least 1 layer: messages move once posted")

    @property
    def context_len(self) -> int:
        """Tokens of a prompt."""
        return self.partition.num_tokens

    @property
    def label(self) -> str:
        """For people, such as "kvr 28,42,26"."""
        dense = f" {self.tsp_keys}, {self.gather}" if self.strategy == "tsp" else ""
        return f"{self.strategy}{dense} {_shown(self.partition)}"

    def place(self, rank: int, size: int) -> int | None:
        """The chunk that a rank of so many takes; None: it only looks on, because chunks are fewer than ranks.

        Raises InputError where there are more chunks than ranks, or fewer under TSP.
        """
        chunks = len(self.partition.chunk_lens)
        if chunks > size or (self.strategy == "tsp" and chunks != size):
            raise InputError("partition", _shown(self.partition), f"a chunk a rank, of which there are {size}")
        first = size - chunks
        return rank - first if rank >= first else None

    def tokens_held(self, rank: int, size: int, kept: KeptTokens) -> int:
        """Tokens whose K and V a rank of so many keeps in such a layer; 0 where it looks on.

        The tokens that its chunk sees, up to the chunk's end; under TSP all.
        """
        place = self.place(rank, size)
        if place is None:
            return 0
        if self.strategy == "tsp":
            return self.context_len
        start, end = self.partition.boundaries[place : place + 2]
        return end - kept.first_seen(start)

    def check(self, geometry: Geometry) -> None:
        """Raise InputError where the model cannot run this plan."""
        least = geometry.least_chunk
        if min(self.partition.chunk_lens[1:], default=least) < least:
            accepted = f"chunks of at least {least} tokens after the first, for {geometry.model_type}"
            raise InputError("partition", _shown(self.partition), accepted)
        if self.strategy == "tsp" and self.tsp_keys == "dense" and geometry.attention == "flash":
            raise InputError("attention", "flash", "eager or sdpa for dense TSP: flash leaves out what dense computes")


def random_prompt(vocab_size: int, plan: RunPlan, seed: int = 0) -> Any:
    """Token ids [B, C], the same on every rank."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (plan.batch, plan.context_len), generator=generator)


def _shown(partition: Partition) -> str:
    return ",".join(map(str, partition.chunk_lens))
