"""Timelines: spans of time on ranks and links, and their sums by operation.

A timeline is a table of spans, or a trace for Perfetto and chrome://tracing, with an arrow for every message and the
question that the timeline answers. Source: "Trace Event Format" of the Chromium project: complete events, flow events
and metadata events. A breakdown sums the seconds by rank and operation, compared with the roofline.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from kvrsim.io.files import write_atomically
from kvrsim.io.schema import fields_to_json
from kvrsim.program import Payload, WorkKind
from kvrsim.results.question import Question
from kvrsim.version import __version__, command_line

if TYPE_CHECKING:
    import pandas

SpanKind = Literal["compute", "wait", "transfer"]
# all-gather: gathering of the ranks' K and V; collective: exchange among the GPUs of one rank
SpanOp = WorkKind | Payload | Literal["all-gather", "collective", "stall"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One stretch of time on a rank's compute stream (compute, wait) or on a link (transfer)."""

    rank: int  # rank that computes, waits, or sends the transfer
    kind: SpanKind
    op: SpanOp  # kind of work, payload of a transfer, or cause of a wait
    name: str  # the operation, such as "attention" or "kv to rank 3"
    layer: int | None  # decoder layer, None for embedding and head
    start_s: float
    end_s: float
    peer: int | None = None  # receiver of a transfer
    nbytes: float | None = None  # bytes of a transfer

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


Basis = Literal["measured", "interpolated", "extrapolated", "fitted", "datasheet", "simulated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakdownRow:
    """Time of one kind of work or waiting on one rank, summed over layers."""

    rank: int
    kind: str  # an operation, such as "gemm" or "recurrence", "resume" (after communication) or "wait"
    what: str  # the matrix product, the kind of recurrence, or the cause of a wait
    seconds: float
    share: float  # share of TTFT
    roofline_share: float | None  # shortest time by the datasheet divided by `seconds`; None: no device work
    basis: Basis  # basis of the seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """All rows of all ranks; the rows of a rank sum to its finish time."""

    ttft_s: float
    rows: tuple[BreakdownRow, ...]

    def to_dict(self) -> list[dict[str, Any]]:
        """Plain JSON values."""
        return [fields_to_json(row) for row in self.rows]

    def to_frame(self) -> pandas.DataFrame:
        """One row per rank and operation."""
        import pandas

        return pandas.DataFrame(self.to_dict())


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """All spans of one prefill, ordered by start."""

    strategy: str
    num_ranks: int
    spans: tuple[Span, ...]
    gpus_per_rank: int = 1  # GPUs per rank; they do the same work
    bases: tuple[str, ...] = ()  # basis of each span's seconds, such as "interpolated"; empty: not determined
    # Share of the critical path by kind of operation, largest first; empty: not determined.
    shares: Mapping[str, float] = field(default_factory=dict)

    def rank_name(self, rank: int) -> str:
        if self.gpus_per_rank == 1:
            return f"rank {rank}"
        return f"rank {rank}, {self.gpus_per_rank} GPUs"

    @property
    def rank_names(self) -> tuple[str, ...]:
        """Names of all ranks."""
        return tuple(map(self.rank_name, range(self.num_ranks)))

    @property
    def end_s(self) -> float:
        """Time at which the last span ends."""
        return max((span.end_s for span in self.spans), default=0.0)

    def of(self, rank: int, kind: SpanKind) -> Iterator[Span]:
        """The spans of one kind on one rank."""
        for span in self.spans:
            if span.rank == rank and span.kind == kind:
                yield span

    def computed_s(self, rank: int) -> float:
        """Seconds in which a rank computes."""
        return sum(span.duration_s for span in self.of(rank, "compute"))

    def to_frame(self) -> pandas.DataFrame:
        """One row per span, with the fields of Span as columns."""
        import pandas

        return pandas.DataFrame([asdict(span) for span in self.spans])

    def write_chrome_trace(self, path: str | Path, question: Question | None = None, **about: str | None) -> None:
        """Write a JSON trace, with the question that the timeline answers; the file appears whole or not at all.

        about: values that replace parts of the question; None removes a part.
        """
        write_trace([("", self.spans, self.rank_names)], path, question, about)


Event = dict[str, Any]

_PIDS = 10_000  # process numbers reserved for one timeline
_COMPUTE = 0  # thread number; links have higher numbers


def write_trace(
    timelines: Sequence[tuple[str, Sequence[Span], Sequence[str]]],
    path: str | Path,
    question: Question | None,
    about: Mapping[str, str | None] = MappingProxyType({}),
) -> None:
    """Write one JSON trace of several timelines, each with its name (or ""), spans and names of ranks.

    question: what the timelines answer; the trace contains it, with the version and the command.
    about: values that replace parts of the question; None removes a part.
    """
    about_run: dict[str, Any] = {"version": f"kvrsim {__version__}"}
    command = command_line()
    if command is not None:
        about_run["command"] = command
    if question is not None:
        about_run |= question.to_dict() | {"cluster": question.cluster.describe()}
    for key, value in about.items():
        if value is None:
            about_run.pop(key, None)
        else:
            about_run[key] = value
    events: list[Event] = []
    for number, (name, spans, ranks) in enumerate(timelines):
        events += trace_events(spans, ranks, name, number)
    labels = [str(about_run[key]) for key in ("model", "cluster", "profile", "version") if key in about_run]
    events.append({"ph": "M", "pid": 0, "name": "process_labels", "args": {"labels": ", ".join(labels)}})
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about_run}
    write_atomically(path, json.dumps(content).encode(), argument="trace")


