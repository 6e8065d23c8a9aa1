"""Summary: what a notebook shows of a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrsim.pages.html import Column, Html, items, table, tag

_MOST_ROWS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The answer, the question, a table and notes, all text."""

    answer: str
    question: str
    caption: str  # what the table holds
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def to_html(self) -> str:
        """Markup, escaped and small: the answer first; of many rows the first ones."""
        shown, left = self.rows[:_MOST_ROWS], len(self.rows) - _MOST_ROWS
        more = [f"{left} more rows: to_frame() has all."] if left > 0 else []
        listed = table(self.columns, shown, caption=self.caption, sortable=False)
        notes = items([*more, *self.notes])
        parts: tuple[Html, ...] = (tag("p", tag("strong", self.answer)), tag("p", self.question), listed)
        return tag("div", *parts, *((notes,) if more or self.notes else ()))
