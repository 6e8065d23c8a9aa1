"""Exchanges: how the ranks of each strategy run a prefill.

`Exchange` has what all exchanges share: a chunk per rank, messages of K and V or states, and their marks. In `chain`,
the model computes attention; in `own_attention`, the exchange does; `pipeline` and `tensor` divide the model.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from torch import Tensor

from kvrsim.errors import InputError
from kvrsim.runtime import marks
from kvrsim.runtime.attention import in_query_blocks
from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.kv_cache import CacheListener, Chunk, Memory, PrefixCache, UpdateEvent, make_buffers
from kvrsim.runtime.model import ModelForward
from kvrsim.runtime.plan import REAL_RUNS, RunPlan, check_decoding
from kvrsim.runtime.transport import Edge, Pending, Transport


def exchange_of(strategy: str) -> type[Exchange]:
    """Return the class that runs a plan's strategy."""
    module, name = REAL_RUNS[strategy].exchange.split(".")
    exchange: type[Exchange] = getattr(import_module(f"{__name__}.{module}"), name)
    return exchange


def make_exchange(forward: ModelForward, transport: Transport, plan: RunPlan, memory: Memory | None = None) -> Exchange:
    """Return a rank's part in prefills of a plan; every rank calls it with the same plan.

    memory: memory per layer that several prefills use in turn; None: new memory.
    Raises InputError where the plan does not suit the model or the number of ranks.
    """
    exchange = exchange_of(plan.strategy)
    exchange.check(plan, forward.geometry)
    transport.connect(exchange.edges(plan, transport.size))
    return exchange(forward, transport, plan, memory)