def trace_events(spans: Sequence[Span], ranks: Sequence[str], name: str = "", number: int = 0) -> list[Event]:
    """Trace events of one timeline: one process per rank, with a thread for its compute stream and one for each link.

    Times are in microseconds, rounded to nanoseconds. A flow leads from each message to the receiver's next span,
    or to the wait that ends with the message.
    ranks: names of the ranks. name: prefix of these names. number: number of the timeline in the trace.
    """
    first = number * _PIDS
    tracks = _tracks(spans)
    events = list(_names(ranks, spans, tracks, first, name))
    by_rank: dict[int, list[tuple[int, int]]] = {}
    for span in spans:
        if span.kind != "transfer":
            by_rank.setdefault(span.rank, []).append(_ns(span))
    streams = {rank: _Stream(moments) for rank, moments in by_rank.items()}
    for index, span in enumerate(spans):
        moves = span.kind == "transfer"
        pid = first + span.rank
        tid = _COMPUTE
        if moves:
            tid = tracks[index][1]
        begin, end = _ns(span, moves=moves)
        args: Event = {"layer": span.layer, "kind": span.kind, "op": span.op}
        if span.nbytes is not None:
            args |= {"bytes": span.nbytes, "to": span.peer}
        event = {"ph": "X", "pid": pid, "tid": tid, "cat": span.kind, "name": span.name, "args": args}
        events.append(event | {"ts": begin / 1e3, "dur": (end - begin) / 1e3})
        if not moves or span.peer not in streams:
            continue
        then = streams[span.peer].from_(end)
        if then >= begin:
            flow = {"cat": "message", "name": span.op, "id": first * 1_000_000 + index}
            events.append(flow | {"ph": "s", "pid": pid, "tid": tid, "ts": begin / 1e3})
            events.append(flow | {"ph": "f", "bp": "e", "pid": first + span.peer, "tid": _COMPUTE, "ts": then / 1e3})
    return events


class _Stream:
    """The compute stream of a rank, on which messages arrive."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self.spans = sorted(span for span in spans if span[1] > span[0])
        self.ends = [end for _, end in self.spans]

    def from_(self, moment_ns: int) -> int:
        """Return the first time from `moment_ns` on within a span; after all spans, the last nanosecond.

        The last wait of a rank without later work ends when its message arrives.
        """
        place = bisect_right(self.ends, moment_ns)
        if place < len(self.spans):
            return max(moment_ns, self.spans[place][0])
        if not self.ends:
            return -1
        return self.ends[-1] - 1


def _ns(span: Span, *, moves: bool = False) -> tuple[int, int]:
    """Begin and end in nanoseconds; a message lasts at least one."""
    begin = round(span.start_s * 1e9)
    end = round(span.end_s * 1e9)
    if moves:
        end = max(end, begin + 1)
    return begin, end


def _tracks(spans: Sequence[Span]) -> dict[int, tuple[str, int]]:
    """Track name and thread number of each transfer, by the transfer's index among the spans.

    Each receiver has a track; messages that overlap have further tracks.
    """
    ends: dict[tuple[int, int], list[int]] = {}
    lanes: dict[int, tuple[int, int, int]] = {}
    for index, span in enumerate(spans):
        if span.kind != "transfer" or span.peer is None:
            continue
        begin, end = _ns(span, moves=True)
        busy = ends.setdefault((span.rank, span.peer), [])
        lane = 0
        while lane < len(busy) and busy[lane] > begin:
            lane += 1
        busy[lane : lane + 1] = [end]
        lanes[index] = (span.rank, span.peer, lane)
    threads: dict[tuple[int, int, int], tuple[str, int]] = {}
    for _, lanes_of_rank in groupby(sorted(set(lanes.values())), key=itemgetter(0)):
        for number, (rank, peer, lane) in enumerate(lanes_of_rank, start=1):
            name = f"link to rank {peer}"
            if lane:
                name += f", {lane + 1}"
            threads[rank, peer, lane] = (name, number)
    return {index: threads[lane_of_link] for index, lane_of_link in lanes.items()}


def _names(
    ranks: Sequence[str], spans: Sequence[Span], tracks: Mapping[int, tuple[str, int]], first: int, name: str
) -> Iterator[Event]:
    """Names and order of processes and threads."""
    links: dict[int, set[tuple[str, int]]] = {}
    for index, track in tracks.items():
        links.setdefault(spans[index].rank, set()).add(track)
    for rank, names in enumerate(ranks):
        pid = first + rank
        if name:
            names = f"{name}, {names}"
        yield from _name_event("process", pid, None, names)
        for label, tid in sorted({("compute", _COMPUTE), *links.get(rank, ())}, key=lambda track: track[1]):
            yield from _name_event("thread", pid, tid, label)


def _name_event(what: str, pid: int, tid: int | None, name: str) -> Iterable[Event]:
    place = {"ph": "M", "pid": pid}
    sort_index = pid
    if tid is not None:
        place["tid"] = tid
        sort_index = tid
    yield place | {"name": f"{what}_name", "args": {"name": name}}
    yield place | {"name": f"{what}_sort_index", "args": {"sort_index": sort_index}}
