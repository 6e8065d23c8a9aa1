"""RankTrace: the marks of one rank's prefill; timeline_of: their Timeline, in the simulator's terms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
    # Where attention itself sends and waits.
    **dict.fromkeys((("updated", "send"), ("attending", "wait"), ("attending", "send")), "attention"),
    **dict.fromkeys((("attending", "output"), ("received", "attending"), ("received", "output")), "attention"),
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

_SENDING = (("send", "updated"), ("send", "sent"), ("send", "send"), ("send", "wait"), ("send", "attending"))
_ASSEMBLED = ("tsp", "zigzag")  # where what is gathered is then joined
_KIND: dict[str, SpanOp] = {
    **{"qkv": "qkv", "append": "append", "assemble": "append", "attention": "attention", "output+mlp": "output+mlp"},
    **{"scan": "attention", "embedding": "embedding", "head": "head", "compute": "other"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """One message that left a rank."""

    layer: int | None  # None: of no layer, as a piece of a pipeline is
    nbytes: float
    dst: int  # the rank that receives


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """The marks of one rank's prefill."""

    rank: int
    start_s: float  # time.monotonic() of the first mark
    marks: tuple[Mark, ...]
    sends: tuple[Sent, ...] = ()  # one for each mark "send"
    receipts: tuple[int | None, ...] = ()  # for each mark "received", the rank that sent; None: all ranks
    gives_token: bool = False  # whether the rank gives the first token, so that it runs the head


def timeline_of(strategy: str, traces: Sequence[RankTrace]) -> Timeline:
    """The simulator's timeline of a real prefill, which starts at 0 with the earliest rank.

    A transfer lasts from the "send" mark, when its K and V are there, to the receiver's noticing. Both are times of
    the ranks' devices, so that no transfer begins before what it carries.
    """
    zero_s = min((trace.start_s for trace in traces if trace.marks), default=0.0)
    spans: list[Span] = []
    for trace in traces:
        spans += _own_spans(trace, strategy, trace.start_s - zero_s)
        spans += _transfers(trace, traces, zero_s, strategy)
    spans.sort(key=lambda span: (span.start_s, span.rank, span.end_s))
    return Timeline(strategy=strategy, num_ranks=1 + max(trace.rank for trace in traces), spans=tuple(spans))


def _own_spans(trace: RankTrace, strategy: str, offset_s: float) -> Iterator[Span]:
    states = _states_of(trace)
    sources, sends = iter(trace.receipts), iter(trace.sends)
    src, dst = None, trace.rank + 1
    for first, second in pairwise(trace.marks):
        if second.name == "received":
            src = next(sources)
        if first.name == "send":
            dst = next(sends).dst
        name, kind = _name_of(first.name, second.name, (src, dst), strategy, is_state=first.layer in states)
        if name is None or second.device_s <= first.device_s or (name == "head" and not trace.gives_token):
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


def _payload(strategy: str, *, is_state: bool) -> SpanOp:
    """What ranks wait for and send."""
    if strategy == "tp":
        return "collective"
    if strategy in _ASSEMBLED and not is_state:
        return "all-gather"
    return "activations" if strategy == "pp" else "state" if is_state else "KV"


def _states_of(trace: RankTrace) -> set[int | None]:
    """The layers that keep a state."""
    return {mark.layer for mark in trace.marks if mark.name == "scan"}


def _name_of(
    first: str, second: str, peers: tuple[int | None, int], strategy: str, *, is_state: bool
) -> tuple[str | None, SpanKind]:
    """What the simulator calls the time between two events; peers: who sent what came, and who gets what leaves."""
    src, dst = peers
    if (first, second) == ("wait", "received"):
        if src is None:
            return "all-reduce" if strategy == "tp" else "all-gather", "wait"
        return f"{_payload(strategy, is_state=is_state)} from rank {src}", "wait"
    # Gloo writes to the socket before it returns.
    if (first, second) in _SENDING:
        return f"send to rank {dst}", "wait"
    name = COMPUTE.get((first, second))
    if name == "append" and is_state:
        return "scan", "compute"
    return "assemble" if name == "append" and strategy in _ASSEMBLED else name, "compute"


def _transfers(trace: RankTrace, traces: Sequence[RankTrace], zero_s: float, strategy: str) -> Iterator[Span]:
    """The messages between two ranks arrive in the order in which they left."""
    states = _states_of(trace)
    arrived = {
        other.rank: iter(
            [at_s for at_s, src in zip(_times_of("received", other, zero_s), other.receipts, strict=True)
             if src == trace.rank]
        )
        for other in traces
    }  # fmt: skip
    for posted_s, sent in zip(_times_of("send", trace, zero_s), trace.sends, strict=True):
        noticed_s = next(arrived[sent.dst], None)
        if noticed_s is not None:
            payload = _payload(strategy, is_state=sent.layer in states)
            yield Span(
                rank=trace.rank,
                kind="transfer",
                op=payload,
                name=f"{payload} {trace.rank}→{sent.dst}",
                layer=sent.layer,
                start_s=posted_s,
                end_s=max(noticed_s, posted_s),
                peer=sent.dst,
                nbytes=sent.nbytes,
            )


def _times_of(name: str, trace: RankTrace, zero_s: float) -> list[float]:
    """Seconds after `zero_s` of the marks of one name, in order."""
    return [trace.start_s - zero_s + mark.device_s for mark in trace.marks if mark.name == name]
