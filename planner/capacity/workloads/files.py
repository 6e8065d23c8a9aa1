"""Traces: CSV with this project's, Azure's or Mooncake's columns, or Mooncake's JSON lines.

The first line determines the format:

    arrival_s,context_tokens,output_tokens[,cached_tokens]     seconds, tokens
    TIMESTAMP,ContextTokens,GeneratedTokens                    Azure LLM inference traces, 2023 and 2024
    {"timestamp", "input_length", "output_length", "hash_ids"} Mooncake: milliseconds; a hash is a block of 512 tokens

Leading Mooncake blocks that occurred in an earlier request count as cached, as in an unlimited prefix cache that all
GPUs share.
"""

from __future__ import annotations

import csv
import itertools
import math
from array import array
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from kvrsim.errors import InputError
from kvrsim.io.schema import parse_json
from kvrsim.program import Array
from kvrsim.units import MAX_TOKENS
from planner.capacity.workloads.workload import MAX_REQUESTS, Workload

BLOCK_TOKENS = 512  # of Mooncake's hash_ids
MAX_LINE = 2**17  # characters; also the limit of a field in Python's csv
MAX_BLOCKS = 5_000_000  # distinct hash_ids in all
_MAX_HASH = 64  # characters of a hash that is text
OWN, AZURE, MOONCAKE = "csv", "azure", "mooncake"
_OWN_COLUMNS = ("arrival_s", "context_tokens", "output_tokens")
_COLUMNS = {  # format -> its columns: arrival, context, output
    OWN: _OWN_COLUMNS,
    AZURE: ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    MOONCAKE: ("timestamp", "input_length", "output_length"),
}
_ACCEPTED = (
    "CSV with a header line arrival_s,context_tokens,output_tokens[,cached_tokens] or"
    " TIMESTAMP,ContextTokens,GeneratedTokens, or Mooncake's JSON lines"
)
_MAX_ARRIVAL_S = 1e10


def read_trace(path: str, kind: str | None = None, argument: str = "requests") -> Workload:
    """Read a trace in the format of its first line, line by line, so that the text is never held in memory.

    kind: "azure" or "mooncake", the only format to accept besides this project's columns. Empty contexts are left out,
    arrivals are sorted, and fully cached contexts keep one token to compute; notes report it. Raises InputError naming
    the argument, the file and the line.
    """
    shown = f"{argument} {' '.join(path.split())}"
    try:
        with open(path, encoding="utf-8-sig", newline=None) as file:
            lines = _bounded(file, shown)
            first = next(lines, "")
            lines = itertools.chain((first,), lines)
            read = _json_columns if first.lstrip().startswith("{") else _csv_columns
            found, columns = read(lines, shown)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text, or not a path"
        raise InputError(argument, path, f"a trace that can be read ({reason})") from None
    if kind is not None and found not in (kind, OWN):
        raise InputError(shown, first, f"the columns of {kind}: {', '.join(_COLUMNS[kind])}")
    return _workload(path, kind or found, columns, shown)


def _bounded(file: TextIO, shown: str) -> Iterator[str]:
    """The lines of a file, none of them longer than MAX_LINE characters."""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise InputError(f"{shown}: line {number}", line[:40], f"lines of at most {MAX_LINE} characters")
        yield line.rstrip("\n")


