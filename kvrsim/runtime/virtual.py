"""Virtual ranks: each rank's real chunk behind its real prefix, one after another on ONE device.

The time of every part of every layer on every rank is measured; messages are not sent. The logits are exact: a rank
reads the K and V that the ranks before it have computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from kvrsim.runtime.exchange import exchange_of
from kvrsim.runtime.kv_cache import Chunk, Memory, allocate_chunk
from kvrsim.runtime.marks import Clock, Mark, clock_of, compute_name
from kvrsim.runtime.measure import cache_distance, conditions_of, forward_of, prompt_of, reference_of
from kvrsim.runtime.model import ModelForward
from kvrsim.runtime.plan import Difference, Job, Parts, Report, RunPlan, Timing
from kvrsim.runtime.transport import Pending, Transport


def run_virtual(transport: Transport, job: Job) -> Report:
    """Replay the ranks of every plan on this process's device, plans interleaved."""
    forward = forward_of(job.model, transport)
    clock = clock_of(forward.geometry.device, all_streams=True)
    first = job.plans[0]
    ids = prompt_of(forward, first, job.model.seed)
    reference = reference_of(forward.model, ids) if job.check_logits else None  # before buffers are made
    whole = Chunk(start=0, length=first.context_len, batch=first.batch)
    memory = allocate_chunk(forward.geometry, whole)
    plans = [_VirtualPlan(forward, plan, clock, ids, memory) for plan in job.plans]
    samples: list[list[tuple[Parts, ...]]] = [[] for _ in plans]
    differences: list[Difference | None] = [None for _ in plans]
    total = (job.warmups + job.repeats) * len(plans)
    with forward.hooked(clock):
        for done in range(total):
            repetition, number = divmod(done, len(plans))
            transport.report(done, total, "prefills")
            parts = tuple(plans[number].run(rank) for rank in range(len(plans[number].ranks)))
            if repetition >= job.warmups:
                samples[number].append(parts)
            if reference is not None and done >= total - len(plans):
                differences[number] = plans[number].difference(*reference)
    transport.report(total, total, "prefills")
    timings = tuple(
        Timing(plan=plan.plan, parts=tuple(parts), difference=difference)
        for plan, parts, difference in zip(plans, samples, differences, strict=True)
    )
    repetitions = {"repetitions": f"{job.repeats} after {job.warmups} warm-ups, plans interleaved"}
    return Report(timings=timings, conditions=conditions_of(transport, forward) | repetitions)


class _VirtualTransport(Transport):
    """A transport without messages: all ranks share the memory that holds what they would exchange."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.name = rank, size, "virtual"

    def isend(self, tensor: Any, dst: int) -> Pending:
        return self

    def irecv(self, tensor: Any, src: int) -> Pending:
        return self

    def wait(self) -> None:
        """Return at once, as virtual ranks have no messages."""


class _VirtualPlan:
    """The ranks of one plan, which share the K and V of the whole context, with each other and with other plans."""

    def __init__(self, forward: ModelForward, plan: RunPlan, clock: Clock, ids: Any, memory: Memory) -> None:
        kind, size = exchange_of(plan.strategy), len(plan.partition.chunk_lens)
        kind.check(plan, forward.geometry)
        self.plan, self.clock, self.ids = plan, clock, ids
        self.logits: Any = None
        self.ranks = [kind(forward, _VirtualTransport(rank, size), plan, clock, memory) for rank in range(size)]
        for rank in self.ranks:
            assert rank.chunk is not None
            rank.chunk = replace(rank.chunk, total_len=plan.context_len, visible_len=rank.chunk.end)
            rank.cache = rank.make_cache(rank.chunk, memory)

    def run(self, number: int) -> Parts:
        """Run one rank's part in a prefill; return the seconds of its parts."""
        rank = self.ranks[number]
        rank.reset()
        self.clock.start()
        self.clock.mark("start")
        logits = rank.run(self.ids)
        if rank.emits_token:
            self.logits = logits
            logits.argmax(-1).tolist()  # the first token, for which a user waits
        self.clock.mark("token")
        return _parts(self.clock.finish(), is_last=rank.emits_token)

    def difference(self, logits: Any, kept: Any) -> Difference:
        """Compare the prefill that ran last with one process's."""
        cache = self.ranks[-1].cache
        assert cache is not None
        return Difference(
            logits=float((self.logits.float() - logits.float()).abs().max()),
            logits_scale=float(logits.abs().max()),
            kv_cache=cache_distance(cache, kept),
        )


def _parts(marks: Sequence[Mark], *, is_last: bool) -> Parts:
    """Sum the seconds between marks by the simulator's names; only the last rank has a head."""
    parts: dict[tuple[int | None, str], float] = {}
    states = {mark.layer for mark in marks if mark.name == "scan"}
    for first, second in pairwise(marks):
        name = compute_name(first, second, is_state=first.layer in states)
        if name is None or (name == "head" and not is_last):
            continue
        key = (None if name in ("embedding", "head") else first.layer, name)
        parts[key] = parts.get(key, 0.0) + second.device_s - first.device_s
    return parts
