"""Prefills on the ranks: measured in turn, compared with one process, and what all ranks are given to do."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch

from kvrsim.choices import Attention
from kvrsim.errors import InputError
from kvrsim.interp import interquartile_range
from kvrsim.results.timeline import Timeline
from kvrsim.runtime.exchange import Exchange, exchange_of
from kvrsim.runtime.faults import Fault, FaultKind, LinkError, RankError, is_out_of_memory
from kvrsim.runtime.geometry import DTYPES, Geometry, KvLayout
from kvrsim.runtime.host import HostLoad, cpu_name, versions
from kvrsim.runtime.kv_cache import Chunk, KvPairs, Memory, PrefixCache, allocate, allocate_chunk, make_buffers
from kvrsim.runtime.marks import RankTrace, clock_of, hooked, timeline_of
from kvrsim.runtime.model import Forward, ModelForward, geometry_of, load_model
from kvrsim.runtime.plan import RunPlan, random_prompt
from kvrsim.runtime.transport import EmulatedLink, EmulatedTransport, Transport


class Prefill:
    """One rank's part in prefills of one plan; buffers are made once and used again.

    Ranks first make sure that they agree on plan, model and libraries. Raises InputError where the plan does
    not suit the model or the number of ranks, RankError where the ranks disagree, a message does not come, or
    memory runs out.
    """

    def __init__(self, forward: Forward, transport: Transport, plan: RunPlan, memory: Memory | None = None) -> None:
        """memory: of each layer, used by other prefills in turn; None: its own."""
        self.forward, self.transport, self.plan, self.geometry = forward, transport, plan, forward.geometry
        self.clock = clock_of(self.geometry.device, all_streams=True)
        self.logits: Any = None  # of the last token, [B, vocabulary], after `run`, on the rank that emits it
        self._exchange: Exchange | None = None
        with self._named_faults():
            agree(transport, self._facts())
            exchange = exchange_of(plan.strategy)
            exchange.check(plan, self.geometry)
            transport.connect(exchange.edges(plan, transport.size))
            self._exchange = exchange(forward, transport, plan, self.clock, memory)

    @property
    def exchange(self) -> Exchange:
        """What this rank runs, keeps and sends."""
        assert self._exchange is not None
        return self._exchange

    @property
    def cache(self) -> PrefixCache | None:
        """What this rank's layers keep; None where it takes no part."""
        return self.exchange.cache

    def run(self, input_ids: Any) -> RankTrace:
        """Prefill prompts [B, C], the same on every rank, starting together."""
        assert tuple(input_ids.shape) == (self.plan.batch, self.plan.context_len)
        exchange, tokens, takes_part = self.exchange, None, self.cache is not None
        exchange.reset()
        with self._named_faults():
            self.transport.barrier()
            self.clock.start()
            self.clock.mark("start")
            if takes_part:
                self.logits = exchange.run(input_ids)
                if exchange.emits_token and self.logits is not None:
                    tokens = tuple(self.logits.argmax(-1).tolist())
            self.clock.mark("token")
            marks = tuple(self.clock.finish())
            exchange.finish()
        return RankTrace(
            rank=self.transport.rank,
            start_s=self.clock.start_s,
            marks=marks if takes_part else (),
            emits_token=exchange.emits_token,
            tokens=tokens,
        )

    def _facts(self) -> dict[str, str]:
        geometry = self.forward.whole_geometry
        layout = f"{geometry.title}; {geometry.dtype}"
        facts = versions() | {"plan": self.plan.label, "batch": str(self.plan.batch), "KV cache": layout}
        facts |= {"collectives": self.plan.gather, "number of ranks": str(self.transport.size)}
        return facts | {"model": self.forward.digest(), "attention": geometry.attention}

    @contextmanager
    def _named_faults(self) -> Iterator[None]:
        """Name the rank and the layer of a failure."""
        try:
            yield
        except LinkError as error:
            raise RankError([self._fault("link", error.reason, error.peer)]) from None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            text = " ".join(str(error).split())[:120] or type(error).__name__
            raise RankError([self._fault("memory", f"out of memory ({text})")]) from error

    def _fault(self, kind: FaultKind, message: str, peer: int | None = None) -> Fault:
        layer = None if self._exchange is None else self._exchange.layer
        return Fault(rank=self.transport.rank, kind=kind, message=message, layer=layer, peer=peer)


