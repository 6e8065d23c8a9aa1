"""RunPlan: what all ranks do in one prefill. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvrsim.errors import InputError
from kvrsim.kernels.profile import Gather
from kvrsim.scenario import Partition

# Registered strategies that ranks can run, and the name of the exchange that runs each.
RUN_STRATEGIES: Mapping[str, str] = MappingProxyType(
    {
        **{"single": "single", "tsp": "tsp", "kvr-e": "kvr", "kvr-s": "kvr", "kvr-p": "kvr", "kvr-b": "kvr"},
        **{"kvr-direct": "kvr_direct", "ring": "ring", "striped": "striped", "zigzag": "zigzag"},
        **{"zigzag-ring": "zigzag_ring", "ulysses": "ulysses", "tp": "tp", "pp": "pp", "pp-s": "pp"},
    }
)


def run_strategy(name: str) -> str:
    """Return the exchange that runs a registered strategy; raise InputError where the runtime has none."""
    if name not in RUN_STRATEGIES:
        raise InputError("strategy", name, f"what the runtime runs: {', '.join(RUN_STRATEGIES)}")
    return RUN_STRATEGIES[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """An exchange with its partition."""

    strategy: str  # one of the values of RUN_STRATEGIES
    partition: Partition
    batch: int = 1  # prompts of equal length
    gather: Gather = "ring"  # an all-gather: between neighbours, or the backend's own
    stage_layers: tuple[int, ...] | None = None  # of each pipeline stage; None: as even as possible
    query_blocks: tuple[tuple[int, ...], ...] = ()  # by chunk, by layer: calls of KVR's attention; empty: one each

    def __post_init__(self) -> None:
        if self.strategy == "single" and len(self.partition.chunk_lens) != 1:
            raise InputError("partition", self.chunks, "one chunk for one GPU")
        if self.batch < 1:
            raise InputError("batch", self.batch, "at least 1 prompt")

    @property
    def context_len(self) -> int:
        """Tokens of a prompt."""
        return self.partition.num_tokens

    @property
    def chunks(self) -> str:
        """The partition as text, such as "28,42,26"."""
        return ",".join(map(str, self.partition.chunk_lens))

    @property
    def name(self) -> str:
        """The exchange as text, such as "zigzag-ring"."""
        return self.strategy.replace("_", "-")

    @property
    def label(self) -> str:
        """The plan as text, such as "kvr 28,42,26"."""
        gather = f" {self.gather}" if self.strategy in ("tsp", "zigzag") else ""
        stages = "" if self.stage_layers is None else f", layers {','.join(map(str, self.stage_layers))}"
        blocks = f" in {','.join(str(max(one)) for one in self.query_blocks)} blocks" if self.query_blocks else ""
        return f"{self.name}{gather} {self.chunks}{stages}{blocks}"


def random_prompt(vocab_size: int, plan: RunPlan, seed: int = 0) -> Any:
    """Return token ids [B, C], the same on every rank."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (plan.batch, plan.context_len), generator=generator)
