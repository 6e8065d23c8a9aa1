"""Prefill: one rank's part in a prefill, alone, by KV-Runahead or by TSP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvrsim.runtime.cache import PrefixCache, UpdateEvent
from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.hooks import clock_of
from kvrsim.runtime.host import versions
from kvrsim.runtime.kept.buffers import KvBuffer, buffers_of, kv_room
from kvrsim.runtime.kept.layers import KeptTokens
from kvrsim.runtime.model import Forward
from kvrsim.runtime.plan import RunPlan
from kvrsim.runtime.ranks.faults import Fault, FaultKind, LinkError, RankError, is_out_of_memory
from kvrsim.runtime.ranks.transport import Pending, Transport, ring_all_gather
from kvrsim.runtime.trace import RankTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one rank reports of one prefill."""

    rank: int
    start_s: float  # time.monotonic() when it began; processes of one host share this clock
    end_s: float  # when its own part was done; on the last rank, when the first token was there
    tokens: tuple[int, ...] | None  # first token of each prompt; None: not the last rank
    trace: RankTrace  # what happened in between; empty where the rank only looked on


class Prefill:
    """One rank's part in prefills of one plan; buffers are made once and used again.

    Ranks first make sure that they agree on plan, model and libraries. Raises InputError where the plan does
    not suit the model or the number of ranks, RankError where the ranks disagree, a message does not come, or
    memory runs out.
    """

    def __init__(self, forward: Forward, transport: Transport, plan: RunPlan, *, room: list[Any] | None = None) -> None:
        """room: each layer's memory for at least as many tokens, used by other prefills in turn; None: its own."""
        self.forward, self.transport, self.plan, self.geometry = forward, transport, plan, forward.geometry
        self.place = plan.place(transport.rank, transport.size)
        self.clock = clock_of(self.geometry.device, all_streams=True)
        self.layer: int | None = None  # to which the rank has come
        self._linked = self.geometry.linked_layers
        self.logits: Any = None  # of the last token, [B, vocabulary], on the last rank after `run`
        self._receives: dict[int, Pending] = {}
        self._sends: list[Pending] = []
        self._sent: list[tuple[int, float]] = []
        with self._named_faults():
            agree(transport, self._facts())
            plan.check(self.geometry)
            self.cache = self._make_cache(room)

    @property
    def is_last(self) -> bool:
        """Whether this rank gives the first token."""
        return self.transport.rank == self.transport.size - 1

    def run(self, input_ids: Any) -> Outcome:
        """Prefill prompts [B, C], the same on every rank, starting together."""
        assert tuple(input_ids.shape) == (self.plan.batch, self.plan.context_len)
        self.layer, tokens = None, None
        self._receives.clear()
        self._sent.clear()
        with self._named_faults():
            self.transport.barrier()
            self.clock.start()
            self.clock.mark("start")
            if self.cache is not None:
                self._post_receives(0, self.plan.receives_ahead or len(self._linked))
                start, end = self._bounds()
                self.logits = self.forward(input_ids[:, start:end], start, self.cache, is_last=self.is_last)
                if self.is_last and self.logits is not None:
                    tokens = tuple(self.logits.argmax(-1).tolist())
            self.clock.mark("token")
            marks = tuple(self.clock.finish())
            self._finish_sends()
        kept, start_s = marks if self.cache is not None else (), self.clock.start_s
        trace = RankTrace(rank=self.transport.rank, start_s=start_s, marks=kept, sends=tuple(self._sent))
        end_s = start_s + marks[-1].device_s
        return Outcome(rank=trace.rank, start_s=start_s, end_s=end_s, tokens=tokens, trace=trace)

    def _facts(self) -> dict[str, str]:
        geometry = self.geometry
        layout = f"{geometry.title}; {geometry.dtype}"
        facts = versions() | {"plan": self.plan.label, "batch": str(self.plan.batch), "KV cache": layout}
        facts |= {"TSP": f"{self.plan.tsp_keys} {self.plan.gather}", "number of ranks": str(self.transport.size)}
        return facts | {"model": self.forward.digest(), "attention": geometry.attention}

    def _bounds(self) -> tuple[int, int]:
        assert self.place is not None
        start, end = self.plan.partition.boundaries[self.place : self.place + 2]
        return start, end

    def _make_cache(self, room: list[Any] | None) -> PrefixCache | None:
        if self.place is None:
            return None
        start, end = self._bounds()
        sizes: dict[str, Any] = dict(prefix_len=start, chunk_len=end - start, batch=self.plan.batch)
        exchange, pass_on = None, None
        if self.plan.strategy == "kvr":
            exchange, pass_on = self._hand_on, self._send
        elif self.plan.strategy == "tsp":
            # To a single query transformers hands no mask, under which it would see the tokens after it.
            dense = self.plan.tsp_keys == "dense" and end - start > 1
            total = self.plan.context_len
            sizes |= dict(total_len=total, visible_len=total if dense else end)
            if self.transport.size > 1:
                exchange, pass_on = self._gather, self._send
        buffers = buffers_of(self.geometry, **sizes, room=room)
        return PrefixCache(buffers, on_update=self._on_update, exchange=exchange, pass_on=pass_on)

    def _on_update(self, event: UpdateEvent, layer: int) -> None:
        if event == "update":
            self.layer = layer
            self.transport.note(layer)
        self.clock.mark(event, layer)

    def _hand_on(self, layer: int) -> None:
        """KVR: wait for the prefix, hand it on with the chunk (of a state, not yet), expect the next layer's.

        The chunk's K and V are written.
        """
        self._receive(layer)
        if isinstance(self._buffer(layer), KvBuffer):
            self._send(layer)
        if self.plan.receives_ahead is not None:
            ahead = self._linked.index(layer) + self.plan.receives_ahead
            self._post_receives(ahead, ahead + 1)

    def _receive(self, layer: int) -> None:
        """Wait for what this layer keeps of the tokens before the chunk, where its receive is posted."""
        if layer in self._receives:
            self.clock.mark("wait", layer)
            self._receives.pop(layer).wait()
            self.clock.mark("received", layer)

    def _send(self, layer: int) -> None:
        """Hand on what this layer keeps of the tokens up to the chunk's end."""
        message = self._buffer(layer).outgoing()
        if self.is_last or not message.nbytes:
            return
        self.clock.mark("send", layer)
        self._sent.append((layer, message.nbytes))
        self._sends.append(self.transport.isend_next(message))
        if not isinstance(self._buffer(layer), KvBuffer):
            self.clock.mark("sent", layer)

    def _post_receives(self, first: int, end: int) -> None:
        """Post receives, of layers counted among those that are linked: a message moves once its receive is posted."""
        if self.plan.strategy == "kvr":
            for layer in self._linked[first:end]:
                self._post(layer)

    def _post(self, layer: int) -> None:
        """A message of no bytes is neither sent nor received."""
        if self.place and (message := self._buffer(layer).incoming()).nbytes:
            self._receives[layer] = self.transport.irecv_prev(message)

    def _buffer(self, layer: int) -> Any:
        assert self.cache is not None
        return self.cache.buffers[layer]

    def _gather(self, layer: int) -> None:
        """TSP, the chunk's K and V written: all chunks' to all ranks. A state goes from rank to rank even so."""
        buffer, boundaries = self._buffer(layer), self.plan.partition.boundaries
        if not isinstance(buffer, KvBuffer):
            self._post(layer)
            self._receive(layer)
            return
        self.clock.mark("wait", layer)
        if self.plan.gather == "ring":
            ring_all_gather(self.transport, buffer.data, boundaries)
        else:
            self.transport.all_gather(buffer.data, boundaries)
        self.clock.mark("received", layer)

    def _finish_sends(self) -> None:
        """Wait until what was sent may be overwritten."""
        for message in self._sends:
            message.wait()
        self._sends.clear()

    @contextmanager
    def _named_faults(self) -> Iterator[None]:
        """Say on which rank and in which layer something went wrong."""
        try:
            yield
        except LinkError as error:
            raise RankError([self._fault("link", error.reason, error.peer)]) from None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise RankError([self._fault("memory", f"out of memory ({_short(error)})")]) from error

    def _fault(self, kind: FaultKind, message: str, peer: int | None = None) -> Fault:
        return Fault(rank=self.transport.rank, kind=kind, message=message, layer=self.layer, peer=peer)


