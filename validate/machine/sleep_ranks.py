"""Ranks that sleep instead of computing, with real messages over emulated links, against the event executor.

So 4 and 8 ranks can be checked on two cores: which rank waits for which and how long, with and without side traffic.
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

# Few bytes per token and a slow link, so that copying the bytes needs little of the two cores.
LAYOUT = KvLayout(num_key_value_heads=1, head_dim=32, v_head_dim=32)
GEOMETRY = Geometry(model_type="llama", num_attention_heads=8, layouts=(LAYOUT,) * 8)
TOKEN_BYTES = GEOMETRY.token_bytes(0)
LATENCY_S = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Sleepers:
    """Ranks, a context and a link."""

    num_ranks: int
    context_len: int
    link_bytes_per_s: float
    token_s: float = 4e-5  # per layer and token, but for attention
    pair_s: float = 1.5e-8  # per layer, query and key

    @property
    def cluster(self) -> Cluster:
        """For the simulator."""
        return load_cluster(num_gpus=self.num_ranks).with_link(self.link_bytes_per_s, LATENCY_S)

    @property
    def link(self) -> EmulatedLink:
        """For the runtime."""
        return EmulatedLink(bandwidth_bytes_per_s=self.link_bytes_per_s, latency_s=LATENCY_S)

    def layer_s(self, chunk: int, prefix: int) -> tuple[float, float]:
        """Seconds of one layer before its K and V are exchanged, and after."""
        before_s = chunk * self.token_s / 3
        return before_s, 2 * before_s + chunk * (prefix + chunk / 2) * self.pair_s

    def plans(self) -> dict[str, RunPlan]:
        """TSP, and KVR with even chunks and with shrinking ones."""
        even = Partition.even(self.context_len, self.num_ranks)
        shrinking = shrinking_partition(self.context_len, self.num_ranks)
        partitions = {"tsp": even, "kvr, even": even, "kvr, shrinking": shrinking}
        return {
            name: RunPlan(strategy=name.partition(",")[0], partition=partition)
            for name, partition in partitions.items()
        }

    def program(self, plan: RunPlan) -> Program:
        """The plan in the simulator's operations."""
        ranks = range(self.num_ranks)
        layer = tuple(tuple(self._ops(plan, rank)) for rank in ranks)
        empty: tuple[tuple[Op, ...], ...] = tuple(() for _ in ranks)
        return Program(
            strategy=plan.strategy,
            prologue=empty,
            layers=(layer,),
            layer_kind_index=(0,) * GEOMETRY.num_hidden_layers,
            epilogue=empty,
        )

    def _ops(self, plan: RunPlan, rank: int) -> Iterator[Op]:
        start, end = plan.partition.boundaries[rank : rank + 2]
        num_keys = self.context_len if plan.strategy == "tsp" else end
        before_s, after_s = self.layer_s(end - start, num_keys - (end - start))
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
class SleepRun:
    """One plan, simulated and measured."""

    num_ranks: int
    name: str
    simulated_s: float
    measured_s: float  # median
    iqr_s: float
    noisy_simulated_s: float | None = None  # median over seeds; None: without side traffic
    noisy_measured_s: float | None = None

    @property
    def error(self) -> float:
        """Simulated over measured, less one."""
        return self.simulated_s / self.measured_s - 1


def sleep_on_rank(
    transport: Transport, sleepers: Sleepers, traffics: Sequence[MessageTraffic | None], repeats: int
) -> list[BenchReport]:
    """Run by every rank: all plans, under each traffic."""
    forward = SleepForward(GEOMETRY, sleepers.layer_s)
    plans = list(sleepers.plans().values())
    reports = []
    for traffic in traffics:
        transport.barrier()
        emulated = EmulatedTransport(transport, replace(sleepers.link, traffic=traffic))
        reports.append(measure(emulated, forward, plans, repeats=repeats, warmups=0 if traffic else 1))
    return reports


def sleep(
    sleepers: Sleepers, *, repeats: int = 5, traffic: MessageTraffic | None = None, num_seeds: int = 5
) -> list[SleepRun]:
    """Simulate and measure every plan without side traffic, and with `traffic` under several seeds."""
    traffics = [replace(traffic, seed=seed) for seed in range(num_seeds)] if traffic else []
    how = Launch(num_ranks=sleepers.num_ranks, timeout_s=60, deadline_s=300)
    quiet, *noisy = launch(sleep_on_rank, sleepers, [None, *traffics], repeats, how=how)[-1]
    runs = []
    for index, (name, plan) in enumerate(sleepers.plans().items()):
        program, timing = sleepers.program(plan), quiet.timings[index]
        noisy_s = [ttft_s for report in noisy for ttft_s in report.timings[index].ttft_s]
        cluster = sleepers.cluster
        runs.append(
            SleepRun(
                num_ranks=sleepers.num_ranks,
                name=name,
                simulated_s=float(run_program(program, cluster)[-1, 0]),
                measured_s=timing.median_s,
                iqr_s=timing.iqr_s,
                noisy_simulated_s=median(noisy_ttft_s(program, cluster, traffic, range(200))) if traffic else None,
                noisy_measured_s=median(noisy_s) if noisy_s else None,
            )
        )
    return runs


def ring_traffic(num_ranks: int, share: float, message_bytes: float) -> MessageTraffic:
    """On every link between neighbours, in the ring's direction."""
    pairs = tuple((rank, (rank + 1) % num_ranks) for rank in range(num_ranks))
    return MessageTraffic(pairs=pairs, share=share, message_bytes=message_bytes)


def noisy_ttft_s(
    program: Program, cluster: Cluster, traffic: MessageTraffic, seeds: Sequence[int]
) -> tuple[float, ...]:
    """TTFT under each seed's side traffic, which queues with the program's messages on some links."""
    assert not cluster.shares_bandwidth, "side traffic queues on separate links"
    return tuple(_ttft_s(program, cluster, traffic, seed) for seed in seeds)


def _ttft_s(program: Program, cluster: Cluster, traffic: MessageTraffic, seed: int) -> float:
    def on_link(src: int, dst: int, link: Link) -> None:
        if traffic.share > 0 and (src, dst) in traffic.pairs:
            link.env.process(_side_traffic(link, traffic, random.Random(f"{seed}:{src}:{dst}")))

    return EventSimulation(program, cluster, record=False, on_link=on_link).finish_s[-1]


def _side_traffic(link: Link, traffic: MessageTraffic, rng: random.Random) -> Generator[Any, Any, None]:
    busy_s = traffic.message_bytes / link.path.bandwidth_bytes_per_s
    while True:
        yield link.env.timeout(rng.expovariate(traffic.share / busy_s))
        link.env.process(link.transmit(traffic.message_bytes, busy_s))
