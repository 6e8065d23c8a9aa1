"""AnswerOptions: an answer as text for people, as JSON, or its table as CSV or Markdown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvrsim.cli.options import Json
from kvrsim.cli.outputs import print_json, tell
from kvrsim.cli.parsing import parse_choice
from kvrsim.errors import InputError
from kvrsim.text import printable

FORMATS = ("csv", "md")
_DIGITS = 6  # significant ones of a number in Markdown


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions:
    """How a command prints its answer; `check` before the work, `printed` after it."""

    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="|".join(FORMATS),
            help="Print the answer's table as CSV or as a Markdown table, with the names and units of --json.",
        ),
    ] = None
    json: Json = False

    def check(self, **others: object) -> None:
        """InputError for an unknown format, or for one beside --json or beside other options that print something."""
        parse_choice(self.format, "format", FORMATS)
        for name, value in {"json": self.json, **others}.items():
            if self.format is not None and value:
                raise InputError("format", self.format, f"nothing with `{name}`, which prints something else")

    def printed(self, content: Callable[[], Mapping[str, Any]], rows: str, *, without: Sequence[str] = ()) -> bool:
        """Print the content as JSON, or its list `rows` as a table; False: neither was asked for.

        without: fields of a row that a table leaves to JSON. Beside a table, warnings go to standard error.
        """
        if not self.json and self.format is None:
            return False
        answer = dict(content())
        if self.json:
            print_json(answer)
        else:
            for warning in answer.get("warnings", ()):
                tell(f"warning: {warning}")
            kept = [{key: value for key, value in row.items() if key not in without} for row in answer[rows]]
            print_rows(kept, str(self.format))
        return True


def print_rows(rows: Sequence[Mapping[str, Any]], form: str) -> None:
    """Rows on standard output in one of FORMATS."""
    flat = [dict(_flat(row)) for row in rows]
    names = list(dict.fromkeys(key for row in flat for key in row))
    if form == "csv":
        import csv

        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([printable(str(row.get(name, ""))) for name in names] for row in flat)
    else:
        used = [name for name in names if any(row.get(name, "") != "" for row in flat)]
        for line in _markdown(used, flat):
            typer.echo(line)


def _flat(row: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, object]]:
    """Cells by name, of what is in a mapping as "link.name"; a list of mappings is left out."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        elif not (isinstance(value, list | tuple) and any(isinstance(one, Mapping) for one in value)):
            yield before + key, _cell(value)


def _cell(value: object) -> object:
    """A list with commas between, as options take it; nothing as nothing."""
    if isinstance(value, list | tuple):
        return ",".join(str(_cell(one)) for one in value)
    return "" if value is None else str(value).lower() if isinstance(value, bool) else value


def _markdown(names: Sequence[str], rows: Iterable[Mapping[str, object]]) -> Iterable[str]:
    """A table as GitHub renders it, numbers at the right."""
    cells = [[row.get(name, "") for name in names] for row in rows]
    numbers = [
        any(isinstance(row[place], int | float) for row in cells)
        and all(isinstance(row[place], int | float) or row[place] == "" for row in cells)
        for place in range(len(names))
    ]
    yield f"| {' | '.join(names)} |"
    yield f"|{'|'.join('---:' if number else '---' for number in numbers)}|"
    for row in cells:
        yield f"| {' | '.join(map(_in_markdown, row))} |"


def _in_markdown(value: object) -> str:
    text = f"{value:.{_DIGITS}g}" if isinstance(value, float) else str(value)
    return printable(" ".join(text.split())).replace("\\", "\\\\").replace("|", "\\|")
