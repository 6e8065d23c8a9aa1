"""CapacityRequest: the checked inputs of a capacity plan besides the scenario, in SI units."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kvrsim.arguments import DeploymentArgs, FleetArgs
from kvrsim.errors import InputError
from kvrsim.hardware import prefix_link
from kvrsim.scenario import Scenario
from kvrsim.units import format_bandwidth, parse_count, parse_number
from planner.capacity.fleet import FleetLimits
from planner.capacity.prefixes import ROUTING, CacheTiers
from planner.capacity.sessions import Pace
from planner.capacity.steps import BUDGET
from planner.capacity.transfer import Transfer
from planner.capacity.workload import RequestSource, Workload

_DEFAULT_MAX_GPUS = 512
_MOST_GPUS_PER_GROUP = 64
_NETWORK_BYTES_PER_S = 50e9  # per GPU, where the cluster has no network: that of nodes with 400 Gbit/s adapters
_MOST_IN_STEP = 2**17  # largest number of tokens of a step
Serving = Literal["split", "colocated"]  # prefill and decoding on different GPUs, or on the same


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """`percentile` percent of all requests have a TTFT of at most `slo_s`, and as many a TPOT of at most `tpot_s`."""

    slo_s: float
    percentile: float  # at most 100, which means all requests
    tpot_s: float | None = None  # None: decoding has no target; another fleet decodes, and is not planned

    def most_late(self, requests: int) -> int:
        """Number of requests that may be late."""
        return requests - max(1, math.ceil(self.percentile / 100 * requests - 1e-9))


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityRequest:
    """Requests, target, allowed fleets, and options of a capacity plan."""

    source: RequestSource
    target: Target
    limits: FleetLimits = field(default_factory=FleetLimits)
    transfer: Transfer | None = None  # transfer of caches to the fleet that decodes; None: not counted
    serving: Serving | None = None  # where groups may decode; None: both are compared
    tiers: CacheTiers = field(default_factory=CacheTiers)  # where groups keep the prefixes of sessions
    budget: int | None = None  # most tokens of a step; None: groups that only prefill run prompts one by one
    replications: int = 5  # number of independent draws of synthetic requests
    seed: int = 0
    sure: bool = False  # whether the upper end of the prediction interval must meet the target, too
    mixed: bool = True  # whether to consider fleets of groups of different sizes

    def workloads(self) -> list[Workload]:
        """The requests of a trace, or those of each replication of a specification."""
        number = self.replications if self.source.is_random else 1
        return [self.source.workload(self.seed, replication) for replication in range(number)]

    @property
    def has_turns(self) -> bool:
        """Whether prefix caches are simulated, on groups that prefill and decode."""
        return self.source.has_turns and self.source.simulates_cache

    @property
    def objective(self) -> str:
        """The quantity to minimise: "gpus" or "cost"."""
        return "cost" if self.limits.by_cost else "gpus"

    @property
    def step_budget(self) -> int:
        """Largest number of tokens in a step of several requests."""
        return self.budget or BUDGET

    def dispatch(self, *, colocated: bool) -> str:
        """The dispatching rule of a fleet, in words."""
        if self.has_turns:
            return f"{ROUTING}; each step of a group computes up to {self.step_budget} tokens"
        if colocated:
            return (
                "a request goes to the group with the fewest requests; each step of a group computes one token of every"
                f" sequence that decodes, then pieces of prompts, up to {self.step_budget} tokens in all"
            )
        rule = "each range of lengths has its own queue, first come, first served"
        if self.budget is None:
            return rule
        return f"{rule}; waiting prompts share steps of up to {self.budget} new tokens, and longer ones are cut"

    def decoding(self, *, colocated: bool) -> str:
        """Describe where tokens are decoded."""
        if colocated:
            text = "the groups that prefill decode, too; a request begins if the cache of its whole sequence fits"
            if self.has_turns:
                text += "; fleets that decode on other GPUs are not planned with prefix caches"
            return text
        if self.transfer is None:
            return "another fleet decodes: a group is free after the first token; the transfer of caches is not counted"
        bandwidth = format_bandwidth(self.transfer.bytes_per_s)
        return (
            f"another fleet decodes: the KV-cache leaves layer by layer, {bandwidth} per GPU; TTFT ends when the cache"
            " has arrived, and a group that prefills prompts one by one is busy until then"
        )


def make_request(fleet: FleetArgs, scenario: Scenario) -> CapacityRequest:
    """Check the arguments and read the requests; raises InputError naming the parameter.

    scenario: the model, and the cluster, whose nodes determine the default group sizes.
    """
    if fleet.max_num_batched_tokens is not None and fleet.max_num_batched_tokens > _MOST_IN_STEP:
        accepted = f"at most {_MOST_IN_STEP} tokens a step"
        raise InputError("max_num_batched_tokens", fleet.max_num_batched_tokens, accepted)
    tpot_s = None if fleet.tpot is None else _positive(fleet.tpot, "tpot")
    source = RequestSource.of(
        fleet.requests,
        columns=fleet.columns,
        rate_scale=fleet.rate_scale,
        pace=Pace.parse(fleet.think_time, fleet.session_rate),
    )
    source = replace(source, simulates_cache=fleet.prefix_cache != "unlimited")
    for name in ("think_time", "session_rate", "kv_cache_host", "kv_cache_remote"):
        if getattr(fleet, name) is not None and not source.has_turns:
            raise InputError(name, getattr(fleet, name), "requests with sessions or with hash_ids")
    serving: Serving | None = None
    if fleet.colocated or (source.has_turns and source.simulates_cache):
        serving = "colocated"
    elif tpot_s is None:
        serving = "split"
    return CapacityRequest(
        source=source,
        target=Target(slo_s=_positive(fleet.slo_ttft, "slo_ttft"), percentile=fleet.percentile, tpot_s=tpot_s),
        limits=_limits(fleet, scenario.cluster.gpus_per_node),
        transfer=_transfer(fleet, scenario),
        serving=serving,
        tiers=_tiers(fleet, scenario),
        budget=fleet.max_num_batched_tokens,
        replications=fleet.replications,
        seed=fleet.seed,
        sure=fleet.sure,
        mixed=not fleet.uniform_only,
    )


def on_each_cluster(args: DeploymentArgs, fleet: FleetArgs) -> list[tuple[DeploymentArgs, FleetArgs]]:
    """The question on each of several clusters, "8xh100,8xb200", with its price; one question for one cluster."""
    if not isinstance(args.cluster, str) or "," not in args.cluster or Path(args.cluster).exists():
        return [(args, fleet)]
    clusters = [name.strip() for name in args.cluster.split(",")]
    prices: list[Any] = [fleet.price_per_gpu_hour] * len(clusters)
    if isinstance(fleet.price_per_gpu_hour, str) and "=" not in fleet.price_per_gpu_hour:
        parts = fleet.price_per_gpu_hour.split(",")
        if len(parts) > 1:
            prices = list(parts)
    if len(prices) != len(clusters):
        accepted = f"{len(clusters)} prices, one for each cluster, or one price for all"
        raise InputError("price_per_gpu_hour", fleet.price_per_gpu_hour, accepted)
    return [
        (DeploymentArgs(**vars(args) | {"cluster": name}), FleetArgs(**vars(fleet) | {"price_per_gpu_hour": price}))
        for name, price in zip(clusters, prices, strict=True)
    ]


def _tiers(fleet: FleetArgs, scenario: Scenario) -> CacheTiers:
    """The memories for prefixes; a GPU loads from its host as fast as its nominal link allows."""
    return CacheTiers(
        gpu=fleet.prefix_cache != "none",
        host_bytes=fleet.kv_cache_host or 0.0,
        host_bytes_per_s=prefix_link(scenario.cluster, "host").bandwidth_bytes_per_s,
        remote_bytes_per_s=fleet.kv_cache_remote,
    )


def _transfer(fleet: FleetArgs, scenario: Scenario) -> Transfer | None:
    """The transfer to the fleet that decodes; None if this fleet is not planned and no bandwidth is given."""
    if fleet.kv_transfer_bandwidth is not None:
        bytes_per_s = _positive(fleet.kv_transfer_bandwidth, "kv_transfer_bandwidth")
    elif fleet.tpot is None:
        return None
    elif scenario.cluster.network is not None:
        bytes_per_s = scenario.cluster.network.bandwidth_bytes_per_s
    else:
        bytes_per_s = min(scenario.cluster.link.bandwidth_bytes_per_s, _NETWORK_BYTES_PER_S)
    return Transfer(model=scenario.model, bytes_per_s=bytes_per_s, element_bytes=scenario.request.dtype_bytes)


def _limits(fleet: FleetArgs, gpus_per_node: int | None) -> FleetLimits:
    sizes = _sizes(fleet.group_sizes, gpus_per_node)
    most = fleet.max_gpus or _DEFAULT_MAX_GPUS
    if min(sizes) > most:
        raise InputError("max_gpus", most, f"at least the {min(sizes)} GPUs of the smallest group")
    sizes = tuple(size for size in sizes if size <= most)
    prices = _prices(fleet.price_per_gpu_hour, sizes)
    if fleet.objective == "cost" and not prices:
        raise InputError("objective", fleet.objective, "with `price_per_gpu_hour`")
    return FleetLimits(
        sizes=sizes,
        max_gpus=most,
        prices=prices,
        by_cost=fleet.objective == "cost",
        node_gpus=fleet.node_granularity,
        spare=fleet.spare,
    )


def _sizes(sizes: tuple[int, ...] | None, gpus_per_node: int | None) -> tuple[int, ...]:
    """GPUs per group; by default powers of two up to 8; on a cluster with nodes, up to two nodes."""
    if sizes is None:
        most = 8 if gpus_per_node is None else min(2 * gpus_per_node, _MOST_GPUS_PER_GROUP)
        return tuple(1 << power for power in range(most.bit_length()))
    if sizes[-1] > _MOST_GPUS_PER_GROUP:
        raise InputError("group_sizes", sizes[-1], f"at most {_MOST_GPUS_PER_GROUP} GPUs")
    return sizes


def _prices(table: float | str | Mapping[int, float] | None, sizes: tuple[int, ...]) -> dict[int, float]:
    """One price for all groups, or one per group size: "1=2.0,2=2.0,4=2.4,8=3.1"."""
    argument = "price_per_gpu_hour"
    if table is None:
        return {}
    prices: Mapping[int, Any] = dict.fromkeys(sizes, table)
    if isinstance(table, Mapping):
        prices = table
    elif isinstance(table, str) and "=" in table:
        pairs = [pair.partition("=") for pair in table.split(",")]
        prices = {parse_count(size.strip(), argument, maximum=_MOST_GPUS_PER_GROUP): price for size, _, price in pairs}
    by_size = {size: parse_number(price, argument, above=0, most=1e6) for size, price in prices.items()}
    if missing := [size for size in sizes if size not in by_size]:
        raise InputError(argument, table, f"a price for groups of {missing[0]} too, or one price for all")
    return {size: by_size[size] for size in sizes}


def _positive(value: float, argument: str) -> float:
    return parse_number(value, argument, above=0, most=1e15)
