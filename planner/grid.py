"""Candidates for the points of a grid, and files of grids; used by tables, maps and predictors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvrsim.io.files import write_atomically
from kvrsim.io.schema import JsonObject, fields_to_json, read

if TYPE_CHECKING:  # files are read without importing the planner
    from kvrsim.execution import Execution
    from planner.candidates import Candidate

SCHEMA_VERSION = 1
_PIECES_S = 0.1  # modelled CPU seconds per grid point to improve pieces: about 1000 simulations
_EXPOSED = 0.05  # exposed communication / TTFT without it; above this, balanced chunks may be far from the best


def quick_candidate(execution: Execution) -> Candidate:
    """A candidate that is quick to find: balanced or even chunks if these are good enough, else searched ones."""
    from kvrsim.scenario import Partition
    from planner.candidates import Candidate, Search
    from planner.search.minimise import Allowance
    from planner.search.search import search

    if execution.strategy.partition_rule != "search":
        return Search(allowance=Allowance(left_s=_PIECES_S)).candidate(execution)
    result = search(execution, method="analytical")
    balanced = Candidate(execution=execution, partition=result.partition, search=result)
    even = Partition.even(execution.request.new_tokens, execution.cluster.num_gpus)
    best = min(balanced, replace(balanced, partition=even, search=None), key=lambda one: one.ttft_s)
    if best.ttft_s <= balanced.ttft_without_communication_s * (1 + _EXPOSED):
        return best
    return Search().candidate(execution)


def largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which `holds` is true, as for all smaller numbers; 0: none."""
    if holds(most):
        return most
    low = 0
    high = most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


class GridFile:
    """A frozen dataclass that is written as versioned JSON, with one line per row of its grid."""

    __slots__ = ()
    file_format: ClassVar[str]  # name of the file format
    command: ClassVar[str]  # command that writes the file
    rows: ClassVar[str]  # name of the field with the rows

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"format": self.file_format, "schema_version": SCHEMA_VERSION, **fields_to_json(self)}

    def to_json(self) -> str:
        """The file's text, with one line for each key and for each row."""
        content = self.to_dict()
        rows = ",\n".join("    " + json.dumps(row, allow_nan=False) for row in content.pop(self.rows))
        head = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
        return f'{{\n{head},\n  "{self.rows}": [\n{rows}\n  ]\n}}\n'

    def write(self, path: str | Path, argument: str = "output") -> None:
        """Write the JSON file atomically."""
        write_atomically(path, self.to_json().encode(), argument=argument)

    @classmethod
    def read(cls, data: JsonObject) -> Self:
        """Read the content of a file and check it; InputError names the key."""
        if data.fields.get("format") != cls.file_format:
            raise data.error("format", f"{cls.file_format}, as {cls.command} writes it")
        if data.fields.get("schema_version") != SCHEMA_VERSION:
            raise data.error("schema_version", str(SCHEMA_VERSION))
        fields = cls.plain_fields(data)
        return read(cls, data.without("format", "schema_version", *fields), **fields)

    @classmethod
    def plain_fields(cls, data: JsonObject) -> dict[str, Any]:
        """Fields whose values are used unchanged."""
        return {}

    @classmethod
    def load(cls, path: str | Path, argument: str) -> Self:
        """Read a file; InputError names the argument, file and key."""
        return cls.read(JsonObject.read(Path(path), argument))
