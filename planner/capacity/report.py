"""A capacity plan in words: target, answer, intervals, groups."""

from __future__ import annotations

from collections.abc import Iterable

from kvrsim.units import format_bandwidth, format_bytes, format_seconds
from planner.capacity.answer import CapacityPlan, FleetAnswer

UNSERVED = "unserved"  # shown for a percentile that falls among unserved requests


def headline(plan: CapacityPlan) -> str:
    """The target in one line."""
    name, target = plan.workload["name"], format_seconds(plan.slo_ttft_s)
    return f"{plan.percentile:g} % of {name} with a TTFT of at most {target}"


def verdict(plan: CapacityPlan) -> str:
    """The answer in one line."""
    fleet = plan.first
    reached_s = fleet.target.value_s
    if plan.answer is not None:
        gpus = f"{fleet.num_gpus} GPU{'s' * (fleet.num_gpus > 1)}"
        return f"{gpus}: {fleet.describe()}. {plan.percentile:g}th percentile {format_seconds(reached_s)}."
    if fleet.unserved == fleet.requests:
        return f"No fleet meets the target. None serves any of the {fleet.requests} requests."
    said = f"has a {plan.percentile:g}th percentile of {format_time(reached_s)}"
    if reached_s == float("inf"):
        said = f"never serves {fleet.unserved} of {fleet.requests} requests"
    return f"No fleet meets the target. The nearest miss, {fleet.describe()}, {said}."


def interval(plan: CapacityPlan) -> str | None:
    """The confidence interval in one line, with a note where it ends above the target; None: unknown."""
    low_s, high_s = plan.first.target.low_s, plan.first.target.high_s
    if low_s is None or high_s is None:
        return None
    ends = f"{format_time(low_s)} to {format_time(high_s)}"
    if plan.answer is not None and high_s > plan.slo_ttft_s:
        ends += f", which ends ABOVE the target of {format_seconds(plan.slo_ttft_s)} (--sure requires it below)"
    return f"{ends}. {plan.first.target.meaning}"


def losses(fleet: FleetAnswer) -> str | None:
    """Unserved requests in one line; None: all are served."""
    if not fleet.unserved:
        return None
    return f"{fleet.unserved} of {fleet.requests} never served; they count as late"


def decodes(plan: CapacityPlan) -> str | None:
    """The fleet that decodes in one line; None: it was not asked for, or there is none."""
    fleet = plan.decode_fleet
    if fleet is None:
        return None
    limit = {"memory": "memory limits it", "tpot": "the TPOT limits it", "requests": "all at once"}[fleet.limited_by]
    count = f"{fleet.num_gpus} GPU{'s' * (fleet.num_gpus > 1)}: {fleet.replicas} × {fleet.gpus_per_group}"
    return (
        f"{count} ({fleet.strategy}), batches of {fleet.batch} ({limit}), {format_seconds(fleet.step_s)} a step at"
        f" {fleet.context_tokens} tokens; at most {fleet.sequences_at_once} sequences at once, TPOT at most"
        f" {format_seconds(fleet.tpot_s)}"
    )


def transfers(plan: CapacityPlan) -> str | None:
    """What leaves for the fleet that decodes in one line; None: not counted."""
    sent, fleet = plan.kv_transfer, plan.first
    if sent is None or fleet.p50_kv_transfer_s is None or fleet.p99_kv_transfer_s is None:
        return None
    rate = "" if sent.mean_bytes_per_s is None else f", {format_bandwidth(sent.mean_bytes_per_s)} in all"
    after = f"{format_seconds(fleet.p50_kv_transfer_s)} (p50) and {format_seconds(fleet.p99_kv_transfer_s)} (p99)"
    return f"{format_bytes(sent.mean_bytes)} a request{rate}; gone {after} after the first token"


def groups_of_fleet(fleet: FleetAnswer) -> Iterable[tuple[str, str, str, str]]:
    """One row a length bucket: new tokens, groups, strategies by share of time, requests."""
    for group in fleet.groups:
        low, high = group.context_range
        strategies = ", ".join(f"{name} {share:.0%}" for name, share in group.strategies.items()) or "none"
        yield f"{low} to {high}", group.groups(), strategies, str(group.requests)


def format_time(seconds: float) -> str:
    """Formatted seconds; UNSERVED for infinity."""
    return format_seconds(seconds) if seconds < float("inf") else UNSERVED
