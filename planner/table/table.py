"""PartitionTable: the best partitions of many lengths and numbers of GPUs; versioned JSON in and out.

docs/how-to/partition-table.md describes the file for programs that read it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrsim.errors import InputError
from kvrsim.io.files import write_atomically
from kvrsim.io.json_text import JsonObject
from kvrsim.units import MAX_TOKENS
from planner.table.setting import TableSetting
from planner.table.steps import ChunkSteps

if TYPE_CHECKING:
    import pandas

SCHEMA_VERSION = 1
FORMAT = "kvrsim partition table"
_KEYS = ("format", "schema_version", "kvrsim_version", "setting", "steps", "entries")
_CLOSE = 1e-6  # by how much shares that sum to 1 may miss it


@dataclass(frozen=True, kw_only=True, slots=True)
class TableEntry:
    """One context on some GPUs, searched."""

    num_gpus: int
    context_len: int  # tokens, cached prefix included
    partition: tuple[int, ...]  # new tokens a rank
    ttft_s: float  # predicted, as are those below
    ttft_low_s: float
    ttft_high_s: float
    speedup_over_tsp: float
    speedup_over_even: float  # KVR-E's TTFT over this one's
    gap: float  # ttft_s over a TTFT that no partition beats, less one
    fits: bool  # in the memory of every GPU
    levels: tuple[
        float, ...
    ]  # a rank's share, were jumps of its chunk's time spread evenly: see planner/table/lookup.py
    token_s: tuple[float, ...]  # seconds that one more token costs a rank, between jumps

    @property
    def fractions(self) -> tuple[float, ...]:
        """Each rank's share of the new tokens."""
        total = sum(self.partition)
        return tuple(chunk / total for chunk in self.partition)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values: dict[str, Any] = {"num_gpus": self.num_gpus, "context_len": self.context_len}
        values |= {"fractions": list(self.fractions), "partition": list(self.partition)}
        numbers = ("ttft_s", "ttft_low_s", "ttft_high_s", "speedup_over_tsp", "speedup_over_even", "gap", "fits")
        values |= {key: getattr(self, key) for key in numbers}
        return values | {"levels": list(self.levels), "token_s": list(self.token_s)}

    @classmethod
    def read(cls, data: JsonObject, cached_prefix: int) -> TableEntry:
        """Check one entry; its fractions must be its partition's."""
        data.only([*cls.__slots__, "fractions"])
        num_gpus = data.integer("num_gpus", maximum=2**20)
        context_len = data.integer("context_len", minimum=cached_prefix + 1)
        entry = cls(
            num_gpus=num_gpus,
            context_len=context_len,
            partition=_chunks(data, num_gpus, context_len - cached_prefix),
            **{key: data.number(key) for key in ("ttft_s", "ttft_low_s", "ttft_high_s")},
            speedup_over_tsp=data.number("speedup_over_tsp"),
            speedup_over_even=data.number("speedup_over_even"),
            gap=data.number("gap", allow_zero=True),
            fits=_fits(data),
            levels=_one_a_rank(data, "levels", num_gpus),
            token_s=_one_a_rank(data, "token_s", num_gpus),
        )
        written = _one_a_rank(data, "fractions", num_gpus)
        if any(abs(a - b) > _CLOSE for a, b in zip(written, entry.fractions, strict=True)):
            raise data.error("fractions", "the partition's chunks over their sum")
        return entry


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionTable:
    """Entries by number of GPUs and context, and what they were made for."""

    setting: TableSetting
    kvrsim_version: str  # that built it
    steps: ChunkSteps
    entries: tuple[TableEntry, ...]  # rising in num_gpus, then context_len; none twice

    @property
    def gpu_counts(self) -> tuple[int, ...]:
        """Numbers of GPUs that it has entries for."""
        return tuple(sorted({entry.num_gpus for entry in self.entries}))

    def of(self, num_gpus: int) -> tuple[TableEntry, ...]:
        """Entries of that number of GPUs, rising in context; raises InputError where there are none."""
        found = tuple(entry for entry in self.entries if entry.num_gpus == num_gpus)
        if not found:
            has = ", ".join(map(str, self.gpu_counts))
            raise InputError("gpus", num_gpus, f"a number of GPUs that the table has: {has}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "kvrsim_version": self.kvrsim_version,
            "setting": self.setting.to_dict(),
            "steps": self.steps.to_dict(),
            "entries": [entry.to_dict() for entry in self.entries],
        }

    def to_json(self) -> str:
        """The file's text: one line an entry."""
        content = self.to_dict()
        entries = ",\n".join("    " + json.dumps(entry, allow_nan=False) for entry in content.pop("entries"))
        head = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
        return f'{{\n{head},\n  "entries": [\n{entries}\n  ]\n}}\n'

    def to_frame(self) -> pandas.DataFrame:
        """One row an entry."""
        import pandas

        return pandas.DataFrame([entry.to_dict() for entry in self.entries])

    def write(self, path: str | Path, argument: str = "output") -> None:
        """Write the JSON, whole or not at all."""
        write_atomically(path, self.to_json().encode(), argument=argument)

    @classmethod
    def read(cls, data: JsonObject) -> PartitionTable:
        """Check a table; InputError names the key."""
        if data.fields.get("format") != FORMAT:
            raise data.error("format", f"{FORMAT}, as kvrsim table build writes it")
        if data.fields.get("schema_version") != SCHEMA_VERSION:
            raise data.error("schema_version", str(SCHEMA_VERSION))
        data.only(_KEYS)
        setting = TableSetting.read(data.child("setting"))
        entries = [TableEntry.read(entry, setting.cached_prefix) for entry in data.children("entries")]
        keys = [(entry.num_gpus, entry.context_len) for entry in entries]
        if not entries or sorted(set(keys)) != keys:
            raise _entries_error(data, len(entries))
        return cls(
            setting=setting,
            kvrsim_version=data.text("kvrsim_version"),
            steps=ChunkSteps.read(data.child("steps")),
            entries=tuple(entries),
        )


def load_table(path: str | Path, argument: str = "table") -> PartitionTable:
    """Read a file that `kvrsim table build` has written; InputError names the argument, file and key."""
    return PartitionTable.read(JsonObject.read(Path(path), argument))


def _entries_error(data: JsonObject, count: int) -> InputError:
    accepted = "entries that rise in num_gpus, then context_len, at least one"
    return InputError(f"{data.where}: entries", f"{count} entries", accepted)


def _chunks(data: JsonObject, num_gpus: int, num_tokens: int) -> tuple[int, ...]:
    """A whole number of tokens a rank, at least 1 each, that sum to the new tokens."""
    values = data.sequence("partition")
    whole = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if len(whole) != len(values) or len(whole) != num_gpus or not all(1 <= value <= MAX_TOKENS for value in whole):
        raise data.error("partition", f"{num_gpus} whole numbers of at least 1")
    if sum(whole) != num_tokens:
        raise data.error("partition", f"chunks that sum to {num_tokens} tokens, not {sum(whole)}")
    return tuple(whole)


def _one_a_rank(data: JsonObject, key: str, num_gpus: int) -> tuple[float, ...]:
    found = tuple(data.numbers(key))
    if len(found) != num_gpus:
        raise data.error(key, f"{num_gpus} numbers, one a GPU")
    return found


def _fits(data: JsonObject) -> bool:
    if not data.has("fits"):
        raise data.error("fits", "true or false")
    return data.flag("fits", default=False)