def agree(transport: Transport, facts: Mapping[str, str]) -> None:
    """Compare facts with all ranks; raise RankError, on every rank, naming what differs from rank 0's."""
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


def shared_memory(
    geometry: Geometry, transport: Transport, plans: Sequence[RunPlan], *, least: int = 0
) -> dict[int, Memory]:
    """Allocate by batch the memory that holds this rank's part in each plan, and at least `least` tokens."""
    elements: dict[int, list[int]] = {}
    for plan in plans:
        whole = Chunk(start=0, length=least, batch=plan.batch)
        exchange = exchange_of(plan.strategy)
        most = elements.setdefault(plan.batch, [0] * geometry.num_hidden_layers)
        for layer, layout in enumerate(geometry.layouts):
            if isinstance(layout, KvLayout):
                held = exchange.elements(plan, transport.rank, transport.size, layout)
                most[layer] = max(most[layer], held, whole.elements(layout))
    return {batch: allocate(geometry, counts, batch) for batch, counts in elements.items()}


def decode(model: Any, cache: PrefixCache, input_ids: Any, tokens: tuple[int, ...], num_tokens: int) -> Any:
    """Continue greedily from the last rank's cache; return the prompts' `num_tokens` next tokens, [B, num_tokens].

    tokens: the first ones, which the prefill emitted.
    """
    first = torch.tensor(tokens, device=input_ids.device).unsqueeze(1)
    if num_tokens == 1:
        return first
    ids = torch.cat([input_ids, first], dim=1)
    continued = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # otherwise tokens that look like padding would be left out
        past_key_values=cache.to_dynamic_cache(),
        max_new_tokens=num_tokens - 1,
        min_new_tokens=num_tokens - 1,
        do_sample=False,
    )
    return continued[:, input_ids.shape[1] :]