class Exchange(CacheListener):
    """One rank's part in the prefills of one plan: the tokens that it runs, and what it sends and receives."""

    first_layer = 0  # number of this rank's first layer in the model

    def __init__(
        self, forward: ModelForward, transport: Transport, plan: RunPlan, memory: Memory | None = None
    ) -> None:
        """Make the buffers, or use `memory`."""
        self.forward = forward
        self.transport = transport
        self.plan = plan
        self.geometry = forward.geometry
        self.rank = transport.rank
        self.clock = marks.clock_of(self.geometry.device, all_streams=True)
        self.logits: Tensor | None = None  # of the last token, [B, vocabulary], after a prefill, on ranks that decode
        self.layer = 0  # number of the layer that the rank has reached
        self._receives: dict[int, list[tuple[int, Pending]]] = {}  # source and message of each posted receive, by layer
        self._sends: list[Pending] = []
        self.chunk = self.chunk_of(plan, transport.rank, transport.size)
        self.cache: Any = None
        if self.chunk is not None:
            self.cache = self.make_cache(self.chunk, memory)

    # Decisions of the strategy before any rank runs.

    @classmethod
    def chunk_of(cls, plan: RunPlan, rank: int, size: int) -> Any:
        """Return the tokens of a rank, a Chunk; None if the rank has no part, which only `Single` has."""
        assert len(plan.partition.chunk_lens) == size, "one chunk per rank"
        start, end = plan.partition.boundaries[rank : rank + 2]
        room = plan.output_tokens - 1 if rank == cls.first_token_rank(plan, size) else 0
        return Chunk(start=start, length=end - start, batch=plan.batch, room=room)

    @classmethod
    def check(cls, plan: RunPlan, geometry: Geometry) -> None:
        """Raise InputError where the model cannot run the plan."""
        least = geometry.least_chunk
        if min(plan.partition.chunk_lens[1:], default=least) < least:
            accepted = f"chunks of at least {least} tokens after the first, for {geometry.model_type}"
            raise InputError("partition", plan.chunks, accepted)
        check_decoding(plan.strategy, plan.output_tokens)
        if plan.query_blocks and (reason := geometry.why_no_own_attention()):
            raise InputError("query_blocks", plan.label, f"one call of attention for {geometry.model_type}: {reason}")

    @classmethod
    def edges(cls, plan: RunPlan, size: int) -> list[Edge]:
        """Return the links that the plan uses in addition to those to the next rank."""
        return []

    @classmethod
    def first_token_rank(cls, plan: RunPlan, size: int) -> int:
        """Return the rank that emits the first token: the last one."""
        return size - 1

    @property
    def emits_token(self) -> bool:
        """Whether this rank emits the first token."""
        return self.rank == self.first_token_rank(self.plan, self.transport.size)

    @property
    def decodes(self) -> bool:
        """Whether this rank takes part in decoding: it has K and V that the next token needs."""
        return self.emits_token

    # One rank's prefill.

    def make_cache(self, chunk: Chunk, memory: Memory | None) -> PrefixCache:
        """Return the rank's cache."""
        return PrefixCache(make_buffers(self.geometry, chunk, memory), self)

    def prefill(self, input_ids: Tensor, *, hooked: bool = False) -> marks.RankTrace:
        """Prefill prompts [B, C], the same on every rank; all ranks start together and reuse their buffers.

        hooked: layers also mark their parts. Raises LinkError if a message does not arrive in time.
        """
        self.layer = 0
        self._receives.clear()
        hooks: AbstractContextManager[None] = nullcontext()
        if hooked:
            hooks = marks.hooked(self.forward.model, self.geometry, self.clock, first_layer=self.first_layer)
        with hooks:
            self.transport.barrier()
            self.clock.start()
            self.clock.mark("start")
            if self.cache is not None:
                result = self.run(input_ids)
                if self.decodes:
                    assert result is not None
                    self.logits = result
                if self.emits_token:
                    assert result is not None
                    result.argmax(-1).tolist()  # the first token, which a user waits for
            self.clock.mark("token")
            recorded: tuple[marks.Mark, ...] = ()
            if self.cache is not None:
                recorded = tuple(self.clock.finish())
            self.finish()
        return marks.RankTrace(rank=self.rank, start_s=self.clock.start_s, marks=recorded, emits_token=self.emits_token)

    def run(self, input_ids: Tensor) -> Tensor | None:
        """Run the rank's part in the prefill of [B, C]; the emitting rank returns the token's logits [B, vocabulary].

        It is not called on ranks that have no part.
        """
        ids = input_ids[:, self.chunk.start : self.chunk.end]
        attend = None
        if self.plan.query_blocks:
            attend = self.attend
        return self.forward(ids, self.chunk.start, self.cache, is_last=self.emits_token, attend=attend)

    def attend(self, query: Tensor, scale: float | None) -> Tensor:
        """Attend to the tokens that the chunk sees, in the plan's query blocks (at most one per query)."""
        buffer = self.buffer(self.layer)
        blocks = self.plan.query_blocks[self.rank][self.layer]
        keys, values = buffer.views(buffer.rows(buffer.first_seen, buffer.chunk.end))
        window = buffer.layout.sliding_window
        return in_query_blocks(self.geometry.attention, query, keys, values, scale, window, min(blocks, query.shape[2]))

    def finish(self) -> None:
        """Wait until the memory of sent messages may be overwritten."""
        for message in self._sends:
            message.wait()
        self._sends.clear()

    def on_update(self, event: UpdateEvent, layer: int) -> None:
        if event == "update":
            self.layer = layer
            self.transport.slot.note(layer)
        self.clock.mark(event, layer)

    def buffer(self, layer: int) -> Any:
        """Return the buffer of a layer."""
        return self.cache.buffers[layer]

    # Messages of K and V, or of states.

    def incoming(self, layer: int) -> list[tuple[int, Tensor]]:
        """Return the source and memory of each message that this rank needs in the layer, without empty messages."""
        message = self.buffer(layer).incoming()
        if self.rank == 0 or message.nbytes == 0:
            return []
        return [(self.rank - 1, message)]

    def outgoing(self, layer: int) -> list[tuple[int, Tensor]]:
        """Return destination and memory of each message that later ranks need in the layer, without empty messages."""
        message = self.buffer(layer).outgoing()
        if self.rank == self.transport.size - 1 or message.nbytes == 0:
            return []
        return [(self.rank + 1, message)]

    def post(self, layer: int) -> None:
        """Post the receives of a layer: a message moves once its receive is posted."""
        self._receives[layer] = [(src, self.transport.irecv(message, src)) for src, message in self.incoming(layer)]

    def receive(self, layer: int) -> None:
        """Wait for the layer's K and V or state of the tokens before the chunk."""
        for src, message in self._receives.pop(layer, []):
            self.wait_for(message, layer, src)

    def forward_kv(self, layer: int) -> None:
        """Send the part of the layer's K and V or state that later ranks need."""
        for dst, message in self.outgoing(layer):
            self.send(message, layer, dst)

    def forward_state(self, layer: int) -> None:
        """Send the state after the chunk, and mark the end of the send."""
        self.forward_kv(layer)
        if self.outgoing(layer):
            self.clock.mark("sent", layer)

    def wait_for(self, message: Pending, layer: int | None, src: int) -> None:
        """Wait for a message."""
        self.clock.mark("wait", layer)
        message.wait()
        self.clock.mark("received", layer, peer=src)

    def gather(self, rows: Tensor, layer: int) -> None:
        """All-gather the chunks' rows of K and V, [C, W], with the plan's kind of all-gather."""
        if self.transport.size == 1:
            return
        self.clock.mark("wait", layer)
        boundaries = self.plan.partition.boundaries
        if self.plan.gather == "ring":
            self.transport.ring_all_gather(rows, boundaries)
        else:
            self.transport.all_gather(rows, boundaries)
        self.clock.mark("received", layer)

    def send(self, message: Tensor, layer: int | None, dst: int) -> None:
        """Start to send a message to another rank."""
        self.clock.mark("send", layer, peer=dst, nbytes=message.nbytes)
        self._sends.append(self.transport.isend(message, dst))
