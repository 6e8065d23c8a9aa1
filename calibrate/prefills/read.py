"""Measured prefills from files: CSV, and what benchmarks of engines write, recognised by their content.

A CSV file has the columns model, gpu, num_gpus, strategy, context_len, batch, cached_prefix, dtype and ttft_s. Only
ttft_s is required; what a file does not say, PrefillDefaults say. An output holds one JSON object, or one a line; its
keys say which tool wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from calibrate.data.csv import CsvRow, CsvTable
from calibrate.prefills.formats import FORMATS
from calibrate.prefills.outputs import Output, add_requests
from calibrate.prefills.rows import COLUMNS, PrefillDefaults, PrefillRow
from kvrsim.choices import DTYPES
from kvrsim.errors import InputError
from kvrsim.io.files import read_text
from kvrsim.io.schema import JsonObject, parse_json
from kvrsim.strategies import get_strategy
from kvrsim.strategies.load import is_file
from kvrsim.units import parse_count, parse_tokens

MOST_ROWS = 500  # the fit takes minutes beyond
MAX_OUTPUT_BYTES = 2**28  # a detailed result of some ten thousand requests, their texts included
_JSON_STARTS = (b"{", b"[")
_RAW = "perf_analyzer's raw records"


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillRows:
    """All rows of all files, and what has to be said of them."""

    rows: tuple[PrefillRow, ...]
    notes: tuple[str, ...]


def read_prefills(paths: Sequence[str | Path], defaults: PrefillDefaults, argument: str = "prefills") -> PrefillRows:
    """Rows of CSV files and of benchmark outputs, in their order, filled with the defaults.

    Raises InputError naming `argument`, the file, and the line, column or key.
    """
    rows: list[PrefillRow] = []
    notes: list[str] = []
    for path in paths:
        if _is_json(path):
            found = _output(path, argument)
            rows += found.rows
            notes += found.notes
        else:
            table = CsvTable.read(path, argument)
            table.need(["ttft_s"])
            rows += map(_csv_row, table.rows)
            unread = [name for name in table.columns if name and name not in COLUMNS]
            if unread:
                notes.append(f"{Path(path).name}: columns that are not read: {', '.join(unread)}")
    if not rows:
        raise InputError(argument, ", ".join(map(str, paths)) or "nothing", "files with one measured prefill or more")
    if len(rows) > MOST_ROWS:
        raise InputError(argument, f"{len(rows)} rows", f"at most {MOST_ROWS}")
    guessed = {row.likely_model for row in rows if row.likely_model and not (row.model or defaults.model)}
    notes += [f"the model is taken to be {model}, by its name in the file" for model in sorted(guessed)]
    return PrefillRows(rows=tuple(row.filled(defaults) for row in rows), notes=tuple(dict.fromkeys(notes)))


def _is_json(path: str | Path) -> bool:
    """Whether a file begins as JSON does; a file that cannot be read is left to the reader of CSV files."""
    try:
        with Path(path).open("rb") as file:
            return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(_JSON_STARTS)
    except (OSError, ValueError):
        return False


def _csv_row(row: CsvRow) -> PrefillRow:
    def text(column: str) -> str | None:
        return row.text(column) if row.has(column) else None

    def count(column: str) -> int | None:
        return parse_count(row.text(column), f"{row.where}: {column}") if row.has(column) else None

    def tokens(column: str) -> int | None:
        return parse_tokens(row.text(column), f"{row.where}: {column}") if row.has(column) else None

    dtype, strategy = text("dtype"), text("strategy")
    if dtype is not None and dtype not in DTYPES:
        raise row.error("dtype", ", ".join(DTYPES))
    if strategy is not None:
        if is_file(strategy):  # a table of measurements names no code to run
            raise row.error("strategy", "a strategy's name; one of a file: `strategy`")
        get_strategy(strategy, f"{row.where}: strategy")
    uncached = row.values.get("cached_prefix") == "0"
    return PrefillRow(
        ttft_s=row.number("ttft_s"),
        where=row.where,
        model=text("model"),
        gpu=text("gpu"),
        num_gpus=count("num_gpus"),
        strategy=strategy,
        context_len=tokens("context_len"),
        batch=count("batch"),
        cached_prefix=0 if uncached else tokens("cached_prefix"),
        dtype=dtype,
    )


def _output(path: str | Path, argument: str) -> Output:
    """Rows and notes of one file; InputError naming `argument`, the file and the key."""
    output = Output(path=Path(path))
    where = f"{argument} {' '.join(str(path).split())}"
    objects = _objects(Path(path), argument, where)
    for one in objects:
        if one.has("experiments"):
            raise InputError(where, _RAW, "profile_export_genai_perf.json, which GenAI-Perf writes beside it")
        reader = next((known.read for known in FORMATS if all(map(one.has, known.keys))), None)
        if reader is None:
            accepted = "; ".join(f"{known.title} ({', '.join(known.keys)})" for known in FORMATS)
            raise InputError(f"{one.where}: keys", ", ".join(one.fields) or "nothing", accepted)
        reader(one, output)
    if output.requests:
        add_requests(output, output.requests, where)
    return output


def _objects(path: Path, argument: str, where: str) -> list[JsonObject]:
    """The object of a file, or that of each line."""
    text = read_text(path, argument, what="a file", most_bytes=MAX_OUTPUT_BYTES)
    try:
        return [_object(parse_json(text), where)]
    except ValueError as error:
        if not text.lstrip().startswith("{"):
            raise InputError(where, " ".join(str(error).split()), "valid JSON") from None
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            place = f"{where}, line {number}"
            try:
                found.append(_object(parse_json(line), place))
            except ValueError as error:
                raise InputError(place, " ".join(str(error).split()), "valid JSON: one object, or one a line") from None
    return found


def _object(value: object, where: str) -> JsonObject:
    if not isinstance(value, dict):
        raise InputError(where, json.dumps(value)[:60], "a JSON object ({...})")
    return JsonObject(fields=value, where=where)
