"""AnswerOptions: an answer as text for people, as JSON, or its table as CSV or Markdown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from kvrsim.choices import DEPLOY_ENGINES
from kvrsim.cli.options import Json
from kvrsim.cli.outputs import print_json, tell
from kvrsim.cli.parsing import parse_choice
from kvrsim.errors import InputError
from kvrsim.text import printable

Rows = Sequence[Mapping[str, Any]]
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

    def printed(
        self, content: Callable[[], Mapping[str, Any]], rows: str | Callable[[], Rows], *, without: Sequence[str] = ()
    ) -> bool:
        """Print the content as JSON, or rows, which may be a list in it, as a table; False: neither was asked for.

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
            print_rows(answer[rows] if isinstance(rows, str) else rows(), str(self.format), without=without)
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class DeployOptions:
    """The serving engine that an answer is for; `check` before the work."""

    emit: Annotated[
        str | None,
        typer.Option(
            "--emit",
            metavar="|".join(DEPLOY_ENGINES),
            help="Print what launches the answer on this engine. Without --strategies, only strategies that it has are"
            " compared.",
        ),
    ] = None
    only_deployable: Annotated[
        str | None,
        typer.Option(
            "--only-deployable", metavar="|".join(DEPLOY_ENGINES), help="Compare only strategies that this engine has."
        ),
    ] = None

    def check(self) -> None:
        """InputError for an engine that is none."""
        for one in fields(self):
            parse_choice(getattr(self, one.name), one.name, DEPLOY_ENGINES)


def print_rows(rows: Rows, form: str, *, without: Sequence[str] = ()) -> None:
    """Rows on standard output in one of FORMATS, but for fields of these names."""
    flat = [dict(_flat(row)) for row in rows]
    names = [key for key in dict.fromkeys(key for row in flat for key in row) if not {*key.split(".")} & {*without}]
    names = [
        name for name in names if not any(other.startswith(f"{name}.") for other in names)
    ]  # nothing, or a mapping
    if form == "csv":
        import csv

        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([printable(_cell(row.get(name))) for name in names] for row in flat)
    else:
        used = [name for name in names if any(row.get(name) is not None for row in flat)]
        for line in _markdown(used, flat):
            typer.echo(line)


def _flat(row: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, object]]:
    """Values by name, of what is in a mapping as "link.name"; a list of mappings is left out."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        elif not (isinstance(value, list | tuple) and any(isinstance(one, Mapping) for one in value)):
            yield before + key, value


def _cell(value: object, digits: int | None = None) -> str:
    """A list with commas between, as options take it; nothing as nothing; a number with all digits, or so many."""
    if isinstance(value, list | tuple):
        return ",".join(_cell(one, digits) for one in value)
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value).lower()
    return f"{value:.{digits}g}" if digits and isinstance(value, float) else str(value)


def _markdown(names: Sequence[str], rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """A table as GitHub renders it, numbers at the right."""
    numbers = [all(type(row.get(name)) in (int, float, type(None)) for row in rows) for name in names]
    yield f"| {' | '.join(names)} |"
    yield f"|{'|'.join('---:' if number else '---' for number in numbers)}|"
    for row in rows:
        cells = (" ".join(printable(_cell(row.get(name), _DIGITS)).split()) for name in names)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
