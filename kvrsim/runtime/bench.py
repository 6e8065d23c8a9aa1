"""Measured TTFT of several plans, interleaved, on the ranks that are there."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvrsim.errors import InputError
from kvrsim.interp import interquartile_range
from kvrsim.results.timeline import Timeline
from kvrsim.runtime.cache import PrefixCache
from kvrsim.runtime.hooks import hooked
from kvrsim.runtime.host import HostLoad, cpu_name, versions
from kvrsim.runtime.kept.buffers import buffers_of
from kvrsim.runtime.model import Forward, ModelForward
from kvrsim.runtime.plan import RunPlan, random_prompt
from kvrsim.runtime.prefill import Outcome, Prefill, shared_room
from kvrsim.runtime.trace import RankTrace, timeline_of
from kvrsim.runtime.transport import Transport
from kvrsim.scenario import Partition


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """TTFT of one plan, measured again and again."""

    plan: RunPlan
    ttft_s: tuple[float, ...]  # of each repetition, warm-ups left out, in the order in which they ran
    other_cores: tuple[float | None, ...] = ()  # of each: cores that others kept busy; None: unknown, (): not asked

    @property
    def median_s(self) -> float:
        """The middle one."""
        return statistics.median(self.ttft_s)

    @property
    def iqr_s(self) -> float:
        """Interquartile range of the repetitions."""
        return interquartile_range(self.ttft_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchReport:
    """What was measured, and on what."""

    timings: tuple[Timing, ...]  # by plan, in the order in which they were given
    timelines: tuple[Timeline, ...]  # by plan: of one more prefill, with its layers hooked
    conditions: dict[str, str]  # machine, libraries, transport, model: all that the figures depend on
    drift_s: tuple[float, ...] = ()  # by round, of a prefill on every rank at once; () where it was not asked for


def measure(
    transport: Transport,
    forward: Forward,
    plans: Sequence[RunPlan],
    *,
    vocab_size: int,
    repeats: int = 7,
    warmups: int = 2,
    seed: int = 0,
    drift_tokens: int | None = None,
) -> BenchReport:
    """Measure each plan `repeats` times after `warmups`, one after another so that drift meets all alike.

    drift_tokens: in every round, time a prefill of so many tokens on every rank at once, too.

    TTFT is the first token minus the earliest start, all ranks leaving a barrier together; ranks on several hosts
    share no clock, there it is the start of the rank that gives the token. Every rank returns the same report.
    """
    if repeats < 1:
        raise InputError("repeats", repeats, "at least 1")
    room = shared_room(forward.geometry, transport, plans, least=drift_tokens or 0)
    prefills = [Prefill(forward, transport, plan, room=room[plan.batch]) for plan in plans]
    prompts = [random_prompt(vocab_size, plan, seed).to(forward.geometry.device) for plan in plans]
    one_host = is_one_host(transport)
    rounds = _Rounds(transport, one_host, len(plans))
    drift = None
    if drift_tokens is not None:
        batch = plans[0].batch
        told: dict[str, Any] = dict(room=room[batch], batch=batch, vocab_size=vocab_size, seed=seed)
        drift = DriftRunner(transport, forward, drift_tokens, **told)
    drift_s: list[float] = []
    done, total = 0, len(plans) * (warmups + repeats)
    for repetition in range(warmups + repeats):
        if drift is not None:
            drift_s.append(drift.run())
        for number in _rotated(len(plans), repetition):
            transport.report(done, total, "prefills")
            rounds.run(number, prefills[number], prompts[number], keep=repetition >= warmups)
            done += 1
    transport.report(done, total, "prefills")
    timings = tuple(
        Timing(plan=plan, ttft_s=tuple(ttft_s), other_cores=tuple(cores))
        for plan, ttft_s, cores in zip(plans, rounds.ttft_s, rounds.other_cores, strict=True)
    )
    timelines = tuple(_timeline(prefill, ids) for prefill, ids in zip(prefills, prompts, strict=True))
    conditions = conditions_of(transport, forward) | {
        "repetitions": f"{repeats} after {warmups} warm-ups, plans interleaved",
        "clock": "one host's" if one_host else "the last rank's own",
    }
    return BenchReport(timings=timings, timelines=timelines, conditions=conditions, drift_s=tuple(drift_s[warmups:]))


class DriftRunner:
    """A prefill of so many tokens on every rank, each by itself, all beginning together."""

    def __init__(
        self,
        transport: Transport,
        forward: Forward,
        num_tokens: int,
        *,
        room: list[Any],
        batch: int,
        vocab_size: int,
        seed: int = 0,
    ) -> None:
        """room: each layer's memory for at least as many tokens, used by other prefills in turn."""
        self.transport, self.forward, geometry = transport, forward, forward.geometry
        plan = RunPlan(strategy="single", partition=Partition(chunk_lens=(num_tokens,)), batch=batch)
        sizes: dict[str, int] = dict(prefix_len=0, chunk_len=num_tokens, batch=batch)
        self.cache = PrefixCache(buffers_of(geometry, **sizes, room=room))
        self.ids = random_prompt(vocab_size, plan, seed).to(geometry.device)

    def run(self) -> float:
        """Seconds of it, the mean of the ranks; the same on every rank."""
        self.transport.barrier()
        started_s = time.monotonic()
        self.forward(self.ids, 0, self.cache, is_last=True)
        if self.ids.is_cuda:
            torch.cuda.synchronize(self.ids.device)
        taken_s: list[float] = self.transport.exchange(time.monotonic() - started_s)
        return sum(taken_s) / len(taken_s)


