"""Measurements of prefills on the ranks, plan after plan in turn, and comparisons with one process."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from kvrsim.runtime.decode import Reference, decode, difference, reference_of
from kvrsim.runtime.exchange import Exchange, exchange_of, make_exchange
from kvrsim.runtime.faults import Fault, RankError
from kvrsim.runtime.host import device_name, versions
from kvrsim.runtime.kv_cache import Chunk, Memory, allocate
from kvrsim.runtime.marks import RankTrace, own_spans, timeline_of
from kvrsim.runtime.model import ModelForward, load_model
from kvrsim.runtime.plan import Difference, Job, ModelChoice, Parts, Report, RunPlan, Timing
from kvrsim.runtime.transport import Pending, Transport

Result = TypeVar("Result")
Lengths = tuple[int, int]  # tokens of a prompt, and tokens to generate


def agree(transport: Transport, forward: ModelForward, facts: Mapping[str, str]) -> None:
    """Compare facts, versions, models and transports of all ranks.

    If some differ from those of rank 0, every rank raises RankError naming them.
    """
    facts_of_rank = {
        **facts,
        **versions(),
        "model": forward.digest,
        "weights": forward.weights,
        "transport": transport.name,
    }
    expected, *others = transport.exchange(facts_of_rank)
    faults = []
    for rank, facts_there in enumerate(others, start=1):
        for fact in sorted(expected):
            value = facts_there.get(fact, "nothing")
            if value != expected[fact]:
                message = f"{fact} is {value}, but {expected[fact]} on rank 0"
                faults.append(Fault(rank=rank, kind="mismatch", message=message))
    if faults:
        raise RankError(faults)


class Stopwatch:
    """One rank's part in timed prefills of several plans, which use the same memory."""

    def __init__(self, transport: Transport, forward: ModelForward, plans: Sequence[RunPlan], seed: int = 0) -> None:
        """`plans` determine the size of the memory; a plan that needs more memory gets its own."""
        self.transport = transport
        self.forward = forward
        self.seed = seed
        self.one_host = len(set(transport.exchange(platform.node()))) == 1  # ranks on several hosts share no clock
        rows = 0
        for plan in plans:
            chunk = exchange_of(plan.strategy).chunk_of(plan, transport.rank, transport.size)
            if chunk is not None:
                rows = max(rows, (chunk.total_len or chunk.end) + chunk.room)
        self.memory = allocate(forward.geometry, Chunk(start=0, length=rows, batch=plans[0].batch))
        self._exchanges: dict[RunPlan, Exchange] = {}

    def exchange(self, plan: RunPlan) -> Exchange:
        """Return the rank's part in prefills of a plan."""
        if plan not in self._exchanges:
            self._exchanges[plan] = make_exchange(self.forward, self.transport, plan, self.memory)
        return self._exchanges[plan]

    def ttft_s(self, plan: RunPlan) -> float:
        """Run a prefill; return the time from the earliest start to the first token, the same on every rank.

        Ranks on several hosts share no clock; then the start of the rank that emits the token is used.
        """
        trace = self.exchange(plan).prefill(prompt_of(self.forward, plan, self.seed))
        traces: list[RankTrace] = self.transport.exchange(trace)
        last = next(trace for trace in traces if trace.emits_token)
        start_s = last.start_s
        if self.one_host:
            start_s = min(trace.start_s for trace in traces if trace.marks)
        return last.end_s - start_s


def in_turn(transport: Transport, job: Job, prefill: Callable[[RunPlan], Result]) -> list[list[Result]]:
    """Call `prefill` for each plan `warmups` + `repeats` times, in turn, so that drift affects all plans equally.

    Return the results of the repeats by plan, in order of measurement.
    """
    results: list[list[Result]] = [[] for _ in job.plans]
    total = len(results) * (job.warmups + job.repeats)
    for done in range(total):
        transport.slot.report(done, total, "prefills")
        repetition, turn = divmod(done, len(results))
        number = (turn + repetition) % len(results)
        result = prefill(job.plans[number])
        if repetition >= job.warmups:
            results[number].append(result)
    transport.slot.report(total, total, "prefills")
    return results


def measure(transport: Transport, forward: ModelForward, job: Job) -> Report:
    """Measure each plan, and record the timeline of one more prefill with hooks in its layers.

    After that prefill, the ranks with the KV cache generate the plan's tokens. With `check_logits`, the rank that emits
    the first token compares this prefill and its tokens with those of one process. The latter runs first, so that its
    KV cache and those of the plans are not in device memory together. Every rank returns the same report.
    """
    plans = job.plans
    seed = job.model.seed
    references: dict[Lengths, Reference] = {}
    if job.check_logits:
        references = _references(transport, forward, job)
    watch = Stopwatch(transport, forward, plans, seed)
    for plan in plans:  # prepare all plans before timing
        watch.exchange(plan)
    timings = []
    for plan, seconds in zip(plans, in_turn(transport, job, watch.ttft_s), strict=True):
        exchange = watch.exchange(plan)
        trace = exchange.prefill(prompt_of(forward, plan, seed), hooked=True)
        decoding = decode(exchange)
        compared = None
        if decoding is not None and trace.emits_token and job.check_logits:
            compared = difference(exchange, decoding, references[plan.context_len, plan.output_tokens])
        traces: list[RankTrace] = []
        for trace_there, decoding_there, compared_there in transport.exchange((trace, decoding, compared)):
            traces.append(trace_there)
            decoding = decoding or decoding_there  # all ranks that decode have the same tokens
            compared = compared or compared_there  # only the rank that emits the token has compared
        timeline = timeline_of(plan.strategy, traces)
        timings.append(
            Timing(plan=plan, ttft_s=tuple(seconds), timeline=timeline, difference=compared, decoding=decoding)
        )
    return Report(timings=tuple(timings), conditions=conditions_of(transport, forward))


