"""Ranks that sleep instead of computing, with real messages over emulated links, against the event executor.

So p = 4 and 8 can be looked at on two cores: what is checked is who waits for whom and for how long, alone and beside
side traffic.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from kvrsim.executors.event import EventSimulation, Link
from kvrsim.executors.run import run_program
from kvrsim.hardware import Cluster, load_cluster
from kvrsim.program import AllGather, Compute, Op, Program, Recv, Send
from kvrsim.runtime.geometry import Geometry, KvLayout
from kvrsim.runtime.measure import BenchReport, measure
from kvrsim.runtime.model import SleepForward
from kvrsim.runtime.plan import RunPlan
from kvrsim.runtime.ranks import Launch, launch
from kvrsim.runtime.transport import EmulatedLink, EmulatedTransport, MessageTraffic, Transport
from kvrsim.scenario import Partition

# Few bytes a token and a slow link: on two cores, moving the bytes takes time from nobody.
KEPT = KvLayout(num_key_value_heads=1, head_dim=32, v_head_dim=32)
GEOMETRY = Geometry(model_type="llama", num_attention_heads=8, layouts=(KEPT,) * 8)
TOKEN_BYTES = GEOMETRY.token_bytes(0)
LATENCY_S = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Sleepers:
    """Ranks, a context and a link."""

    num_ranks: int
    context_len: int
    link_bytes_per_s: float
    token_s: float = 4e-5  # of a layer, a token, but for attention
    pair_s: float = 1.5e-8  # of a layer, a query and a key

    @property
    def cluster(self) -> Cluster:
        """The simulator's view of the link."""
        return load_cluster(num_gpus=self.num_ranks).with_link(self.link_bytes_per_s, LATENCY_S)

    @property
    def link(self) -> EmulatedLink:
        """The runtime's."""
        return EmulatedLink(bandwidth_bytes_per_s=self.link_bytes_per_s, latency_s=LATENCY_S)

    def layer_s(self, chunk: int, prefix: int) -> tuple[float, float]:
        """Seconds of one layer before its K and V are exchanged, and after."""
        before_s = chunk * self.token_s / 3
        return before_s, 2 * before_s + chunk * (prefix + chunk / 2) * self.pair_s

    def plans(self) -> dict[str, RunPlan]:
        """TSP, and KVR with even chunks and with shrinking ones."""
        even = Partition.even(self.context_len, self.num_ranks)
        shrinking = shrinking_partition(self.context_len, self.num_ranks)
        return {
            "tsp": RunPlan(strategy="tsp", partition=even),
            "kvr, even": RunPlan(strategy="kvr", partition=even),
            "kvr, shrinking": RunPlan(strategy="kvr", partition=shrinking),
        }

    def program(self, plan: RunPlan) -> Program:
        """The same in the simulator's operations."""
        ranks = range(self.num_ranks)
        layer = tuple(tuple(self._ops(plan, rank)) for rank in ranks)
        nothing: tuple[tuple[Op, ...], ...] = tuple(() for _ in ranks)
        return Program(
            strategy=plan.strategy,
            prologue=nothing,
            layers=(layer,),
            layer_kind_index=(0,) * GEOMETRY.num_hidden_layers,
            epilogue=nothing,
        )

    def _ops(self, plan: RunPlan, rank: int) -> Iterator[Op]:
        start, end = plan.partition.boundaries[rank : rank + 2]
        seen = self.context_len if plan.strategy == "tsp" else end
        before_s, after_s = self.layer_s(end - start, seen - (end - start))
        yield Compute(name="qkv", device_s=np.array([before_s]))
        if plan.strategy == "tsp":
            yield AllGather(nbytes=np.array([float((end - start) * TOKEN_BYTES)]))
        else:
            if rank > 0:
                yield Recv(src=rank - 1)
            if rank < self.num_ranks - 1:
                yield Send(dst=rank + 1, nbytes=np.array([float(end * TOKEN_BYTES)]))
        yield Compute(name="attention", device_s=np.array([after_s]))


def shrinking_partition(tokens: int, ranks: int) -> Partition:
    """Chunks that shrink by a tenth from rank to rank."""
    shares = 0.9 ** np.arange(ranks)
    ends = np.round(np.cumsum(shares) / shares.sum() * tokens).astype(int)
    return Partition(chunk_lens=tuple(int(chunk) for chunk in np.diff([0, *ends])))


