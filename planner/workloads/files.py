"""Traces: CSV of this project's, Azure's or Mooncake's columns, and Mooncake's JSON lines.

The first line tells the format:

    arrival_s,context_tokens,output_tokens[,cached_tokens]     seconds, tokens
    TIMESTAMP,ContextTokens,GeneratedTokens                    Azure LLM inference traces, 2023 and 2024
    {"timestamp", "input_length", "output_length", "hash_ids"} Mooncake: milliseconds; a hash is a block of 512 tokens

Of Mooncake's blocks, those leading ones that an earlier request had count as cached, as in a prefix cache that
forgets nothing and that every GPU reads.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from kvrsim.errors import InputError
from kvrsim.io.json_text import parse_json
from kvrsim.program import Array
from kvrsim.units import MAX_TOKENS
from planner.workloads.workload import MAX_REQUESTS, Workload

BLOCK_TOKENS = 512  # of Mooncake's hash_ids
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
    """Read a trace whose format its header tells.

    kind: "azure" or "mooncake", which then must be it (or this project's columns). Zero-length contexts are left
    out, unsorted arrivals sorted, and prefixes cached in whole shortened by a token; notes say so. Raises
    InputError naming the argument, the file and the line.
    """
    shown = f"{argument} {' '.join(path.split())}"
    lines = _lines(path, argument)
    first = lines[0].lstrip() if lines else ""
    found, columns = _json_columns(lines, shown) if first.startswith("{") else _csv_columns(lines, shown)
    if kind is not None and found not in (kind, OWN):
        raise InputError(shown, first, f"the columns of {kind}: {', '.join(_COLUMNS[kind])}")
    return _workload(path, kind or found, columns, shown)


def _lines(path: str, argument: str) -> list[str]:
    try:
        with open(path, encoding="utf-8-sig", newline=None) as file:
            return file.read().split("\n")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text, or not a path"
        raise InputError(argument, path, f"a trace that can be read ({reason})") from None


class _Columns:
    """Columns of a trace as they were read, with the line of each row."""

    def __init__(self, lines: Sequence[int], arrival_s: Array, **lengths: Array) -> None:
        self.lines, self.arrival_s, self.lengths = lines, arrival_s, lengths


def _csv_columns(lines: list[str], shown: str) -> tuple[str, _Columns]:
    header = [name.strip() for name in next(csv.reader(lines[:1]), [])]
    kind = next((kind for kind, columns in _COLUMNS.items() if set(columns) <= set(header)), None)
    if kind is None or len(set(header)) < len(header):
        raise InputError(f"{shown}: line 1", ",".join(header), _ACCEPTED)
    numbers, rows = [], []
    for number, row in enumerate(csv.reader(lines[1:]), start=2):
        if not row:
            continue
        if len(row) != len(header):
            raise InputError(f"{shown}: line {number}", ",".join(row), f"{len(header)} values, as in the header")
        numbers.append(number)
        rows.append(row)
    _check_count(len(rows), shown)
    texts = dict(zip(header, zip(*rows, strict=True), strict=True))
    when, context, output = _COLUMNS[kind]
    scale = {OWN: 1.0, AZURE: 1.0, MOONCAKE: 1e-3}[kind]
    parse = _date_s if kind == AZURE else _number
    arrival_s = scale * _parsed(texts[when], numbers, parse, when, shown)
    lengths = {"context": (context, texts[context]), "output": (output, texts[output])}
    if "cached_tokens" in texts:
        lengths["cached"] = ("cached_tokens", texts["cached_tokens"])
    read = {key: _tokens(values, numbers, name, shown) for key, (name, values) in lengths.items()}
    return kind, _Columns(numbers, arrival_s, **read)


def _json_columns(lines: list[str], shown: str) -> tuple[str, _Columns]:
    numbers: list[int] = []
    times, contexts, outputs, cached = [], [], [], []
    seen: set[Any] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _json_row(line, number, shown)
        numbers.append(number)
        times.append(row["timestamp"])
        contexts.append(row["input_length"])
        outputs.append(row["output_length"])
        hashes = row.get("hash_ids") or []
        cached.append(BLOCK_TOKENS * _leading(hashes, seen))
        seen.update(hashes)
    _check_count(len(numbers), shown)
    arrival_s = 1e-3 * _parsed(times, numbers, _number, "timestamp", shown)
    context = _tokens(contexts, numbers, "input_length", shown)
    output = _tokens(outputs, numbers, "output_length", shown)
    held = np.minimum(np.array(cached, dtype=float), context)
    return MOONCAKE, _Columns(numbers, arrival_s, context=context, output=output, cached=held)


def _json_row(line: str, number: int, shown: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not set(_COLUMNS[MOONCAKE]) <= set(row):
        raise InputError(f"{shown}: line {number}", line, f"a JSON object with {', '.join(_COLUMNS[MOONCAKE])}")
    hashes = row.get("hash_ids") or []
    if not isinstance(hashes, list) or not all(isinstance(one, int | str) for one in hashes):
        raise InputError(f"{shown}: line {number}: hash_ids", hashes, "a list of numbers or texts")
    return row


def _leading(hashes: Sequence[Any], seen: set[Any]) -> int:
    """How many blocks from the front were seen before."""
    return next((index for index, one in enumerate(hashes) if one not in seen), len(hashes))


def _check_count(count: int, shown: str) -> None:
    if not 1 <= count <= MAX_REQUESTS:
        raise InputError(shown, f"{count} requests", f"1 to {MAX_REQUESTS} requests")


def _parsed(values: Sequence[Any], lines: Sequence[int], parse: Callable[[Any], float], name: str, shown: str) -> Array:
    """Numbers of a column; at once where they are plain, and one by one to find the line that is not."""
    if parse is _number and all(type(value) is not bool for value in values):
        try:
            numbers = np.array(values, dtype=float)
            if np.isfinite(numbers).all():
                return numbers
        except (ValueError, TypeError):
            pass
    parsed = []
    for line, value in zip(lines, values, strict=True):
        number = parse(value)
        if not np.isfinite(number):
            accepted = "a date and time" if parse is _date_s else "a finite number"
            raise InputError(f"{shown}: line {line}: {name}", value, accepted)
        parsed.append(number)
    return np.array(parsed)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        return float("nan")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def _date_s(value: Any) -> float:
    """Seconds of a date such as "2023-11-16 18:15:46.6805900"; dates without a zone are taken as UTC."""
    try:
        moment = datetime.fromisoformat(value.strip())
    except ValueError:
        return float("nan")
    zoned = moment if moment.tzinfo else moment.replace(tzinfo=_UTC)
    return zoned.timestamp()


_UTC = datetime.fromisoformat("2000-01-01T00:00:00+00:00").tzinfo


def _tokens(values: Sequence[Any], lines: Sequence[int], name: str, shown: str) -> Array:
    """Whole numbers of tokens, at least 0."""
    numbers = _parsed(values, lines, _number, name, shown)
    wrong = (numbers < 0) | (numbers != np.floor(numbers)) | (numbers > MAX_TOKENS)
    if wrong.any():
        first = int(wrong.argmax())
        accepted = f"a whole number of tokens from 0 to {MAX_TOKENS}"
        raise InputError(f"{shown}: line {lines[first]}: {name}", values[first], accepted)
    return numbers


def _workload(path: str, kind: str, columns: _Columns, shown: str) -> Workload:
    arrival_s, lengths, notes = columns.arrival_s, columns.lengths, []
    out_of_range = (arrival_s < 0) | (arrival_s > _MAX_ARRIVAL_S)
    if out_of_range.any():
        first = int(out_of_range.argmax())
        where = f"{shown}: line {columns.lines[first]}"
        raise InputError(where, f"arrival {arrival_s[first]:g} s", f"seconds from 0 to {_MAX_ARRIVAL_S:g}")
    kept = lengths["context"] >= 1
    if not kept.any():
        raise InputError(shown, "no context of at least 1 token", "requests with a context")
    if not kept.all():
        line = columns.lines[int(np.argmin(kept))]
        notes.append(f"{int((~kept).sum())} requests with a context of 0 tokens left out (the first in line {line})")
    order = np.flatnonzero(kept)
    if (np.diff(arrival_s[order]) < 0).any():
        order = order[np.argsort(arrival_s[order], kind="stable")]
        notes.append("arrivals were not in order and have been sorted")
    context = lengths["context"][order].astype(np.int64)
    cached = lengths.get("cached", np.zeros(len(kept)))[order].astype(np.int64)
    if (whole := cached >= context).any():
        notes.append(f"{int(whole.sum())} contexts cached in whole: their last token is computed all the same")
    return Workload(
        name=Path(path).name,
        kind=kind,
        arrival_s=arrival_s[order] - arrival_s[order[0]],
        context_len=context,
        cached_prefix=np.minimum(cached, context - 1),
        output_tokens=lengths["output"][order].astype(np.int64),
        notes=tuple(notes),
    )
