"""Tables as plain values, made once per result: the terminal, notebooks and pages draw the same columns and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from kvrsim.units import format_bytes, format_seconds

INTERVAL_TITLES = ("80 %\ninterval", "prediction\ninterval")
TIED = "≈"  # next to a strategy that the prediction cannot distinguish from the best
_CLAIMED = 0.7, 0.9  # coverage, within which an interval is called an 80 % interval
_ROUNDING_S = 1e-12  # less than this is rounding


class Text(str):
    """A text with a style of Rich, such as "bold" or "red"."""

    __slots__ = ("style",)
    style: str

    def __new__(cls, text: str, style: str = "") -> Self:
        self = super().__new__(cls, text)
        self.style = style
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A cell that is sorted by something other than its text."""

    shown: str
    value: float | str | None = None  # to sort by; None: after all others


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of a table."""

    title: str  # may have two lines
    number: bool = False  # aligned to the right; sorted from the smallest
    wraps: bool = False  # prose, which may take several lines
    hint: str = ""  # what the column means; a page shows it at the pointer
    rank: int = 1  # above 1 a phone leaves it out; a narrow terminal leaves out the highest first

    @property
    def label(self) -> str:
        """The title on one line."""
        return " ".join(self.title.split())


@dataclass(slots=True)
class Table:
    """Rows of text under titles."""

    columns: list[Column] = field(default_factory=list)
    rows: list[tuple[str | Cell, ...]] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)  # of each row, such as "bold"

    def add_column(self, title: str) -> None:
        """Add a column of prose."""
        self.columns.append(Column(title=title, wraps=True))

    def add_row(self, *cells: str | Cell, style: str | None = None) -> None:
        """Add a row: a cell for each column."""
        self.rows.append(cells)
        self.styles.append(style or "")

    def texts(self) -> list[tuple[str, ...]]:
        """The rows as people read them."""
        return [tuple(cell.shown if isinstance(cell, Cell) else cell for cell in row) for row in self.rows]

    def without(self, rank: int) -> Table:
        """The same without the columns of a rank."""
        kept = [place for place, column in enumerate(self.columns) if column.rank != rank]
        rows = [tuple(row[place] for place in kept) for row in self.rows]
        return replace(self, columns=[self.columns[place] for place in kept], rows=rows)


def columns(*titles: str, numbers: bool = False, into: Table | None = None) -> Table:
    """A table with these columns, or one with them added; numbers are aligned to the right."""
    table = into or Table()
    table.columns += [Column(title=title, number=numbers) for title in titles]
    return table


def narrowing(table: Table, *optional: str) -> Table:
    """The table with ranks of columns: a narrow terminal leaves out the titles that begin so, in this order."""
    ranks = {title: 1 + len(optional) - place for place, title in enumerate(optional)}

    def ranked(column: Column) -> Column:
        rank = next((rank for title, rank in ranks.items() if column.title.startswith(title)), column.rank)
        return replace(column, rank=rank)

    return replace(table, columns=list(map(ranked, table.columns)))


def interval_title(coverage: float | None) -> str:
    """Of a column of prediction intervals; "80 %" where 70 to 90 % of held-out TTFTs were inside.

    coverage: the share that was; None: nobody checked it.
    """
    claimed = coverage is not None and _CLAIMED[0] <= coverage <= _CLAIMED[1]
    return INTERVAL_TITLES[0] if claimed else INTERVAL_TITLES[1]


def format_interval(low_s: float, high_s: float) -> str:
    """Both ends, in the unit of the upper: "612–771 ms", "0.819–1.05 s"."""
    low, high = format_seconds(low_s), format_seconds(high_s)
    number, unit = low.split(" ")
    if not high.endswith(f" {unit}"):
        number = f"{low_s / high_s * float(high.split(' ')[0]):.3g}"
    return f"{number}–{high}"


def format_partition(chunks: Sequence[int], room: int = 14) -> str:
    """All chunks where there is room, "8 × 2048" where they are equal, else the first and the last."""
    if len(chunks) > 1 and len(set(chunks)) == 1:
        return f"{len(chunks)} × {chunks[0]}"
    full = ", ".join(map(str, chunks))
    return full if len(full) <= room else f"{chunks[0]} … {chunks[-1]}"


def format_wait(seconds: float) -> str:
    """Seconds that are a difference of two times: what rounding leaves of nothing is nothing."""
    return format_seconds(seconds if seconds > _ROUNDING_S else 0.0)


def fits_text(fits: bool) -> Text:
    """Whether it fits in memory."""
    return Text("yes") if fits else Text("NO", style="red")


def seconds_cell(seconds: float | None) -> Cell:
    """Seconds, sorted by their number."""
    return Cell(shown="" if seconds is None else format_wait(seconds), value=seconds)


def bytes_cell(size: float) -> Cell:
    """Bytes, sorted by their number."""
    return Cell(shown=format_bytes(size), value=size)


def baseline_title(strategy: str) -> str:
    """What a baseline is called."""
    return "1 GPU" if strategy == "single" else strategy.upper()
