"""Where a measured prefill takes longer or shorter than predicted: by part, on the rank that has the first token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvrsim.results.timeline import Span, Timeline

PARTS = ("products", "attention", "cache", "ends", "exchange", "waiting")
_OF_OP = {
    **dict.fromkeys(("qkv", "output+mlp"), "products"),
    **dict.fromkeys(("attention", "merge"), "attention"),
    "append": "cache",
}


class Timelines(Protocol):
    """A candidate with a predicted and a measured timeline."""

    @property
    def predicted(self) -> Timeline:
        """As simulated."""

    @property
    def measured(self) -> Timeline | None:
        """Of one prefill; None: there is none."""


def part_of(span: Span) -> str:
    """The part that a span on a compute stream belongs to.

    products: matrix products with what is around them. attention: with the merging of partial results and what an
    exchange packs and unpacks. cache: K and V on their way into it. ends: embedding, head and the rest.
    exchange: sends, receives and collectives that hold the rank. waiting: the host, and what has no other name.
    """
    if span.kind == "compute":
        return _OF_OP.get(span.op, "ends")
    return "waiting" if span.op == "stall" or span.name == "host" else "exchange"


def seconds_by_part(timeline: Timeline, rank: int) -> dict[str, float]:
    """Of one rank; what of the time until its last span ends is in no span is waiting."""
    found = dict.fromkeys(PARTS, 0.0)
    end_s = 0.0
    for span in timeline.spans:
        if span.rank == rank and span.kind != "transfer":
            found[part_of(span)] += span.duration_s
            end_s = max(end_s, span.end_s)
    found["waiting"] += max(0.0, end_s - sum(found.values()))
    return found


def giver_of(timeline: Timeline) -> int:
    """The rank that has the first token: the one that runs the head."""
    heads = [span.rank for span in timeline.spans if span.op == "head"]
    return heads[-1] if heads else timeline.num_ranks - 1


def differences(candidate: Timelines) -> Mapping[str, float] | None:
    """Measured minus predicted seconds of each part; None: there is no measured timeline."""
    if candidate.measured is None:
        return None
    timelines = candidate.predicted, candidate.measured
    predicted, measured = (seconds_by_part(one, giver_of(one)) for one in timelines)
    return {part: measured[part] - predicted[part] for part in PARTS}
