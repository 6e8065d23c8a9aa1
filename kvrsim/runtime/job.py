"""Job: the model, plans and link that every rank receives, and the reports that ranks return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvrsim.choices import Attention
from kvrsim.errors import InputError
from kvrsim.runtime.bench import BenchReport, conditions_of, is_one_host, measure, ttft_of
from kvrsim.runtime.check import Difference, compare
from kvrsim.runtime.exchange import exchange_of
from kvrsim.runtime.geometry import DTYPES
from kvrsim.runtime.host import versions
from kvrsim.runtime.kept.buffers import kv_room
from kvrsim.runtime.model import ModelForward, geometry_of, load_model
from kvrsim.runtime.plan import RunPlan, random_prompt
from kvrsim.runtime.prefill import Outcome, Prefill, agree, decode
from kvrsim.runtime.transport import EmulatedLink, EmulatedTransport, MessageTraffic, Transport


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChoice:
    """Which model the ranks run, with random weights."""

    config: str | Mapping[str, object]  # a built-in name, a path, or the keys of a config.json
    dtype: str  # one of DTYPES
    attention: Attention  # kernel
    device: str = "cpu"  # or "cuda"
    seed: int = 0  # of the weights and of the prompt
    init_std: float | None = None  # spread of the weights; None: the config's

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError("dtype", self.dtype, "what the runtime computes in: " + ", ".join(DTYPES))

    def load(self, device: torch.device | str | None = None) -> Any:
        """The Hugging Face model, on the device of the rank."""
        place = self.device if device is None else device
        return load_model(self.config, self.dtype, place, self.attention, self.seed, self.init_std)

    def check(self, plan: RunPlan) -> None:
        """Raise InputError where the model cannot run a plan, before it is loaded."""
        exchange_of(plan.strategy).check(plan, geometry_of(self.config, self.attention))


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What all ranks measure."""

    model: ModelChoice
    plans: tuple[RunPlan, ...]
    repeats: int = 5
    warmups: int = 1
    link: EmulatedLink | None = None  # None: messages as fast as they are
    traffic: MessageTraffic | None = None  # beside them, on an emulated link
    check_logits: bool = True  # against one process
    drift_tokens: int | None = None  # of a prefill on every rank at once, in every round; None: not timed
    generate: int = 0  # tokens that the last rank goes on with, greedily, after the last plan's prefill

    def facts(self) -> dict[str, str]:
        """What decides how many messages each rank sends and expects: it must be the same on all of them."""
        return {
            "repeats": str(self.repeats),
            "warm-ups": str(self.warmups),
            "check of the logits": "on" if self.check_logits else "off",
            "tokens to generate": str(self.generate),
            "tokens for the clock drift": str(self.drift_tokens),
            "partitions": "; ".join(plan.label for plan in self.plans),
            "emulated link": str(self.link),
            "side traffic": str(self.traffic),
            "seed": str(self.model.seed),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class JobReport:
    """What the ranks have measured."""

    bench: BenchReport
    differences: tuple[Difference, ...]  # by plan; empty where they were not asked for
    generated: tuple[tuple[int, ...], ...] = ()  # tokens by prompt


def run_job(transport: Transport, job: Job) -> JobReport:
    """Measure every plan, then compare logits with one process's; every rank returns the same report."""
    agree(transport, job.facts() | versions())
    forward = ModelForward(job.model.load(device_of(transport)))
    forward = _own_part(forward, job, transport)
    linked = linked_by(transport, job.link, job.traffic)
    vocab_size, seed = forward.model.config.vocab_size, job.model.seed
    bench = measure(
        linked,
        forward,
        job.plans,
        vocab_size=vocab_size,
        repeats=job.repeats,
        warmups=job.warmups,
        seed=seed,
        drift_tokens=job.drift_tokens,
    )
    found: list[Difference] = []
    if job.check_logits:
        linked.report(0, len(job.plans), "logits compared")
        found = compare(transport, forward.model, job.plans, num_tokens=1, seed=seed)
    generated = _generate(transport, forward, job) if job.generate else ()
    return JobReport(bench=bench, differences=tuple(found), generated=generated)


def linked_by(transport: Transport, link: EmulatedLink | None, traffic: MessageTraffic | None) -> Transport:
    """The transport, over an emulated link where there is one.

    Raises InputError for traffic on a real link.
    """
    if link is None:
        if traffic is not None:
            raise InputError("side_traffic", traffic.share, "nothing without `link_bandwidth`: links are emulated")
        return transport
    return EmulatedTransport(transport, link, traffic)


def _own_part(forward: ModelForward, job: Job, transport: Transport) -> ModelForward:
    """What this rank's plan needs of the model, where nothing else is asked of the rank."""
    if len(job.plans) > 1 or job.check_logits or job.drift_tokens is not None or job.generate:
        return forward
    plan = job.plans[0]
    return exchange_of(plan.strategy).own_forward(forward, plan, transport.rank, transport.size)


class Prefills:
    """One rank's part in prefills of any plans of one context, one after another, in the same memory."""

    def __init__(self, transport: Transport, model: ModelChoice) -> None:
        self.transport, self.choice = transport, model
        self.forward = ModelForward(model.load(device_of(transport)))
        self.one_host = is_one_host(transport)
        self.room: list[Any] | None = None

    def ttft_s(self, plan: RunPlan) -> float:
        """Measured now; the same on every rank."""
        geometry = self.forward.geometry
        if self.room is None:
            self.room = kv_room(geometry, plan.context_len, plan.batch)
        prefill = Prefill(self.forward, self.transport, plan, room=self.room)
        vocab_size = self.forward.model.config.vocab_size
        ids = random_prompt(vocab_size, plan, self.choice.seed).to(geometry.device)
        outcomes: list[Outcome] = self.transport.exchange(prefill.run(ids))
        return ttft_of(outcomes, one_host=self.one_host)

    def conditions(self) -> dict[str, str]:
        """What the times depend on."""
        return conditions_of(self.transport, self.forward)


def device_of(transport: Transport) -> Any:
    """Where this rank computes."""
    return getattr(transport, "device", "cpu")


def _generate(transport: Transport, forward: ModelForward, job: Job) -> tuple[tuple[int, ...], ...]:
    """The last plan's prefill, and the tokens that follow; the same on every rank."""
    plan = job.plans[-1]
    ids = random_prompt(forward.model.config.vocab_size, plan, job.model.seed).to(forward.geometry.device)
    prefill = Prefill(forward, transport, plan)
    outcome = prefill.run(ids)
    found: tuple[tuple[int, ...], ...] = ()
    if outcome.tokens is not None:
        assert prefill.cache is not None
        rows = decode(forward.model, prefill.cache, ids, outcome.tokens, job.generate)
        found = tuple(tuple(row) for row in rows.tolist())
    every: list[tuple[tuple[int, ...], ...]] = transport.exchange(found)
    return max(every, key=len)
