"""Tables, facts and trees on the terminal, by Rich; imported only where no JSON is asked for."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.table import Column, Table
from rich.text import Text

from kvrsim.text import printable

_BLANKS_AT_END = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$")  # also before the end of a style
_NO_TERMINAL = 118  # columns, where output goes to a file or a pipe
_WIDE = 100  # columns; from here on there is room for two blanks between a table's columns
_PROSE = 24  # columns of the screen that a cell of several words has at least


@dataclass(frozen=True, slots=True)
class Shrinkable:
    """A table of which a terminal that is too narrow shows fewer columns, rather than parts of figures."""

    table: Table
    optional: tuple[str, ...] = ()  # beginnings of titles, in the order in which columns go

    def within(self, width: int) -> tuple[Table, tuple[str, ...]]:
        """The table with columns left out until it is that wide, or none may go; and the titles of those."""
        table, gone = self.table, []
        for title in self.optional:
            if natural_width(table, prose=_PROSE) <= width:
                break
            gone += [_title(column) for column in table.columns if str(column.header).startswith(title)]
            table = _without(table, title)
        return table, tuple(gone)


@dataclass(frozen=True, slots=True)
class Hint:
    """A command that makes sense next: for who reads a terminal, not for files and pipes."""

    command: str


Part = RenderableType | Shrinkable | Hint


def show(*parts: Part) -> None:
    """Print to standard output, without blanks at the ends of lines; no figure is ever cut.

    Control characters, which names may hold, are spelled out.
    Prose is wrapped at the terminal's width, or at COLUMNS. A table that is wider loses the columns that it can
    spare on a terminal, and its rows are shown one below the other where that is not enough; elsewhere it stays whole,
    and its lines are longer.
    """
    typer.echo(page(parts, _console().width, terminal=sys.stdout.isatty()))


def page(parts: Sequence[Part], width: int, *, terminal: bool) -> str:
    """What `show` prints, at a width."""
    lines = [(line, _width_of(line, width)) for part in parts for line in _fitted(part, width, terminal=terminal)]
    console = _console(max((wide for _, wide in lines), default=width))
    with console.capture() as captured:
        for line, wide in lines:
            part = console.render_str(line) if isinstance(line, str) else line
            segments = console.render(part, console.options.update(width=wide))
            safe = [Segment(printable(segment.text), segment.style, segment.control) for segment in segments]
            console.print(Segments(safe), end="")
    return "\n".join(_BLANKS_AT_END.sub(r"\1", line) for line in captured.get().splitlines())


def _width_of(part: RenderableType, width: int) -> int:
    """The screen's width for prose; for a table at least its own, so that no cell is cut."""
    return max(width, natural_width(part)) if isinstance(part, Table) and part.show_header else width


def _fitted(part: Part, width: int, *, terminal: bool) -> Iterator[RenderableType]:
    if isinstance(part, Hint):
        if terminal:
            yield from ("", Text(f"next: {part.command}", style="dim"))
        return
    shrinkable = part if isinstance(part, Shrinkable) else None
    if isinstance(part, Table) and part.show_header:
        shrinkable = Shrinkable(part)
    if shrinkable is None:
        assert not isinstance(part, Shrinkable)
        yield part
        return
    _set_gap(shrinkable.table, 2 if width >= _WIDE else 1)
    if not terminal:
        yield shrinkable.table
        return
    if natural_width(shrinkable.table, prose=_PROSE) > width:
        _set_gap(shrinkable.table, 1)
    table, gone = shrinkable.within(width)
    if natural_width(table, prose=_PROSE) > width:
        yield from _stacked(shrinkable.table)
        return
    yield table
    if gone:
        yield Text(f"columns hidden for lack of width: {', '.join(gone)}", style="dim")


def _set_gap(table: Table, gap: int) -> None:
    table.padding = (0, gap, 0, 0)


def _stacked(table: Table) -> Iterator[RenderableType]:
    """Rows one below the other, each cell beside its title: for a screen that is too narrow for the table."""
    first, *others = table.columns
    cells = [list(column.cells) for column in others]
    for number, head in enumerate(first.cells):
        yield Text(f"{_title(first)} {head}".strip(), style="bold")
        row = facts(style="")
        for column, values in zip(others, cells, strict=True):
            if str(values[number]):
                row.add_row(f"  {_title(column)}", values[number])
        yield row


def natural_width(table: Table, *, prose: int = 0) -> int:
    """Columns of the screen below which figures would be cut; prose: the least for cells that may wrap at blanks."""
    gap = table.padding[1]
    return sum(_column_width(column, prose) for column in table.columns) + gap * (len(table.columns) - 1)


def _column_width(column: Column, prose: int) -> int:
    lines = [line for cell in (column.header, *column.cells) for line in str(cell).splitlines()]
    longest = max(map(cell_len, lines), default=0)
    if column.no_wrap:
        return longest
    words = max((cell_len(word) for line in lines for word in line.split()), default=0)
    return max(words, min(longest, prose))


def _without(table: Table, title: str) -> Table:
    """The same table without the columns whose titles begin so."""
    kept = [index for index, column in enumerate(table.columns) if not str(column.header).startswith(title)]
    less = columns(into=None)
    less.padding = table.padding
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
    table = into or Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, justify="right" if numbers else "left", no_wrap=True)
    return table


def facts(*, style: str = "bold") -> Table:
    """A label and what it says, wrapped beside it."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True, style=style)
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
