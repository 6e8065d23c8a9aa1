"""What a rank did when: marks, and their Timeline in the simulator's words."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch

from kvrsim.runtime.geometry import Geometry
from kvrsim.timeline import Span, SpanKind, SpanOp, Timeline

# In a layer, in this order: it begins; K and V are there; waiting for others' begins and ends; ours are sent;
# attention may begin; it has ended; the layer has ended. Around them: the prefill begins, the first token is there.
Event = Literal["start", "layer", "update", "wait", "received", "send", "updated", "output", "layer_end", "token"]

# Between an event and the next one: what the simulator calls it.
COMPUTE = {
    ("layer", "update"): "qkv",
    ("update", "updated"): "append",
    ("update", "wait"): "append",
    ("update", "send"): "append",
    ("received", "updated"): "append",
    ("received", "send"): "append",
    ("updated", "output"): "attention",
    ("output", "layer_end"): "output+mlp",
    ("updated", "token"): "compute",  # where there is no model to hook: all that follows the exchange
    ("updated", "update"): "compute",
    ("start", "layer"): "embedding",
    ("start", "update"): "compute",
    ("layer_end", "token"): "head",
}

_KIND: dict[str, SpanOp] = {
    **{"qkv": "qkv", "append": "append", "assemble": "append", "attention": "attention", "output+mlp": "output+mlp"},
    **{"embedding": "embedding", "head": "head", "compute": "other"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """One moment on one rank."""

    event: Event
    layer: int | None  # decoder layer; None outside of them
    time_s: float  # time.monotonic(), which the processes of one host share


class Recorder:
    """Notes moments: on the CPU as they come, on CUDA as the device comes to them, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self._noted: list[tuple[Event, int | None, Any]] = []
        self._base: tuple[float, Any] = (0.0, None)

    def start(self) -> float:
        """Forget everything, wait for the device and mark the start; returns its time."""
        self._noted.clear()
        if self.on_cuda:
            torch.cuda.synchronize()
        start_s = time.monotonic()
        self.mark("start")
        self._base = (start_s, self._noted[0][2])
        return start_s

    def mark(self, event: Event, layer: int | None = None) -> None:
        """Note a moment."""
        if self.on_cuda:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
            self._noted.append((event, layer, moment))
        else:
            self._noted.append((event, layer, time.monotonic()))

    def marks(self) -> tuple[Mark, ...]:
        """All moments in their order; on CUDA, once the device has come to the last."""
        base_s, base = self._base
        if self.on_cuda:
            torch.cuda.synchronize()
        times = [base_s + base.elapsed_time(moment) / 1e3 if self.on_cuda else moment for _, _, moment in self._noted]
        return tuple(
            Mark(event=event, layer=layer, time_s=time_s)
            for (event, layer, _), time_s in zip(self._noted, times, strict=True)
        )


@contextmanager
def hooked(model: Any, geometry: Geometry, recorder: Recorder) -> Iterator[None]:
    """While this lasts, the model's layers mark where they begin and end, and where attention ends."""
    handles = []
    for index, layer in enumerate(geometry.layers(model)):
        handles += [
            layer.register_forward_pre_hook(_marking(recorder, "layer", index)),
            geometry.output_projection_of(layer).register_forward_pre_hook(_marking(recorder, "output", index)),
            layer.register_forward_hook(_marking(recorder, "layer_end", index)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _marking(recorder: Recorder, event: Event, layer: int) -> Any:
    def hook(*_: Any) -> None:
        recorder.mark(event, layer)

    return hook


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """The marks of one rank's prefill."""

    rank: int
    marks: tuple[Mark, ...]
    sends: tuple[tuple[int, float], ...] = ()  # of each message to the next rank: layer, bytes


def timeline_of(strategy: str, traces: Sequence[RankTrace]) -> Timeline:
    """The simulator's timeline of a real prefill, which starts at 0 with the earliest rank.

    A transfer lasts from the "send" mark, when its K and V are there, to the receiver's noticing. Both are times of
    the ranks' devices, so that no transfer begins before what it carries.
    """
    zero_s = min((trace.marks[0].time_s for trace in traces if trace.marks), default=0.0)
    spans: list[Span] = []
    last = max(trace.rank for trace in traces)
    for trace in traces:
        spans += _own_spans(trace, strategy, zero_s, is_last=trace.rank == last)
        spans += _transfers(trace, traces, zero_s)
    spans.sort(key=lambda span: (span.start_s, span.rank, span.end_s))
    return Timeline(strategy=strategy, num_ranks=1 + last, spans=tuple(spans))


def _own_spans(trace: RankTrace, strategy: str, zero_s: float, *, is_last: bool) -> Iterator[Span]:
    for first, second in pairwise(trace.marks):
        name, kind = _name_of(first.event, second.event, trace.rank, strategy)
        if name is None or second.time_s <= first.time_s or (name == "head" and not is_last):
            continue
        yield Span(
            rank=trace.rank,
            kind=kind,
            op=_KIND[name] if kind == "compute" else "KV",
            name=name,
            layer=None if name == "head" else first.layer,
            start_s=first.time_s - zero_s,
            end_s=second.time_s - zero_s,
        )


def _name_of(first: Event, second: Event, rank: int, strategy: str) -> tuple[str | None, SpanKind]:
    """What the simulator calls the time between two events."""
    if (first, second) == ("wait", "received"):
        return "all-gather" if strategy == "tsp" else f"KV from rank {rank - 1}", "wait"
    if (first, second) == ("send", "updated"):  # gloo writes to the socket before it returns
        return f"send to rank {rank + 1}", "wait"
    name = COMPUTE.get((first, second))
    return "assemble" if name == "append" and strategy == "tsp" else name, "compute"


def _transfers(trace: RankTrace, traces: Sequence[RankTrace], zero_s: float) -> Iterator[Span]:
    peer = next((other for other in traces if other.rank == trace.rank + 1), None)
    noticed = {mark.layer: mark.time_s for mark in peer.marks if mark.event == "received"} if peer else {}
    posted = {mark.layer: mark.time_s for mark in trace.marks if mark.event == "send"}
    for layer, nbytes in trace.sends:
        if layer in noticed:
            posted_s = posted[layer]
            yield Span(
                rank=trace.rank,
                kind="transfer",
                op="KV",
                name=f"KV {trace.rank}→{trace.rank + 1}",
                layer=layer,
                start_s=posted_s - zero_s,
                end_s=max(noticed[layer], posted_s) - zero_s,
                peer=trace.rank + 1,
                nbytes=nbytes,
            )
