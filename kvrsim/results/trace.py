"""Timelines as a trace for Perfetto and chrome://tracing, with an arrow for every message and the question asked.

Source: "Trace Event Format" of the Chromium project: complete events, flow events and metadata events.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvrsim.io.files import write_atomically
from kvrsim.results.question import Question
from kvrsim.results.span import Span
from kvrsim.version import __version__, command_line

Event = dict[str, Any]

_PIDS = 10_000  # process numbers reserved for one timeline
_COMPUTE = 0  # thread number; links have those above


def write_trace(
    timelines: Sequence[tuple[str, Sequence[Span], Sequence[str]]],
    path: str | Path,
    question: Question | None,
    about: Mapping[str, str | None] = MappingProxyType({}),
) -> None:
    """Write one JSON trace of several timelines, each with its name ("": none), spans and names of ranks; atomically.

    question: what the timelines answer; the trace has it with the version and, where there is one, the command.
    about: parts of the question that are otherwise; None: it has no such part.
    """
    command = command_line()
    told: dict[str, Any] = {"version": f"kvrsim {__version__}"} | ({} if command is None else {"command": command})
    if question is not None:
        told |= question.to_dict() | {"cluster": question.cluster.describe()}
    told = {key: value for key, value in (told | dict(about)).items() if key not in about or value is not None}
    events = [event for number, one in enumerate(timelines) for event in trace_events(*one[1:], one[0], number)]
    label = ", ".join(str(told[key]) for key in ("model", "cluster", "profile", "version") if key in told)
    events.append({"ph": "M", "pid": 0, "name": "process_labels", "args": {"labels": label}})
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": told}
    write_atomically(path, json.dumps(content).encode(), argument="trace")


def trace_events(spans: Sequence[Span], ranks: Sequence[str], name: str = "", number: int = 0) -> list[Event]:
    """Trace events of one timeline: a process a rank, with a thread for its compute stream and one for each link.

    Times are microseconds, whole nanoseconds. A flow goes from each message to what its receiver then does.
    ranks: their names. name: before them. number: of the timeline, where a trace has several.
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
        pid, tid = first + span.rank, tracks[index][1] if moves else _COMPUTE
        begin, end = _ns(span, moves=moves)
        args: Event = {"layer": span.layer, "kind": span.kind, "op": span.op}
        if span.nbytes is not None:
            args |= {"bytes": span.nbytes, "to": span.peer}
        event = {"ph": "X", "pid": pid, "tid": tid, "cat": span.kind, "name": span.name, "args": args}
        events.append(event | {"ts": begin / 1e3, "dur": (end - begin) / 1e3})
        if moves and span.peer in streams and (then := streams[span.peer].from_(end)) is not None:
            flow = {"cat": "message", "name": span.op, "id": first * 1_000_000 + index}
            events.append(flow | {"ph": "s", "pid": pid, "tid": tid, "ts": begin / 1e3})
            events.append(flow | {"ph": "f", "bp": "e", "pid": first + span.peer, "tid": _COMPUTE, "ts": then / 1e3})
    return events


class _Stream:
    """What a rank's compute stream does, where a message may arrive."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self.spans = sorted(span for span in spans if span[1] > span[0])
        self.ends = [end for _, end in self.spans]

    def from_(self, moment_ns: int) -> int | None:
        """The first moment from then on that is inside a span; None: the rank has finished."""
        place = bisect_right(self.ends, moment_ns)
        return None if place == len(self.spans) else max(moment_ns, self.spans[place][0])


def _ns(span: Span, *, moves: bool = False) -> tuple[int, int]:
    """Begin and end; of a message a nanosecond apart at least."""
    begin, end = round(span.start_s * 1e9), round(span.end_s * 1e9)
    return begin, max(end, begin + 1) if moves else end


def _tracks(spans: Sequence[Span]) -> dict[int, tuple[str, int]]:
    """Of each transfer, by its place among the spans: its track's name and thread number.

    There is a track for each receiver, and others beside it for messages that overlap.
    """
    ends: dict[tuple[int, int], list[int]] = {}
    lanes: dict[int, tuple[int, int, int]] = {}
    for index, span in enumerate(spans):
        if span.kind != "transfer" or span.peer is None:
            continue
        begin, end = _ns(span, moves=True)
        busy = ends.setdefault((span.rank, span.peer), [])
        lane = next((lane for lane, until in enumerate(busy) if until <= begin), len(busy))
        busy[lane : lane + 1] = [end]
        lanes[index] = (span.rank, span.peer, lane)
    ordered = groupby(sorted(set(lanes.values())), key=itemgetter(0))
    numbers = {track: number for _, tracks in ordered for number, track in enumerate(tracks, start=1)}
    return {
        index: (f"link to rank {peer}" + (f", {lane + 1}" if lane else ""), numbers[rank, peer, lane])
        for index, (rank, peer, lane) in lanes.items()
    }


def _names(
    ranks: Sequence[str], spans: Sequence[Span], tracks: Mapping[int, tuple[str, int]], first: int, name: str
) -> Iterator[Event]:
    """Names and order of processes and threads."""
    links: dict[int, set[tuple[str, int]]] = {}
    for index, track in tracks.items():
        links.setdefault(spans[index].rank, set()).add(track)
    for rank, named in enumerate(ranks):
        pid, of = first + rank, f"{name}, " if name else ""
        yield from _named("process", pid, None, of + named)
        for label, tid in sorted({("compute", _COMPUTE), *links.get(rank, ())}, key=lambda track: track[1]):
            yield from _named("thread", pid, tid, label)


def _named(what: str, pid: int, tid: int | None, name: str) -> Iterable[Event]:
    place = {"ph": "M", "pid": pid} | ({} if tid is None else {"tid": tid})
    yield place | {"name": f"{what}_name", "args": {"name": name}}
    yield place | {"name": f"{what}_sort_index", "args": {"sort_index": pid if tid is None else tid}}
