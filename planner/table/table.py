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
from kvrsim.io.schema import JsonObject, NonNegative, fields_to_json, read
from planner.table.quantization import QuantizationSteps
from planner.table.setting import TableSetting

if TYPE_CHECKING:
    import pandas

SCHEMA_VERSION = 1
FORMAT = "kvrsim partition table"
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
    speedup_over_even: float  # the same strategy's TTFT with even chunks over this one's
    gap: NonNegative | None  # ttft_s over a TTFT that no partition beats, less one; None: no bound is known
    fits: bool  # in the memory of every GPU
    # A rank's share, were jumps of its chunk's time spread evenly: see planner/table/lookup.py.
    levels: tuple[float, ...]
    token_s: tuple[float, ...]  # seconds that one more token costs a rank, between jumps

    @property
    def fractions(self) -> tuple[float, ...]:
        """Each rank's share of the new tokens."""
        total = sum(self.partition)
        return tuple(chunk / total for chunk in self.partition)

    def __post_init__(self) -> None:
        for key in ("partition", "levels", "token_s"):
            if len(getattr(self, key)) != self.num_gpus:
                raise InputError(key, getattr(self, key), f"{self.num_gpus} numbers, one a GPU")

    @classmethod
    def read(cls, data: JsonObject) -> TableEntry:
        """Check one entry; its fractions must be its partition's."""
        entry, written = read(cls, data.without("fractions")), data.numbers("fractions")
        exact = zip(written, entry.fractions, strict=False)
        if len(written) != entry.num_gpus or any(abs(a - b) > _CLOSE for a, b in exact):
            raise data.error("fractions", "the partition's chunks over their sum")
        return entry

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        head = {"num_gpus": self.num_gpus, "context_len": self.context_len, "fractions": list(self.fractions)}
        return head | fields_to_json(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionTable:
    """Entries by number of GPUs and context, and what they were made for."""

    setting: TableSetting
    kvrsim_version: str  # that built it
    steps: QuantizationSteps
    entries: tuple[TableEntry, ...]  # rising in num_gpus, then context_len; none twice

    def __post_init__(self) -> None:
        keys = [(entry.num_gpus, entry.context_len) for entry in self.entries]
        if not keys or sorted(set(keys)) != keys:
            accepted = "entries that rise in num_gpus, then context_len, at least one"
            raise InputError("entries", f"{len(keys)} entries", accepted)
        for index, entry in enumerate(self.entries):
            tokens = entry.context_len - self.setting.cached_prefix
            if sum(entry.partition) != tokens:
                raise InputError(f"entries[{index}].partition", entry.partition, f"chunks that sum to {tokens} tokens")

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
            **fields_to_json(self, "kvrsim_version", "setting", "steps", "entries"),
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
        return read(cls, data.without("format", "schema_version"))


def load_table(path: str | Path, argument: str = "table") -> PartitionTable:
    """Read a file that `kvrsim table build` has written; InputError names the argument, file and key."""
    return PartitionTable.read(JsonObject.read(Path(path), argument))