# TTFT of several plans, in turn.


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """TTFT of one plan, measured repeatedly."""

    plan: RunPlan
    ttft_s: tuple[float, ...]  # of each repetition in the order in which they ran, without warm-ups
    other_cores: tuple[float | None, ...] = ()  # cores that other processes kept busy in each; None: unknown

    @property
    def median_s(self) -> float:
        """Median TTFT."""
        return statistics.median(self.ttft_s)

    @property
    def iqr_s(self) -> float:
        """Interquartile range of the repetitions."""
        return interquartile_range(self.ttft_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchReport:
    """What was measured, and on what."""

    timings: tuple[Timing, ...]  # by plan
    timelines: tuple[Timeline, ...]  # by plan: of one more prefill, with its layers hooked
    conditions: dict[str, str]  # machine, libraries, transport, model: all that the figures depend on
    drift_s: tuple[float, ...] = ()  # by round, of a prefill on every rank at once; empty where it was not requested


def measure(
    transport: Transport,
    forward: Forward,
    plans: Sequence[RunPlan],
    *,
    repeats: int = 7,
    warmups: int = 2,
    seed: int = 0,
    drift_tokens: int | None = None,
) -> BenchReport:
    """Measure each plan `repeats` times after `warmups`, one after another so that clock drift affects all equally.

    drift_tokens: in every round, also time a prefill of that length on every rank at once.

    TTFT is the first token minus the earliest start, all ranks leaving a barrier together. Ranks on several hosts share
    no clock; there it is the start of the rank that emits the token. Every rank returns the same report.
    """
    if repeats < 1:
        raise InputError("repeats", repeats, "at least 1")
    memory = shared_memory(forward.geometry, transport, plans, least=drift_tokens or 0)
    prefills = [Prefill(forward, transport, plan, memory[plan.batch]) for plan in plans]
    prompts = [prompt_of(forward, plan, seed) for plan in plans]
    batch, one_host = plans[0].batch, is_one_host(transport)
    load = HostLoad()
    ttft_s: list[list[float]] = [[] for _ in plans]
    cores: list[list[float | None]] = [[] for _ in plans]
    drift_s: list[float] = []
    done, total = 0, len(plans) * (warmups + repeats)
    for repetition in range(warmups + repeats):
        if drift_tokens is not None:
            chunk = Chunk(start=0, length=drift_tokens, batch=batch)
            drift_s.append(_prefill_alone_s(transport, forward, chunk, prompts[0], memory[batch]))
        for turn in range(len(plans)):
            number = (turn + repetition) % len(plans)
            transport.report(done, total, "prefills")
            load.other_cores(_cpu_s(transport))
            traces: list[RankTrace] = transport.exchange(prefills[number].run(prompts[number]))
            others = load.other_cores(_cpu_s(transport)) if one_host else None
            if repetition >= warmups:
                ttft_s[number].append(ttft_of(traces, one_host=one_host))
                cores[number].append(others)
            done += 1
    transport.report(done, total, "prefills")
    cores = transport.exchange(cores)[0]  # as rank 0 sees them
    return BenchReport(
        timings=tuple(
            Timing(plan=plan, ttft_s=tuple(times), other_cores=tuple(others))
            for plan, times, others in zip(plans, ttft_s, cores, strict=True)
        ),
        timelines=tuple(_hooked_timeline(prefill, ids) for prefill, ids in zip(prefills, prompts, strict=True)),
        conditions=conditions_of(transport, forward)
        | {
            "repetitions": f"{repeats} after {warmups} warm-ups, plans interleaved",
            "clock": "one host's" if one_host else "the last rank's own",
        },
        drift_s=tuple(drift_s[warmups:]),
    )


def prompt_of(forward: Forward, plan: RunPlan, seed: int) -> Any:
    """Return random token ids [B, C] on the rank's device."""
    return random_prompt(forward.vocab_size, plan, seed).to(forward.geometry.device)


def _prefill_alone_s(transport: Transport, forward: Forward, chunk: Chunk, ids: Any, memory: Memory) -> float:
    """Run a prefill on every rank, each by itself, all starting together; return the mean of the ranks' seconds."""
    cache = PrefixCache(make_buffers(forward.geometry, chunk, memory))
    transport.barrier()
    started_s = time.monotonic()
    forward(ids[:, : chunk.length], 0, cache, is_last=True)
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    seconds: list[float] = transport.exchange(time.monotonic() - started_s)
    return sum(seconds) / len(seconds)


def _cpu_s(transport: Transport) -> float:
    """Return the processor time that all ranks have used."""
    return float(sum(transport.exchange(time.process_time())))


def is_one_host(transport: Transport) -> bool:
    """Whether all ranks share a clock."""
    return len(set(transport.exchange(platform.node()))) == 1


def ttft_of(traces: Sequence[RankTrace], *, one_host: bool) -> float:
    """Return the first token minus the earliest start, or that of its own rank where ranks share no clock."""
    last = next(trace for trace in traces if trace.emits_token)
    starts_s = [trace.start_s for trace in traces if trace.marks]
    return last.end_s - (min(starts_s) if one_host else last.start_s)


def _hooked_timeline(prefill: Prefill, ids: Any) -> Timeline:
    """Run one more prefill, with layers hooked where there is a model."""
    exchange = prefill.exchange
    if isinstance(exchange.forward, ModelForward):
        model = exchange.forward.model
        with hooked(model, exchange.geometry, prefill.clock, first_layer=exchange.first_layer):
            trace = prefill.run(ids)
    else:
        trace = prefill.run(ids)
    return timeline_of(prefill.plan.strategy, prefill.transport.exchange(trace))


def conditions_of(transport: Transport, forward: Forward) -> dict[str, str]:
    """Return what measured times depend on: libraries, machine, transport, model."""
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


# Exactness: several ranks against one process.


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How far a prefill on several ranks is from the same on one."""

    plan: str  # the plan's label
    logits: float  # largest difference of the last token's logits
    logits_scale: float  # largest logit, by magnitude
    kv_cache: float  # largest difference in K, V and states, on the rank that emits the first token, over all layers
    same_tokens: bool  # whether the greedy continuations are equal
    num_tokens: int  # of the continuation


def compare(
    transport: Transport, model: Any, plans: Sequence[RunPlan], *, num_tokens: int = 8, seed: int = 0
) -> list[Difference]:
    """Run each plan and compare it, where its first token is, with transformers' own prefill there.

    Every rank returns the same. A strategy after which no rank can decode is compared in its first token alone.
    References are computed first, so that their KV cache and the plans' are not in the device's memory together.
    """
    forward, differences = ModelForward(model), list[Difference]()
    prompts = [prompt_of(forward, plan, seed) for plan in plans]
    references: dict[tuple[int, ...], _Reference] = {}
    for plan, ids in zip(plans, prompts, strict=True):
        own = transport.rank == exchange_of(plan.strategy).first_token_rank(plan, transport.size)
        if own and tuple(ids.shape) not in references:
            references[tuple(ids.shape)] = _Reference.of(model, ids, num_tokens)
    memory = shared_memory(forward.geometry, transport, plans)
    for number, (plan, ids) in enumerate(zip(plans, prompts, strict=True)):
        prefill = Prefill(forward, transport, plan, memory[plan.batch])
        tokens = prefill.run(ids).tokens
        difference = None if tokens is None else _difference(prefill, model, tokens, ids, references[tuple(ids.shape)])
        differences += [one for one in transport.exchange(difference) if one is not None]
        transport.report(number + 1, len(plans), "logits compared")
    return differences


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reference:
    """What transformers computes by itself; K, V and states are in the host's memory."""

    logits: Any  # of the last token
    kept: KvPairs
    tokens: Any  # greedy continuation [B, num_tokens]

    @classmethod
    def of(cls, model: Any, ids: Any, num_tokens: int) -> _Reference:
        """Run a model."""
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        kept = [_kept_by(layer) for layer in cache.layers]
        del cache
        tokens = logits.argmax(-1, keepdim=True)
        if num_tokens > 1:
            lengths: dict[str, Any] = dict(max_new_tokens=num_tokens, min_new_tokens=num_tokens)
            mask = torch.ones_like(ids)
            tokens = model.generate(ids, attention_mask=mask, do_sample=False, **lengths)[:, ids.shape[1] :]
        return cls(logits=logits, kept=kept, tokens=tokens)


def _difference(prefill: Prefill, model: Any, tokens: tuple[int, ...], ids: Any, reference: _Reference) -> Difference:
    cache, num_tokens = prefill.cache, reference.tokens.shape[1] if prefill.exchange.decodes else 1
    assert cache is not None
    continued = decode(model, cache, ids, tokens, num_tokens)
    return Difference(
        plan=prefill.plan.label,
        logits=_distance(prefill.logits, reference.logits),
        logits_scale=reference.logits.abs().max().item(),
        kv_cache=cache_distance(cache, prefill.exchange.own_part(reference.kept)),
        same_tokens=bool(torch.equal(continued, reference.tokens[:, :num_tokens])),
        num_tokens=num_tokens,
    )


def _kept_by(layer: Any) -> tuple[Any, Any] | None:
    """Copy what a layer of transformers' cache holds to the host: K and V, its states, or nothing."""
    if hasattr(layer, "recurrent_states"):
        return layer.recurrent_states[0].cpu(), layer.conv_states[0].cpu()
    return (layer.keys.cpu(), layer.values.cpu()) if layer.keys is not None else None


def cache_distance(ours: PrefixCache, theirs: KvPairs) -> float:
    """Return the largest difference of K, V and states in any layer, in what both sides hold."""
    distances = [0.0]
    for own, other in zip(ours.parts(), theirs, strict=True):
        for a, b in zip(own or (), other or (), strict=True):
            # K and V end with the last token; a convolution's inputs, in the last dimension, too.
            axis = a.dim() - (1 if a.dim() == 3 else 2)
            common = min(a.shape[axis], b.shape[axis])
            a, b = (part.narrow(axis, part.shape[axis] - common, common) for part in (a, b))
            distances.append(_distance(a, b.to(a.device)))
    return float(torch.tensor(distances).max())  # which lets "not a number" through, unlike max()


def _distance(ours: Any, theirs: Any) -> float:
    return float((ours.float() - theirs.float()).abs().max().item())


# What all ranks are given to do.


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChoice:
    """Which model the ranks run, with random weights."""

    config: str | Mapping[str, object]  # a built-in name, a path, or the keys of a config.json
    dtype: str  # one of DTYPES
    attention: Attention  # kernel
    device: str = "cpu"  # or "cuda"
    seed: int = 0  # of the weights and of the prompt
    init_std: float | None = None  # standard deviation of the weights; None: the config's

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError("dtype", self.dtype, "what the runtime computes in: " + ", ".join(DTYPES))

    def load(self, transport: Transport) -> ModelForward:
        """Make the model on the device of the rank."""
        model = load_model(self.config, self.dtype, transport.device, self.attention, self.seed, self.init_std)
        return ModelForward(model)

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
    check_logits: bool = True  # against one process
    drift_tokens: int | None = None  # of a prefill on every rank at once, in every round; None: not timed
    generate: int = 0  # tokens that the last rank decodes greedily after the last plan's prefill

    def facts(self) -> dict[str, str]:
        """Return what determines how many messages each rank sends and expects: it must be the same on all of them."""
        facts = {one.name: str(getattr(self, one.name)) for one in fields(self) if one.name not in ("model", "plans")}
        plans = "; ".join(plan.label for plan in self.plans)
        return facts | {"partitions": plans, "seed": str(self.model.seed)}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobReport:
    """What the ranks have measured."""

    bench: BenchReport
    differences: tuple[Difference, ...]  # by plan; empty where logits were not compared
    generated: tuple[tuple[int, ...], ...] = ()  # tokens by prompt


def run_job(transport: Transport, job: Job) -> JobReport:
    """Measure every plan, then compare logits with one process's; every rank returns the same report."""
    agree(transport, job.facts() | versions())
    forward = job.model.load(transport)
    if len(job.plans) == 1 and not job.check_logits and job.drift_tokens is None and not job.generate:
        plan = job.plans[0]
        forward = exchange_of(plan.strategy).own_forward(forward, plan, transport.rank, transport.size)
    linked = transport if job.link is None else EmulatedTransport(transport, job.link)
    times: dict[str, Any] = dict(repeats=job.repeats, warmups=job.warmups, drift_tokens=job.drift_tokens)
    bench = measure(linked, forward, job.plans, seed=job.model.seed, **times)
    differences: list[Difference] = []
    if job.check_logits:
        linked.report(0, len(job.plans), "logits compared")
        differences = compare(transport, forward.model, job.plans, num_tokens=1, seed=job.model.seed)
    generated = _generate(transport, forward, job) if job.generate else ()
    return JobReport(bench=bench, differences=tuple(differences), generated=generated)


def _generate(transport: Transport, forward: ModelForward, job: Job) -> tuple[tuple[int, ...], ...]:
    """Run the last plan's prefill and decode; return the tokens, the same on every rank."""
    plan = job.plans[-1]
    ids = prompt_of(forward, plan, job.model.seed)
    prefill = Prefill(forward, transport, plan)
    tokens = prefill.run(ids).tokens
    own: tuple[tuple[int, ...], ...] = ()
    if tokens is not None:
        assert prefill.cache is not None
        rows = decode(forward.model, prefill.cache, ids, tokens, job.generate)
        own = tuple(tuple(row) for row in rows.tolist())
    every: list[tuple[tuple[int, ...], ...]] = transport.exchange(own)
    return max(every, key=len)


class Stopwatch:
    """One rank's part in prefills of any plans of one context, one after another, in the same memory."""

    def __init__(self, transport: Transport, model: ModelChoice) -> None:
        self.transport, self.choice = transport, model
        self.forward = model.load(transport)
        self.one_host = is_one_host(transport)
        self.memory: Memory | None = None

    def ttft_s(self, plan: RunPlan) -> float:
        """Measure a plan once; the same on every rank."""
        if self.memory is None:
            whole = Chunk(start=0, length=plan.context_len, batch=plan.batch)
            self.memory = allocate_chunk(self.forward.geometry, whole)
        prefill = Prefill(self.forward, self.transport, plan, self.memory)
        traces = self.transport.exchange(prefill.run(prompt_of(self.forward, plan, self.choice.seed)))
        return ttft_of(traces, one_host=self.one_host)

    def conditions(self) -> dict[str, str]:
        """Return what the times depend on."""
        return conditions_of(self.transport, self.forward)
