"""What happened when, on which rank and link: spans, as a table and as a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrsim.results.span import Span as Span
from kvrsim.results.span import SpanKind as SpanKind
from kvrsim.results.span import SpanOp as SpanOp
from kvrsim.results.trace import trace_events, write_trace

if TYPE_CHECKING:
    import pandas

    from kvrsim.results.question import Question


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """All spans of one prefill, or of several behind each other, ordered by start."""

    strategy: str
    num_ranks: int
    spans: tuple[Span, ...]
    gpus_per_rank: int = 1  # GPUs that a rank stands for, which do everything alike
    first_tokens_s: tuple[float, ...] = ()  # of each request that is shown, where there are several
    bases: tuple[str, ...] = ()  # of each span: how its seconds are known, such as "interpolated"; empty: not told

    def rank_name(self, rank: int) -> str:
        """For people, with its GPUs where they are several."""
        return f"rank {rank}" if self.gpus_per_rank == 1 else f"rank {rank}, {self.gpus_per_rank} GPUs"

    @property
    def rank_names(self) -> tuple[str, ...]:
        """Of all ranks."""
        return tuple(map(self.rank_name, range(self.num_ranks)))

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
        """Trace events as chrome://tracing and Perfetto read them; see kvrsim/results/trace.py."""
        return trace_events(self.spans, self.rank_names)

    def write_chrome_trace(self, path: str | Path, question: Question | None = None, **about: str | None) -> None:
        """Write a JSON trace, with the question that the timeline answers; the file appears whole or not at all.

        about: parts of the question that are otherwise; None: it has no such part.
        """
        write_trace([("", self.spans, self.rank_names)], path, question, about)
