"""Virtual ranks: each rank's real chunk with its real prefix, one rank after another on ONE device.

The time of every part of every layer is measured on every rank; messages are not sent. The logits are exact: a rank
reads the K and V that earlier ranks have computed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from kvrsim.runtime.exchange import Exchange, make_exchange
from kvrsim.runtime.kv_cache import Chunk, Memory, allocate
from kvrsim.runtime.marks import RankTrace, own_spans
from kvrsim.runtime.measure import conditions_of, difference, forward_of, in_turn, prompt_of, reference_of
from kvrsim.runtime.model import ModelForward
from kvrsim.runtime.plan import Difference, Job, Parts, Report, RunPlan, Timing
from kvrsim.runtime.transport import Pending, Transport


def run_virtual(transport: Transport, job: Job) -> Report:
    """Run the ranks of every plan one after another on this process's device, alternating between plans."""
    forward = forward_of(job.model, transport)
    first = job.plans[0]
    ids = prompt_of(forward, first, job.model.seed)
    reference = reference_of(forward.model, ids) if job.check_logits else None  # before buffers are made
    memory = allocate(forward.geometry, Chunk(start=0, length=first.context_len, batch=first.batch))
    ranks = {plan: _virtual_ranks(forward, plan, memory) for plan in job.plans}
    differences: dict[RunPlan, Difference] = {}

    def prefill(plan: RunPlan) -> tuple[Parts, ...]:
        parts = tuple(_parts(rank.prefill(ids, hooked=True), plan) for rank in ranks[plan])
        if reference is not None:
            differences[plan] = difference(ranks[plan][-1], reference)
        return parts

    timings = tuple(
        Timing(plan=plan, parts=tuple(parts), difference=differences.get(plan))
        for plan, parts in zip(job.plans, in_turn(transport, job, prefill), strict=True)
    )
    return Report(timings=timings, conditions=conditions_of(transport, forward))


class _VirtualTransport(Transport):
    """A transport without messages: all ranks share one memory, so nothing must be exchanged."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.name = rank, size, "virtual"

    def isend(self, tensor: Any, dst: int) -> Pending:
        return self

    def irecv(self, tensor: Any, src: int) -> Pending:
        return self

    def wait(self) -> None:
        """Return at once, as virtual ranks have no messages."""


def _virtual_ranks(forward: ModelForward, plan: RunPlan, memory: Memory) -> list[Exchange]:
    """Return the ranks of one plan. They share the K and V of the whole context, also with other plans."""
    size = len(plan.partition.chunk_lens)
    ranks = [make_exchange(forward, _VirtualTransport(rank, size), plan, memory) for rank in range(size)]
    for rank in ranks:
        assert rank.chunk is not None
        rank.chunk = replace(rank.chunk, total_len=plan.context_len, visible_len=rank.chunk.end)
        rank.cache = rank.make_cache(rank.chunk, memory)
    return ranks


def _parts(trace: RankTrace, plan: RunPlan) -> Parts:
    """Sum the seconds of a rank's computation by layer and by the simulator's names."""
    parts: dict[tuple[int | None, str], float] = defaultdict(float)
    for span in own_spans(trace, plan.strategy):
        if span.kind == "compute":
            parts[span.layer, span.name] += span.duration_s
    return dict(parts)