class _Columns:
    """Columns of a trace, with the line number of each row."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.lines = array("q")
        self.values = [array("d") for _ in names]

    def add(self, line: int, values: Sequence[float]) -> None:
        """One row."""
        self.lines.append(line)
        for column, value in zip(self.values, values, strict=True):
            column.append(value)

    def column(self, name: str) -> Array:
        """One column, shape (rows,)."""
        return np.array(self.values[self.names.index(name)])


def _csv_columns(lines: Iterator[str], shown: str) -> tuple[str, _Columns]:
    rows = csv.reader(lines)
    header = [name.strip() for name in _row(rows, 1, shown) or ()]
    kind = next((kind for kind, columns in _COLUMNS.items() if set(columns) <= set(header)), None)
    if kind is None or len(set(header)) < len(header):
        raise InputError(f"{shown}: line 1", ",".join(header), _ACCEPTED)
    when, context, output = _COLUMNS[kind]
    scale = {OWN: 1.0, AZURE: 1.0, MOONCAKE: 1e-3}[kind]
    read_time = _date_s if kind == AZURE else _seconds
    wanted = {"context": context, "output": output}
    if "cached_tokens" in header:
        wanted["cached"] = "cached_tokens"
    places = {key: header.index(name) for key, name in wanted.items()}
    found = _Columns(("arrival", *wanted))
    while (row := _row(rows, rows.line_num + 1, shown)) is not None:
        if not row:
            continue
        where = f"{shown}: line {rows.line_num}"
        if len(row) != len(header):
            raise InputError(where, ",".join(row), f"{len(header)} values, as in the header")
        lengths = [_tokens(row[places[key]], f"{where}: {name}") for key, name in wanted.items()]
        _check_count(len(found.lines) + 1, shown)
        found.add(rows.line_num, [scale * read_time(row[header.index(when)], f"{where}: {when}"), *lengths])
    _check_count(len(found.lines), shown)
    return kind, found


def _row(rows: Any, number: int, shown: str) -> list[str] | None:
    """The next row; None at the end."""
    try:
        return next(rows, None)
    except csv.Error as error:
        raise InputError(f"{shown}: line {number}", str(error), "a line of comma-separated values") from None


def _json_columns(lines: Iterator[str], shown: str) -> tuple[str, _Columns]:
    found = _Columns(("arrival", "context", "output", "cached"))
    seen: set[int | str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row, where = _json_row(line, number, shown), f"{shown}: line {number}"
        hashes = row.get("hash_ids") or []
        context = _tokens(row["input_length"], f"{where}: input_length")
        cached = min(float(BLOCK_TOKENS * _leading(hashes, seen)), context)
        seen.update(hashes)
        if len(seen) > MAX_BLOCKS:
            raise InputError(f"{where}: hash_ids", f"{len(seen)} blocks", f"at most {MAX_BLOCKS} blocks in all")
        _check_count(len(found.lines) + 1, shown)
        arrival_s = 1e-3 * _seconds(row["timestamp"], f"{where}: timestamp")
        found.add(number, [arrival_s, context, _tokens(row["output_length"], f"{where}: output_length"), cached])
    _check_count(len(found.lines), shown)
    return MOONCAKE, found


def _json_row(line: str, number: int, shown: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not set(_COLUMNS[MOONCAKE]) <= set(row):
        raise InputError(f"{shown}: line {number}", line, f"a JSON object with {', '.join(_COLUMNS[MOONCAKE])}")
    hashes = row.get("hash_ids") or []
    if not isinstance(hashes, list) or not all(_is_hash(one) for one in hashes):
        accepted = f"a list of numbers of 64 bits or texts of at most {_MAX_HASH} characters"
        raise InputError(f"{shown}: line {number}: hash_ids", hashes, accepted)
    return row


def _is_hash(value: object) -> bool:
    return abs(value) < 2**64 if isinstance(value, int) else isinstance(value, str) and len(value) <= _MAX_HASH


def _leading(hashes: Sequence[Any], seen: set[Any]) -> int:
    """Number of leading blocks that occurred before."""
    return next((index for index, one in enumerate(hashes) if one not in seen), len(hashes))


def _check_count(count: int, shown: str) -> None:
    if not 1 <= count <= MAX_REQUESTS:
        had = f"{count} requests" if count <= MAX_REQUESTS else f"more than {MAX_REQUESTS} requests"
        raise InputError(shown, had, f"1 to {MAX_REQUESTS} requests")


def _number(value: Any) -> float:
    if isinstance(value, bool):
        return float("nan")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def _seconds(value: Any, where: str) -> float:
    number = _number(value)
    if not math.isfinite(number):
        raise InputError(where, value, "a finite number")
    return number


def _date_s(value: str, where: str) -> float:
    """Seconds of a date such as "2023-11-16 18:15:46.6805900"; dates without a zone are taken as UTC."""
    try:
        moment = datetime.fromisoformat(value.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise InputError(where, value, "a date and time") from None


def _tokens(value: Any, where: str) -> float:
    """A whole number of tokens, at least 0."""
    number = _number(value)
    if not 0 <= number <= MAX_TOKENS or number != math.floor(number):
        raise InputError(where, value, f"a whole number of tokens from 0 to {MAX_TOKENS}")
    return number


def _workload(path: str, kind: str, columns: _Columns, shown: str) -> Workload:
    arrival_s, context_len, notes = columns.column("arrival"), columns.column("context"), []
    out_of_range = (arrival_s < 0) | (arrival_s > _MAX_ARRIVAL_S)
    if out_of_range.any():
        first = int(out_of_range.argmax())
        where = f"{shown}: line {columns.lines[first]}"
        raise InputError(where, f"arrival {arrival_s[first]:g} s", f"seconds from 0 to {_MAX_ARRIVAL_S:g}")
    kept = context_len >= 1
    if not kept.any():
        raise InputError(shown, "no context of at least 1 token", "requests with a context")
    if not kept.all():
        line = columns.lines[int(np.argmin(kept))]
        notes.append(f"{int((~kept).sum())} requests with a context of 0 tokens left out (the first in line {line})")
    order = np.flatnonzero(kept)
    if (np.diff(arrival_s[order]) < 0).any():
        order = order[np.argsort(arrival_s[order], kind="stable")]
        notes.append("arrivals were not in order and have been sorted")
    context = context_len[order].astype(np.int64)
    held = columns.column("cached") if "cached" in columns.names else np.zeros(len(kept))
    cached = held[order].astype(np.int64)
    if (whole := cached >= context).any():
        notes.append(f"{int(whole.sum())} fully cached contexts: their last token is computed anyway")
    return Workload(
        name=Path(path).name,
        kind=kind,
        arrival_s=arrival_s[order] - arrival_s[order[0]],
        context_len=context,
        cached_prefix=np.minimum(cached, context - 1),
        output_tokens=columns.column("output")[order].astype(np.int64),
        notes=tuple(notes),
    )
