"""Virtual ranks: each rank's real chunk behind its real prefix, one after another on ONE device.

What is measured is the time of every part of every layer on every rank; messages are not sent. The logits are exact:
a rank finds the K and V that the ranks before it have computed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from kvrsim.runtime.bench import conditions_of
from kvrsim.runtime.cache import PrefixCache
from kvrsim.runtime.exchange import exchange_of
from kvrsim.runtime.hooks import Clock, Mark, clock_of, hooked
from kvrsim.runtime.host import HostLoad
from kvrsim.runtime.job import Job
from kvrsim.runtime.kept.buffers import buffers_of, kv_room
from kvrsim.runtime.model import ModelForward
from kvrsim.runtime.plan import RunPlan, random_prompt
from kvrsim.runtime.trace import COMPUTE
from kvrsim.runtime.transport import Transport

Parts = Mapping[tuple[int | None, str], float]  # seconds by layer (None: outside) and the simulator's word


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualTiming:
    """One plan, replayed again and again."""

    plan: RunPlan
    repeats: tuple[tuple[Parts, ...], ...]  # by repetition, by rank
    other_cores: tuple[float | None, ...]  # by repetition: cores that others kept busy; None: unknown
    logits_error: float | None  # largest difference from one process's logits; None: not asked for
    logits_scale: float | None  # largest logit, by magnitude


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualReport:
    """What was measured, and on what."""

    timings: tuple[VirtualTiming, ...]  # by plan
    conditions: dict[str, str]


def run_virtual(transport: Transport, job: Job) -> VirtualReport:
    """Replay the ranks of every plan on this one process's device, plans interleaved."""
    forward = ModelForward(job.model.load(getattr(transport, "device", "cpu")))
    clock = clock_of(forward.geometry.device, all_streams=True)
    first = job.plans[0]
    alone = None
    if job.check_logits:  # before the ranks' KV buffers are made
        ids = random_prompt(forward.model.config.vocab_size, first, job.model.seed).to(forward.geometry.device)
        alone = _logits_alone(forward.model, ids)
    room = kv_room(forward.geometry, first.context_len, first.batch)
    plans = [_VirtualRanks(forward, plan, clock, job.model.seed, room) for plan in job.plans]
    repeats: list[list[tuple[Parts, ...]]] = [[] for _ in plans]
    cores: list[list[float | None]] = [[] for _ in plans]
    load, total = HostLoad(), (job.warmups + job.repeats) * len(plans)
    with hooked(forward.model, forward.geometry, clock):
        for repetition in range(job.warmups + job.repeats):
            for number, plan in enumerate(plans):
                transport.report(repetition * len(plans) + number, total, "prefills")
                load.other_cores(time.process_time())
                found = plan.run()
                others = load.other_cores(time.process_time())
                if repetition >= job.warmups:
                    repeats[number].append(found)
                    cores[number].append(others)
    transport.report(total, total, "prefills")
    timings = tuple(
        VirtualTiming(
            plan=plan.plan,
            repeats=tuple(repeats[number]),
            other_cores=tuple(cores[number]),
            logits_error=None if alone is None else float((plan.logits.float() - alone).abs().max()),
            logits_scale=None if alone is None else float(alone.abs().max()),
        )
        for number, plan in enumerate(plans)
    )
    told = {"repetitions": f"{job.repeats} after {job.warmups} warm-ups, plans interleaved"}
    return VirtualReport(timings=timings, conditions=conditions_of(transport, forward) | told)


class _VirtualRanks:
    """The ranks of one plan, which share the K and V of the whole context, with each other and with other plans."""

    def __init__(self, forward: ModelForward, plan: RunPlan, clock: Clock, seed: int, room: list[Any]) -> None:
        geometry = forward.geometry
        exchange_of(plan.strategy).check(plan, geometry)
        self.forward, self.plan, self.clock = forward, plan, clock
        self.logits: Any = None
        self.ids = random_prompt(forward.model.config.vocab_size, plan, seed).to(geometry.device)
        self.room = room
        self.caches = [self._cache(chunk, *bounds) for chunk, bounds in enumerate(pairwise(plan.partition.boundaries))]

    def run(self) -> tuple[Parts, ...]:
        """One prefill: seconds of every part, rank by rank."""
        return tuple(self._rank(rank) for rank in range(len(self.caches)))

    def _cache(self, chunk: int, start: int, end: int) -> PrefixCache:
        """A rank's view: TSP's dense attention covers what comes later too, as it does after a real all-gather."""
        plan = self.plan
        dense = plan.strategy == "tsp" and plan.tsp_keys == "dense" and end - start > 1
        sizes: dict[str, Any] = dict(prefix_len=start, chunk_len=end - start, batch=plan.batch)
        sizes |= dict(total_len=plan.context_len, visible_len=plan.context_len if dense else end)
        buffers = buffers_of(self.forward.geometry, **sizes, room=self.room)
        blocks = plan.query_blocks[chunk] if plan.query_blocks else ()
        return PrefixCache(buffers, on_update=self.clock.mark, query_blocks=blocks)

    def _rank(self, rank: int) -> Parts:
        start, end = self.plan.partition.boundaries[rank : rank + 2]
        is_last = end == self.plan.context_len
        self.clock.start()
        self.clock.mark("start")
        logits = self.forward(self.ids[:, start:end], start, self.caches[rank], is_last=is_last)
        if is_last:
            self.logits = logits
            logits.argmax(-1).tolist()  # the first token, which a user waits for
        self.clock.mark("token")
        return _parts(self.clock.finish(), is_last=is_last)


def _parts(marks: Sequence[Mark], *, is_last: bool) -> Parts:
    """Seconds between marks by the simulator's words; only the last rank has a head."""
    found: dict[tuple[int | None, str], float] = {}
    for first, second in pairwise(marks):
        name = COMPUTE.get((first.name, second.name))
        if name is None or (name == "head" and not is_last):
            continue
        key = (None if name in ("embedding", "head") else first.layer, name)
        found[key] = found.get(key, 0.0) + second.device_s - first.device_s
    return found


def _logits_alone(model: Any, ids: Any) -> Any:
    """What transformers computes by itself, of the last token."""
    with torch.inference_mode():
        return model(input_ids=ids, logits_to_keep=1, use_cache=False).logits[:, -1].float()
