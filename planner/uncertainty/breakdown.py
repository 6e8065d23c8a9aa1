"""Breakdown of a simulated prefill: seconds of every part, and what each rank waited for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvrsim.kernels.calibrated import CostModel
from kvrsim.kernels.roofline import RooflineCost
from kvrsim.kernels.sensitivity import Part
from kvrsim.model.mixers import RECURRENCE_TITLES
from kvrsim.partition import Partition
from kvrsim.program import Array, Compute, Program, work_s
from kvrsim.results.breakdown import Breakdown, BreakdownRow
from kvrsim.results.timeline import Timeline
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from planner.uncertainty.bases import basis_of, chunk_of, weighted_program

_RESUME, _ENGINE = Part("resume"), Part("engine")
_ROUNDING = 1e-9
_RANK = re.compile(r"rank \d+")


def breakdown(
    scenario: Scenario, strategy: Strategy, partition: Partition, finish_s: Sequence[float], timeline: Timeline
) -> Breakdown:
    """Seconds, share of TTFT, share of the roofline and basis of every part on every rank.

    finish_s: when each rank has finished, as the simulation that recorded the timeline found.
    """
    ttft_s = finish_s[-1]
    seconds = _part_seconds(scenario, strategy, partition, scenario.cost)
    least = _part_seconds(scenario, strategy, partition, _roofline(scenario))
    rows = []
    for rank in range(len(finish_s)):
        chunk, start = chunk_of(scenario, strategy, partition, rank)
        for part in seconds:
            if (taken := float(seconds[part][rank])) > _ROUNDING * ttft_s:
                roofline_s = None if part in (_RESUME, _ENGINE) else float(least[part][rank])
                rows.append(
                    BreakdownRow(
                        rank=rank,
                        kind=part.kind,
                        what=_name(scenario, part),
                        seconds=taken,
                        share=taken / ttft_s,
                        roofline_share=None if roofline_s is None else roofline_s / taken,
                        basis=basis_of(scenario, part, chunk, start),
                    )
                )
        busy_s = float(sum(part[rank] for part in seconds.values()))
        rows.extend(_waits(timeline, rank, ttft_s, finish_s[rank] - busy_s))
    return Breakdown(ttft_s=ttft_s, rows=tuple(rows))


def _part_seconds(scenario: Scenario, strategy: Strategy, partition: Partition, cost: CostModel) -> dict[Part, Array]:
    """For each part, the device seconds of each rank."""
    program, names = weighted_program(scenario, strategy, partition, cost)
    width = len(names) + 1
    totals = np.array([_device_s(program, rank, width) for rank in range(program.num_ranks)])
    found = {part: totals[:, index] - totals[:, -1] for index, part in enumerate(names)}
    engine_s = np.array([_engine_s(program, rank) for rank in range(program.num_ranks)])
    return found | {_RESUME: totals[:, -1] - engine_s, _ENGINE: engine_s}


def _device_s(program: Program, rank: int, width: int) -> Array:
    total = np.zeros(width)
    for _, op in program.ops(rank):
        total = total + work_s(op)
    return total


def _engine_s(program: Program, rank: int) -> float:
    """What the device waits for before the layers: requests and steps."""
    ops = (op for _, op in program.ops(rank) if isinstance(op, Compute) and op.kind == "request")
    return sum(float(op.device_s[0]) for op in ops)


def _roofline(scenario: Scenario) -> CostModel:
    """The datasheet's limits for the same operations."""
    cost, request = scenario.cost, scenario.request
    limits = RooflineCost.of(
        scenario.cluster.gpu,
        kernel=scenario.kernel,
        batch=request.batch,
        dtype=request.dtype,
        element_bytes=request.dtype_bytes,
    )
    return replace(
        limits,
        fused=cost.fused,
        whole_attention=cost.whole_attention,
        copies=cost.copies,
        head_on_all_tokens=cost.head_on_all_tokens,
    )


def _name(scenario: Scenario, part: Part) -> str:
    if part.product is not None:
        shape = f"{part.product.in_features}→{part.product.out_features}"
        return f"{part.product.num_matrices} × {shape}" if part.product.num_matrices > 1 else shape
    if part.variant is not None:
        return next(title for kind, title in RECURRENCE_TITLES.items() if kind == part.variant)
    steps = "norms, rotary, copies"
    kernels = {"attention": scenario.kernel, "latent": f"latent, {scenario.kernel}", "sparse": "chosen keys"}
    kernels["experts"] = "routed, as grouped products"
    return (kernels | {"elementwise": steps}).get(part.kind, "after messages" if part == _RESUME else "request, step")


def _waits(timeline: Timeline, rank: int, ttft_s: float, idle_s: float) -> list[BreakdownRow]:
    """What the rank's compute stream stood still for; what is left of its idle time, the host held it up."""
    waits: dict[str, float] = {}
    for span in timeline.of(rank, "wait"):
        if span.name != "host":
            what = _RANK.sub("a neighbour", span.name)
            waits[what] = waits.get(what, 0.0) + span.duration_s
    host_s = idle_s - sum(waits.values())
    if host_s > _ROUNDING * ttft_s:
        waits["host"] = host_s
    return [
        BreakdownRow(
            rank=rank,
            kind="wait",
            what=name,
            seconds=seconds,
            share=seconds / ttft_s,
            roofline_share=None,
            basis="simulated",
        )
        for name, seconds in waits.items()
    ]
