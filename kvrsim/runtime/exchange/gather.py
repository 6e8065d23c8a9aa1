"""TSP and zigzag: all ranks' K and V go to all ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from kvrsim.runtime.attention import lower_right
from kvrsim.runtime.exchange import Exchange, OwnAttentionExchange
from kvrsim.runtime.kv_cache import Chunk, KvBuffer, Memory, PrefixCache

if TYPE_CHECKING:
    from kvrsim.runtime.plan import RunPlan


class Gathered(Exchange):
    """TSP: each rank gathers the K and V of all tokens in its own buffer. A state goes from rank to rank."""

    @classmethod
    def chunk_of(cls, plan: RunPlan, rank: int, size: int) -> Chunk:
        """Return the rank's chunk, with memory for all tokens."""
        chunk = super().chunk_of(plan, rank, size)
        assert chunk is not None
        return replace(chunk, total_len=plan.context_len)

    def make_cache(self, chunk: Chunk, memory: Memory | None) -> PrefixCache:
        """Let attention see all tokens; masks hide the later ones. Flash kernels see only tokens up to the chunk's end.

        transformers passes no mask for a single query; then later tokens are left out, too.
        """
        dense = self.geometry.attention != "flash" and chunk.length > 1
        return super().make_cache(replace(chunk, visible_len=chunk.total_len if dense else chunk.end), memory)

    def before_attention(self, layer: int) -> None:
        """Gather K and V, or wait for a state."""
        buffer = self.buffer(layer)
        if isinstance(buffer, KvBuffer):
            self.gather(buffer.data, layer)
        else:
            self.post(layer)
            self.receive(layer)

    def after_scan(self, layer: int) -> None:
        self.forward_state(layer)


def zigzag_pieces(plan: RunPlan, rank: int) -> list[range]:
    """Return the positions of a rank's early and late piece; early pieces are in reverse order of the ranks.

    The last rank has the first and the last piece. A piece may be empty.
    """
    lens = plan.partition.chunk_lens
    early = [length // 2 for length in lens]
    late = [length - half for length, half in zip(lens, early, strict=True)]
    first = sum(early[rank + 1 :])
    second = sum(early) + sum(late[:rank])
    return [range(first, first + early[rank]), range(second, second + late[rank])]


class Zigzag(OwnAttentionExchange):
    """Zigzag: pieces are gathered and joined in the order of the context, in memory that all layers share."""

    positions_of = staticmethod(zigzag_pieces)

    @cached_property
    def _whole(self) -> Any:
        """K and V of all tokens, in the order of the context."""
        own = self.buffer(self.geometry.linked_layers[0]).data
        return own.new_zeros(self.plan.context_len, own.shape[1])

    @cached_property
    def _pieces(self) -> Any:
        """Gathered K and V of all tokens, in the order of the ranks."""
        return torch.zeros_like(self._whole)

    def before_attention(self, layer: int) -> None:
        """Gather K and V and join them in the order of the context."""
        boundaries = self.plan.partition.boundaries
        self._pieces[boundaries[self.rank] : boundaries[self.rank + 1]].copy_(self.buffer(layer).data)
        self.gather(self._pieces, layer)
        for rank, (start, end) in enumerate(pairwise(boundaries)):
            runs = zigzag_pieces(self.plan, rank)
            for run, part in zip(runs, self._pieces[start:end].split([len(run) for run in runs]), strict=True):
                self._whole[run.start : run.stop].copy_(part)

    def attend(self, query: Any, scale: float | None) -> Any:
        """Attend from each piece to all tokens up to its end."""
        assert self.layer is not None
        buffer = self.buffer(self.layer)
        runs = zigzag_pieces(self.plan, self.rank)
        parts = []
        for run, part in zip(runs, query.split([len(run) for run in runs], dim=2), strict=True):
            if run:
                keys, values = buffer.views(self._whole[: run.stop])
                parts.append(lower_right(self.geometry.attention, part, keys, values, scale))
        return torch.cat(parts, dim=2)
