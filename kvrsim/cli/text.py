"""Text for people: tables, labelled facts and trees on a terminal, and the phrases that several commands share.

The library Rich draws them; it is imported when something is shown, so that --json does not wait for it.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import typer

from kvrsim.text import in_markdown, markdown_table, printable
from kvrsim.units import format_bytes, format_seconds
from kvrsim.views.table import Table, Text, format_interval, format_partition, interval_title

if TYPE_CHECKING:
    from rich.console import Console

    from kvrsim.closed_loop import ClosedLoop
    from kvrsim.hardware import Cluster, MemoryLimit
    from kvrsim.memory import RankMemory
    from kvrsim.noise import Distribution
    from kvrsim.results.question import Question

_BLANKS_AT_END = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$")  # blanks at a line's end, also before style codes
_NO_TERMINAL = 118  # width of output to a file or a pipe
_WIDE = 100  # width from which two blanks separate the columns of a table
_PROSE = 24  # smallest width of a cell of several words


Row = tuple[str, str | None]  # a label and its text; None or empty: the label is left out


@dataclass(slots=True)
class Facts:
    """Labels with texts that wrap to their right."""

    rows: list[tuple[str, str]]
    style: str = "bold"  # style of the labels


Part = str | Table | Facts


def facts(*rows: Row, style: str = "bold") -> Facts:
    """The rows that have a text."""
    return Facts(rows=[(label, text) for label, text in rows if text], style=style)


def show(*parts: Part) -> None:
    """Print to standard output without trailing blanks; no number is cut off.

    Control characters in names are escaped.
    Prose is wrapped at the terminal's width, or at COLUMNS. A table that is wider than a terminal loses its optional
    columns; if it is still too wide, its rows are printed as lists. Without a terminal the table stays whole.
    """
    typer.echo(page(parts, _console().width, terminal=sys.stdout.isatty()))


def page(parts: Sequence[Part], width: int, *, terminal: bool) -> str:
    """Lines that `show` prints at a given width."""
    from rich.segment import Segment, Segments

    drawn = []
    for line in (line for part in parts for line in _fitted(part, width, terminal=terminal)):
        room, gap = width, 1
        if isinstance(line, Table):
            if width >= _WIDE and not (terminal and natural_width(line, prose=_PROSE, gap=2) > width):
                gap = 2
            room = max(width, natural_width(line, gap=gap))
        drawn.append((_drawn(line, gap), room))
    console = _console(max((room for _, room in drawn), default=width))
    with console.capture() as captured:
        for line, room in drawn:
            segments = console.render(line, console.options.update(width=room))
            safe = [Segment(printable(segment.text), segment.style, segment.control) for segment in segments]
            console.print(Segments(safe), end="")
    return "\n".join(_BLANKS_AT_END.sub(r"\1", line) for line in captured.get().splitlines())


def markdown(parts: Sequence[Part]) -> str:
    """The tables of a screen in Markdown."""
    return "\n\n".join(
        markdown_table(
            [column.label for column in part.columns],
            [[in_markdown(cell) for cell in cells] for cells in part.texts()],
            ["---:" if column.number else "---" for column in part.columns],
        )
        for part in parts
        if isinstance(part, Table)
    )


def _fitted(part: Part, width: int, *, terminal: bool) -> Iterator[str | Table | Facts]:
    """The text of a part of a screen at a given width."""
    if not isinstance(part, Table) or not terminal:
        yield part
    else:
        table = part
        for rank in sorted({column.rank for column in part.columns} - {1}, reverse=True):
            if natural_width(table, prose=_PROSE) > width:
                table = table.without(rank)
        if natural_width(table, prose=_PROSE) > width:
            yield from _stacked(part)
            return
        yield table
        shown = {column.title for column in table.columns}
        if gone := [column.label for column in part.columns if column.title not in shown]:
            yield Text(f"columns hidden for lack of width: {', '.join(gone)}", "dim")


def _stacked(table: Table) -> Iterator[str | Facts]:
    """Rows as lists of titles and cells, for a screen that is too narrow for the table."""
    first, *others = table.columns
    for cells in table.texts():
        yield Text(f"{first.label} {cells[0]}".strip(), "bold")
        yield facts(*((f"  {column.label}", cell) for column, cell in zip(others, cells[1:], strict=True)), style="")


def natural_width(table: Table, *, prose: int = 0, gap: int = 1) -> int:
    """Smallest width that cuts off no number; `prose`: width to which cells of words wrap."""
    from rich.cells import cell_len

    rows, total = table.texts(), gap * (len(table.columns) - 1)
    for place, column in enumerate(table.columns):
        texts = (column.title, *(cells[place] for cells in rows))
        lines = [line for text in texts for line in text.split("\n")]
        longest = max(map(cell_len, lines), default=0)
        words = max((cell_len(word) for line in lines for word in line.split()), default=0)
        total += max(words, min(longest, prose)) if column.wraps else longest
    return total


def _drawn(part: str | Table | Facts, gap: int) -> Any:
    """Make the object that Rich draws."""
    from rich.table import Table as Grid
    from rich.text import Text as Styled

    def styled(text: str, style: str = "") -> Styled:
        return Styled(text, style=text.style if isinstance(text, Text) else style)

    if isinstance(part, str):
        return styled(part)
    if isinstance(part, Facts):
        grid = Grid.grid(padding=(0, 1, 0, 0))
        grid.add_column(no_wrap=True, style=part.style)
        grid.add_column(overflow="fold")
        for label, text in part.rows:
            grid.add_row(styled(label), styled(text))
        return grid
    grid = Grid(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    for column in part.columns:
        grid.add_column(column.title, justify="right" if column.number else "left", no_wrap=not column.wraps)
    for cells, style in zip(part.texts(), part.styles, strict=True):
        grid.add_row(*map(styled, cells), style=style or None)
    return grid


def _console(width: int | None = None) -> Console:
    """Console of the given width, else of COLUMNS, else of the terminal, else of a fixed width."""
    from rich.console import Console

    if width is None and not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        width = _NO_TERMINAL
    return Console(markup=False, highlight=False, emoji=False, width=width)


def show_tree(name: str, content: Mapping[str, Any]) -> None:
    """Print keys and values, nested ones indented."""
    show(Text(name, "bold"), Facts(list(_branch(content, indent="  "))))


def _branch(content: Mapping[str, Any], indent: str) -> Iterator[tuple[str, str]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}", ""
            yield from _branch(value, indent + "  ")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
            for number, item in enumerate(value):
                yield from _branch({f"{key} {number}": item}, indent)
        elif value not in (None, (), []):
            yield f"{indent}{key}", _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def blocks_text(query_blocks: Sequence[int]) -> str:
    """Calls of attention by rank: "8, 8, 4, 4 calls of attention on ranks 0 to 3"."""
    return f"{', '.join(map(str, query_blocks))} calls of attention on ranks 0 to {len(query_blocks) - 1}"


def stages_text(pieces: Sequence[int], layers: Sequence[int]) -> str:
    """Pieces and stages of a pipeline: "12 pieces of 14784, 8448, ... tokens; stages of 8 × 4 layers"."""
    runs = [(piece, len(list(same))) for piece, same in groupby(pieces)]
    shown = ", ".join(f"{count} × {piece}" if count > 1 else str(piece) for piece, count in runs)
    stages = format_partition(layers, room=4 * len(layers))
    return f"{len(pieces)} piece{'s' * (len(pieces) != 1)} of {shown} tokens; stages of {stages} layers"


def round_up_percent(share: float) -> str:
    """A share in percent, rounded up to two decimals because it is part of a proof."""
    return f"{math.ceil(max(0.0, share) * 1e4 - 1e-9) / 100:.2f}"


def header(question: Question, cluster: Cluster, what: str | None = None) -> tuple[Text, Text]:
    """The question in two lines; `cluster` is the simulated one, `what` names the task (default: one prefill)."""
    request, cached = question.request(), question.cached()
    one = f"Prefill of {request}{',' * bool(cached)} by {question.model}"
    first = (one,) if what is None else (what, *cached)
    first = (*first, *question.settings())
    second = (cluster.describe(), f"profile {question.profile}", *question.served())
    return Text(" · ".join(first)), Text(" · ".join(second), style="dim")


def headline(text: str) -> Text:
    """Mark up the answer so that it is emphasised."""
    return Text(text, style="bold")


def likely(low_s: float, ttft_s: float, high_s: float, coverage: float | None) -> str:
    """A TTFT and its interval: "602 ms (80 % interval 568–638 ms)"."""
    if low_s == high_s:
        return format_seconds(ttft_s)
    return f"{format_seconds(ttft_s)} ({' '.join(interval_title(coverage).split())} {format_interval(low_s, high_s)})"


def rests_on_line(question: Question, *more: str) -> str:
    """Basis of a prediction in one line, and where to read more."""
    from kvrsim.engine import NO_ENGINE
    from kvrsim.kernels.profile import builtin_profiles
    from kvrsim.scenario import ROOFLINE

    if question.profile == ROOFLINE:
        return f"the datasheet of {question.cluster.gpu.name}, no measurement: TTFTs are lower limits"
    engine = "" if question.engine == NO_ENGINE else f", engine {question.engine}"
    shipped = question.profile in builtin_profiles()
    details = f"kvrsim profiles show {question.profile}" if shipped else "details: --json"
    return f"{'; '.join((f'profile {question.profile}{engine}', *more))} ({details})"


def coverage_text(coverage: float | None) -> str:
    """Note on the coverage of 80 % intervals; `coverage` as in interval_title."""
    share = "were not checked on whole prefills" if coverage is None else f"contained {coverage:.0%} of held-out TTFTs"
    return f"80 % intervals {share}"


def limit_text(limit: MemoryLimit) -> str:
    """The memory limit, and the option that changes it."""
    return f"{limit.describe()} (--memory-fraction)"


def note_rows(notes: Iterable[str]) -> list[Row]:
    """One row per note."""
    return [(Text("note:", style="yellow"), note) for note in notes]


def users_row(loop: ClosedLoop | None, mean_ttft_s: float | None) -> Row:
    """The mean TTFT of closed-loop users, if requested."""
    if loop is None or mean_ttft_s is None:
        return "users:", None
    text = f"mean TTFT {format_seconds(mean_ttft_s)} of {loop.users} at once, {loop.output_tokens:g} output tokens"
    return "users:", f"{text} each, {format_seconds(loop.tpot_s)} per token on the same GPUs"


def misfit_row(strategy: str, memory: Sequence[RankMemory], limit_bytes: int) -> Row:
    """Needs of the rank furthest above the limit, and the number of other ranks above it; no text if all fit."""
    over = [rank for rank, held in enumerate(memory) if held.total > limit_bytes]
    if not over:
        return "", None
    worst = max(over, key=lambda rank: memory[rank].total)
    needs = f"{format_bytes(memory[worst].total)} of {format_bytes(limit_bytes)}"
    parts = sorted(memory[worst].at_peak.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)
    others = f"; {len(over) - 1} other ranks need more than the limit, too" if len(over) > 1 else ""
    return "", f"{strategy}, rank {worst} needs {needs}: {listed}{others}"


def mean_change(noisy: Distribution) -> str:
    """Note on the mean TTFT under noise, relative to that without noise."""
    more = round(noisy.mean.value_s / noisy.quiet_s - 1, 4) + 0.0  # avoids "-0.0%"
    return f"mean {more:+.1%} over noise-free"
