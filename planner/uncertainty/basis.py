"""The basis of seconds (measured, interpolated, extrapolated, fitted, datasheet) by span; and the breakdown of TTFT.

A breakdown has the seconds of every part on every rank, and each rank's waits by cause.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from kvrsim.compile import build_program, columns
from kvrsim.execution import Execution
from kvrsim.kernels.cost import CostModel, Part, RooflineCost, WeightedCost, listing
from kvrsim.kernels.profile import OperationFit
from kvrsim.model.mixers import RECURRENCE_TITLES
from kvrsim.placement import PlacedScenario
from kvrsim.program import Array, Compute, Program, work_s
from kvrsim.results.timeline import Basis, Breakdown, BreakdownRow, Span, Timeline
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies.pipeline import context_ranks
from planner.uncertainty.sensitivities import UNCOMPARED_KINDS

_WHOLE_SHARE = 0.995  # share of an operation's seconds above which only one basis is named
_WorkKey = tuple[int, int | None, str]  # rank, layer, name


def weighted_program(execution: Execution, partition: Partition, cost: CostModel) -> tuple[Program, list[Part]]:
    """Build a program with one column per part, where only that part takes time, and a last column without any part.

    Launches are not hidden by kernels in this program, so that the columns add up. Returns the program and the parts,
    in the order of the columns.
    """
    placed = execution.placed
    if placed.host.hidden_share:
        execution = execution.on(placed.with_host(replace(placed.host, hidden_share=0.0)))
    chunks = columns(partition.chunk_lens)
    noting, parts = listing(cost)
    build_program(execution, chunks, noting)
    names = list(parts)
    weights = np.eye(len(names), len(names) + 1)
    weighted = WeightedCost(cost=cost, weights=dict(zip(names, weights, strict=True)))
    wide = [np.repeat(chunk, weights.shape[1]) for chunk in chunks]
    return build_program(execution, wide, weighted), names


def chunk_of(execution: Execution, partition: Partition, rank: int) -> tuple[int, int]:
    """Tokens of a rank's chunk, and of the context before this chunk; for a pipeline, those of the last piece."""
    piece = len(partition.chunk_lens) - 1 if execution.strategy.is_pipeline else rank
    start = execution.request.cached_prefix + sum(partition.chunk_lens[:piece])
    return partition.chunk_lens[piece] // context_ranks(execution.strategy), start


def basis_of(scenario: PlacedScenario, part: Part, chunk: int, start: int) -> Basis:
    """The basis of a part's seconds: measured, interpolated, extrapolated, fitted to whole TTFTs, or the datasheet."""
    profile = scenario.profile
    if profile is None:
        return "datasheet"
    fit = profile.operations.get(part.kind)
    if fit is None:
        return "extrapolated" if part.kind in UNCOMPARED_KINDS else "fitted"
    if part.variant is not None and (rates := profile.kernels.recurrence) and part.variant not in rates.kinds:
        return "extrapolated"  # extrapolated from another kind of recurrence
    sizes = _sizes(scenario, part, chunk, start)
    if not _inside(fit, sizes):
        return "extrapolated"
    is_measured = part.product is not None and profile.kernels.is_measured(part.product)
    return "measured" if is_measured else "interpolated"


def bases_of(execution: Execution, partition: Partition, timeline: Timeline) -> tuple[str, ...]:
    """The basis of each span's seconds in a simulated prefill, in words, such as "interpolated".

    For work of several parts, the text has the share of each basis: "80 % interpolated, 20 % extrapolated". Waits are
    "simulated". A message is "interpolated" or "extrapolated" by its size if links were measured, else "datasheet".
    """
    work = dict(_work(execution, partition))
    return tuple(_of_span(execution.placed, span, work) for span in timeline.spans)


