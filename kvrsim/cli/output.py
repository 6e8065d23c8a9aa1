"""Answers on standard output as JSON or rows, lines on standard error, and files next to an answer.

Files are written after the answer is printed; a picture that fails does not affect the answer.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.exceptions import Exit

from kvrsim.cli.text import Part, markdown, show
from kvrsim.errors import EXIT_NOT_WRITTEN, KvrsimError
from kvrsim.text import printable

if TYPE_CHECKING:
    from kvrsim.cli.options import OutputArgs

Rows = Sequence[Mapping[str, Any]]
ADVICE = "this is a bug in kvrsim; KVRSIM_TRACEBACK=1 shows where, please report it"


def print_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object; NaN and infinity raise ValueError."""
    click.echo(json.dumps(content, indent=2, allow_nan=False))


def print_result(content: Mapping[str, Any], *screen: Part, json: bool) -> None:
    """Print a result as JSON or, by default, as a screen."""
    if json:
        print_json(content)
    else:
        show(*screen)


def print_answer(
    args: OutputArgs,
    content: Callable[[], Mapping[str, Any]],
    rows: str | Callable[[], Rows],
    screen: Callable[[], Sequence[Part]],
) -> None:
    """Print an answer: its content as JSON, its rows (or a list in the content) as CSV, or its screen.

    Markdown contains the tables of the screen. With CSV and Markdown, notes go to standard error.
    """
    if args.json:
        print_json(content())
        return
    if args.format is None:
        show(*screen())
        return
    answer = content()
    warn_notes(answer.get("warnings", ()))
    if args.format == "md":
        click.echo(markdown(screen()))
    else:
        print_csv(answer[rows] if isinstance(rows, str) else rows())


_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of a formula in spreadsheets


def print_csv(rows: Rows) -> None:
    """Print rows as CSV, with the columns of all rows."""
    import csv

    from kvrsim.io.schema import scalars

    flat = [scalars(row) for row in rows]
    names = list(dict.fromkeys(key for row in flat for key in row))
    names = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([printable(_cell(row.get(name))) for name in names] for row in flat)


def _cell(value: object) -> str:
    """The text of a cell; a text that a spreadsheet would compute gets an apostrophe before it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return str(value)


def warn(line: str) -> None:
    """Print a line for people on standard error."""
    click.echo(printable(f"kvrsim: {line}"), err=True)


def warn_notes(notes: Iterable[str]) -> None:
    """Print notes on standard error, a line per note."""
    for note in notes:
        warn(f"note: {note}")


def warn_once(note: str) -> None:
    """Print a warning from the first rank only."""
    from kvrsim.io.files import is_first_rank

    if is_first_rank():
        warn(note)


def write_files(*outputs: tuple[str | None, Callable[[str], object]]) -> None:
    """Write files, each by its own function of the path; a path of None is skipped.

    Prints one line per file on standard error: its path, or why writing it failed. After all files, raises Exit
    with EXIT_NOT_WRITTEN if one or more failed.
    """
    sys.stdout.flush()
    failed = False
    for path, write in outputs:
        if path is None:
            continue
        try:
            write(path)
        except Exception as error:
            failed = True
            warn(f"error: {path}: not written, the answer is complete: {reason_of(error)}")
        else:
            warn(f"written: {path}")
    if failed:
        raise Exit(EXIT_NOT_WRITTEN)


def reason_of(error: Exception) -> str:
    """Describe an error in one line; print the traceback of a bug if KVRSIM_TRACEBACK is set."""
    if os.environ.get("KVRSIM_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    message = " ".join(str(error).split())
    if isinstance(error, KvrsimError | OSError):
        return message
    return f"{type(error).__name__}: {message} ({ADVICE})"
