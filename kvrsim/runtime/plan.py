"""RunPlan: what all ranks do in one prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kvrsim.errors import InputError
from kvrsim.kernels.profile import Gather  # at run time, too: plans travel between ranks, read by their annotations
from kvrsim.scenario import Partition


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """A strategy with its partition."""

    strategy: str  # the file of kvrsim.runtime.exchange that runs it
    partition: Partition
    batch: int = 1  # prompts of equal length
    tsp_keys: Literal["dense", "truncated"] = "dense"  # whether a chunk is also scored against later tokens
    gather: Gather = "ring"  # an all-gather: between neighbours, or the backend's own
    stage_layers: tuple[int, ...] | None = None  # of a pipeline, each stage's; None: as even as they can be
    receives_ahead: int | None = 1  # layers for which KVR posts receives before it comes to them; None: all
    query_blocks: tuple[tuple[int, ...], ...] = ()  # by chunk, by layer: calls of KVR's attention; empty: one each

    def __post_init__(self) -> None:
        if self.strategy == "single" and len(self.partition.chunk_lens) != 1:
            raise InputError("partition", self.chunks, "one chunk for one GPU")
        if self.batch < 1:
            raise InputError("batch", self.batch, "at least 1 prompt")
        if self.receives_ahead is not None and self.receives_ahead < 1:
            raise InputError("receives_ahead", self.receives_ahead, "at least 1 layer: messages move once posted")

    @property
    def context_len(self) -> int:
        """Tokens of a prompt."""
        return self.partition.num_tokens

    @property
    def chunks(self) -> str:
        """For people, such as "28,42,26"."""
        return ",".join(map(str, self.partition.chunk_lens))

    @property
    def name(self) -> str:
        """The strategy's, for people, such as "zigzag-ring"."""
        return self.strategy.replace("_", "-")

    @property
    def label(self) -> str:
        """For people, such as "kvr 28,42,26"."""
        told = {"tsp": f" {self.tsp_keys}, {self.gather}", "zigzag": f" {self.gather}"}.get(self.strategy, "")
        stages = "" if self.stage_layers is None else f", layers {','.join(map(str, self.stage_layers))}"
        blocks = f" in {','.join(str(max(one)) for one in self.query_blocks)} blocks" if self.query_blocks else ""
        return f"{self.name}{told} {self.chunks}{stages}{blocks}"


def random_prompt(vocab_size: int, plan: RunPlan, seed: int = 0) -> Any:
    """Token ids [B, C], the same on every rank."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (plan.batch, plan.context_len), generator=generator)
