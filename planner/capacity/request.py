"""CapacityRequest: the checked inputs of a capacity plan besides the scenario, in SI units."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvrsim.arguments import FleetArgs
from kvrsim.errors import InputError
from kvrsim.scenario import Scenario
from kvrsim.units import format_bandwidth, parse_count, parse_number
from planner.capacity.decode import Transfer
from planner.capacity.fleet import FleetLimits
from planner.capacity.workload import RequestSource, Workload

_DEFAULT_MAX_GPUS = 512
_MOST_GPUS_PER_GROUP = 64
_MOST_PACKED = 2**17  # largest number of new tokens per packed step


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The target that `percentile` percent of all requests have a TTFT of at most `slo_s`."""

    slo_s: float
    percentile: float  # at most 100, which means all requests

    def most_late(self, requests: int) -> int:
        """Number of requests that may be late."""
        return requests - max(1, math.ceil(self.percentile / 100 * requests - 1e-9))


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityRequest:
    """Requests, target, allowed fleets, and options of a capacity plan."""

    source: RequestSource
    target: Target
    limits: FleetLimits = field(default_factory=FleetLimits)
    tpot_s: float | None = None  # target of the fleet that decodes; None: that fleet is not planned
    transfer: Transfer | None = None  # transfer of caches to that fleet; None: not counted
    pack_tokens: int | None = None  # most new tokens in a step that several prompts share; None: prompts run one by one
    replications: int = 5  # number of independent draws of synthetic requests
    seed: int = 0
    sure: bool = False  # whether the upper end of the prediction interval must meet the target, too
    mixed: bool = True  # whether to consider fleets of groups of different sizes

    def workloads(self) -> list[Workload]:
        """The requests of a trace, or those of each replication of a specification."""
        number = self.replications if self.source.is_random else 1
        return [self.source.workload(self.seed, replication) for replication in range(number)]

    @property
    def objective(self) -> str:
        """The quantity to minimise: "gpus" or "cost"."""
        return "cost" if self.limits.by_cost else "gpus"

    @property
    def dispatch(self) -> str:
        """The dispatching rule, in words."""
        rule = "each range of lengths has its own queue, first come, first served"
        if self.pack_tokens is None:
            return rule
        return f"{rule}; waiting prompts share steps of up to {self.pack_tokens} new tokens, and longer ones are cut"

    @property
    def decoding(self) -> str:
        """Describe where tokens are decoded."""
        if self.transfer is None:
            return (
                "another fleet decodes: a group is free after the first token; moving the KV-cache there is not counted"
            )
        bandwidth = format_bandwidth(self.transfer.bytes_per_s)
        return (
            f"another fleet decodes: the KV-cache leaves layer by layer, {bandwidth} per GPU, and a group is free after"
            " the first token and when the cache has left"
        )


def make_request(fleet: FleetArgs, scenario: Scenario) -> CapacityRequest:
    """Check the arguments and read the requests; raises InputError naming the parameter.

    scenario: the model, and the cluster, whose nodes determine the default group sizes.
    """
    transfer = None
    if fleet.kv_transfer_bandwidth is not None:
        bytes_per_s = _positive(fleet.kv_transfer_bandwidth, "kv_transfer_bandwidth")
        width = scenario.request.dtype_bytes
        transfer = Transfer(model=scenario.model, bytes_per_s=bytes_per_s, element_bytes=width)
    if fleet.pack_tokens is not None and fleet.pack_tokens > _MOST_PACKED:
        raise InputError("pack_tokens", fleet.pack_tokens, f"at most {_MOST_PACKED} tokens a step")
    return CapacityRequest(
        source=RequestSource.of(fleet.requests, columns=fleet.columns, rate_scale=fleet.rate_scale),
        target=Target(slo_s=_positive(fleet.slo_ttft, "slo_ttft"), percentile=fleet.percentile),
        limits=_limits(fleet, scenario.cluster.gpus_per_node),
        tpot_s=None if fleet.tpot is None else _positive(fleet.tpot, "tpot"),
        transfer=transfer,
        pack_tokens=fleet.pack_tokens,
        replications=fleet.replications,
        seed=fleet.seed,
        sure=fleet.sure,
        mixed=not fleet.uniform_only,
    )


def _limits(fleet: FleetArgs, gpus_per_node: int | None) -> FleetLimits:
    sizes = _sizes(fleet.group_sizes, gpus_per_node)
    most = fleet.max_gpus or _DEFAULT_MAX_GPUS
    if min(sizes) > most:
        raise InputError("max_gpus", most, f"at least the {min(sizes)} GPUs of the smallest group")
    sizes = tuple(size for size in sizes if size <= most)
    prices = _prices(fleet.price_per_gpu_hour, sizes)
    if fleet.objective == "cost" and not prices:
        raise InputError("objective", fleet.objective, "with `price_per_gpu_hour`")
    return FleetLimits(sizes=sizes, max_gpus=most, prices=prices, by_cost=fleet.objective == "cost")


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
