"""Scenario: everything that a prediction is about, and the programs that it leads to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvrsim.cost.group import Group, all_gather, all_reduce, group_of, grouped_cluster, share_of
from kvrsim.cost.kernels import CalibratedCost, CostModel, RooflineCost
from kvrsim.cost.layer import LayerCosts
from kvrsim.errors import InputError
from kvrsim.hardware import DEFAULT_MEMORY_FRACTION, Cluster, MemoryLimit
from kvrsim.model import ModelSpec
from kvrsim.profile import CalibrationProfile, HostRates, SendStyle, profiles_with
from kvrsim.program import Array, Compute, Op, Program, beside_receives
from kvrsim.rates.attention import ATTENTION_KERNELS
from kvrsim.rates.elementwise import Traffic
from kvrsim.rates.gemm import Product
from kvrsim.request import Request
from kvrsim.strategies import Step, Strategy

NO_HOST = HostRates(layer_s=0.0, gather_piece_s=0.0, resume_s=0.0)
ROOFLINE = "roofline"
KERNELS = ATTENTION_KERNELS


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One request, on one cluster, by one model, predicted from one profile (None: the datasheet's roofline)."""

    model: ModelSpec
    cluster: Cluster
    request: Request
    profile: CalibrationProfile | None
    kernel: str  # attention kernel, one of KERNELS
    group: Group | None = None  # GPUs that each rank stands for; `cluster` is then as such groups see it
    memory_fraction: float = DEFAULT_MEMORY_FRACTION  # of each GPU's memory that the prefill may use

    def __post_init__(self) -> None:
        self.memory_limit  # noqa: B018  # checks the fraction
        if self.profile is None and self.kernel not in KERNELS:
            raise InputError("attention", self.kernel, ", ".join(KERNELS))
        if self.profile is not None and self.kernel not in self.profile.attention_kernels:
            has = ", ".join(self.profile.attention_kernels)
            others = " or ".join(profiles_with(self.kernel, self.profile.gpu))
            where = f"; `profile` {others} has {self.kernel}" if others else ""
            raise InputError("attention", self.kernel, f"a kernel that profile {self.profile.name} has: {has}{where}")
        if self.profile is not None and self.request.dtype not in self.profile.valid.dtypes:
            has = ", ".join(self.profile.valid.dtypes)
            raise InputError("dtype", self.request.dtype, f"what profile {self.profile.name} has: {has}")

    @property
    def profile_name(self) -> str:
        """The profile's name, or "roofline"."""
        return self.profile.name if self.profile else ROOFLINE

    @property
    def memory_limit(self) -> MemoryLimit:
        """What a rank's peak is compared with; InputError for a fraction that is none."""
        return MemoryLimit(gpu_memory_bytes=self.cluster.gpu.memory_bytes, memory_fraction=self.memory_fraction)

    def on_gpus(self, num_gpus: int) -> Scenario:
        """The same on another number of GPUs."""
        return replace(self, cluster=self.cluster.with_num_gpus(num_gpus))

    def for_strategy(self, strategy: Strategy) -> Scenario:
        """As the strategy sees it: on one GPU, or with groups of GPUs as ranks.

        Raises InputError where the GPUs or the model's heads do not divide into its groups.
        """
        if strategy.partition_rule == "whole":
            return self.on_gpus(1)
        num_gpus = self.cluster.num_gpus
        placed = self.in_groups(strategy.group_size or num_gpus)
        if strategy.refuses is not None and (why := strategy.refuses(placed.share, placed.cluster.num_gpus)):
            raise InputError("strategies", strategy.name, f"with {num_gpus} GPUs, {why}")
        return placed

    def in_groups(self, size: int) -> Scenario:
        """The same with groups of that many GPUs, each of which splits all matrices, as ranks."""
        if size == 1:
            return self
        num_gpus = self.cluster.num_gpus
        if num_gpus % size:
            raise InputError("strategies", f"tp{size}", f"groups that {num_gpus} GPUs divide into")
        cluster = grouped_cluster(self.cluster, size)
        return replace(self, cluster=cluster, group=group_of(self.cluster, size, share_of(self.model, size)))

    @property
    def num_gpus(self) -> int:
        """GPUs in all."""
        return self.cluster.num_gpus * self.gpus_per_rank

    @property
    def gpus_per_rank(self) -> int:
        """GPUs that a rank stands for."""
        return 1 if self.group is None else self.group.size

    @property
    def share(self) -> ModelSpec:
        """What one GPU of a rank holds of every layer."""
        return self.model if self.group is None else self.group.model

    def without_communication(self) -> Scenario:
        """The same with links that cost nothing and nothing to resume from: the paper's TTFT(p)."""
        quiet = self.with_own_links(1e30, latency_s=0.0)
        if self.group is not None:
            quiet = replace(quiet, group=self.group.without_links())
        if quiet.profile is None:
            return quiet
        host = replace(quiet.profile.host, resume_s=0.0, message_s=0.0)
        links = replace(quiet.profile.links, pending_share=0.0)
        return replace(quiet, profile=replace(quiet.profile, host=host, links=links))

    def with_own_links(self, bandwidth_bytes_per_s: float, latency_s: float | None = None) -> Scenario:
        """The same with a path of that bandwidth for every pair; messages hold the streams, or not, as before."""
        links = self.cluster.with_topology("switch").with_link(bandwidth_bytes_per_s, latency_s)
        if self.profile is None:
            return replace(self, cluster=links)
        sends: SendStyle = "overlap" if self.sends_overlap else "rendezvous"
        profile = replace(self.profile, links=replace(self.profile.links, sends=sends))
        return replace(self, cluster=links, profile=profile)

    def with_slower_links(self, factor: float) -> Scenario:
        """The same with links so many times slower."""
        network = self.cluster.network
        cluster = replace(
            self.cluster,
            link=self.cluster.link.faster(1 / factor),
            network=None if network is None else network.faster(1 / factor),
        )
        group = None if self.group is None else self.group.slower(factor)
        return replace(self, cluster=cluster, group=group)

    @property
    def cost(self) -> CostModel:
        """Seconds of an operation on this scenario's GPU."""
        element_bytes, batch = self.request.dtype_bytes, self.request.batch
        if self.profile is not None:
            return CalibratedCost(
                rates=self.profile.kernels, kernel=self.kernel, batch=batch, element_bytes=element_bytes
            )
        return RooflineCost.of(
            self.cluster.gpu,
            kernel=self.kernel,
            batch=batch,
            dtype=self.request.dtype,
            element_bytes=element_bytes,
        )

    @property
    def links_are_measured(self) -> bool:
        """Whether the links' figures are the profile's, not a datasheet's or the user's."""
        return self.profile is not None and self.cluster.link.profile == self.profile.name

    @property
    def sends_overlap(self) -> bool:
        """Whether messages move beside computation."""
        if self.profile is None:
            return True
        links = self.profile.links
        return (links.sends_over_bus if self.cluster.topology == "bus" else links.sends) == "overlap"

    @property
    def pending_share(self) -> float:
        """Of a rank's compute rate, what is lost while a receive waits; 0 where it was not measured."""
        return 0.0 if self.profile is None else self.profile.links.pending_share

    @property
    def least_cost(self) -> CostModel:
        """The same, but for attention, which takes what no call of its kernel beats."""
        cost = self.cost
        return replace(cost, least=True) if isinstance(cost, CalibratedCost) else cost

    def layer_costs(self, cost: CostModel | None = None) -> tuple[LayerCosts, ...]:
        """One for each kind of layer of the model; `cost` in the place of the scenario's own."""
        host = self.profile.host if self.profile else NO_HOST
        cost = cost or self.cost
        communicates = self.num_gpus > 1
        return tuple(
            LayerCosts(
                self.share,
                layer,
                cost,
                host,
                self.request.batch,
                self.request.dtype_bytes,
                self.request.cached_prefix,
                self.sends_overlap,
                host.resume_s if communicates else 0.0,
                self.kernel,
                self.group,
            )
            for layer in self.share.layer_kinds
        )

    def program(self, strategy: Strategy, chunks: Sequence[Array], cost: CostModel | None = None) -> Program:
        """The strategy's program for a batch of partitions; `cost` in the place of the scenario's own.

        chunks: one float array of shape (B,) a rank, tokens of that rank's chunk.
        """
        cost = cost or self.cost
        if strategy.pipeline is not None:
            return strategy.pipeline(self, chunks, cost)
        starts = [np.full_like(chunks[0], self.request.cached_prefix)]
        for chunk in chunks[:-1]:
            starts.append(starts[-1] + chunk)
        ranks = range(len(chunks))
        steps = [Step(costs, tuple(chunks), tuple(starts)) for costs in self.layer_costs(cost)]
        assert strategy.group_size in (None, self.gpus_per_rank), "see for_strategy"
        total = starts[-1] + chunks[-1]
        ends = [total] * len(chunks) if strategy.gathers_kv else [s + c for s, c in zip(starts, chunks, strict=True)]
        even = Program(
            strategy=strategy.name,
            prologue=tuple(
                (*self.embedding(chunk, cost), *self.prepare(chunk, end, cost))
                for chunk, end in zip(chunks, ends, strict=True)
            ),
            layers=tuple(
                tuple(beside_receives(tuple(strategy.layer(step, rank)), self.pending_share) for rank in ranks)
                for step in steps
            ),
            layer_kind_index=self.share.layer_kind_index,
            epilogue=tuple(self.head(chunks[rank], cost) if rank == len(chunks) - 1 else () for rank in ranks),
        )
        # A part of the ranks' chunks asks for a part of the program, of no rank in particular.
        everyone = len(chunks) == self.cluster.num_gpus
        return even.slowed([self.cluster.slowness(rank) for rank in ranks]) if everyone else even

    def embedding(self, chunk: Array, cost: CostModel) -> tuple[Op, ...]:
        """One row read and written a token; in a group, each GPU has some rows."""
        nbytes = 4.0 * self.model.hidden_size  # of two-byte elements
        read = Compute(
            name="embedding", device_s=cost.traffic_s(chunk, (Traffic("embedding", nbytes, 1),)), kind="embedding"
        )
        if self.group is None:
            return (read,)
        summed = chunk * float(self.request.batch * self.model.hidden_size * self.request.dtype_bytes)
        return read, all_reduce(self.group, summed)

    def prepare(self, chunk: Array, keys: Array, cost: CostModel) -> tuple[Op, ...]:
        """Mask and rotary tables, where they were measured; the host and the device wait for each other there."""
        if self.profile is None:
            return ()
        request_s, element_s = self.profile.host.request_s, self.profile.kernels.elementwise.mask_element_s
        if not request_s and not element_s and not self.profile.host.prepare_s:
            return ()
        device_s, host_s = cost.prepare_s(request_s, chunk * keys), self.profile.host.prepare_s
        host_s = request_s if host_s is None else host_s
        return (Compute(name="prepare", device_s=device_s, host_s=host_s, kind="embedding"),)

    def head(self, chunk: Array, cost: CostModel) -> tuple[Op, ...]:
        """Final norm and logits, of the last token alone or, as the 2023 Hugging Face code did, of all."""
        head = self.share.lm_head
        tokens = chunk if cost.head_on_all_tokens else np.ones_like(chunk)
        logits = Compute(
            name="head", device_s=cost.head_s(tokens, Product(head.in_features, head.out_features)), kind="head"
        )
        if self.group is None:
            return (logits,)
        nbytes = tokens * float(self.request.batch * self.model.lm_head.out_features * self.request.dtype_bytes)
        return logits, all_gather(self.group, nbytes)
