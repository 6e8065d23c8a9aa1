"""Tensor parallelism: every rank runs all tokens through its share of every matrix; the parts are added up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrsim.errors import InputError
from kvrsim.runtime.cache import PrefixCache
from kvrsim.runtime.exchange.base import Exchange, KvPairs
from kvrsim.runtime.kept.buffers import borrowed_room, buffers_of
from kvrsim.runtime.model import ModelForward
from kvrsim.runtime.split.shard import Place, ShardForward, check_plan

if TYPE_CHECKING:
    from kvrsim.runtime.hooks import Clock
    from kvrsim.runtime.kept.layers import KeptTokens
    from kvrsim.runtime.model import Forward
    from kvrsim.runtime.plan import RunPlan
    from kvrsim.runtime.transport import Transport


class TensorParallel(Exchange):
    """All ranks have the first token; the last one gives it."""

    decodes = False
    forward: ShardForward

    def __init__(
        self, forward: Forward, transport: Transport, plan: RunPlan, clock: Clock, room: list[Any] | None
    ) -> None:
        """forward: of the whole model, or this rank's share of it."""
        if not isinstance(forward, ShardForward):
            assert isinstance(forward, ModelForward)
            forward = ShardForward(forward, Place(rank=transport.rank, size=transport.size))
        super().__init__(forward, transport, plan, clock, room)
        self._scratch: Any = None  # of a sum, made once

    @classmethod
    def place_of(cls, plan: RunPlan, rank: int, size: int) -> int | None:
        """Every rank takes the whole context."""
        if len(plan.partition.chunk_lens) != 1:
            raise InputError("partition", plan.chunks, "one chunk: under tp every rank takes all tokens")
        return 0

    @classmethod
    def own_forward(cls, forward: ModelForward, plan: RunPlan, rank: int, size: int) -> ModelForward:
        """A share of every matrix."""
        return ShardForward(forward, Place(rank=rank, size=size), own=True)

    @classmethod
    def check_family(cls, model_type: str) -> None:
        """Raise InputError where transformers has no tensor-parallel plan that the runtime can follow."""
        check_plan(model_type)

    @classmethod
    def tokens_held(cls, plan: RunPlan, rank: int, size: int, kept: KeptTokens) -> int:
        """None as the whole model keeps them."""
        return 0

    def make_cache(self, room: list[Any] | None) -> PrefixCache:
        """K and V of this rank's KV heads."""
        room = borrowed_room(self.geometry, self.plan.context_len, self.plan.batch, room)
        return PrefixCache(buffers_of(self.geometry, **self.buffer_sizes(), room=room), on_update=self.on_update)

    def run(self, input_ids: Any) -> Any:
        """All tokens through this rank's share of the layers."""
        assert self.cache is not None
        self.forward.sums = self
        return self.forward(input_ids, 0, self.cache, is_last=True)

    def part_of(self, kept: KvPairs) -> KvPairs:
        """This rank's KV heads."""
        found: KvPairs = []
        for layer, pair in enumerate(kept):
            assert pair is not None
            count = self.cache_heads(layer)
            first = self.transport.rank * pair[0].shape[1] // self.transport.size
            found.append((pair[0][:, first : first + count], pair[1][:, first : first + count]))
        return found

    def cache_heads(self, layer: int) -> int:
        """KV heads that this rank keeps."""
        return int(self.buffer(layer).kept.num_key_value_heads)

    def add_up(self, part: Any, layer: int | None) -> None:
        """Sum a tensor over all ranks, in place."""
        if self.transport.size == 1:
            return
        self.clock.mark("wait", layer)
        if self.plan.gather == "ring":
            needed = -(-part.numel() // self.transport.size)
            if self._scratch is None or len(self._scratch) < needed:
                self._scratch = part.new_empty(needed)
            self.transport.ring_all_reduce(part.view(-1), self._scratch)
        else:
            self.transport.all_reduce(part)
        self.mark_received(layer, None)

    def joined(self, whole: Any, boundaries: list[int]) -> None:
        """Gather rows from all ranks."""
        if self.transport.size > 1:
            self.transport.ring_all_gather(whole, boundaries)


EXCHANGE = TensorParallel
