"""PromptRun: one rank's part in prompts that arrive one after another; early ranks begin the next one early."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from kvrsim.errors import InputError
from kvrsim.runtime.bench import conditions_of, is_one_host
from kvrsim.runtime.hooks import Mark
from kvrsim.runtime.job import Job, device_of, linked_by
from kvrsim.runtime.model import Forward, ModelForward
from kvrsim.runtime.plan import RunPlan, random_prompt
from kvrsim.runtime.prefill import Prefill, agree
from kvrsim.runtime.ranks.transport import Transport

_LEAD_S = 0.02  # from the ranks' agreement on when to begin until then


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPrompts:
    """What one rank did; seconds since the first prompt's arrival."""

    begin_s: tuple[float, ...]  # of each prompt
    end_s: tuple[float, ...]  # the same; on the last rank, when the first token was there
    waited_s: float  # for other ranks, in all prompts together
    tokens: tuple[tuple[int, ...], ...]  # first token of each prompt's rows; () on the other ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptsReport:
    """Prompts as they were run, again and again."""

    repeats: tuple[tuple[RankPrompts, ...], ...]  # by repetition, by rank
    logits_error: float | None  # largest difference from one process's; None: not compared
    logits_scale: float | None  # largest logit, by magnitude
    conditions: dict[str, str]


class PromptRun(Prefill):
    """Prompts of one plan, one behind the other in the same memory."""

    def __init__(self, forward: Forward, transport: Transport, plan: RunPlan) -> None:
        """As Prefill. Raises InputError for a plan that is no chain, and for ranks of several hosts."""
        if plan.strategy not in ("single", "kvr"):
            raise InputError("requests", plan.label, "a strategy that is a chain: single, kvr-e, kvr-s or kvr-p")
        if not is_one_host(transport):
            raise InputError("requests", "ranks of several hosts", "ranks of one host, which share a clock")
        super().__init__(forward, transport, plan)

    def run_all(
        self, prompts: Sequence[Any], arrivals_s: Sequence[float], kept: list[Any] | None = None
    ) -> RankPrompts:
        """Run prompts [B, C] that arrive at these times; no rank waits for another but for its messages.

        kept: where the logits of each prompt go, on the rank that has them.
        """
        self.exchange.reset()
        with self._named_faults():
            self.transport.barrier()
            zero_s = max(self.transport.exchange(time.monotonic())) + _LEAD_S
            self.clock.start()
            self.clock.mark("start")
            found = [
                self._one(ids, zero_s + arrival_s, kept, more=number + 1 < len(prompts))
                for number, (ids, arrival_s) in enumerate(zip(prompts, arrivals_s, strict=True))
            ]
            marks = self.clock.finish()
            self.exchange.finish()
        return RankPrompts(
            begin_s=tuple(begin_s - zero_s for begin_s, _, _ in found),
            end_s=tuple(end_s - zero_s for _, end_s, _ in found),
            waited_s=_waited_s(marks),
            tokens=tuple(tokens for _, _, tokens in found if tokens),
        )

    def _one(
        self, ids: Any, arrival_s: float, kept: list[Any] | None, *, more: bool
    ) -> tuple[float, float, tuple[int, ...]]:
        """When a prompt begins and ends here, and its first tokens."""
        exchange, tokens = self.exchange, ()
        exchange.more = more
        if (early_s := arrival_s - time.monotonic()) > 0:
            time.sleep(early_s)
        begin_s = time.monotonic()
        if exchange.place is not None:
            logits = exchange.run(ids)
            if exchange.gives_token and logits is not None:
                tokens = tuple(logits.argmax(-1).tolist())
                if kept is not None:
                    kept.append(logits)
        if ids.is_cuda:
            torch.cuda.current_stream(ids.device).synchronize()
        return begin_s, time.monotonic(), tokens


def _waited_s(marks: Sequence[Mark]) -> float:
    names = ("wait", "received")
    pairs = pairwise(marks)
    return sum(later.device_s - mark.device_s for mark, later in pairs if (mark.name, later.name) == names)


def run_prompts(transport: Transport, job: Job, arrivals_s: Sequence[float]) -> PromptsReport:
    """Run a job's only plan on as many prompts as arrive, `repeats` times; every rank returns the same report."""
    agree(transport, job.facts() | {"arrivals": " ".join(map(str, arrivals_s))})
    forward = ModelForward(job.model.load(device_of(transport)))
    return measure_prompts(linked_by(transport, job.link, job.traffic), forward, job, arrivals_s)


def measure_prompts(transport: Transport, forward: Forward, job: Job, arrivals_s: Sequence[float]) -> PromptsReport:
    """As `run_prompts`, with any forward."""
    (plan,) = job.plans
    run, seeds = PromptRun(forward, transport, plan), range(job.model.seed, job.model.seed + len(arrivals_s))
    model = forward.model if isinstance(forward, ModelForward) else None
    vocab_size = 2 if model is None else model.config.vocab_size
    prompts = [random_prompt(vocab_size, plan, seed).to(forward.geometry.device) for seed in seeds]
    repeats, kept = [], list[Any]()
    for repetition in range(job.warmups + job.repeats):
        transport.report(repetition, job.warmups + job.repeats, "rounds of prompts")
        kept.clear()
        found: list[RankPrompts] = transport.exchange(run.run_all(prompts, arrivals_s, kept), RankPrompts)
        if repetition >= job.warmups:
            repeats.append(tuple(found))
    transport.report(job.warmups + job.repeats, job.warmups + job.repeats, "rounds of prompts")
    error, scale = _compared(model, prompts, kept) if job.check_logits and kept and model is not None else (None, None)
    return PromptsReport(
        repeats=tuple(repeats),
        logits_error=transport.exchange(error, float | None)[-1],
        logits_scale=transport.exchange(scale, float | None)[-1],
        conditions=conditions_of(transport, forward) | {"repetitions": f"{job.repeats} after {job.warmups} warm-ups"},
    )


def _compared(model: Any, prompts: Sequence[Any], kept: Sequence[Any]) -> tuple[float, float]:
    """The largest difference of any prompt's last logits from one process's, and the largest logit."""
    errors, scales = [], []
    for ids, logits in zip(prompts, kept, strict=True):
        with torch.inference_mode():
            alone = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].float()
        errors.append(float((logits.float() - alone).abs().max()))
        scales.append(float(alone.abs().max()))
    return max(errors), max(scales)
