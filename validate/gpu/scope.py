"""Scope: what the steps run on, and how long they may take."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

# Small enough for two busy cores, large enough that its products take longer than what disturbs them.
TINY = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
}


@dataclass(frozen=True, kw_only=True)
class Scope:
    """One machine, and how much of it is tried."""

    folder: str  # where the report and what the steps write go
    num_gpus: int  # of this machine; 0: it has none, the CPU computes
    quick: bool = False  # as short as it can be: whether the steps run, not how fast

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU."""
        return self.num_gpus > 0

    @property
    def device(self) -> str:
        """As kvrsim's --device."""
        return "cuda" if self.on_gpu else "cpu"

    @property
    def dtype(self) -> str:
        """Of all that is measured."""
        return "fp16" if self.on_gpu else "fp32"

    @property
    def most_ranks(self) -> int:
        """That the steps run together: the GPUs, of which the runtime's plans use up to 8; on a CPU two."""
        return min(self.num_gpus, 8) if self.on_gpu else 2

    @property
    def ctx(self) -> str:
        """Context of the steps that compare strategies."""
        return "4k" if self.on_gpu else "256"

    @property
    def long_ctx(self) -> str:
        """Of the step about long contexts."""
        if self.on_gpu:
            return "128k"
        return "1k" if self.quick else "4k"

    @property
    def model(self) -> str:
        """Name or path: a tiny one on a CPU."""
        return "llama-7b" if self.on_gpu else str(self._tiny)

    @property
    def long_model(self) -> str:
        """That is made for the long context."""
        return "llama-3-8b" if self.on_gpu else str(self._tiny)

    @property
    def attentions(self) -> tuple[str, ...]:
        """Kernels, in the order of the profile's default."""
        return ("flash", "sdpa", "eager")

    @cached_property
    def _tiny(self) -> Path:
        path = Path(self.folder, "tiny.json")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(TINY), encoding="utf-8")
        return path

    @property
    def profile(self) -> Path:
        """That the step `calibrate` writes."""
        return Path(self.folder, "mine.json")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)
