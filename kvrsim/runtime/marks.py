"""Marks of a forward pass: clocks that record marks, hooks that set marks on a model, and the resulting timeline.

A calibration turns marks into rows (calibrate.measure.forward). Marks of a layer, in this order:

    layer               the layer begins; "output" instead, if the layer has no mixer
    update              the layer's K and V are computed; the cache's update begins
    wait, received      waiting for other ranks' K and V begins and ends
    send                the rank's own K and V are sent
    updated             the cache's update has ended; attention begins
    scan                instead of updated, in a layer with a state: the state before the chunk has arrived
    attending           if attention itself sends and waits: attention computes, after its sends
    sent                the state after the chunk is being sent
    output              attention has ended; the output projection begins
    layer_end           the layer has ended

`>NAME` and `<NAME` enclose one module. Around the layers: "start" of a prefill or of a
pipeline's piece, "embedding" and "head" modules, and "token".
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvrsim.results.timeline import Span, SpanKind, SpanOp, Timeline
from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.plan import REAL_RUNS

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Cycles per second of a delay on the device. The value is above the clock of nearly all GPUs, so that the delay is at
# least as long as requested.
_CYCLES_PER_S = 2.0e9
_EMPTY_MARKS = 8  # number of empty intervals before a forward


class Moment(NamedTuple):
    """A mark before its device time is known."""

    name: str
    layer: int | None
    peer: int | None
    nbytes: float
    event: torch.cuda.Event | None  # the device's record; None: the host is the device
    host_s: float  # time.monotonic()


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """One moment of a forward pass."""

    name: str
    layer: int | None = None  # decoder layer; None: outside the layers
    device_s: float  # time at which the device finished all earlier work; seconds since the first mark
    host_s: float  # time at which the host issued the mark; seconds since the first mark
    peer: int | None = None  # the other rank of "send" and "received"; None: all ranks
    nbytes: float = 0.0  # bytes of "send"


class MarkRecorder:
    """Recorder of the marks of one forward pass at a time, by the monotonic clock, for a CPU."""

    host_is_device = True  # on a CPU, the host is the device: device_s and host_s are equal

    def __init__(self) -> None:
        self.start_s = 0.0  # time.monotonic() of the first mark; the processes of one host share this clock
        self.moments: list[Moment] = []

    def start(self, hold_s: float = 0.0) -> None:
        """Remove all marks and wait for the device; then keep it busy for `hold_s`, so that the host runs ahead."""
        self.moments = []

    def clear(self) -> None:
        """Remove all marks; the device goes on with what the host has issued."""
        self.moments = []

    def mark(self, name: str, layer: int | None = None, *, peer: int | None = None, nbytes: float = 0.0) -> None:
        """Record the host's time and the end of all earlier work on the device; peer and nbytes: those of a message."""
        event = self._event()
        now_s = time.monotonic()
        if not self.moments:
            self.start_s = now_s
        self.moments.append(Moment(name, layer, peer, nbytes, event, now_s))

    def hold(self, hold_s: float) -> None:
        """Keep the current stream of the device busy, so that the host runs ahead; on a CPU, do nothing."""

    def wait(self) -> None:
        """Return when the device has finished all issued work."""

    def finish(self) -> Sequence[Mark]:
        """Wait for the device; return all marks since `start`, in order."""
        self.wait()
        marks = []
        for moment in self.moments:
            host_s = moment.host_s - self.start_s
            device_s = self._device_s(moment.event, host_s)
            mark = Mark(
                name=moment.name,
                layer=moment.layer,
                device_s=device_s,
                host_s=host_s,
                peer=moment.peer,
                nbytes=moment.nbytes,
            )
            marks.append(mark)
        return marks

    def _event(self) -> torch.cuda.Event | None:
        """Return the device's record of a mark."""
        return None

    def _device_s(self, event: torch.cuda.Event | None, host_s: float) -> float:
        """Return the device's time of a mark, in seconds since the first mark."""
        return host_s


