"""How the seconds of each part and each span are known: measured, interpolated, extrapolated, or not measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kvrsim.compile import build_program, columns
from kvrsim.kernels.calibrated import CostModel
from kvrsim.kernels.profile import OperationFit
from kvrsim.kernels.sensitivity import Part, WeightedCost, listing
from kvrsim.partition import Partition
from kvrsim.program import Array, Program, work_s
from kvrsim.results.breakdown import Basis
from kvrsim.results.timeline import Span, Timeline
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from kvrsim.strategies.pipeline import context_ranks
from planner.uncertainty.causes import UNCOMPARED_KINDS

_ALL = 0.995  # of an operation's seconds, from which on they are said to be known in one way
_WorkKey = tuple[int, int | None, str]  # rank, layer, name


def weighted_program(
    scenario: Scenario, strategy: Strategy, partition: Partition, cost: CostModel
) -> tuple[Program, list[Part]]:
    """A program with a column for each part, in which it alone takes its time, and a last one, in which none does.

    Returns the program and the parts, in the order of the columns.
    """
    chunks = columns(partition.chunk_lens)
    noting, parts = listing(cost)
    build_program(scenario, strategy, chunks, noting)
    names = list(parts)
    weights = np.eye(len(names), len(names) + 1)
    weighted = WeightedCost(cost=cost, weights=dict(zip(names, weights, strict=True)))
    wide = [np.repeat(chunk, weights.shape[1]) for chunk in chunks]
    return build_program(scenario, strategy, wide, weighted), names


def chunk_of(scenario: Scenario, strategy: Strategy, partition: Partition, rank: int) -> tuple[int, int]:
    """Tokens of a rank's chunk, and of the context before it; of a pipeline, the last piece stands for all."""
    piece = len(partition.chunk_lens) - 1 if strategy.pipeline else rank
    start = scenario.request.cached_prefix + sum(partition.chunk_lens[:piece])
    return partition.chunk_lens[piece] // context_ranks(strategy), start


def basis_of(scenario: Scenario, part: Part, chunk: int, start: int) -> Basis:
    """How well a part is known: by its own measurement, between measurements, outside, or by whole TTFTs alone."""
    profile = scenario.profile
    if profile is None:
        return "datasheet"
    fit = profile.operations.get(part.kind)
    if fit is None:
        return "extrapolated" if part.kind in UNCOMPARED_KINDS else "fitted"
    if part.variant is not None and (rates := profile.kernels.recurrence) and part.variant not in rates.kinds:
        return "extrapolated"  # from another kind
    sizes = _sizes(scenario, part, chunk, start)
    if not _inside(fit, sizes):
        return "extrapolated"
    known = part.product is not None and profile.kernels.is_measured(part.product)
    return "measured" if known else "interpolated"


def bases_of(scenario: Scenario, strategy: Strategy, partition: Partition, timeline: Timeline) -> tuple[str, ...]:
    """How the seconds of each span of a simulated prefill are known, in words: "interpolated".

    Work of several parts has the share of its seconds that each basis has: "80 % interpolated, 20 % extrapolated".
    Waiting is simulated. Of a message: whether a link's measurement reaches its size, or the datasheet says its time.
    """
    work = dict(_work(scenario, strategy, partition))
    return tuple(_of_span(scenario, span, work) for span in timeline.spans)


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


def _work(scenario: Scenario, strategy: Strategy, partition: Partition) -> Iterator[tuple[_WorkKey, str]]:
    """Of each operation of each rank that computes."""
    program, parts = weighted_program(scenario, strategy, partition, scenario.cost)
    for rank in range(program.num_ranks):
        chunk, start = chunk_of(scenario, strategy, partition, rank)
        bases = [basis_of(scenario, part, chunk, start) for part in parts]
        known: dict[int, str] = {}
        for layer, op in program.ops(rank):
            name = getattr(op, "name", None)
            if name is None or not (seconds := work_s(op)).any():
                continue
            if id(op) not in known:
                known[id(op)] = _in_words(bases, np.broadcast_to(seconds, len(parts) + 1))
            yield (rank, layer, name), known[id(op)]


def _in_words(bases: Sequence[Basis], seconds: Array) -> str:
    """seconds: of each part and of none, shape (parts + 1,)."""
    shares: dict[str, float] = {}
    for basis, taken in zip(bases, seconds[:-1] - seconds[-1], strict=True):
        shares[basis] = shares.get(basis, 0.0) + float(taken)
    whole = sum(shares.values())
    if whole <= 0:
        return "set by hand"  # the steps of an engine
    ranked = sorted(((taken / whole, basis) for basis, taken in shares.items() if taken > 0), reverse=True)
    if ranked[0][0] >= _ALL:
        return ranked[0][1]
    return ", ".join(f"{max(1, round(100 * share))} % {basis}" for share, basis in ranked)


def _sizes(scenario: Scenario, part: Part, chunk: int, start: int) -> Mapping[str, float]:
    """The sizes of one part, named as in OperationFit.seen."""
    batch = scenario.request.batch
    if part.product is not None:
        product, head = part.product, scenario.share.lm_head
        is_head = (product.in_features, product.out_features) == (head.in_features, head.out_features)
        rows = batch * (1 if is_head and not scenario.cost.head_on_all_tokens else chunk * product.share)
        return {"tokens": rows, "in_features": product.in_features, "out_features": product.out_features}
    if part.kind == "attention":
        model = scenario.share
        return {
            "chunk": chunk,
            "prefix": start,
            "num_attention_heads": model.num_attention_heads,
            "head_dim": model.head_dim,
            "batch": batch,
        }
    if part.kind in ("latent", "sparse"):
        return {"chunk": chunk, "context": start + chunk, "num_attention_heads": scenario.share.num_attention_heads}
    return {"tokens": chunk * batch}


def _inside(fit: OperationFit, sizes: Mapping[str, float]) -> bool:
    seen = fit.seen
    return all(seen[key][0] <= size <= seen[key][1] for key, size in sizes.items() if key in seen and size)