def _of_span(scenario: Scenario, span: Span, work: Mapping[_WorkKey, str]) -> str:
    if span.kind == "compute":
        return work.get((span.rank, span.layer, span.name), "extrapolated")
    if span.kind == "wait" and span.op != "collective":
        return "simulated"
    profile = scenario.profile
    if profile is None or (span.kind == "transfer" and not scenario.links_are_measured):
        return "datasheet"
    kind = "send_recv" if span.kind == "transfer" else "all_reduce"
    if span.kind == "transfer" and span.op == "all-gather" and scenario.cluster.link.gather is not None:
        kind = "all_gather"
    fit = profile.operations.get(kind)
    if fit is None or not fit.num_rows:
        return "datasheet"
    return "interpolated" if _inside(fit, {"bytes": span.nbytes or 0.0}) else "extrapolated"


def _work(execution: Execution, partition: Partition) -> Iterator[tuple[_WorkKey, str]]:
    """Yield the basis of each operation that computes, with its key (rank, layer, name)."""
    program, parts = weighted_program(execution, partition, execution.placed.cost)
    for rank in range(program.num_ranks):
        chunk, start = chunk_of(execution, partition, rank)
        bases = [basis_of(execution.placed, part, chunk, start) for part in parts]
        by_block: dict[int, str] = {}
        for layer, op in program.ops(rank):
            name = getattr(op, "name", None)
            if name is None or not (seconds := work_s(op)).any():
                continue
            if id(op) not in by_block:
                by_block[id(op)] = _in_words(bases, np.broadcast_to(seconds, len(parts) + 1))
            yield (rank, layer, name), by_block[id(op)]


def _in_words(bases: Sequence[Basis], seconds: Array) -> str:
    """Describe the share of each basis. seconds: shape (parts + 1,), the last entry is the value without any part."""
    shares = defaultdict[str, float](float)
    for basis, each_s in zip(bases, (seconds[:-1] - seconds[-1]).tolist(), strict=True):
        shares[basis] += each_s
    whole = sum(shares.values())
    if whole <= 0:
        return "set by hand"  # the steps of an engine
    ranked = sorted(((each_s / whole, basis) for basis, each_s in shares.items() if each_s > 0), reverse=True)
    if ranked[0][0] >= _WHOLE_SHARE:
        return ranked[0][1]
    return ", ".join(f"{max(1, round(100 * share))} % {basis}" for share, basis in ranked)


def _sizes(scenario: PlacedScenario, part: Part, chunk: int, start: int) -> Mapping[str, float]:
    """The sizes of one part, with the names in OperationFit.seen."""
    batch = scenario.request.batch
    if part.product is not None:
        product = part.product
        head = scenario.share.lm_head
        is_head = (product.in_features, product.out_features) == (head.in_features, head.out_features)
        rows = batch * (1 if is_head and not scenario.traits.head_on_all_tokens else chunk * product.share)
        return {"tokens": rows, "in_features": product.in_features, "out_features": product.out_features}
    if part.kind == "attention":
        heads = {name: getattr(scenario.share, name) for name in ("num_attention_heads", "head_dim")}
        return {"chunk": chunk, "prefix": start, "batch": batch} | heads
    if part.kind in ("latent", "sparse"):
        return {"chunk": chunk, "context": start + chunk, "num_attention_heads": scenario.share.num_attention_heads}
    return {"tokens": chunk * batch}


def _inside(fit: OperationFit, sizes: Mapping[str, float]) -> bool:
    ranges = fit.seen
    return all(ranges[key][0] <= size <= ranges[key][1] for key, size in sizes.items() if key in ranges and size)


# -- Breakdown of a simulated prefill: seconds of every part, and each rank's waits

_RESUME = Part("resume")
_LAUNCHES = Part("launches")
_ENGINE = Part("engine")
_ROUNDING = 1e-9
_RANK = re.compile(r"rank \d+")


