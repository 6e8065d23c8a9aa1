"""CapacityRequest: the parameters of a capacity plan, checked and in SI units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from kvrsim.choices import DECODES, FLEET_OBJECTIVES, ORDERS, Order
from kvrsim.errors import InputError
from kvrsim.units import parse_bandwidth, parse_count, parse_number, parse_seconds, parse_tokens
from planner.capacity.designs import Limits
from planner.capacity.evaluations import Target
from planner.capacity.fleet.decoding import Decoding
from planner.capacity.fleet.fleet import Conditions
from planner.capacity.workloads.source import Source

DEFAULT_MAX_GPUS = 512
_MOST_GPUS_A_GROUP = 64
_MOST_PACKED = 2**17  # new tokens of a step


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityRequest:
    """What a capacity plan needs besides the scenario."""

    source: Source
    target: Target
    limits: Limits = field(default_factory=Limits)
    conditions: Conditions = field(default_factory=Conditions)
    decoding: Decoding = field(default_factory=Decoding)
    tpot_s: float | None = None  # target of the fleet that decodes; None: it is not sized
    kv_transfer_bytes_per_s: float | None = None  # of one GPU, to that fleet; None: not counted
    pack_tokens: int | None = None  # most new tokens of a step that prompts share; None: prompts run one by one
    replications: int = 5  # of synthetic requests
    seed: int = 0
    needs_confidence: bool = False  # the upper confidence bound has to meet the target, too
    mixed: bool = True  # consider fleets of groups of different sizes


def make_request(
    *,
    requests: str,
    slo_ttft: float | str,
    percentile: float | str = 99,
    max_gpus: int | str | None = None,
    group_sizes: str | None = None,
    gpus_per_node: int | None = None,
    rate_scale: float | str = 1,
    price_per_gpu_hour: float | str | Mapping[int, float] | None = None,
    objective: str = "gpus",
    decode: str = "separate",
    tpot: float | str | None = None,
    kv_transfer_bandwidth: float | str | None = None,
    pack_tokens: int | str | None = None,
    order: str = "first-come",
    replications: int | str = 5,
    sure: bool = False,
    uniform_only: bool = False,
    seed: int = 0,
) -> CapacityRequest:
    """Check all parameters and read the requests; raises InputError naming the parameter.

    gpus_per_node: where the cluster has nodes; the sizes of groups go up to two nodes by default.
    """
    for value, argument, choices in (
        (decode, "decode", DECODES),
        (objective, "objective", FLEET_OBJECTIVES),
        (order, "order", ORDERS),
    ):
        if value not in choices:
            raise InputError(argument, value, f"one of {', '.join(choices)}")
    sizes = _sizes(_usual_sizes(gpus_per_node) if group_sizes is None else group_sizes)
    most = DEFAULT_MAX_GPUS if max_gpus is None else _count(max_gpus, "max_gpus")
    if min(sizes) > most:
        raise InputError("max_gpus", most, f"at least the {min(sizes)} GPUs of the smallest group")
    sizes = tuple(size for size in sizes if size <= most)
    prices = _prices(price_per_gpu_hour, sizes)
    if objective == "cost" and not prices:
        raise InputError("objective", objective, "with `price_per_gpu_hour`")
    target = Target(
        slo_s=_seconds(slo_ttft, "slo_ttft"), percentile=parse_number(percentile, "percentile", above=0, most=100)
    )
    tpot_s = None if tpot is None else _seconds(tpot, "tpot")
    decoding = _decoding(decode, tpot_s)
    if kv_transfer_bandwidth is not None and decode != "separate":
        raise InputError("kv_transfer_bandwidth", kv_transfer_bandwidth, "only with `decode` separate")
    conditions = Conditions(
        order=cast("Order", order),
    )
    return CapacityRequest(
        source=Source.of(
            requests,
            rate_scale=parse_number(rate_scale, "rate_scale", above=0, most=1e6),
        ),
        target=target,
        limits=Limits(sizes=sizes, max_gpus=most, prices=prices, by_cost=objective == "cost"),
        conditions=conditions,
        decoding=decoding,
        tpot_s=tpot_s if decode == "separate" else None,
        kv_transfer_bytes_per_s=None if kv_transfer_bandwidth is None else _bandwidth(kv_transfer_bandwidth),
        pack_tokens=None if pack_tokens is None else _budget(pack_tokens),
        replications=_count(replications, "replications"),
        seed=seed,
        needs_confidence=sure,
        mixed=not uniform_only,
    )


def _decoding(decode: str, tpot_s: float | None) -> Decoding:
    if decode == "separate":
        return Decoding()
    if tpot_s is None:
        raise InputError("tpot", "nothing", "the time per output token, such as 30ms, with `decode` last-gpu")
    return Decoding(seconds_per_token=tpot_s)


def _usual_sizes(gpus_per_node: int | None) -> str:
    """Powers of two up to 8 or, where there are nodes, up to two of them."""
    most = 8 if gpus_per_node is None else min(2 * gpus_per_node, _MOST_GPUS_A_GROUP)
    return ",".join(str(1 << power) for power in range(most.bit_length()))


def _sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    sizes = {parse_count(part, "group_sizes", maximum=_MOST_GPUS_A_GROUP) for part in parts}
    return tuple(sorted(sizes))


def _prices(given: float | str | Mapping[int, float] | None, sizes: tuple[int, ...]) -> dict[int, float]:
    """One price for all groups, or one a group size: "1=2.0,2=2.0,4=2.4,8=3.1"."""
    argument = "price_per_gpu_hour"
    if given is None:
        return {}
    if isinstance(given, Mapping):
        named = {size: parse_number(price, argument, above=0, most=1e6) for size, price in given.items()}
    elif isinstance(given, str) and "=" in given:
        pairs = [pair.partition("=") for pair in given.split(",")]
        named = {
            parse_count(size.strip(), argument, maximum=_MOST_GPUS_A_GROUP): parse_number(
                price, argument, above=0, most=1e6
            )
            for size, _, price in pairs
        }
    else:
        named = dict.fromkeys(sizes, parse_number(given, argument, above=0, most=1e6))
    if missing := [size for size in sizes if size not in named]:
        raise InputError(argument, given, f"a price for groups of {missing[0]} too, or one price for all")
    return {size: named[size] for size in sizes}


def _seconds(value: float | str, argument: str) -> float:
    return (
        parse_seconds(value, argument) if isinstance(value, str) else parse_number(value, argument, above=0, most=1e9)
    )


def _bandwidth(value: float | str) -> float:
    argument = "kv_transfer_bandwidth"
    return parse_bandwidth(value, argument) if isinstance(value, str) else parse_number(value, argument, above=0)


def _count(value: int | str, argument: str) -> int:
    return parse_count(str(value), argument)


def _budget(value: int | str) -> int:
    tokens = parse_tokens(str(value), "pack_tokens")
    if tokens > _MOST_PACKED:
        raise InputError("pack_tokens", value, f"at most {_MOST_PACKED} tokens a step")
    return tokens