@dataclass(frozen=True, kw_only=True, slots=True)
class Slept:
    """One way to run, simulated and measured."""

    num_ranks: int
    name: str
    simulated_s: float
    measured_s: float  # median
    iqr_s: float
    noisy_simulated_s: float | None = None  # median over seeds; None: without side traffic
    noisy_measured_s: float | None = None

    @property
    def error(self) -> float:
        """Above 0: simulated too long."""
        return self.simulated_s / self.measured_s - 1


def sleep_on_rank(
    transport: Transport, sleepers: Sleepers, traffics: Sequence[MessageTraffic | None], repeats: int
) -> list[BenchReport]:
    """Run by every rank: all plans, under each traffic."""
    forward = SleepForward(GEOMETRY, sleepers.layer_s)
    plans = list(sleepers.plans().values())
    found = []
    for traffic in traffics:
        transport.barrier()
        emulated, warmups = EmulatedTransport(transport, replace(sleepers.link, traffic=traffic)), 0 if traffic else 1
        found.append(measure(emulated, forward, plans, repeats=repeats, warmups=warmups))
    return found


def sleep(
    sleepers: Sleepers, *, repeats: int = 5, traffic: MessageTraffic | None = None, num_seeds: int = 5
) -> list[Slept]:
    """Simulate and measure every plan; beside traffic too, where there is some, under several seeds."""
    seeds = range(num_seeds if traffic else 0)
    real = [replace(traffic, seed=seed) for seed in seeds if traffic]
    how = Launch(num_ranks=sleepers.num_ranks, timeout_s=60, deadline_s=300)
    alone, *beside = launch(sleep_on_rank, sleepers, [None, *real], repeats, how=how)[-1]
    found = []
    for index, (name, plan) in enumerate(sleepers.plans().items()):
        program, timing = sleepers.program(plan), alone.timings[index]
        noisy = [ttft_s for report in beside for ttft_s in report.timings[index].ttft_s]
        many = range(200)
        found.append(
            Slept(
                num_ranks=sleepers.num_ranks,
                name=name,
                simulated_s=float(run_program(program, sleepers.cluster)[-1, 0]),
                measured_s=timing.median_s,
                iqr_s=timing.iqr_s,
                noisy_simulated_s=median(noisy_ttft_s(program, sleepers.cluster, traffic, many)) if traffic else None,
                noisy_measured_s=median(noisy) if noisy else None,
            )
        )
    return found


def ring_traffic(num_ranks: int, share: float, message_bytes: float) -> MessageTraffic:
    """On every link between neighbours, in the ring's direction."""
    pairs = tuple((rank, (rank + 1) % num_ranks) for rank in range(num_ranks))
    return MessageTraffic(pairs=pairs, share=share, message_bytes=message_bytes)


# -- side traffic in the simulator: others' messages queue on some links with ours, as the runtime's emulated links do


def noisy_ttft_s(
    program: Program, cluster: Cluster, traffic: MessageTraffic, seeds: Sequence[int]
) -> tuple[float, ...]:
    """TTFT under each seed's traffic; the same seed gives the same times."""
    assert not cluster.shares_bandwidth, "side traffic has links of its own to queue on"
    return tuple(_ttft_s(program, cluster, traffic, seed) for seed in seeds)


def _ttft_s(program: Program, cluster: Cluster, traffic: MessageTraffic, seed: int) -> float:
    def on_link(src: int, dst: int, link: Link) -> None:
        if traffic.share > 0 and (src, dst) in traffic.pairs:
            link.env.process(_others(link, traffic, random.Random(f"{seed}:{src}:{dst}")))

    return EventSimulation(program, cluster, record=False, on_link=on_link).finish_s[-1]


def _others(link: Link, traffic: MessageTraffic, rng: random.Random) -> Generator[Any, Any, None]:
    busy_s = traffic.message_bytes / link.path.bandwidth_bytes_per_s
    while True:
        yield link.env.timeout(rng.expovariate(traffic.share / busy_s))
        link.env.process(link.transmit(traffic.message_bytes, busy_s))
