"""RankTrace: the marks of one rank's prefill; timeline_of: their Timeline, in the simulator's terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from kvrsim.program.operations import Payload
from kvrsim.results.timeline import Span, SpanKind, SpanOp, Timeline
from kvrsim.runtime.hooks import Mark

# What the simulator calls the time between two marks.
COMPUTE = {
    ("layer", "update"): "qkv",
    ("update", "updated"): "append",
    ("update", "wait"): "append",
    ("update", "send"): "append",
    ("received", "updated"): "append",
    ("received", "send"): "append",
    ("updated", "output"): "attention",
    **dict.fromkeys((("update", "scan"), ("received", "scan"), ("scan", "send"), ("scan", "output")), "scan"),
    ("sent", "output"): "scan",
    ("output", "layer_end"): "output+mlp",
    ("layer", "layer_end"): "output+mlp",  # of a layer without attention
    ("updated", "token"): "compute",  # where there is no model to hook: all that follows the exchange
    ("updated", "update"): "compute",
    ("start", "layer"): "embedding",
    **dict.fromkeys((("start", "wait"), ("received", "layer"), ("sent", "layer")), "embedding"),  # of split models
    **dict.fromkeys((("output", "wait"), ("received", "wait"), ("received", "layer_end")), "output+mlp"),
    ("start", "update"): "compute",
    ("layer_end", "token"): "head",
}

_KIND: dict[str, SpanOp] = {
    **{"qkv": "qkv", "append": "append", "assemble": "append", "attention": "attention", "output+mlp": "output+mlp"},
    **{"scan": "attention", "embedding": "embedding", "head": "head", "compute": "other"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """The marks of one rank's prefill."""

    rank: int
    start_s: float  # time.monotonic() of the first mark
    marks: tuple[Mark, ...]
    sends: tuple[tuple[int | None, float], ...] = ()  # of each message to the next rank: layer, bytes


def timeline_of(strategy: str, traces: Sequence[RankTrace]) -> Timeline:
    """The simulator's timeline of a real prefill, which starts at 0 with the earliest rank.

    A transfer lasts from the "send" mark, when its K and V are there, to the receiver's noticing. Both are times of
    the ranks' devices, so that no transfer begins before what it carries.
    """
    zero_s = min((trace.start_s for trace in traces if trace.marks), default=0.0)
    spans: list[Span] = []
    last = max(trace.rank for trace in traces)
    for trace in traces:
        spans += _own_spans(trace, strategy, trace.start_s - zero_s, is_last=trace.rank == last)
        spans += _transfers(trace, traces, zero_s, strategy)
    spans.sort(key=lambda span: (span.start_s, span.rank, span.end_s))
    return Timeline(strategy=strategy, num_ranks=1 + last, spans=tuple(spans))


def _own_spans(trace: RankTrace, strategy: str, offset_s: float, *, is_last: bool) -> Iterator[Span]:
    states = _states_of(trace)
    for first, second in pairwise(trace.marks):
        name, kind = _name_of(first.name, second.name, trace.rank, strategy, is_state=first.layer in states)
        if name is None or second.device_s <= first.device_s or (name == "head" and not is_last):
            continue
        yield Span(
            rank=trace.rank,
            kind=kind,
            op=_KIND[name] if kind == "compute" else _payload(strategy, is_state=first.layer in states),
            name=name,
            layer=None if name == "head" else first.layer,
            start_s=first.device_s + offset_s,
            end_s=second.device_s + offset_s,
        )


def _payload(strategy: str, *, is_state: bool) -> Payload | Literal["collective"]:
    """What ranks wait for and send."""
    if strategy == "tp":
        return "collective"
    return "activations" if strategy == "pp" else "state" if is_state else "KV"


def _states_of(trace: RankTrace) -> set[int | None]:
    """The layers that keep a state."""
    return {mark.layer for mark in trace.marks if mark.name == "scan"}


def _name_of(first: str, second: str, rank: int, strategy: str, *, is_state: bool) -> tuple[str | None, SpanKind]:
    """What the simulator calls the time between two events."""
    if (first, second) == ("wait", "received"):
        if strategy == "tp":
            return "all-reduce", "wait"
        gathered = strategy == "tsp" and not is_state
        return "all-gather" if gathered else f"{_payload(strategy, is_state=is_state)} from rank {rank - 1}", "wait"
    if (first, second) in (("send", "updated"), ("send", "sent")):  # gloo writes to the socket before it returns
        return f"send to rank {rank + 1}", "wait"
    name = COMPUTE.get((first, second))
    if name == "append" and is_state:
        return "scan", "compute"
    return "assemble" if name == "append" and strategy == "tsp" else name, "compute"


def _transfers(trace: RankTrace, traces: Sequence[RankTrace], zero_s: float, strategy: str) -> Iterator[Span]:
    peer = next((other for other in traces if other.rank == trace.rank + 1), None)
    noticed = _times_of("received", peer, zero_s) if peer else {}
    posted, states = _times_of("send", trace, zero_s), _states_of(trace)
    sent: Counter[int | None] = Counter()  # of a layer; pieces of a pipeline belong to none
    for layer, nbytes in trace.sends:
        key = layer, sent[layer]
        sent[layer] += 1
        if key in noticed:
            posted_s = posted[key]
            payload = _payload(strategy, is_state=layer in states)
            yield Span(
                rank=trace.rank,
                kind="transfer",
                op=payload,
                name=f"{payload} {trace.rank}→{trace.rank + 1}",
                layer=layer,
                start_s=posted_s,
                end_s=max(noticed[key], posted_s),
                peer=trace.rank + 1,
                nbytes=nbytes,
            )


def _times_of(name: str, trace: RankTrace, zero_s: float) -> dict[tuple[int | None, int], float]:
    """Seconds after `zero_s` of the marks of one name, by layer and how many of it there are before."""
    found: dict[tuple[int | None, int], float] = {}
    count: Counter[int | None] = Counter()
    for mark in trace.marks:
        if mark.name == name:
            found[mark.layer, count[mark.layer]] = trace.start_s - zero_s + mark.device_s
            count[mark.layer] += 1
    return found
