"""Prefill: one rank's part in prefills of a plan, timed, with what goes wrong named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvrsim.runtime.cache import PrefixCache
from kvrsim.runtime.exchange import exchange_of
from kvrsim.runtime.exchange.base import Exchange
from kvrsim.runtime.faults import Fault, FaultKind, LinkError, RankError, is_out_of_memory
from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.hooks import clock_of
from kvrsim.runtime.host import versions
from kvrsim.runtime.kept.buffers import kv_room
from kvrsim.runtime.kept.layers import KeptTokens
from kvrsim.runtime.model import Forward
from kvrsim.runtime.plan import RunPlan
from kvrsim.runtime.trace import RankTrace
from kvrsim.runtime.transport import Transport


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one rank reports of one prefill."""

    rank: int
    start_s: float  # time.monotonic() when it began; processes of one host share this clock
    end_s: float  # when its own part was done, the first token included
    tokens: tuple[int, ...] | None  # first token of each prompt; None: it does not give them
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
        self.clock = clock_of(self.geometry.device, all_streams=True)
        self.logits: Any = None  # of the last token, [B, vocabulary], where `gives_token`, after `run`
        self._exchange: Exchange | None = None
        with self._named_faults():
            agree(transport, self._facts())
            exchange_of(plan.strategy).check(plan, self.geometry)
            transport.connect(exchange_of(plan.strategy).edges(plan, transport.size))
            self._exchange = exchange_of(plan.strategy)(forward, transport, plan, self.clock, room)

    @property
    def exchange(self) -> Exchange:
        """What this rank runs, keeps and sends."""
        assert self._exchange is not None
        return self._exchange

    @property
    def cache(self) -> PrefixCache | None:
        """What this rank's layers keep; None where it looks on."""
        return self.exchange.cache

    def run(self, input_ids: Any) -> Outcome:
        """Prefill prompts [B, C], the same on every rank, starting together."""
        assert tuple(input_ids.shape) == (self.plan.batch, self.plan.context_len)
        exchange, tokens, takes_part = self.exchange, None, self.exchange.place is not None
        exchange.reset()
        with self._named_faults():
            self.transport.barrier()
            self.clock.start()
            self.clock.mark("start")
            if takes_part:
                self.logits = exchange.run(input_ids)
                if exchange.gives_token and self.logits is not None:
                    tokens = tuple(self.logits.argmax(-1).tolist())
            self.clock.mark("token")
            marks = tuple(self.clock.finish())
            exchange.finish()
        kept, start_s = marks if takes_part else (), self.clock.start_s
        trace = RankTrace(
            rank=self.transport.rank,
            start_s=start_s,
            marks=kept,
            sends=tuple(exchange.sent),
            receipts=tuple(exchange.received),
            gives_token=exchange.gives_token,
        )
        end_s = start_s + marks[-1].device_s
        return Outcome(rank=trace.rank, start_s=start_s, end_s=end_s, tokens=tokens, trace=trace)

    def _facts(self) -> dict[str, str]:
        geometry = self.forward.whole_geometry
        layout = f"{geometry.title}; {geometry.dtype}"
        facts = versions() | {"plan": self.plan.label, "batch": str(self.plan.batch), "KV cache": layout}
        facts |= {"TSP": f"{self.plan.tsp_keys} {self.plan.gather}", "number of ranks": str(self.transport.size)}
        return facts | {"model": self.forward.digest(), "attention": geometry.attention}

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
        layer = None if self._exchange is None else self._exchange.layer
        return Fault(rank=self.transport.rank, kind=kind, message=message, layer=layer, peer=peer)


def agree(transport: Transport, facts: Mapping[str, str]) -> None:
    """Compare facts with all ranks; raises RankError, on every rank, naming what differs from rank 0's."""
    everyone: list[Mapping[str, str]] = transport.exchange(dict(facts))
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
            exchange_of(plan.strategy).tokens_held(plan, transport.rank, transport.size, kept)
            if isinstance(kept, KeptTokens)
            else 0
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
