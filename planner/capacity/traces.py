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
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from kvrsim.errors import InputError
from kvrsim.io.schema import parse_json
from kvrsim.program import Array
from kvrsim.units import MAX_TOKENS
from planner.capacity.workload import MAX_REQUESTS, Workload

BLOCK_TOKENS = 512  # of Mooncake's hash_ids
MAX_LINE = 2**17  # characters; also the limit of a field in Python's csv
MAX_BLOCKS = 5_000_000  # distinct hash_ids in all
_MAX_HASH = 64  # characters of a hash that is text
_MAX_ARRIVAL_S = 1e10
OWN, AZURE, MOONCAKE = "csv", "azure", "mooncake"
_COLUMNS = {  # format -> its columns: arrival, context, output
    OWN: ("arrival_s", "context_tokens", "output_tokens"),
    AZURE: ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    MOONCAKE: ("timestamp", "input_length", "output_length"),
}
_ACCEPTED = (
    "CSV with a header line arrival_s,context_tokens,output_tokens[,cached_tokens] or"
    " TIMESTAMP,ContextTokens,GeneratedTokens, or Mooncake's JSON lines"
)
_Row = tuple[float, float, float, float, float]  # line number, arrival in seconds, tokens of context, output, prefix


def read_trace(path: str, kind: str | None = None, argument: str = "requests") -> Workload:
    """Read a trace in the format of its first line, line by line, so that the text is never held in memory.

    kind: "azure" or "mooncake", the only format to accept besides this project's columns. Empty contexts are left out,
    arrivals are sorted, and fully cached contexts keep one token to compute; notes report it. Raises InputError naming
    the argument, the file and the line.
    """
    shown = f"{argument} {' '.join(path.split())}"
    values = array("d")
    count = 0
    try:
        with open(path, encoding="utf-8-sig", newline=None) as file:
            lines = _bounded(file, shown)
            first = next(lines, "")
            lines = itertools.chain((first,), lines)
            if first.lstrip().startswith("{"):
                file_kind, rows = MOONCAKE, _json_rows(lines, shown)
            else:
                file_kind, rows = _csv_rows(lines, shown)
            for count, row in enumerate(rows, start=1):
                if count > MAX_REQUESTS:
                    break
                values.extend(row)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text, or not a path"
        raise InputError(argument, path, f"a trace that can be read ({reason})") from None
    if not 1 <= count <= MAX_REQUESTS:
        number = f"{count} requests" if not count else f"more than {MAX_REQUESTS} requests"
        raise InputError(shown, number, f"1 to {MAX_REQUESTS} requests")
    if kind is not None and file_kind not in (kind, OWN):
        raise InputError(shown, first, f"the columns of {kind}: {', '.join(_COLUMNS[kind])}")
    return _workload(Path(path).name, kind or file_kind, np.array(values).reshape(-1, 5), shown)


def _bounded(file: TextIO, shown: str) -> Iterator[str]:
    """The lines of a file, none of them longer than MAX_LINE characters."""
    for number in itertools.count(1):
        line = file.readline(MAX_LINE + 1)
        if not line:
            return
        if len(line) > MAX_LINE:
            raise InputError(f"{shown}: line {number}", line[:40], f"lines of at most {MAX_LINE} characters")
        yield line.rstrip("\n")


def _csv_rows(lines: Iterator[str], shown: str) -> tuple[str, Iterator[_Row]]:
    """The format of the header line, and the rows after it."""
    reader = csv.reader(lines)
    header = [name.strip() for name in _csv_row(reader, shown) or ()]
    kind = next((kind for kind, columns in _COLUMNS.items() if set(columns) <= set(header)), None)
    if kind is None or len(set(header)) < len(header):
        raise InputError(f"{shown}: line 1", ",".join(header), _ACCEPTED)
    arrival, *lengths = _COLUMNS[kind]
    scale = 1e-3 if kind == MOONCAKE else 1.0
    read_time = _date_s if kind == AZURE else _seconds
    if has_prefix := "cached_tokens" in header:
        lengths.append("cached_tokens")

    def rows() -> Iterator[_Row]:
        while (row := _csv_row(reader, shown)) is not None:
            if not row:
                continue
            where = f"{shown}: line {reader.line_num}"
            if len(row) != len(header):
                raise InputError(where, ",".join(row), f"{len(header)} values, as in the header")
            context, output, *prefix = (_tokens(row[header.index(name)], f"{where}: {name}") for name in lengths)
            arrival_s = scale * read_time(row[header.index(arrival)], f"{where}: {arrival}")
            yield reader.line_num, arrival_s, context, output, prefix[0] if has_prefix else 0.0

    return kind, rows()


