"""Partial: entries as they are searched, beside the table to be, so that interrupted work goes on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvrsim import __version__
from kvrsim.errors import InputError
from planner.table_entry import Draft
from planner.table_setting import TableSetting

SUFFIX = ".partial"
_FORMAT = "kvrsim partition table, unfinished"


@dataclass(slots=True)
class Partial:
    """A file of one JSON object a line: the setting, then entries; a last line that was cut off is dropped.

    One of another setting or version is started anew, with a note. The file goes when the table is done, and stays
    when the work is interrupted; None keeps nothing.
    """

    path: Path | None
    setting: TableSetting
    drafts: dict[tuple[int, int], Draft] = field(init=False)
    note: str = field(init=False, default="")
    _file: TextIOWrapper | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.drafts = {}
        if self.path is None or not self.path.exists():
            return
        lines = self._lines(self.path)
        if not lines or lines[0] != self._head():
            self.note = f"{self.path}: of other settings or another version; its entries are searched anew"
            return
        drafts = [_draft_of(line) for line in lines[1:]]
        self.drafts = {draft.key: draft for draft in drafts if draft is not None}
        if drafts:
            self.note = f"{self.path}: {len(self.drafts)} entries searched before"

    def __enter__(self) -> Self:
        if self.path is not None:
            try:
                self._file = self.path.open("w", encoding="utf-8")
                self._write(self._head())
            except OSError as error:
                raise InputError("output", self.path, f"a file that can be written ({error.strerror})") from None
            for draft in self.drafts.values():
                self._write(asdict(draft))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, draft: Draft) -> None:
        """Keep one more; when this returns, no kill of this process takes it away."""
        self._write(asdict(draft))

    def remove(self) -> None:
        """The table stands elsewhere now."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _head(self) -> dict[str, Any]:
        return {"format": _FORMAT, "kvrsim_version": __version__, "setting": self.setting.to_dict()}

    def _write(self, content: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(content) + "\n")
            self._file.flush()

    @staticmethod
    def _lines(path: Path) -> list[Any]:
        """The objects up to the first line that is none."""
        found = []
        try:
            for line in path.read_text(encoding="utf-8").splitlines():
                found.append(json.loads(line))
        except (OSError, ValueError):
            pass
        return found


def _draft_of(line: Any) -> Draft | None:
    """A line's draft; None where it is none."""
    try:
        draft = Draft(**(line | {"partition": tuple(line["partition"]), "balanced": tuple(line["balanced"])}))
    except (TypeError, KeyError):
        return None
    return draft if len(draft.partition) == len(draft.balanced) == draft.num_gpus else None
