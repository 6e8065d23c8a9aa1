"""Prefills on the ranks: measure them in turn, and compare them with one process."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvrsim.runtime.exchange import Exchange, exchange_of
from kvrsim.runtime.faults import Fault, FaultKind, LinkError, RankError, is_out_of_memory
from kvrsim.runtime.host import device_name, versions
from kvrsim.runtime.kv_cache import KvPairs, Memory, PrefixCache, allocate
from kvrsim.runtime.marks import RankTrace, clock_of, timeline_of
from kvrsim.runtime.model import ModelForward, load_model
from kvrsim.runtime.plan import Difference, Job, ModelChoice, Report, RunPlan, Timing, random_prompt
from kvrsim.runtime.transport import EmulatedTransport, Transport


class Prefill:
    """One rank's part in prefills of one plan; buffers are made once and used again.

    Ranks first make sure that they agree on plan, model and libraries. Raises InputError where the plan does
    not suit the model or the number of ranks, RankError where the ranks disagree, a message does not come, or
    memory runs out.
    """

    def __init__(
        self, forward: ModelForward, transport: Transport, plan: RunPlan, memory: Memory | None = None
    ) -> None:
        """memory: per layer, shared in turn with other prefills; None: its own."""
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
        """The part that this rank runs, keeps and sends."""
        assert self._exchange is not None
        return self._exchange

    @property
    def cache(self) -> PrefixCache | None:
        """The cache of this rank's layers; None if the rank takes no part."""
        return self.exchange.cache

    def run(self, input_ids: Any) -> RankTrace:
        """Prefill prompts [B, C], the same on every rank, starting together."""
        assert tuple(input_ids.shape) == (self.plan.batch, self.plan.context_len)
        exchange, takes_part = self.exchange, self.cache is not None
        exchange.reset()
        with self._named_faults():
            self.transport.barrier()
            self.clock.start()
            self.clock.mark("start")
            if takes_part:
                self.logits = exchange.run(input_ids)
                if exchange.emits_token and self.logits is not None:
                    self.logits.argmax(-1).tolist()  # the first token, for which a user waits
            self.clock.mark("token")
            marks = tuple(self.clock.finish())
            exchange.finish()
        return RankTrace(
            rank=self.transport.rank,
            start_s=self.clock.start_s,
            marks=marks if takes_part else (),
            emits_token=exchange.emits_token,
        )

    def run_hooked(self, input_ids: Any) -> RankTrace:
        """Do the same with layers hooked, so that the timeline shows their parts."""
        with self.exchange.forward.hooked(self.clock, self.exchange.first_layer):
            return self.run(input_ids)

    def difference(self, reference: tuple[Any, KvPairs]) -> Difference:
        """Compare the prefill that ran last with one process's: `reference_of`."""
        logits, kept = reference
        assert self.cache is not None
        return Difference(
            logits=_distance(self.logits, logits),
            logits_scale=logits.abs().max().item(),
            kv_cache=cache_distance(self.cache, self.exchange.own_part(kept)),
        )

    def _facts(self) -> dict[str, str]:
        geometry = self.forward.whole_geometry
        layout = f"{geometry.title}; {geometry.dtype}"
        facts = versions() | {"plan": self.plan.label, "batch": str(self.plan.batch), "KV cache": layout}
        facts |= {"collectives": self.plan.gather, "number of ranks": str(self.transport.size)}
        return facts | {"model": self.forward.digest, "attention": geometry.attention}

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
    first, *others = transport.exchange(dict(facts))
    faults = []
    for rank, theirs in enumerate(others, start=1):
        for fact in sorted({*first, *theirs}):
            own, expected = theirs.get(fact, "nothing"), first.get(fact, "nothing")
            if own != expected:
                message = f"{fact} is {own}, but {expected} on rank 0"
                faults.append(Fault(rank=rank, kind="mismatch", message=message))
    if faults:
        raise RankError(faults)


class Stopwatch:
    """One rank's part in timed prefills of several plans of one batch, in the same memory."""

    def __init__(self, transport: Transport, forward: ModelForward, plans: Sequence[RunPlan], seed: int = 0) -> None:
        """`plans` determine the size of the memory; other plans that need no more may be timed as well."""
        self.transport, self.forward, self.seed = transport, forward, seed
        self.one_host = len(set(transport.exchange(platform.node()))) == 1  # else the ranks share no clock
        geometry, size = forward.geometry, transport.size
        elements = [0] * geometry.num_hidden_layers
        for plan in plans:
            held = exchange_of(plan.strategy).elements(plan, transport.rank, size, geometry.layouts)
            elements = list(map(max, elements, held))
        self.memory = allocate(geometry, elements, plans[0].batch)
        self._prefills: dict[RunPlan, Prefill] = {}

    def prefill(self, plan: RunPlan) -> Prefill:
        """Return the rank's part in prefills of a plan."""
        if plan not in self._prefills:
            self._prefills[plan] = Prefill(self.forward, self.transport, plan, self.memory)
        return self._prefills[plan]

    def ttft_s(self, plan: RunPlan) -> float:
        """Run a prefill; return the first token minus the earliest start, the same on every rank.

        Ranks on several hosts share no clock; there it is the start of the rank that emits the token.
        """
        trace = self.prefill(plan).run(prompt_of(self.forward, plan, self.seed))
        traces: list[RankTrace] = self.transport.exchange(trace)
        last = next(trace for trace in traces if trace.emits_token)
        starts_s = [trace.start_s for trace in traces if trace.marks] if self.one_host else [last.start_s]
        return last.end_s - min(starts_s)

    def conditions(self) -> dict[str, str]:
        """Return what measured times depend on: libraries, machine, transport, model."""
        clock = {"clock": "one host's" if self.one_host else "the last rank's own"}
        return conditions_of(self.transport, self.forward) | clock


