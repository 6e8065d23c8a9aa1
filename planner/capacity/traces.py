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
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

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
_ACCEPTED = (
    "CSV with a header line arrival_s,context_tokens,output_tokens[,cached_tokens] or"
    " TIMESTAMP,ContextTokens,GeneratedTokens, or Mooncake's JSON lines"
)
_Record = Mapping[str, Any]  # one line of a file by column


def read_trace(path: str, kind: str | None = None, argument: str = "requests") -> Workload:
    """Read a trace in the format of its first line, line by line, so that the text is never held in memory.

    kind: "azure" or "mooncake", the only format to accept besides this project's columns. Empty contexts are left out,
    arrivals are sorted, and fully cached contexts keep one token to compute; notes report it. Raises InputError naming
    the argument, the file and the line.
    """
    source = f"{argument} {' '.join(path.split())}"
    rows = array("d")  # line number, arrival in seconds, tokens of context, output and cached prefix
    count = 0
    try:
        with open(path, encoding="utf-8-sig", newline=None) as file:
            lines = _bounded(file, source)
            first = next(lines, "")
            read = _json_records if first.lstrip().startswith("{") else _csv_records
            file_kind, records = read(itertools.chain((first,), lines), source)
            columns, to_seconds = _FORMATS[file_kind]
            seen: set[int | str] = set()
            for count, (line, record) in enumerate(records, start=1):
                if count > MAX_REQUESTS:
                    break
                where = f"{source}: line {line}"
                arrival, *lengths = columns
                context, output = (_tokens(record[name], f"{where}: {name}") for name in lengths)
                cached = _tokens(record.get("cached_tokens", 0), f"{where}: cached_tokens")
                if hashes := record.get("hash_ids"):
                    cached = min(BLOCK_TOKENS * _leading_blocks(hashes, seen, f"{where}: hash_ids"), context)
                rows.extend((line, to_seconds(record[arrival], f"{where}: {arrival}"), context, output, cached))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text, or not a path"
        raise InputError(argument, path, f"a trace that can be read ({reason})") from None
    if not 1 <= count <= MAX_REQUESTS:
        number = "0 requests" if not count else f"more than {MAX_REQUESTS} requests"
        raise InputError(source, number, f"1 to {MAX_REQUESTS} requests")
    if kind is not None and file_kind not in (kind, OWN):
        raise InputError(source, first, f"the columns of {kind}: {', '.join(_FORMATS[kind].columns)}")
    return _workload(Path(path).name, kind or file_kind, np.array(rows).reshape(-1, 5), source)


def _bounded(file: TextIO, source: str) -> Iterator[str]:
    """The lines of a file, none of them longer than MAX_LINE characters."""
    for number in itertools.count(1):
        line = file.readline(MAX_LINE + 1)
        if not line:
            return
        if len(line) > MAX_LINE:
            raise InputError(f"{source}: line {number}", line[:40], f"lines of at most {MAX_LINE} characters")
        yield line.rstrip("\n")


def _csv_records(lines: Iterator[str], source: str) -> tuple[str, Iterator[tuple[int, _Record]]]:
    """The format of the header line, and line number and record of each line after it."""
    reader = csv.reader(lines)

    def rows() -> Iterator[list[str]]:
        try:
            yield from reader
        except csv.Error as error:
            where = f"{source}: line {reader.line_num + 1}"
            raise InputError(where, str(error), "a line of comma-separated values") from None

    header = [name.strip() for name in next(rows(), ())]
    kind = next((kind for kind, one in _FORMATS.items() if set(one.columns) <= set(header)), None)
    if kind is None or len(set(header)) < len(header):
        raise InputError(f"{source}: line 1", ",".join(header), _ACCEPTED)

    def records() -> Iterator[tuple[int, _Record]]:
        for row in filter(None, rows()):
            if len(row) != len(header):
                accepted = f"{len(header)} values, as in the header"
                raise InputError(f"{source}: line {reader.line_num}", ",".join(row), accepted)
            yield reader.line_num, {name: value for name, value in zip(header, row, strict=True) if name != "hash_ids"}

    return kind, records()


def _json_records(lines: Iterator[str], source: str) -> tuple[str, Iterator[tuple[int, _Record]]]:
    """The same of JSON lines."""
    columns = _FORMATS[MOONCAKE].columns

    def records() -> Iterator[tuple[int, _Record]]:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = parse_json(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or not set(columns) <= set(record):
                raise InputError(f"{source}: line {number}", line, f"a JSON object with {', '.join(columns)}")
            yield number, record

    return MOONCAKE, records()


def _leading_blocks(hashes: Any, seen: set[int | str], where: str) -> int:
    """The number of leading blocks that occurred before; adds all blocks to those seen."""
    if not isinstance(hashes, list) or not all(map(_is_hash, hashes)):
        raise InputError(where, hashes, f"a list of numbers of 64 bits or texts of at most {_MAX_HASH} characters")
    leading = next((index for index, one in enumerate(hashes) if one not in seen), len(hashes))
    seen.update(hashes)
    if len(seen) > MAX_BLOCKS:
        raise InputError(where, f"{len(seen)} blocks", f"at most {MAX_BLOCKS} blocks in all")
    return leading


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


def _milliseconds(value: Any, where: str) -> float:
    return 1e-3 * _seconds(value, where)


def _date(value: Any, where: str) -> float:
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


class _Format(NamedTuple):
    columns: tuple[str, str, str]  # arrival, context, output
    to_seconds: Callable[[Any, str], float]  # of an arrival, and where it stands


OWN, AZURE, MOONCAKE = "csv", "azure", "mooncake"
_FORMATS = {
    OWN: _Format(("arrival_s", "context_tokens", "output_tokens"), _seconds),
    AZURE: _Format(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _date),
    MOONCAKE: _Format(("timestamp", "input_length", "output_length"), _milliseconds),
}


def _workload(name: str, kind: str, rows: Array, source: str) -> Workload:
    """The requests of rows as in read_trace, repaired, with notes on the repairs."""
    notes = []
    out_of_range = (rows[:, 1] < 0) | (rows[:, 1] > _MAX_ARRIVAL_S)
    if out_of_range.any():
        line, arrival_s = rows[int(out_of_range.argmax()), :2]
        where = f"{source}: line {line:.0f}"
        raise InputError(where, f"arrival {arrival_s:g} s", f"seconds from 0 to {_MAX_ARRIVAL_S:g}")
    empty = rows[:, 2] < 1
    if empty.all():
        raise InputError(source, "no context of at least 1 token", "requests with a context")
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