class CudaClock(MarkRecorder):
    """Clock with CUDA events on the current stream; `cuda` is torch.cuda or a replacement.

    all_streams: False waits only for the current stream; a wait for the whole device would never end while a receive on
    another stream is pending.
    """

    host_is_device = False

    def __init__(self, cuda: Any, all_streams: bool = False) -> None:
        super().__init__()
        self.cuda = cuda
        self.all_streams = all_streams

    def start(self, hold_s: float = 0.0) -> None:
        super().start()
        self.wait()
        self.hold(hold_s)

    def hold(self, hold_s: float) -> None:
        if hold_s > 0:
            self.cuda._sleep(round(hold_s * _CYCLES_PER_S))

    def wait(self) -> None:
        if self.all_streams:
            self.cuda.synchronize()
        else:
            self.cuda.current_stream().synchronize()

    def _event(self) -> torch.cuda.Event | None:
        event = self.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _device_s(self, event: torch.cuda.Event | None, host_s: float) -> float:
        first = self.moments[0].event
        assert first is not None
        milliseconds: float = first.elapsed_time(event)
        return milliseconds / 1e3


def clock_of(device: torch.device | str, *, all_streams: bool = False) -> MarkRecorder:
    """Return the clock of a torch device, or of a type of device ("cpu" or "cuda")."""
    if getattr(device, "type", device) != "cuda":
        return MarkRecorder()
    import torch

    return CudaClock(torch.cuda, all_streams)


def mark_empty(clock: MarkRecorder) -> None:
    """Set marks without work between them; they show how long a mark takes on the device."""
    for _ in range(_EMPTY_MARKS + 1):
        clock.mark("empty")


def without_marks(marks: Sequence[Mark]) -> list[Mark]:
    """Return the marks after the empty ones, without the device time that the marks themselves take.

    Host times are unchanged, because real prefills also mark their layers.
    """
    empty = marks[: _EMPTY_MARKS + 1]
    rest = marks[_EMPTY_MARKS + 1 :]
    gaps = [after.device_s - before.device_s for before, after in pairwise(empty)]
    mark_s = 0.0
    if gaps:
        mark_s = float(np.median(gaps))
    reduced: list[Mark] = []
    for passed, mark in enumerate(rest):
        device_s = mark.device_s - passed * mark_s
        if reduced:
            device_s = max(device_s, reduced[-1].device_s)
        reduced.append(replace(mark, device_s=device_s))
    return reduced


@contextmanager
def hooked(
    model: PreTrainedModel,
    geometry: Geometry,
    clock: MarkRecorder,
    *,
    parts: Sequence[str] = (),
    ends: bool = False,
    first_layer: int = 0,
) -> Iterator[None]:
    """Make the model's layers mark "layer", "output" and "layer_end" while the context lasts.

    parts: names of modules of every layer that are also marked. ends: also mark the embedding and the head.
    first_layer: number of the first layer.
    """
    with ExitStack() as stack:

        def enclose(module: torch.nn.Module, before: str, after: str | None, layer: int | None = None) -> None:
            """Mark a module's begin and end; after: None for no mark at its end."""
            stack.callback(module.register_forward_pre_hook(lambda *_: clock.mark(before, layer)).remove)
            if after is not None:
                stack.callback(module.register_forward_hook(lambda *_: clock.mark(after, layer)).remove)

        for index, layer in enumerate(geometry.layers(model), start=first_layer):
            _, output = geometry.mixer_of(layer)
            begin = "layer"
            if output is None:
                begin = "output"
            enclose(layer, begin, "layer_end", index)
            for part in parts:
                enclose(layer.get_submodule(part), f">{part}", f"<{part}", index)
            if output is not None:
                enclose(output, "output", None, index)
        if ends:
            enclose(model.get_input_embeddings(), ">embedding", "<embedding")
            enclose(model.get_output_embeddings(), ">head", "<head")
        yield


