"""What happened when, on which rank and link: spans, as a table and as a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvrsim.io.files import write_atomically
from kvrsim.program.operations import Payload, WorkKind

if TYPE_CHECKING:
    import pandas

SpanKind = Literal["compute", "wait", "transfer"]
# all-gather: of the ranks' K and V; collective: among the GPUs that a rank stands for
SpanOp = WorkKind | Payload | Literal["all-gather", "collective", "stall"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One stretch of time on a rank's compute stream (compute, wait) or on a link (transfer)."""

    rank: int  # rank that computes or waits; of a transfer, the sender
    kind: SpanKind
    op: SpanOp  # what a compute span works on, what a transfer carries, what a wait is for
    name: str  # the operation, such as "attention" or "kv to rank 3"
    layer: int | None  # decoder layer, None for embedding and head
    start_s: float
    end_s: float
    peer: int | None = None  # of a transfer, the receiver
    nbytes: float | None = None  # of a transfer

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """All spans of one prefill, or of several behind each other, ordered by start."""

    strategy: str
    num_ranks: int
    spans: tuple[Span, ...]
    gpus_per_rank: int = 1  # GPUs that a rank stands for, which do everything alike
    first_tokens_s: tuple[float, ...] = ()  # of each request that is shown, where there are several

    def rank_name(self, rank: int) -> str:
        """For people, with its GPUs where they are several."""
        return f"rank {rank}" if self.gpus_per_rank == 1 else f"rank {rank}, {self.gpus_per_rank} GPUs"

    @property
    def end_s(self) -> float:
        """When the last span ends."""
        return max((span.end_s for span in self.spans), default=0.0)

    def of(self, rank: int, kind: SpanKind) -> Iterator[Span]:
        """The spans of one kind on one rank."""
        return (span for span in self.spans if span.rank == rank and span.kind == kind)

    def computed_s(self, rank: int) -> float:
        """Time that a rank has computed."""
        return sum(span.duration_s for span in self.of(rank, "compute"))

    def to_frame(self) -> pandas.DataFrame:
        """One row a span, columns as the fields of Span."""
        import pandas

        return pandas.DataFrame([asdict(span) for span in self.spans])

    def chrome_events(self) -> list[dict[str, Any]]:
        """Trace events (complete events, microseconds) as chrome://tracing and Perfetto read them.

        Source: "Trace Event Format" of the Chromium project.
        """
        events: list[dict[str, Any]] = []
        for rank in range(self.num_ranks):
            events.append(_name("process_name", rank, 0, self.rank_name(rank)))
            events.append(_name("thread_name", rank, 0, "compute"))
            events.append(_name("thread_name", rank, 1, "link out"))
        for span in self.spans:
            args: dict[str, object] = {"layer": span.layer, "kind": span.kind, "op": span.op}
            if span.nbytes is not None:
                args |= {"bytes": span.nbytes, "to": span.peer}
            events.append(
                {"ph": "X", "pid": span.rank, "tid": 1 if span.kind == "transfer" else 0, "cat": span.kind}
                | {"name": span.name, "ts": span.start_s * 1e6, "dur": span.duration_s * 1e6, "args": args}
            )
        return events

    def write_chrome_trace(self, path: str | Path) -> None:
        """Write a JSON trace; the file appears whole or not at all."""
        trace = {"traceEvents": self.chrome_events(), "displayTimeUnit": "ms"}
        write_atomically(path, json.dumps(trace).encode(), argument="trace")


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}