def _csv_row(reader: Any, shown: str) -> list[str] | None:
    """The next row; None at the end."""
    try:
        return next(reader, None)
    except csv.Error as error:
        where = f"{shown}: line {reader.line_num + 1}"
        raise InputError(where, str(error), "a line of comma-separated values") from None


def _json_rows(lines: Iterator[str], shown: str) -> Iterator[_Row]:
    seen: set[int | str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{shown}: line {number}"
        row = _json_row(line, where)
        hashes = row.get("hash_ids") or []
        context = _tokens(row["input_length"], f"{where}: input_length")
        leading = next((index for index, one in enumerate(hashes) if one not in seen), len(hashes))
        seen.update(hashes)
        if len(seen) > MAX_BLOCKS:
            raise InputError(f"{where}: hash_ids", f"{len(seen)} blocks", f"at most {MAX_BLOCKS} blocks in all")
        arrival_s = 1e-3 * _seconds(row["timestamp"], f"{where}: timestamp")
        output = _tokens(row["output_length"], f"{where}: output_length")
        yield number, arrival_s, context, output, min(float(BLOCK_TOKENS * leading), context)


def _json_row(line: str, where: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not set(_COLUMNS[MOONCAKE]) <= set(row):
        raise InputError(where, line, f"a JSON object with {', '.join(_COLUMNS[MOONCAKE])}")
    hashes = row.get("hash_ids") or []
    if not isinstance(hashes, list) or not all(_is_hash(one) for one in hashes):
        accepted = f"a list of numbers of 64 bits or texts of at most {_MAX_HASH} characters"
        raise InputError(f"{where}: hash_ids", hashes, accepted)
    return row


def _is_hash(value: object) -> bool:
    return abs(value) < 2**64 if isinstance(value, int) else isinstance(value, str) and len(value) <= _MAX_HASH


def _number(value: Any) -> float:
    """The value as a number; nan if it is none."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


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


def _workload(name: str, kind: str, rows: Array, shown: str) -> Workload:
    """The requests of rows as in _Row, repaired, with notes on the repairs."""
    notes = []
    out_of_range = (rows[:, 1] < 0) | (rows[:, 1] > _MAX_ARRIVAL_S)
    if out_of_range.any():
        line, arrival_s = rows[int(out_of_range.argmax()), :2]
        where = f"{shown}: line {line:.0f}"
        raise InputError(where, f"arrival {arrival_s:g} s", f"seconds from 0 to {_MAX_ARRIVAL_S:g}")
    empty = rows[:, 2] < 1
    if empty.all():
        raise InputError(shown, "no context of at least 1 token", "requests with a context")
    if empty.any():
        line = rows[int(empty.argmax()), 0]
        notes.append(f"{int(empty.sum())} requests with a context of 0 tokens left out (the first in line {line:.0f})")
    rows = rows[~empty]
    if (np.diff(rows[:, 1]) < 0).any():
        rows = rows[np.argsort(rows[:, 1], kind="stable")]
        notes.append("arrivals were not in order and have been sorted")
    context, output, prefix = rows[:, 2:].T.astype(np.int64)
    if whole := int((prefix >= context).sum()):
        notes.append(f"{whole} fully cached contexts: their last token is computed anyway")
    return Workload(
        name=name,
        kind=kind,
        arrival_s=rows[:, 1] - rows[0, 1],
        context_len=context,
        cached_prefix=np.minimum(prefix, context - 1),
        output_tokens=output,
        notes=tuple(notes),
    )