def measure(
    transport: Transport,
    forward: ModelForward,
    plans: Sequence[RunPlan],
    *,
    repeats: int = 7,
    warmups: int = 2,
    seed: int = 0,
    check: bool = False,
) -> Report:
    """Measure each plan `repeats` times after `warmups`, one after another so that clock drift affects all equally.

    check: compare one more prefill of each with transformers' own, where its first token is. One process's logits are
    computed first, so that its KV cache and the plans' are not in the device's memory together. Every rank returns the
    same report.
    """
    references: dict[int, tuple[Any, KvPairs]] = {}
    for plan in plans if check else ():
        if plan.context_len not in references and transport.rank == first_token_rank(plan, transport):
            references[plan.context_len] = reference_of(forward.model, prompt_of(forward, plan, seed))
    watch = Stopwatch(transport, forward, plans, seed)
    for plan in plans:  # prepare every plan before any is timed
        watch.prefill(plan)
    ttft_s: list[list[float]] = [[] for _ in plans]
    total = len(plans) * (warmups + repeats)
    for done in range(total):
        repetition, turn = divmod(done, len(plans))
        number = (turn + repetition) % len(plans)
        transport.report(done, total, "prefills")
        one_s = watch.ttft_s(plans[number])
        if repetition >= warmups:
            ttft_s[number].append(one_s)
    transport.report(total, total, "prefills")
    timings = []
    for plan, seconds in zip(plans, ttft_s, strict=True):
        prefill = watch.prefill(plan)
        trace = prefill.run_hooked(prompt_of(forward, plan, seed))
        own = prefill.difference(references[plan.context_len]) if check and trace.emits_token else None
        traces, differences = transport.exchange(trace), transport.exchange(own)
        timings.append(
            Timing(
                plan=plan,
                ttft_s=tuple(seconds),
                timeline=timeline_of(plan.strategy, traces),
                difference=next((one for one in differences if one is not None), None),
            )
        )
    conditions = watch.conditions() | {"repetitions": f"{repeats} after {warmups} warm-ups, plans interleaved"}
    return Report(timings=tuple(timings), conditions=conditions)


def first_token_rank(plan: RunPlan, transport: Transport) -> int:
    """Return the rank that emits a plan's first token."""
    return exchange_of(plan.strategy).first_token_rank(plan, transport.size)


def prompt_of(forward: ModelForward, plan: RunPlan, seed: int) -> Any:
    """Return random token ids [B, C] on the rank's device."""
    return random_prompt(forward.vocab_size, plan, seed).to(forward.geometry.device)


def conditions_of(transport: Transport, forward: ModelForward) -> dict[str, str]:
    """Return what measured times depend on: libraries, machine, transport, model."""
    geometry = forward.whole_geometry
    return versions() | {
        "ranks": str(transport.size),
        "transport": transport.name,
        "device": device_name(geometry.device.type),
        "cores of the host": str(os.cpu_count()),
        "threads per rank": str(torch.get_num_threads()),
        "dtype": str(geometry.dtype).removeprefix("torch."),
        "attention": geometry.attention,
        "messages": geometry.title,
        "model": f"{geometry.model_type}, {geometry.num_hidden_layers} layers, {forward.digest}",
    }


# Exactness: several ranks against one process.


def reference_of(model: Any, ids: Any) -> tuple[Any, KvPairs]:
    """Return the last token's logits, and each layer's cache in host memory, as transformers computes them."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    return logits, [_kept_by(layer) for layer in cache.layers]


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
    return float(torch.tensor(distances).max())  # unlike max(), this keeps NaN


def _distance(ours: Any, theirs: Any) -> float:
    return float((ours.float() - theirs.float()).abs().max().item())


def forward_of(choice: ModelChoice, transport: Transport) -> ModelForward:
    """Load a model on the device of the rank."""
    kernel, seed, init_std = choice.attention, choice.seed, choice.init_std
    return ModelForward(load_model(choice.config, choice.dtype, transport.device, kernel, seed, init_std))


def run_job(transport: Transport, job: Job) -> Report:
    """Measure every plan; every rank returns the same report."""
    agree(transport, job.facts() | versions())
    forward = forward_of(job.model, transport)
    if len(job.plans) == 1 and not job.check_logits:
        plan = job.plans[0]
        forward = exchange_of(plan.strategy).own_forward(forward, plan, transport.rank, transport.size)
    linked = transport if job.link is None else EmulatedTransport(transport, job.link)
    times: dict[str, Any] = dict(repeats=job.repeats, warmups=job.warmups)
    return measure(linked, forward, job.plans, seed=job.model.seed, check=job.check_logits, **times)
