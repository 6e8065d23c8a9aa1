"""Text for people: tables, labelled facts and trees on a terminal, and the phrases that several commands share.

Style codes are printed on a terminal only.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat, zip_longest
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import click

from kvrsim.notes import arranged
from kvrsim.text import in_markdown, markdown_table, printable
from kvrsim.units import format_bytes, format_seconds
from kvrsim.views.table import Table, Text, format_interval, format_partition, interval_title

if TYPE_CHECKING:
    from kvrsim.closed_loop import ClosedLoop
    from kvrsim.hardware import Cluster, MemoryLimit
    from kvrsim.memory import RankMemory
    from kvrsim.noise import Distribution
    from kvrsim.results.question import Question

_NO_TERMINAL = 118  # width of output to a file or a pipe
_WIDE = 100  # width from which two blanks separate the columns of a table
_STYLES: dict[str, dict[str, Any]] = {  # styles of texts, as click.style takes them
    **{"bold": {"bold": True}, "dim": {"dim": True}},
    **{"red": {"fg": "red"}, "yellow": {"fg": "yellow"}},
}
_PROSE = 24  # smallest width of a cell of several words
_CONTINUED = " \\"  # end of a line if the command continues in the next line


class ShellCommand(str):
    """A shell command on a screen; if it is too long for a line, it continues after a backslash and can be copied."""

    __slots__ = ()

    def lines(self, width: int) -> list[str]:
        """Lines at most `width` wide, if no word is longer; all but the last end with a backslash."""
        first, *others = [printable(shlex.quote(word)) for word in shlex.split(self)]
        lines = [first]
        for word in others:
            longer = f"{lines[-1]} {word}"
            if len(longer) + len(_CONTINUED) <= width:
                lines[-1] = longer
            else:
                lines.append(f"  {word}")
        return [*(f"{line}{_CONTINUED}" for line in lines[:-1]), lines[-1]]


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
    text = page(parts, get_terminal_size((_NO_TERMINAL, 1)).columns, terminal=sys.stdout.isatty())
    color = None  # click decides
    if os.environ.get("NO_COLOR"):
        color = False
    click.echo(text, color=color)


def page(parts: Sequence[Part], width: int, *, terminal: bool) -> str:
    """Lines that `show` prints at a given width, with style codes on a terminal."""
    lines = list[str]()
    for part in parts:
        for fitted in _fit(part, width, terminal=terminal):
            lines += _lines(fitted, width, terminal=terminal)
    text = "\n".join(lines)
    return text if terminal else click.unstyle(text)


def _lines(part: Part, width: int, *, terminal: bool) -> Iterator[str]:
    """Lines of a text, of facts or of a table."""
    if isinstance(part, str):
        yield from _row([part], [width])
    elif isinstance(part, Facts):
        first = max((len(label) for label, _ in part.rows), default=0)
        for row in part.rows:
            yield from _row(row, [first, max(1, width - first - 1)], styles=(part.style, ""))
    else:
        gap = 1
        has_room = not terminal or natural_width(part, prose=_PROSE, gap=2) <= width
        if width >= _WIDE and has_room:
            gap = 2
        widths = _table_widths(part, width - gap * (len(part.columns) - 1))
        layout: Any = {"widths": widths, "numbers": [column.number for column in part.columns], "gap": " " * gap}
        yield from _row([column.title for column in part.columns], **layout, styles=["bold"] * len(widths))
        for number, (cells, style) in enumerate(zip(part.texts(), part.styles, strict=True)):
            if number in part.headings:
                yield part.headings[number]
            yield from _row(cells, **layout, styles=[style] * len(widths))


def _row(
    cells: Sequence[str],
    widths: Sequence[int],
    *,
    styles: Sequence[str] = ("",),
    numbers: Iterable[bool] = repeat(False),
    gap: str = " ",
) -> Iterator[str]:
    """Lines of cells next to each other; numbers are aligned to the right."""
    wrapped = [_wrap(cell, width) for cell, width in zip(cells, widths, strict=True)]
    cell_styles = [
        f"{style} {cell.style}" if isinstance(cell, Text) else style for cell, style in zip(cells, styles, strict=False)
    ]
    columns = list(zip(widths, numbers, cell_styles, strict=False))
    for texts in zip_longest(*wrapped, fillvalue=""):
        line = list[str]()
        for text, (width, is_number, style) in zip(texts, columns, strict=True):
            blanks = " " * (width - len(text))
            styled = _style(text, style)
            line.append(blanks + styled if is_number else styled + blanks)
        yield gap.join(line).rstrip()


def _wrap(text: str, width: int) -> list[str]:
    """Lines of a text at most `width` wide; longer words are split. Control characters are escaped."""
    if isinstance(text, ShellCommand):
        return text.lines(width)
    lines = list[str]()
    for paragraph in printable(text).split("\n"):
        wrapped = textwrap.wrap(paragraph, width, replace_whitespace=False, break_on_hyphens=False)
        lines += wrapped or [""]
    return lines


def _style(text: str, style: str) -> str:
    """Mark up a text with the codes of a terminal; `style` names some of _STYLES."""
    codes: dict[str, Any] = {}
    for name in style.split():
        codes |= _STYLES[name]
    if not text or not codes:
        return text
    return click.style(text, **codes)


def markdown(parts: Sequence[Part]) -> str:
    """The tables of a screen in Markdown."""
    return "\n\n".join(_markdown_table(part) for part in parts if isinstance(part, Table))


def _markdown_table(table: Table) -> str:
    titles = [column.label for column in table.columns]
    rows = [list(map(in_markdown, cells)) for cells in table.texts()]
    rules = ["---:" if column.number else "---" for column in table.columns]
    return markdown_table(titles, rows, rules)


def _fit(part: Part, width: int, *, terminal: bool) -> Iterator[str | Table | Facts]:
    """The text of a part of a screen at a given width."""
    if not isinstance(part, Table) or not terminal:
        yield part
        return
    table = part
    for rank in sorted({column.rank for column in part.columns} - {1}, reverse=True):
        if natural_width(table, prose=_PROSE) > width:
            table = table.without(rank)
    if natural_width(table, prose=_PROSE) > width:
        yield from _stack(part)
        return
    yield table
    titles = {column.title for column in table.columns}
    hidden = [column.label for column in part.columns if column.title not in titles]
    if hidden:
        yield Text(f"columns hidden for lack of width: {', '.join(hidden)}", "dim")


def _stack(table: Table) -> Iterator[str | Facts]:
    """Rows as lists of titles and cells, for a screen that is too narrow for the table."""
    first, *others = table.columns
    for number, cells in enumerate(table.texts()):
        if number in table.headings:
            yield table.headings[number]
        yield Text(f"{first.label} {cells[0]}".strip(), "bold")
        labels = [f"  {column.label}" for column in others]
        yield facts(*zip(labels, cells[1:], strict=True), style="")


def natural_width(table: Table, *, prose: int = 0, gap: int = 1) -> int:
    """Smallest width that cuts off no number; `prose`: width to which cells of words wrap."""
    return sum(_least_widths(table, prose)) + gap * (len(table.columns) - 1)


def _least_widths(table: Table, prose: float) -> list[int]:
    """Smallest width of each column that cuts off no number; `prose`: width to which cells of words wrap."""
    widths = []
    rows = table.texts()
    for place, column in enumerate(table.columns):
        text = "\n".join([column.title, *(cells[place] for cells in rows)])
        longest = max(map(len, text.split("\n")))
        if column.wraps:
            longest_word = max(map(len, text.split()), default=0)
            widths.append(max(longest_word, int(min(longest, prose))))
        else:
            widths.append(longest)
    return widths


def _table_widths(table: Table, room: int) -> list[int]:
    """Widths of columns within a width: the widest columns of prose wrap, but no word is split."""
    least = _least_widths(table, 0)
    widths = _least_widths(table, math.inf)
    while sum(widths) > room and widths != least:
        widest = max(range(len(widths)), key=lambda place: (widths[place] > least[place], widths[place]))
        widths[widest] -= 1
    return widths


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


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def blocks_text(query_blocks: Sequence[int]) -> str:
    """Calls of attention by rank: "8, 8, 4, 4 calls of attention on ranks 0 to 3"."""
    return f"{', '.join(map(str, query_blocks))} calls of attention on ranks 0 to {len(query_blocks) - 1}"


def stages_text(pieces: Sequence[int], layers: Sequence[int]) -> str:
    """Pieces and stages of a pipeline: "12 pieces of 14784, 8448, ... tokens; 4 stages of 8 layers"."""
    text = str(pieces[0])
    if len(set(pieces)) > 1:
        runs = [(piece, len(list(same))) for piece, same in groupby(pieces)]
        texts = [f"{count} × {piece}" if count > 1 else str(piece) for piece, count in runs]
        text = ", ".join(texts)
    stages = str(layers[0])
    if len(set(layers)) > 1:
        stages = format_partition(layers, room=4 * len(layers))
    num_pieces = f"{len(pieces)} piece{'s' * (len(pieces) != 1)}"
    num_stages = f"{len(layers)} stage{'s' * (len(layers) != 1)}"
    return f"{num_pieces} of {text} tokens; {num_stages} of {stages} layers"


def confirm_command(plan: str, model: str, profile: str) -> ShellCommand:
    """The command that measures a saved plan. model: as it was given to the plan, whose file has only its name."""
    command = f"kvrsim confirm {shlex.quote(plan)}"
    if os.path.exists(model):
        command = f"kvrsim confirm --plan {shlex.quote(plan)} --model {shlex.quote(model)}"
    return ShellCommand(f"{command} --profile {shlex.quote(profile)}")


def round_up_percent(share: float) -> str:
    """Format a share in percent, rounded up to two decimals; a proven bound must not be rounded down."""
    return f"{math.ceil(max(0.0, share) * 1e4 - 1e-9) / 100:.2f}"


def header(question: Question, cluster: Cluster, what: str | None = None) -> tuple[Text, Text]:
    """The question in two lines; `cluster` is the simulated one, `what` names the task (default: one prefill)."""
    request = question.request()
    cached = question.prefix_text()
    if what is None:
        task: tuple[str, ...] = (f"Prefill of {request}{',' * bool(cached)} by {question.model}",)
    else:
        task = (what, *cached)
    first = (*task, *question.settings())
    second = (cluster.describe(), f"profile {question.profile}", *question.engine_text())
    return Text(" · ".join(first)), Text(" · ".join(second), style="dim")


def headline(text: str) -> Text:
    """Make the answer bold."""
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
    basis = f"profile {question.profile}"
    if question.engine != NO_ENGINE:
        basis += f", engine {question.engine}"
    details = "details: --json"
    if question.profile in builtin_profiles():
        details = f"kvrsim profiles show {question.profile}"
    return f"{'; '.join([basis, *more])} ({details})"


def coverage_text(coverage: float | None) -> str:
    """Note on the coverage of 80 % intervals; `coverage` as in interval_title."""
    if coverage is None:
        return "80 % intervals were not checked on whole prefills"
    return f"80 % intervals contained {coverage:.0%} of held-out TTFTs"


def limit_text(limit: MemoryLimit) -> str:
    """The memory limit, and the option that changes it."""
    return f"{limit.describe()} (--memory-fraction)"


def note_rows(notes: Iterable[str]) -> list[Row]:
    """One row per note, those that say why the answer may be wrong first."""
    return [(Text("note:", style="yellow"), note) for note in arranged(notes)]


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
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)
    text = f"{strategy}, rank {worst} needs {needs}: {sizes}"
    if len(over) > 1:
        text += f"; {len(over) - 1} other ranks need more than the limit, too"
    return "", text


def mean_change(noisy: Distribution) -> str:
    """Note on the mean TTFT under noise, relative to that without noise, on GPUs and links that are all alike."""
    more = round(noisy.mean.value_s / noisy.quiet_s - 1, 4) + 0.0  # avoids "-0.0%"
    return f"mean {more:+.1%} over the even machine without noise"
