"""Exchange: one rank's part in the prefills of one plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrsim.errors import InputError
from kvrsim.runtime.cache import PrefixCache, UpdateEvent
from kvrsim.runtime.hooks import Clock
from kvrsim.runtime.kept.buffers import KvBuffer, buffers_of
from kvrsim.runtime.trace import Sent
from kvrsim.runtime.transport import Pending, Transport

if TYPE_CHECKING:
    from kvrsim.runtime.geometry import Geometry
    from kvrsim.runtime.kept.layers import KeptTokens
    from kvrsim.runtime.model import Forward, ModelForward
    from kvrsim.runtime.plan import RunPlan

KvPairs = list[tuple[Any, Any] | None]  # K and V of each layer, in the model's own layout, or its states


class Exchange:
    """The tokens that a rank runs, and what its layers keep, send and receive; this one exchanges nothing.

    Its cache calls `before_attention` in each layer, after the chunk's K and V are written or before a scan, and
    `after_scan` where a layer keeps a state.
    """

    decodes = True  # whether the rank that gives the token can go on from what it keeps
    first_layer = 0  # the model's number of the first layer that this rank's forward has

    def __init__(
        self, forward: Forward, transport: Transport, plan: RunPlan, clock: Clock, room: list[Any] | None
    ) -> None:
        """room: each layer's memory for at least as many tokens, used by other prefills in turn; None: its own."""
        self.forward, self.transport, self.plan, self.clock = forward, transport, plan, clock
        self.geometry = forward.geometry
        self.place = self.place_of(plan, transport.rank, transport.size)
        self.layer: int | None = None  # to which the rank has come
        self.sent: list[Sent] = []
        self.received: list[int | None] = []  # where each came from that is marked as received; None: from all
        self._receives: dict[int, Pending] = {}
        self._sends: list[Pending] = []
        self.cache = None if self.place is None else self.make_cache(room)

    @classmethod
    def place_of(cls, plan: RunPlan, rank: int, size: int) -> int | None:
        """The chunk that a rank of so many takes; None: it only looks on, because chunks are fewer than ranks.

        Raises InputError where there are more chunks than ranks.
        """
        chunks = len(plan.partition.chunk_lens)
        if chunks > size:
            raise not_a_chunk_a_rank(plan, size)
        first = size - chunks
        return rank - first if rank >= first else None

    @classmethod
    def tokens_held(cls, plan: RunPlan, rank: int, size: int, kept: KeptTokens) -> int:
        """Tokens whose K and V a rank of so many keeps in such a layer; 0 where it looks on.

        The tokens that its chunk sees, up to the chunk's end.
        """
        place = cls.place_of(plan, rank, size)
        if place is None:
            return 0
        start, end = plan.partition.boundaries[place : place + 2]
        return end - kept.first_seen(start)

    @classmethod
    def check(cls, plan: RunPlan, geometry: Geometry) -> None:
        """Raise InputError where the model cannot run the plan."""
        least = geometry.least_chunk
        if min(plan.partition.chunk_lens[1:], default=least) < least:
            accepted = f"chunks of at least {least} tokens after the first, for {geometry.model_type}"
            raise InputError("partition", plan.chunks, accepted)
        if plan.query_blocks and not geometry.family.query_blocks:
            accepted = f"attention in one call for {geometry.model_type}, whose scores are not softmaxed by themselves"
            raise InputError("query_blocks", plan.label, accepted)

    @classmethod
    def own_forward(cls, forward: ModelForward, plan: RunPlan, rank: int, size: int) -> ModelForward:
        """The forward of a rank's part of the model, in memory of its own where it is not all of it."""
        return forward

    @classmethod
    def check_family(cls, model_type: str) -> None:
        """Raise InputError where the strategy cannot run any model of an architecture."""

    @classmethod
    def edges(cls, plan: RunPlan, size: int) -> list[tuple[int, int]]:
        """From a rank to another, besides those to the next rank: messages that the plan sends."""
        return []

    @classmethod
    def giver_of(cls, plan: RunPlan, size: int) -> int:
        """The rank that gives the first token: the last one."""
        return size - 1

    @property
    def gives_token(self) -> bool:
        """Whether this rank gives the first token."""
        return self.transport.rank == self.giver_of(self.plan, self.transport.size)

    def bounds(self) -> tuple[int, int]:
        """The first token of the rank's chunk, and the one behind it."""
        assert self.place is not None
        start, end = self.plan.partition.boundaries[self.place : self.place + 2]
        return start, end

    def make_cache(self, room: list[Any] | None) -> PrefixCache:
        """The memory of what each layer keeps, as transformers sees it."""
        buffers = buffers_of(self.geometry, **self.buffer_sizes(), room=room)
        hooks: dict[str, Any] = dict(exchange=self.before_attention, pass_on=self.after_scan)
        blocks = self.plan.query_blocks[self.place] if self.plan.query_blocks and self.place is not None else ()
        return PrefixCache(buffers, on_update=self.on_update, query_blocks=blocks, **hooks)

    def buffer_sizes(self) -> dict[str, int]:
        """What `buffers_of` takes."""
        start, end = self.bounds()
        return dict(prefix_len=start, chunk_len=end - start, batch=self.plan.batch)

    def scratch(self) -> list[Any]:
        """Memory that one layer at a time needs besides what is kept, made once."""
        return []

    def reset(self) -> None:
        """Forget the prefill before."""
        self.layer = None
        self._receives.clear()
        self.sent.clear()
        self.received.clear()

    def run(self, input_ids: Any) -> Any:
        """The rank's part in the prefill of [B, C]; returns the last token's logits [B, vocabulary] where it has them.

        Ranks that only look on do not come here.
        """
        assert self.cache is not None
        start, end = self.bounds()
        return self.forward(input_ids[:, start:end], start, self.cache, is_last=self.gives_token)

    def part_of(self, kept: KvPairs) -> KvPairs:
        """Of what one process keeps, layer by layer, what this rank keeps."""
        return kept

    def finish(self) -> None:
        """Wait until what was sent may be overwritten."""
        for message in self._sends:
            message.wait()
        self._sends.clear()

    def on_update(self, event: UpdateEvent, layer: int) -> None:
        """A layer has begun or ended to write what it keeps."""
        if event == "update":
            self.layer = layer
            self.transport.note(layer)
        self.clock.mark(event, layer)

    def before_attention(self, layer: int) -> None:
        """The chunk's K and V are written, or a scan is to begin: fetch what the chunk sees of other ranks' tokens."""

    def after_scan(self, layer: int) -> None:
        """The state after the chunk is there."""

    def buffer(self, layer: int) -> Any:
        """What a layer keeps."""
        assert self.cache is not None
        return self.cache.buffers[layer]

    def post(self, layer: int) -> None:
        """Expect what the rank before hands on in a layer: of no bytes, no message is sent or received."""
        if self.place and (message := self.buffer(layer).incoming()).nbytes:
            self._receives[layer] = self.transport.irecv_prev(message)

    def receive(self, layer: int) -> None:
        """Wait for what this layer keeps of the tokens before the chunk, where its receive is posted."""
        if layer in self._receives:
            self.wait_for(self._receives.pop(layer), layer, self.transport.rank - 1)

    def wait_for(self, message: Pending, layer: int | None, src: int) -> None:
        """Wait for a message."""
        self.clock.mark("wait", layer)
        message.wait()
        self.mark_received(layer, src)

    def mark_received(self, layer: int | None, src: int | None) -> None:
        """A message is there; src None: all ranks' are."""
        self.clock.mark("received", layer)
        self.received.append(src)

    def hand_on(self, layer: int) -> None:
        """Send what this layer keeps of the tokens up to the chunk's end to the next rank."""
        message = self.buffer(layer).outgoing()
        if self.transport.rank == self.transport.size - 1 or not message.nbytes:
            return
        self.send(message, layer, self.transport.rank + 1)
        if not isinstance(self.buffer(layer), KvBuffer):
            self.clock.mark("sent", layer)

    def send(self, message: Any, layer: int | None, dst: int, *, after_others: bool = False) -> None:
        """Begin to send to another rank; after_others: once all that was sent before has left."""
        self.clock.mark("send", layer)
        if after_others:
            self.finish()
        self.sent.append(Sent(layer=layer, nbytes=message.nbytes, dst=dst))
        self._sends.append(self.transport.isend(message, dst))


def not_a_chunk_a_rank(plan: RunPlan, size: int) -> InputError:
    """The error for a partition that does not fit the ranks."""
    return InputError("partition", plan.chunks, f"a chunk a rank, of which there are {size}")