# Simulator's name of the work that begins at a mark; other marks only interrupt this work.
_BEGINS = {
    **{"start": "embedding", "layer": "qkv", "update": "append", "scan": "scan", "updated": "attention"},
    **{"output": "output+mlp", "layer_end": "head"},
}
_AFTER_SEND = ("updated", "sent", "send", "wait", "attending", "start", "token")
_OPS: dict[str, SpanOp] = {
    **{"qkv": "qkv", "append": "append", "assemble": "append", "attention": "attention", "output+mlp": "output+mlp"},
    **{"scan": "attention", "embedding": "embedding", "head": "head"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """Marks of one rank's prefill."""

    rank: int
    start_s: float  # time.monotonic() of the first mark; processes of one host share this clock
    marks: tuple[Mark, ...]  # empty if the rank had no part
    emits_token: bool = False  # whether the rank emits the first token and therefore runs the head

    @property
    def end_s(self) -> float:
        """Time at which the rank's part ended, including the first token."""
        return self.start_s + self.marks[-1].device_s

    def of(self, name: str) -> list[Mark]:
        """Return the marks with this name, in order."""
        return [mark for mark in self.marks if mark.name == name]


def timeline_of(strategy: str, traces: Sequence[RankTrace]) -> Timeline:
    """Return the timeline of a real prefill in the simulator's format; it starts at 0 with the earliest rank.

    A transfer lasts from the "send" mark, when its K and V exist, until the receiver has noticed it. Both are device
    times of the ranks, so no transfer begins before its K and V exist.
    """
    zero_s = min((trace.start_s for trace in traces if trace.marks), default=0.0)
    spans: list[Span] = []
    for trace in traces:
        spans += own_spans(trace, strategy, trace.start_s - zero_s)
        spans += _transfers(trace, traces, strategy, zero_s)
    spans.sort(key=lambda span: (span.start_s, span.rank, span.end_s))
    return Timeline(strategy=strategy, num_ranks=1 + max(trace.rank for trace in traces), spans=tuple(spans))


def own_spans(trace: RankTrace, strategy: str, offset_s: float = 0.0) -> Iterator[Span]:
    """Yield spans of the rank's computation and waits; its first mark is at `offset_s`."""
    states = {mark.layer for mark in trace.of("scan")}
    running = "embedding"
    for first, second in pairwise(trace.marks):
        running = _BEGINS.get(first.name, running)
        payload = _payload(strategy, is_state=first.layer in states)
        kind: SpanKind = "compute"
        name = running
        op = _OPS[running]
        if first.name == "wait":
            name = _wait_name(payload, second.peer)
            kind = "wait"
            op = payload
        elif first.name == "send" and second.name in _AFTER_SEND:  # gloo's send returns after the write to the socket
            name = f"send to rank {first.peer}"
            kind = "wait"
            op = payload
        elif running == "append" and first.layer in states:
            name = "scan"
            op = _OPS["scan"]
        elif running == "append" and payload == "all-gather":  # the rank joins the gathered K and V
            name = "assemble"
        elif running == "head" and not (trace.emits_token and second.name == "token"):
            continue
        if second.device_s > first.device_s:
            layer = first.layer
            if name == "head":
                layer = None
            start_s = first.device_s + offset_s
            end_s = second.device_s + offset_s
            yield Span(rank=trace.rank, kind=kind, op=op, name=name, layer=layer, start_s=start_s, end_s=end_s)


def _payload(strategy: str, *, is_state: bool) -> SpanOp:
    """Return the payload of the ranks' messages."""
    if is_state:
        return "state"
    return REAL_RUNS[strategy].payload


def _wait_name(payload: SpanOp, peer: int | None) -> str:
    """Name a wait: by the rank that it waits for, or by the collective."""
    if peer is not None:
        return f"{payload} from rank {peer}"
    if payload == "collective":
        return "all-reduce"
    return "all-gather"


def _transfers(trace: RankTrace, traces: Sequence[RankTrace], strategy: str, zero_s: float) -> Iterator[Span]:
    """Match the messages from a rank to each other rank; they arrive in the order of sending."""
    arrivals = {other.rank: _arrivals(other, trace.rank) for other in traces}
    states = {mark.layer for mark in trace.of("scan")}
    for send in trace.of("send"):
        assert send.peer is not None
        start_s = trace.start_s + send.device_s - zero_s
        end_s = next(arrivals[send.peer]) - zero_s
        payload = _payload(strategy, is_state=send.layer in states)
        yield Span(
            rank=trace.rank,
            kind="transfer",
            op=payload,
            name=f"{payload} {trace.rank}→{send.peer}",
            layer=send.layer,
            start_s=start_s,
            end_s=max(end_s, start_s),
            peer=send.peer,
            nbytes=send.nbytes,
        )


def _arrivals(trace: RankTrace, src: int) -> Iterator[float]:
    """Yield the times at which a rank has received the messages from rank `src`, by its host's clock."""
    for mark in trace.of("received"):
        if mark.peer == src:
            yield trace.start_s + mark.device_s
