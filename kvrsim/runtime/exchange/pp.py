"""A pipeline: each rank is a stage with some of the layers, through which the context goes piece by piece."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch

from kvrsim.errors import InputError
from kvrsim.runtime.cache import PrefixCache, UpdateEvent
from kvrsim.runtime.exchange.base import Exchange, KvPairs
from kvrsim.runtime.kept.buffers import borrowed_room, buffers_of
from kvrsim.runtime.model import ModelForward
from kvrsim.runtime.split.stage import StageForward
from kvrsim.runtime.transport import Pending

if TYPE_CHECKING:
    from kvrsim.runtime.geometry import Geometry
    from kvrsim.runtime.hooks import Clock
    from kvrsim.runtime.kept.layers import KeptTokens
    from kvrsim.runtime.model import Forward
    from kvrsim.runtime.plan import RunPlan
    from kvrsim.runtime.transport import Transport

_LANDINGS = 2  # pieces of activations that a stage has room for: one to run, one to come


class Pipeline(Exchange):
    """A piece attends to its stage's K and V of the pieces before; its hidden states go on to the next stage.

    The next piece's receive is posted before a piece runs: a message moves once its receive is posted.
    """

    decodes = False
    forward: StageForward

    def __init__(
        self, forward: Forward, transport: Transport, plan: RunPlan, clock: Clock, room: list[Any] | None
    ) -> None:
        """forward: of the whole model, or of this rank's stage."""
        if not isinstance(forward, StageForward):
            assert isinstance(forward, ModelForward)
            forward = StageForward(forward, stage_of(plan, forward.geometry, transport.rank, transport.size))
        self.stage, self.caches = forward, tuple[PrefixCache, ...]()
        super().__init__(forward, transport, plan, clock, room)
        self.first_layer = forward.layers.start
        self._landings = () if forward.is_first else self._made_landings()
        self._coming: list[Pending] = []

    @classmethod
    def place_of(cls, plan: RunPlan, rank: int, size: int) -> int | None:
        """Every rank is a stage."""
        if plan.stage_layers is not None and len(plan.stage_layers) != size:
            raise InputError("partition", plan.label, f"a stage a rank, of which there are {size}")
        return rank

    @classmethod
    def own_forward(cls, forward: ModelForward, plan: RunPlan, rank: int, size: int) -> ModelForward:
        """A stage's layers."""
        return StageForward(forward, stage_of(plan, forward.geometry, rank, size))

    @classmethod
    def tokens_held(cls, plan: RunPlan, rank: int, size: int, kept: KeptTokens) -> int:
        """None in all layers of the model."""
        return 0

    def make_cache(self, room: list[Any] | None) -> PrefixCache:
        """A view of the same memory for each piece; the last one's is the stage's."""
        total, batch, layers = self.plan.context_len, self.plan.batch, self.stage.layers
        if room is not None and len(room) > len(layers):  # the whole model's
            room = room[layers.start : layers.stop]
        room = borrowed_room(self.geometry, total, batch, room)

        def view(start: int, end: int) -> PrefixCache:
            sizes: dict[str, int] = dict(prefix_len=start, chunk_len=end - start, batch=batch)
            sizes |= dict(total_len=total, visible_len=end)
            return PrefixCache(buffers_of(self.geometry, **sizes, room=room), on_update=self.on_update)

        self.caches = tuple(view(start, end) for start, end in pairwise(self.plan.partition.boundaries))
        return self.caches[-1]

    def reset(self) -> None:
        """Forget the prefill before."""
        super().reset()
        self._coming.clear()

    def run(self, input_ids: Any) -> Any:
        """Every piece through this stage; the final stage returns the last token's logits."""
        pieces, found = list(pairwise(self.plan.partition.boundaries)), None
        self._expect(0)
        for number, (start, end) in enumerate(pieces):
            given = input_ids[:, start:end] if self.stage.is_first else self._come(number)
            self._expect(number + 1)
            found = self.stage.piece(given, start, self.caches[number], is_last=number == len(pieces) - 1)
            if not self.stage.is_final:
                self._go_on(found)
        return found if self.stage.is_final else None

    def on_update(self, event: UpdateEvent, layer: int) -> None:
        """The model's number of a layer, in place of the stage's."""
        super().on_update(event, layer + self.stage.layers.start)

    def part_of(self, kept: KvPairs) -> KvPairs:
        """The stage's layers."""
        return kept[self.stage.layers.start : self.stage.layers.stop]

    def _made_landings(self) -> tuple[Any, ...]:
        """Memory in which pieces come in by turns, flat."""
        lengths, hidden_size = self.plan.partition.chunk_lens, self.stage.model.config.hidden_size
        size, geometry = self.plan.batch * max(lengths) * hidden_size, self.geometry
        count = min(_LANDINGS, len(lengths))
        return tuple(torch.empty(size, dtype=geometry.dtype, device=geometry.device) for _ in range(count))

    def _landing(self, number: int) -> Any:
        """Where a piece comes in, [B, c, hidden_size]."""
        length, batch = self.plan.partition.chunk_lens[number], self.plan.batch
        flat = self._landings[number % len(self._landings)]
        hidden_size = self.stage.model.config.hidden_size
        return flat[: batch * length * hidden_size].view(batch, length, hidden_size)

    def _expect(self, number: int) -> None:
        if not self.stage.is_first and number < len(self.plan.partition.chunk_lens):
            self._coming.append(self.transport.irecv_prev(self._landing(number)))

    def _come(self, number: int) -> Any:
        """Wait for a piece."""
        self.wait_for(self._coming[number], None, self.transport.rank - 1)
        return self._landing(number)

    def _go_on(self, hidden: Any) -> None:
        """Send a piece to the next stage, once the one before has left: no more are kept."""
        hidden = hidden.contiguous()
        self.send(hidden, None, self.transport.rank + 1, after_others=True)
        self.clock.mark("sent")


def stage_of(plan: RunPlan, geometry: Geometry, rank: int, size: int) -> range:
    """The layers of a rank; where the plan does not say, as even as they can be.

    Raises InputError where the stages are not those of the model.
    """
    count = geometry.num_hidden_layers
    share, rest = divmod(count, size)
    layers = plan.stage_layers or tuple(share + (stage < rest) for stage in range(size))
    if len(layers) != size or sum(layers) != count or min(layers) < 1:
        shown = ",".join(map(str, layers))
        raise InputError("stage_layers", shown, f"{size} stages with the model's {count} layers, at least one each")
    return [range(*pair) for pair in pairwise(accumulate(layers, initial=0))][rank]


EXCHANGE = Pipeline