def _references(transport: Transport, forward: ModelForward, job: Job) -> dict[Lengths, Reference]:
    """Return what one process generates, for the plans whose first token this rank emits."""
    references: dict[Lengths, Reference] = {}
    for plan in job.plans:
        last = exchange_of(plan.strategy).first_token_rank(plan, transport.size)
        lengths = (plan.context_len, plan.output_tokens)
        if lengths not in references and transport.rank == last:
            prompt = prompt_of(forward, plan, job.model.seed)
            references[lengths] = reference_of(forward.model, prompt, plan.output_tokens)
    return references


def prompt_of(forward: ModelForward, plan: RunPlan, seed: int) -> Tensor:
    """Return random token ids [B, C] on the rank's device, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, forward.vocab_size, (plan.batch, plan.context_len), generator=generator)
    return ids.to(forward.geometry.device)


def conditions_of(transport: Transport, forward: ModelForward) -> dict[str, str]:
    """Return the conditions that measured times depend on: libraries, machine, transport, model."""
    geometry = forward.geometry
    return versions() | {
        "ranks": str(transport.size),
        "transport": transport.name,
        "device": device_name(geometry.device.type),
        "cores of the host": str(os.cpu_count()),
        "threads per rank": str(torch.get_num_threads()),
        "dtype": str(geometry.dtype).removeprefix("torch."),
        "attention": geometry.attention,
        "weights": forward.weights,
        "model": f"{geometry.model_type}, {geometry.num_hidden_layers} layers, {forward.digest}",
    }


def forward_of(choice: ModelChoice, transport: Transport) -> ModelForward:
    """Load a model on the rank's device."""
    settings = (choice.dtype, transport.device, choice.attention, choice.seed, choice.checkpoint)
    return ModelForward(load_model(choice.config, *settings), weights=choice.weights)


def run_job(transport: Transport, job: Job) -> Report:
    """Measure every plan; every rank returns the same report."""
    forward = forward_of(job.model, transport)
    agree(transport, forward, job.facts())
    return measure(transport, forward, job)


# Virtual ranks: each rank's real chunk with its real prefix, one rank after another on ONE device.


def run_virtual(transport: Transport, job: Job) -> Report:
    """Run the ranks of every plan one after another on this process's device, alternating between plans."""
    forward = forward_of(job.model, transport)
    first = job.plans[0]
    ids = prompt_of(forward, first, job.model.seed)
    reference = None
    if job.check_logits:
        reference = reference_of(forward.model, ids)  # before buffers are made
    memory = allocate(forward.geometry, Chunk(start=0, length=first.context_len, batch=first.batch))
    ranks = {plan: _virtual_ranks(forward, plan, memory) for plan in job.plans}
    differences: dict[RunPlan, Difference] = {}

    def prefill(plan: RunPlan) -> tuple[Parts, ...]:
        parts = tuple(_parts(rank.prefill(ids, hooked=True), plan) for rank in ranks[plan])
        if reference is not None:
            last = ranks[plan][-1]
            tokens = decode(last)
            assert tokens is not None
            differences[plan] = difference(last, tokens, reference)
        return parts

    timings = []
    for plan, parts in zip(job.plans, in_turn(transport, job, prefill), strict=True):
        timings.append(Timing(plan=plan, parts=tuple(parts), difference=differences.get(plan)))
    return Report(timings=tuple(timings), conditions=conditions_of(transport, forward))


class _VirtualTransport(Transport):
    """A transport without messages: all ranks share one memory, so nothing must be exchanged."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.name = "virtual"

    def isend(self, tensor: Tensor, dst: int) -> Pending:
        return self

    def irecv(self, tensor: Tensor, src: int) -> Pending:
        return self

    def wait(self) -> None:
        """Return at once, as virtual ranks have no messages."""


def _virtual_ranks(forward: ModelForward, plan: RunPlan, memory: Memory) -> list[Exchange]:
    """Return the ranks of one plan. They share the K and V of the whole context, also with other plans."""
    size = len(plan.partition.chunk_lens)
    ranks = [make_exchange(forward, _VirtualTransport(rank, size), plan, memory) for rank in range(size)]
    for rank in ranks:
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