def agree(transport: Transport, facts: Mapping[str, str]) -> None:
    """Compare facts with all ranks; raises RankError, on every rank, naming what differs from rank 0's."""
    everyone: list[Mapping[str, str]] = transport.exchange(dict(facts), dict[str, str])
    faults = []
    for rank, theirs in enumerate(everyone):
        for fact in sorted({*everyone[0], *theirs}):
            own, first = theirs.get(fact, "nothing"), everyone[0].get(fact, "nothing")
            if own != first:
                message = f"{fact} is {own}, but {first} on rank 0"
                faults.append(Fault(rank=rank, kind="mismatch", message=message))
    if faults:
        raise RankError(faults)


def shared_room(
    geometry: Geometry, transport: Transport, plans: Sequence[RunPlan], *, least: int = 0
) -> dict[int, list[Any]]:
    """By batch, memory in which this rank's part in each of the plans fits, and `least` tokens at least."""
    tokens: dict[int, list[int]] = {}
    for plan in plans:
        held = [
            plan.tokens_held(transport.rank, transport.size, kept) if isinstance(kept, KeptTokens) else 0
            for kept in geometry.kept
        ]
        known = tokens.get(plan.batch, [least] * len(held))
        tokens[plan.batch] = [max(pair) for pair in zip(known, held, strict=True)]
    return {batch: kv_room(geometry, counts, batch) for batch, counts in tokens.items()}


def decode(model: Any, cache: PrefixCache, input_ids: Any, tokens: tuple[int, ...], num_tokens: int) -> Any:
    """Go on greedily from the last rank's cache: the prompts' `num_tokens` next tokens, [B, num_tokens].

    `tokens` are the first ones, which the prefill gave.
    """
    first = torch.tensor(tokens, device=input_ids.device).unsqueeze(1)
    if num_tokens == 1:
        return first
    ids = torch.cat([input_ids, first], dim=1)
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # else tokens that look like padding would be left out
        past_key_values=cache.to_dynamic_cache(),
        max_new_tokens=num_tokens - 1,
        min_new_tokens=num_tokens - 1,
        do_sample=False,
    )
    return found[:, input_ids.shape[1] :]


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
