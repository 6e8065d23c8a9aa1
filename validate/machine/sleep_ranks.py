"""Ranks that sleep instead of computing, with real messages over emulated links, against the executors.

So 4 and 8 ranks can be checked on two cores: which rank waits for which and how long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvrsim.executors.run import run_program
from kvrsim.hardware import Cluster, load_cluster
from kvrsim.program import AllGather, Compute, Op, Program, Recv, Send
from kvrsim.runtime.geometry import Geometry, KvLayout
from kvrsim.runtime.kv_cache import PrefixCache
from kvrsim.runtime.marks import Clock
from kvrsim.runtime.measure import measure
from kvrsim.runtime.model import ModelForward
from kvrsim.runtime.plan import EmulatedLink, Report, RunPlan, Timing
from kvrsim.runtime.ranks import Launch, launch
from kvrsim.runtime.transport import EmulatedTransport, Transport
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
    timing: Timing

    @property
    def error(self) -> float:
        """Simulated over measured, less one."""
        return self.simulated_s / self.timing.median_s - 1


class SleepForward(ModelForward):
    """Sleeps instead of computing, with real messages."""

    def __init__(self, layer_s: Callable[[int, int], tuple[float, float]]) -> None:
        """layer_s(chunk, prefix): seconds of one layer before its K and V are exchanged, and after."""
        self.geometry = self.whole_geometry = GEOMETRY
        self.layer_s, self.vocab_size = layer_s, 10

    def __call__(self, ids: Any, start: int, cache: PrefixCache, *, is_last: bool, own: Any = None) -> None:
        before_s, after_s = self.layer_s(ids.shape[1], cache.visible_len - ids.shape[1])
        for layer in range(self.geometry.num_hidden_layers):
            time.sleep(before_s)
            cache.listener.on_update("update", layer)
            cache.listener.before_attention(layer)
            cache.listener.on_update("updated", layer)
            time.sleep(after_s)

    def hooked(self, clock: Clock, first_layer: int = 0) -> AbstractContextManager[None]:
        """Hook nothing."""
        return nullcontext()

    def digest(self) -> str:
        """Return a constant: all that sleep are alike."""
        return "sleeps"


def sleep_on_rank(transport: Transport, sleepers: Sleepers, repeats: int) -> Report:
    """Run by every rank: all plans."""
    emulated, plans = EmulatedTransport(transport, sleepers.link), list(sleepers.plans().values())
    return measure(emulated, SleepForward(sleepers.layer_s), plans, repeats=repeats, warmups=1)


def sleep(sleepers: Sleepers, *, repeats: int = 5) -> list[SleepRun]:
    """Simulate and measure every plan."""
    how = Launch(num_ranks=sleepers.num_ranks, timeout_s=60, deadline_s=300)
    report = launch(sleep_on_rank, sleepers, repeats, how=how)[-1]
    runs = []
    for (name, plan), timing in zip(sleepers.plans().items(), report.timings, strict=True):
        simulated_s = float(run_program(sleepers.program(plan), sleepers.cluster)[-1, 0])
        runs.append(SleepRun(num_ranks=sleepers.num_ranks, name=name, simulated_s=simulated_s, timing=timing))
    return runs
