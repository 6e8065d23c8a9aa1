"""Columns of a table by their roles: by usual names, as other tools write them, or by names that the user gives.

A role is what a column holds, such as the tokens of a prompt. Case and punctuation of names do not matter, and the
name of a time may end in its unit: "TTFT (ms)" is the role ttft_s in milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvrsim.errors import InputError

Usual = Mapping[str, Sequence[str]]  # usual names by role, in lower case with _ between words, the likeliest first

PROMPT_TOKENS = (
    *("context_tokens", "prompt_tokens", "input_tokens", "contexttokens", "input_length", "prompt_len"),
    *("context_len", "context_length", "context", "ctx", "prompt_length", "input_len", "num_prompt_tokens", "isl"),
    "input_sequence_length",
)
OUTPUT_TOKENS = ("output_tokens", "completion_tokens", "generated_tokens", "generatedtokens", "output_length")
CACHED_TOKENS = ("cached_tokens", "cached_prefix", "cached_prompt_tokens", "cache_read_tokens")

_SECONDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("ms", "msec", "millis", "millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("us", "usec", "microsecond", "microseconds"), 1e-6),
    **dict.fromkeys(("ns", "nsec", "nanosecond", "nanoseconds"), 1e-9),
}


class RoleColumn(NamedTuple):
    """A column of a table."""

    name: str  # name in the header
    unit_s: float | None  # seconds per unit of a time; None: its name has no unit, or it is no time


def plain_name(name: str) -> str:
    """The name in lower case, with one _ between words."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def split_unit(name: str) -> tuple[str, float | None]:
    """The plain name without its unit of time, and the seconds per unit; None without a unit."""
    base, _, unit = plain_name(name).rpartition("_")
    return (base, _SECONDS[unit]) if base and unit in _SECONDS else (plain_name(name), None)


def parse_columns(text: str, usual: Usual, argument: str = "columns") -> dict[str, RoleColumn]:
    """Read "ROLE=COLUMN,..." of a user; a role may also be one of its usual names, such as ttft_ms.

    A role that names a unit gives it to a column whose name has none. Raises InputError for an unknown role.
    """
    columns: dict[str, RoleColumn] = {}
    for part in text.split(","):
        key, mark, name = (piece.strip() for piece in part.partition("="))
        role = _role_of(key, usual)
        if not mark or not name or role is None or role in columns:
            accepted = f"{', '.join(f'{role}=COLUMN' for role in usual)}, with commas between, each once"
            raise InputError(argument, text, accepted)
        unit_s = split_unit(name)[1]
        if unit_s is None:
            unit_s = split_unit(key)[1]
        columns[role] = RoleColumn(name, unit_s)
    return columns


def find_columns(
    header: Sequence[str], usual: Usual, named: Mapping[str, RoleColumn], argument: str = "columns"
) -> dict[str, RoleColumn]:
    """The column of each role that the table has: the one that the user names, else the first with a usual name.

    Raises InputError for a named column that is not in the header.
    """
    columns: dict[str, RoleColumn] = {}
    taken = {column.name for column in named.values()}
    for role, names in usual.items():
        if role in named:
            if named[role].name not in header:
                raise InputError(argument, named[role].name, f"a column of the file: {', '.join(header)}")
            columns[role] = named[role]
            continue
        places = [
            (place, position, name)
            for position, name in enumerate(header)
            if name not in taken and (place := _place(name, role, names)) is not None
        ]
        if places:
            _, _, name = min(places)
            columns[role] = RoleColumn(name, split_unit(name)[1])
    return columns


def _role_of(key: str, usual: Usual) -> str | None:
    if key in usual:
        return key
    return next((role for role, names in usual.items() if _place(key, role, names) is not None), None)


def _place(name: str, role: str, names: Sequence[str]) -> int | None:
    """The place of a column's name among the names of a role; None if it is not there."""
    plain = plain_name(name)
    if plain == role:
        return -1
    if plain in names:
        return names.index(plain)
    base, unit_s = split_unit(name)
    is_time = role.endswith("_s")
    return names.index(base) if is_time and unit_s is not None and base in names else None
