"""PaceRunner: how fast the ranks compute now, all at once; what drifts between a calibration and a run shows in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from kvrsim.partition import Partition
from kvrsim.runtime.cache import KvBuffer, PrefixCache
from kvrsim.runtime.forward import Forward
from kvrsim.runtime.plan import RunPlan, random_prompt
from kvrsim.runtime.ranks.transport import Transport


class PaceRunner:
    """A prefill of so many tokens on every rank, each by itself, all beginning together."""

    def __init__(
        self,
        transport: Transport,
        forward: Forward,
        num_tokens: int,
        *,
        room: Sequence[Any],
        batch: int,
        vocab_size: int,
        seed: int = 0,
    ) -> None:
        """room: each layer's memory for at least as many tokens, used by other prefills in turn."""
        self.transport, self.forward, geometry = transport, forward, forward.geometry
        plan = RunPlan(strategy="single", partition=Partition(chunk_lens=(num_tokens,)), batch=batch)
        sizes: dict[str, int] = dict(prefix_len=0, chunk_len=num_tokens, batch=batch)
        self.cache = PrefixCache([KvBuffer(geometry, data=data[:num_tokens], **sizes) for data in room])
        self.ids = random_prompt(vocab_size, plan, seed).to(geometry.device)

    def run(self) -> float:
        """Seconds of it, the mean of the ranks; the same on every rank."""
        self.transport.barrier()
        started_s = time.monotonic()
        self.forward(self.ids, 0, self.cache, is_last=True)
        if self.ids.is_cuda:
            torch.cuda.synchronize(self.ids.device)
        taken_s: list[float] = self.transport.exchange(time.monotonic() - started_s)
        return sum(taken_s) / len(taken_s)
