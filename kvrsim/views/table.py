"""Tables and sentences as plain values; terminal, notebooks and pages share them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, NamedTuple, Self

from kvrsim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from kvrsim.results.results import SimResult

INTERVAL_TITLES = ("80 %\ninterval", "prediction\ninterval")
TIED = "≈"  # mark of a strategy that the prediction cannot distinguish from the best
CLAIMED_COVERAGE = 0.7, 0.9  # intervals with a coverage in this range are called 80 % intervals
_FEW = 8  # largest number of chunks that are all written out
_ROUNDING_S = 1e-12  # smaller differences are rounding errors


class Text(str):
    """A text with a style, such as "bold" or "red"."""

    __slots__ = ("style",)
    style: str

    def __new__(cls, text: str, style: str = "") -> Self:
        self = super().__new__(cls, text)
        self.style = style
        return self


class Cell(NamedTuple):
    """A cell with a value to sort by."""

    shown: str
    value: float | str | None = None  # value to sort by; None: the cell is sorted last


class Column(NamedTuple):
    """A column of a table."""

    title: str  # may have two lines
    number: bool = False  # whether cells are numbers: aligned to the right, sorted from the smallest
    wraps: bool = False  # whether cells are prose, which may take several lines
    hint: str = ""  # meaning of the column; a page shows it as a tooltip
    rank: int = 1  # columns above rank 1 are hidden on phones; narrow terminals hide the highest rank first

    @property
    def label(self) -> str:
        """The title on one line."""
        return " ".join(self.title.split())


@dataclasses.dataclass(slots=True)
class Table:
    """Rows of text under titles."""

    columns: list[Column] = field(default_factory=list)
    rows: list[tuple[str | Cell, ...]] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)  # style of each row, such as "bold"
    headings: dict[int, str] = field(default_factory=dict)  # heading of the rows that begin with a row, by its number

    def add_row(self, *cells: str | Cell, style: str | None = None) -> None:
        """Add a row: a cell for each column."""
        self.rows.append(cells)
        self.styles.append(style or "")

    def texts(self) -> list[tuple[str, ...]]:
        """The rows as plain texts, as people read them."""
        return [tuple(cell.shown if isinstance(cell, Cell) else cell for cell in row) for row in self.rows]

    def without(self, rank: int) -> Table:
        """The table without the columns of a rank."""
        places = [place for place, column in enumerate(self.columns) if column.rank != rank]
        rows = [tuple(row[place] for place in places) for row in self.rows]
        return replace(self, columns=[self.columns[place] for place in places], rows=rows)


def columns(*titles: str) -> Table:
    """Make a table with these columns. ">" before a title marks numbers, "~" marks prose that may wrap."""
    return Table(columns=[Column(title=one.lstrip(">~"), number=one[0] == ">", wraps=one[0] == "~") for one in titles])


def narrowing(table: Table, *optional: str) -> Table:
    """Choose the columns that a narrow terminal hides, in this order, by the beginnings of their titles."""
    ranks = {title: 1 + len(optional) - place for place, title in enumerate(optional)}

    def rank(column: Column) -> Column:
        rank = next((rank for title, rank in ranks.items() if column.title.startswith(title)), column.rank)
        return column._replace(rank=rank)

    return replace(table, columns=list(map(rank, table.columns)))


def interval_title(coverage: float | None) -> str:
    """Column title of prediction intervals: "80 %" if they held 70 to 90 % of the held-out TTFTs.

    coverage: the measured share; None: not measured.
    """
    claimed = coverage is not None and CLAIMED_COVERAGE[0] <= coverage <= CLAIMED_COVERAGE[1]
    return INTERVAL_TITLES[0] if claimed else INTERVAL_TITLES[1]


def format_interval(low_s: float, high_s: float) -> str:
    """Format both ends in the unit of the upper end: "612–771 ms", "0.819–1.05 s"."""
    low = format_seconds(low_s)
    high = format_seconds(high_s)
    number, unit = low.split(" ")
    if not high.endswith(f" {unit}"):
        number = f"{low_s / high_s * float(high.split(' ')[0]):.3g}"
    return f"{number}–{high}"


def format_partition(chunks: Sequence[int], room: int = 14) -> str:
    """Format the chunks: "8 × 2048" if they are equal, all of them if there is room, or the first and the last."""
    if len(chunks) > 1 and len(set(chunks)) == 1:
        return f"{len(chunks)} × {chunks[0]}"
    full = ", ".join(map(str, chunks))
    return full if len(full) <= room else f"{chunks[0]} … {chunks[-1]}"


def format_wait(seconds: float) -> str:
    """Format a difference of two times; a rounding error prints as 0."""
    return format_seconds(seconds if seconds > _ROUNDING_S else 0.0)


def fits_text(fits: bool) -> Text:
    """Return "yes", or "NO" in red."""
    return Text("yes") if fits else Text("NO", style="red")


def seconds_cell(seconds: float | None) -> Cell:
    """Make a cell of seconds; the column is sorted by the number of seconds."""
    return Cell(shown="" if seconds is None else format_wait(seconds), value=seconds)


def bytes_cell(size: float) -> Cell:
    """Make a cell of bytes; the column is sorted by the number of bytes."""
    return Cell(shown=format_bytes(size), value=size)


def baseline_title(strategy: str) -> str:
    """Label of a baseline."""
    return "1 GPU" if strategy == "single" else strategy.upper()


def pieces_text(tokens: Sequence[int], is_pipeline: bool) -> str:
    """Pieces of a pipeline, or chunks by rank, in short: "342 pieces, 29440 falling to 1024 tokens"."""
    count = f"{len(tokens)} {'pieces' if is_pipeline else 'chunks'}"
    if len(set(tokens)) == 1:
        return f"{count} of {tokens[0]} tokens"
    if len(tokens) <= _FEW:
        return f"{', '.join(map(str, tokens))} tokens"
    order = "falling" if tokens[0] >= tokens[-1] else "rising"
    return f"{count}, {tokens[0]} {order} to {tokens[-1]} tokens"


def ranks_table(result: SimResult) -> Table:
    """Table of each rank's computing, waiting, messages and memory."""
    is_gpu = result.timeline is not None and result.timeline.gpus_per_rank > 1
    ranks = {"tokens": 2, "compute": 3, "wait": 4, "sent": 5}
    titles = ("GPU" if is_gpu else "rank", "tokens", "compute", "wait", "sent", "peak memory")
    columns = [Column(title=title, number=True, rank=ranks.get(title, 1)) for title in titles]
    table = Table(columns=[*columns, Column(title="fits")])
    for rank in result.per_rank:
        table.add_row(
            str(rank.rank),
            str(rank.chunk_len),
            seconds_cell(rank.compute_s),
            seconds_cell(rank.wait_s),
            bytes_cell(rank.sent_bytes),
            bytes_cell(rank.memory.total),
            fits_text(rank.memory.total <= result.memory_limit.nbytes),
        )
    return table