class _Rounds:
    """What has been measured so far, by plan."""

    def __init__(self, transport: Transport, one_host: bool, num_plans: int) -> None:
        self.transport, self.one_host, self.load = transport, one_host, HostLoad()
        self.ttft_s: list[list[float]] = [[] for _ in range(num_plans)]
        self.other_cores: list[list[float | None]] = [[] for _ in range(num_plans)]

    def run(self, number: int, prefill: Prefill, ids: Any, *, keep: bool) -> None:
        """One prefill of a plan."""
        self._load()
        outcomes: list[Outcome] = self.transport.exchange(prefill.run(ids))
        cores = self._load()
        if keep:
            self.ttft_s[number].append(ttft_of(outcomes, one_host=self.one_host))
            self.other_cores[number].append(cores)

    def _load(self) -> float | None:
        """Cores that others have kept busy since the last call, as rank 0 sees them."""
        own_cpu_s = sum(self.transport.exchange(time.process_time()))
        cores = self.load.other_cores(own_cpu_s) if self.one_host else None
        return self.transport.exchange(cores)[0]  # type: ignore[no-any-return]


def _rotated(count: int, by: int) -> list[int]:
    """0, 1, ... count - 1, another one first each time."""
    return [(number + by) % count for number in range(count)]


def is_one_host(transport: Transport) -> bool:
    """Whether all ranks share a clock."""
    return len(set(transport.exchange(platform.node()))) == 1


def ttft_of(outcomes: Sequence[Outcome], *, one_host: bool) -> float:
    """The first token minus the earliest start, or that of its own rank where ranks share no clock."""
    giver = next(outcome for outcome in outcomes if outcome.trace.gives_token)
    starts = [outcome.start_s for outcome in outcomes if outcome.trace.marks]
    return giver.end_s - (min(starts) if one_host else giver.start_s)


def _timeline(prefill: Prefill, ids: Any) -> Timeline:
    """One more prefill, its layers hooked where there is a model."""
    exchange = prefill.exchange
    if isinstance(exchange.forward, ModelForward):
        first = exchange.first_layer
        with hooked(exchange.forward.model, exchange.geometry, prefill.clock, first_layer=first):
            trace = prefill.run(ids).trace
    else:
        trace = prefill.run(ids).trace
    everyone: list[RankTrace] = prefill.transport.exchange(trace)
    return timeline_of(prefill.plan.strategy, everyone)


def conditions_of(transport: Transport, forward: Forward) -> dict[str, str]:
    """What measured times depend on: libraries, machine, transport, model."""
    geometry = forward.whole_geometry
    on_cuda = geometry.device.type == "cuda"
    device = torch.cuda.get_device_name(geometry.device) if on_cuda else f"CPU ({cpu_name()})"
    return versions() | {
        "ranks": str(transport.size),
        "transport": transport.name,
        "device": device,
        "cores of the host": str(os.cpu_count()),
        "threads a rank": str(torch.get_num_threads()),
        "dtype": str(geometry.dtype).removeprefix("torch."),
        "attention": geometry.attention,
        "handed on": geometry.title,
        "model": f"{geometry.model_type}, {geometry.num_hidden_layers} layers, {forward.digest()}",
    }
