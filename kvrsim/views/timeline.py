"""Timelines as the data of a page: columns of whole numbers, lane by lane.

A lane is the compute stream or the outgoing link of a rank. Its spans are ordered by start. Times are in ticks of
at least a nanosecond: each span has its distance from the end of the previous span (`gap`, negative if messages
overlap) and its length. A table of kinds holds what spans share: operation, receiver and bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvrsim.hardware import MemoryLimit
from kvrsim.memory import RankMemory
from kvrsim.results.timeline import Span, Timeline
from kvrsim.units import format_bytes
from kvrsim.views.page import Section, join, tag
from kvrsim.views.style import OPERATIONS, operation_of, variable, variable_of

SCRIPTS = ("spans.js", "gantt-view.js", "gantt.js", "memory.js", "timeline.js")
_KEYS = (
    "[Ctrl] and wheel, [+] [−] or [W] [S] zoom; drag sums a part; [Shift] and drag or [A] [D] move; [0] shows all;"
    " [←] [→] [↑] [↓] go from operation to operation."
)
_FINEST_S = 1e-9
_MOST_TICKS = 2**32  # largest number of ticks, which limits the digits of long timelines


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledTimeline:
    """A timeline that a page shows."""

    name: str  # name, shown where a reader selects the timeline
    title: str  # title above the lanes
    timeline: Timeline
    basis: str | None = None  # basis of all seconds; None: each span's own
    memory: str | None = None  # key of its entry in the memory data; None: `name`


def gantt_section(*, several: bool) -> Section:
    """Section of the chart, its keyboard keys and a table of times; of several timelines, the reader selects two."""
    chart = tag("div", id="gantt", class_="chart")
    times = tag("details", tag("summary", "Seconds by rank and kind"), tag("div", id="times"))
    title = "Timelines" if several else "Timeline"
    return Section(
        title=title,
        body=join([chart, tag("p", *_with_keys(_KEYS), class_="hint only-screen"), times]),
        ident="timelines",
    )


def timelines_data(timelines: Sequence[LabelledTimeline]) -> dict[str, Any]:
    """Data for SCRIPTS: the timelines and their legend."""
    return {"timelines": [to_data(one) for one in timelines], "legend": legend(one.timeline for one in timelines)}


def to_data(one: LabelledTimeline) -> dict[str, Any]:
    """Plain JSON values, as assets/spans.js reads them."""
    timeline = one.timeline
    tick_s = max(_FINEST_S, timeline.end_s / _MOST_TICKS)
    kinds: dict[tuple[Any, ...], int] = {}
    lanes: dict[tuple[int, bool], list[tuple[Span, str]]] = {}
    bases = timeline.bases if one.basis is None and timeline.bases else (one.basis or "",) * len(timeline.spans)
    for span, basis in zip(timeline.spans, bases, strict=True):
        lanes.setdefault((span.rank, span.kind == "transfer"), []).append((span, basis))
    return {
        "name": one.name,
        "title": one.title,
        "memory": one.memory or one.name,
        "ranks": timeline.num_ranks,
        "rank_names": list(timeline.rank_names),
        "end_s": timeline.end_s,
        "tick_s": tick_s,
        "first_tokens_s": _first_tokens_s(timeline),
        "shares": [*timeline.shares.items()],
        "lanes": [
            {"rank": rank, "link": link} | _columns(lanes[rank, link], tick_s, kinds) for rank, link in sorted(lanes)
        ],
        "kinds": [dict(zip(("colour", "name", "peer", "bytes", "basis"), kind, strict=True)) for kind in kinds],
    }


def legend(timelines: Iterable[Timeline]) -> list[tuple[str, str]]:
    """Label and CSS variable of every colour in the timelines."""
    operations = {(span.kind, span.op) for timeline in timelines for span in timeline.spans}
    labels = {variable_of(kind, op): operation_of(kind, op).label for kind, op in operations}
    order = [variable("op", name) for name in OPERATIONS]
    return [(labels[name], name) for name in order if name in labels]


def _with_keys(words: str) -> Iterator[str]:
    """Mark up a text in which names of keyboard keys are in brackets."""
    for number, part in enumerate(re.split(r"[][]", words)):
        yield tag("kbd", part) if number % 2 else part


def _columns(
    spans: Sequence[tuple[Span, str]], tick_s: float, kinds: dict[tuple[Any, ...], int]
) -> dict[str, list[int]]:
    """Columns of one lane."""
    columns: dict[str, list[int]] = {"kind": [], "layer": [], "gap": [], "ticks": []}
    clock = 0
    for span, basis in sorted(spans, key=lambda pair: pair[0].start_s):
        kind = (variable_of(span.kind, span.op), span.name, span.peer, span.nbytes, basis)
        start = round(span.start_s / tick_s)
        ticks = max(1, round(span.duration_s / tick_s))
        columns["kind"].append(kinds.setdefault(kind, len(kinds)))
        columns["layer"].append(-1 if span.layer is None else span.layer)
        columns["gap"].append(start - clock)
        columns["ticks"].append(ticks)
        clock = start + ticks
    return columns


def _first_tokens_s(timeline: Timeline) -> list[float]:
    """Time of each request's first token, in seconds; for a single request, the time at which the last rank ends."""
    last = timeline.num_ranks - 1
    ends = (span.end_s for span in timeline.spans if span.rank == last and span.kind != "transfer")
    return [max(ends, default=timeline.end_s)]


# Memory

_PARTS = ("weights", "KV cache", "KV in flight", "activations, scores, logits", "runtime")


def memory_section(limit: MemoryLimit) -> Section:
    """Memory of the strategies on the page."""
    lead = f"Peak of each GPU, by what it is for. The dashed line is the {limit.describe()}."
    return Section(title="Memory", lead=lead, body=tag("div", id="memory"))


def memory_data(memory: Mapping[str, Sequence[RankMemory]], limit: MemoryLimit) -> dict[str, Any]:
    """Memory of each strategy, by ranks with equal needs: first rank, last rank and the bytes of each part."""
    return {
        "limit": limit.nbytes,
        "limit_words": format_bytes(limit.nbytes),
        "parts": list(_PARTS),
        "of": {name: list(_groups(ranks)) for name, ranks in memory.items()},
    }


def _groups(ranks: Sequence[RankMemory]) -> Iterator[list[Any]]:
    first = 0
    for parts, same in groupby(list(rank.at_peak.values()) for rank in ranks):
        count = len(list(same))
        yield [first, first + count - 1, parts]
        first += count
