"""Tables, facts and trees on the terminal, by Rich; imported only where no JSON is asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.table import Column, Table
from rich.text import Text

from kvrsim.text import printable

if TYPE_CHECKING:
    pass

_NO_TERMINAL = 118  # columns, where output goes to a file or a pipe
_WIDE = 100  # columns; from here on there is room for two blanks between a table's columns


@dataclass(frozen=True, slots=True)
class Shrinkable:
    """A table of which a terminal that is too narrow shows fewer columns, rather than parts of figures."""

    table: Table
    optional: tuple[str, ...]  # beginnings of titles, in the order in which columns go

    def within(self, width: int) -> tuple[Table, tuple[str, ...]]:
        """The table with columns left out until it is that wide, or none may go; and the titles of those."""
        table, gone = self.table, []
        for title in self.optional:
            if natural_width(table) <= width:
                break
            gone += [_title(column) for column in table.columns if str(column.header).startswith(title)]
            table = _without(table, title)
        return table, tuple(gone)


def show(*parts: RenderableType | Shrinkable) -> None:
    """Print to standard output, without blanks at the ends of lines; no figure is ever cut.

    Control characters, which names may hold, are spelled out.
    Prose is wrapped at the terminal's width, or at COLUMNS. A table that is wider loses the columns that it can
    spare on a terminal; elsewhere it stays whole, and its lines are longer.
    """
    width = _console().width
    lines = [(line, _width_of(line, width)) for part in parts for line in _fitted(part, width)]
    console = _console(max((wide for _, wide in lines), default=width))
    with console.capture() as captured:
        for line, wide in lines:
            part = console.render_str(line) if isinstance(line, str) else line
            segments = console.render(part, console.options.update(width=wide))
            safe = [Segment(printable(segment.text), segment.style, segment.control) for segment in segments]
            console.print(Segments(safe), end="")
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _width_of(part: RenderableType, width: int) -> int:
    """The screen's width for prose; for a table at least its own, so that no cell is cut."""
    return max(width, natural_width(part)) if isinstance(part, Table) and part.show_header else width


def _fitted(part: RenderableType | Shrinkable, width: int) -> Iterator[RenderableType]:
    if not isinstance(part, Shrinkable):
        yield part
    elif not sys.stdout.isatty():
        yield part.table
    else:
        table, gone = part.within(width)
        yield table
        if gone:
            yield Text(f"columns hidden for lack of width: {', '.join(gone)}", style="dim")


def natural_width(table: Table) -> int:
    """Columns of the screen below which figures would be cut: prose may wrap at every blank."""
    gap = table.padding[1]
    return sum(map(_column_width, table.columns)) + gap * (len(table.columns) - 1)


def _column_width(column: Column) -> int:
    lines = [line for cell in (column.header, *column.cells) for line in str(cell).splitlines()]
    parts = lines if column.no_wrap else [word for line in lines for word in line.split()]
    return max(map(cell_len, parts), default=0)


def _without(table: Table, title: str) -> Table:
    """The same table without the columns whose titles begin so."""
    kept = [index for index, column in enumerate(table.columns) if not str(column.header).startswith(title)]
    less = columns(into=None)
    for index in kept:
        column = table.columns[index]
        less.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap)
    cells = [list(column.cells) for column in table.columns]
    for number, row in enumerate(table.rows):
        less.add_row(*(cells[index][number] for index in kept), style=row.style)
    return less


def _title(column: Column) -> str:
    return " ".join(str(column.header).split())


def _console(width: int | None = None) -> Console:
    """A given width, else COLUMNS, else the terminal's; without a terminal there is no limit."""
    if width is None and not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        width = _NO_TERMINAL
    return Console(markup=False, highlight=False, emoji=False, width=width)


def columns(*titles: str, numbers: bool = False, into: Table | None = None) -> Table:
    """A table with these columns, or one with them added; numbers stand right."""
    gap = 2 if _console().width >= _WIDE else 1
    table = into or Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, justify="right" if numbers else "left", no_wrap=True)
    return table


def facts() -> Table:
    """A label and what it says, wrapped beside it."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    return table


def show_tree(name: str, content: Mapping[str, Any]) -> None:
    """Keys and values, nested ones indented."""
    table = facts()
    for label, value in _branch(content, indent="  "):
        table.add_row(Text(label), value)
    show(Text(name, style="bold"), table)


def _branch(content: Mapping[str, Any], indent: str) -> Iterator[tuple[str, str]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}", ""
            yield from _branch(value, indent + "  ")
        elif _holds_objects(value):
            for number, item in enumerate(value):
                yield from _branch({f"{key} {number}": item}, indent)
        elif value not in (None, (), []):
            yield f"{indent}{key}", _shown(value)


def _holds_objects(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
