"""CsvTable: a CSV file whose values are checked as they are read.

Comma-separated, UTF-8, one header line; lines that begin with # are comments. Every mistake raises InputError naming
the argument, the file, the line and the column.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvrsim.errors import InputError
from kvrsim.io.files import read_text

MAX_CSV_BYTES = 2**28  # some millions of rows; what is larger was given by mistake
MAX_WHOLE = 10**18

# Plain ASCII: float() and int() alone would read "1_000", "inf" and other alphabets' digits.
_WHOLE = re.compile(r"([0-9]{1,18})(?:\.0*)?", re.ASCII)  # 4096.0 is how pandas writes a column with gaps
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,3})?", re.ASCII)
_LFS_POINTER = "version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvRow:
    """One line of a CSV file."""

    values: Mapping[str, str]  # text by column, without blanks around it
    where: str  # the argument, the file and the line, for messages

    def error(self, column: str, accepted: str) -> InputError:
        """The error to raise for a column whose value is not what is accepted."""
        return InputError(f"{self.where}: {column}", self.values.get(column) or "nothing", accepted)

    def placed(self, error: InputError) -> InputError:
        """The same error, saying in which file and line."""
        return InputError(f"{self.where}: {error.parameter}", error.value, error.accepted)

    def has(self, column: str) -> bool:
        return bool(self.values.get(column))

    def text(self, column: str) -> str:
        """What stands there, required."""
        value = self.values.get(column)
        if not value:
            raise self.error(column, "a text")
        return value

    def whole(self, column: str, *, minimum: int = 1) -> int:
        """A whole number, required."""
        match = _WHOLE.fullmatch(self.values.get(column, ""))
        if match is None or not minimum <= int(match[1]) <= MAX_WHOLE:
            raise self.error(column, f"a whole number from {minimum} to {MAX_WHOLE:.0e}")
        return int(match[1])

    def number(self, column: str, *, allow_zero: bool = False) -> float:
        """A finite number above 0 (or of at least 0), required."""
        text = self.values.get(column, "")
        value = float(text) if _NUMBER.fullmatch(text) else -1.0
        if not (0 < value <= 1e30 or (allow_zero and value == 0)):
            raise self.error(column, "a finite number " + ("of at least 0" if allow_zero else "above 0"))
        return value

    def flag(self, column: str) -> bool:
        """True or False, as Python and JSON write them."""
        value = self.values.get(column, "").lower()
        if value not in ("true", "false"):
            raise self.error(column, "True or False")
        return value == "true"


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvTable:
    """A CSV file with one header line."""

    path: Path  # the file
    where: str  # the argument and the file, for messages
    columns: tuple[str, ...]  # as the header has them; an unnamed column is ""
    rows: tuple[CsvRow, ...]  # without comments and empty lines

    @classmethod
    def read(cls, path: str | Path, argument: str) -> CsvTable:
        """Read a whole file; raises InputError where it cannot be read or is not a CSV with a header."""
        where = f"{argument} {' '.join(str(path).split())}"
        reader = csv.reader(_lines(_content(path, argument)), strict=True)
        try:
            columns = tuple(name.strip() for name in next((line for line in reader if line), []))
            _check_header(columns, where)
            rows = tuple(_row(line, columns, f"{where}, line {reader.line_num}") for line in reader if line)
        except csv.Error as error:
            raise InputError(f"{where}, line {reader.line_num}", error, "a line of comma-separated values") from None
        return cls(path=Path(path), where=where, columns=columns, rows=rows)

    def need(self, columns: Iterable[str]) -> None:
        """Refuse a table that lacks one of these columns."""
        for name in columns:
            if name not in self.columns:
                raise InputError(f"{self.where}: header", ", ".join(self.columns), f"a column {name} among the others")

    def only(self, columns: Iterable[str]) -> None:
        """Refuse a table that has any but these columns."""
        known = list(columns)
        for name in self.columns:
            if name not in known:
                raise InputError(f"{self.where}: column", name or "nothing", ", ".join(known))


def one_line(text: str) -> str:
    """A text that can stand in a CSV cell, from one that a path has."""
    return "".join(letter if letter.isprintable() else " " for letter in text).strip() or "unknown"


def leading_comments(path: str | Path, argument: str) -> Iterator[tuple[int, str]]:
    """Number and text of each comment before the header."""
    for number, line in enumerate(io.StringIO(_content(path, argument)), start=1):
        if line.strip() and not line.startswith("#"):
            return
        if line.startswith("#"):
            yield number, line.rstrip("\n")


def _content(path: str | Path, argument: str) -> str:
    """The text of a file, or the InputError that says why not."""
    text = read_text(path, argument, what="a CSV file", most_bytes=MAX_CSV_BYTES)
    if text.startswith(_LFS_POINTER):
        raise InputError(argument, path, "the CSV itself; this is its Git LFS pointer (git lfs pull fetches the file)")
    return text


def _lines(text: str) -> Iterable[str]:
    """The lines, comments blanked rather than left out, so that line numbers stay those of the file."""
    return ("\n" if line.startswith("#") else line for line in io.StringIO(text, newline=""))


def _check_header(columns: tuple[str, ...], where: str) -> None:
    if not any(columns):
        raise InputError(where, "an empty file", "a CSV file with a header line")
    for name in columns:
        if name and columns.count(name) > 1:
            raise InputError(f"{where}: header", name, "each column once")


def _row(values: list[str], columns: tuple[str, ...], where: str) -> CsvRow:
    if len(values) != len(columns):
        raise InputError(where, f"{len(values)} values", f"{len(columns)} values, one a column of the header")
    return CsvRow(values=dict(zip(columns, map(str.strip, values), strict=True)), where=where)