def breakdown(execution: Execution, partition: Partition, finish_s: Sequence[float], timeline: Timeline) -> Breakdown:
    """Seconds, share of TTFT, share of the roofline and basis of every part on every rank.

    finish_s: finish time of each rank in the simulation that recorded the timeline.
    """
    ttft_s = finish_s[-1]
    seconds = _part_seconds(execution, partition, execution.placed.cost)
    least = _part_seconds(execution, partition, _roofline(execution.placed))
    rows = []
    for rank in range(len(finish_s)):
        chunk, start = chunk_of(execution, partition, rank)
        for part in seconds:
            if (part_s := float(seconds[part][rank])) > _ROUNDING * ttft_s:
                roofline_s = None if part in (_RESUME, _LAUNCHES, _ENGINE) else float(least[part][rank])
                rows.append(
                    BreakdownRow(
                        rank=rank,
                        kind=part.kind,
                        what=_name(execution.placed, part),
                        seconds=part_s,
                        share=part_s / ttft_s,
                        roofline_share=None if roofline_s is None else roofline_s / part_s,
                        basis=basis_of(execution.placed, part, chunk, start),
                    )
                )
        busy_s = float(sum(part[rank] for part in seconds.values()))
        rows.extend(_waits(timeline, rank, ttft_s, finish_s[rank] - busy_s))
    return Breakdown(ttft_s=ttft_s, rows=tuple(rows))


def _part_seconds(execution: Execution, partition: Partition, cost: CostModel) -> dict[Part, Array]:
    """Device seconds of each rank, for each part."""
    program, names = weighted_program(execution, partition, cost)
    totals = np.zeros((program.num_ranks, len(names) + 1))
    for rank in range(program.num_ranks):
        for _, op in program.ops(rank):
            totals[rank] += work_s(op)
    parts_s = {part: totals[:, index] - totals[:, -1] for index, part in enumerate(names)}
    engine_s = np.array([_engine_s(program, rank) for rank in range(program.num_ranks)])
    idle = _LAUNCHES if execution.placed.host.launch_s else _RESUME
    idle_s = totals[:, -1] - engine_s
    if execution.placed.host.hidden_share:
        busy = build_program(execution, columns(partition.chunk_lens), cost)
        for rank in range(busy.num_ranks):
            busy_s = sum(float(work_s(op).sum()) for _, op in busy.ops(rank))
            idle_s[rank] = busy_s - engine_s[rank] - sum(part_s[rank] for part_s in parts_s.values())
    return parts_s | {idle: idle_s, _ENGINE: engine_s}


def _engine_s(program: Program, rank: int) -> float:
    """Seconds that the device waits for the engine's requests and steps, before the layers."""
    ops = (op for _, op in program.ops(rank) if isinstance(op, Compute) and op.kind == "request")
    return sum(float(op.device_s[0]) for op in ops)


def _roofline(scenario: Scenario) -> CostModel:
    """The cost model of the datasheet's limits for the same operations."""
    traits = replace(scenario.traits, fused_merge=True, measures_merge=False, score_bytes={}, repeats_rotary=False)
    return RooflineCost.of(scenario.cluster.gpu, traits, scenario.request.dtype)


def _name(scenario: Scenario, part: Part) -> str:
    if part.product is not None:
        shape = f"{part.product.in_features}→{part.product.out_features}"
        return f"{part.product.num_matrices} × {shape}" if part.product.num_matrices > 1 else shape
    if part.variant is not None:
        return next(title for kind, title in RECURRENCE_TITLES.items() if kind == part.variant)
    steps = "norms, rotary, copies"
    kernels = {"attention": scenario.kernel, "latent": f"latent, {scenario.kernel}", "sparse": "chosen keys"}
    kernels["experts"] = "routed, as grouped products"
    kernels |= {"elementwise": steps, "resume": "after messages", "launches": "of all kernels"}
    return kernels.get(part.kind, "request, step")


def _waits(timeline: Timeline, rank: int, ttft_s: float, idle_s: float) -> list[BreakdownRow]:
    """Idle seconds of the rank's compute stream by cause; the idle time outside all waits is the host's delay."""
    waits = defaultdict[str, float](float)
    for span in timeline.of(rank, "wait"):
        if span.name != "host":
            waits[_RANK.sub("a neighbour", span.name)] += span.duration_s
    host_s = idle_s - sum(waits.values())
    if host_s > _ROUNDING * ttft_s:
        waits["host"] = host_s
    row = partial(BreakdownRow, rank=rank, kind="wait", roofline_share=None, basis="simulated")
    return [row(what=name, seconds=seconds, share=seconds / ttft_s) for name, seconds in waits.items()]
