"""Partial: a journal of searched entries beside the table's file, so that an interrupted build resumes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvrsim.io.journal import Journal
from kvrsim.io.schema import JsonObject, read, to_json
from kvrsim.version import __version__
from planner.table.entry import Draft
from planner.table.setting import TableSetting

SUFFIX = ".partial"
_FORMAT = "kvrsim partition table, unfinished 2"


@dataclass(slots=True)
class Partial:
    """A journal of entries, locked while it is open; with a path of None nothing is written.

    The file is removed when the table is done, and kept when the build is interrupted. Raises InputError naming
    `output` where it has other settings or another version, is not a journal, or is in use by another process.
    """

    path: Path | None
    setting: TableSetting
    drafts: dict[tuple[int, int], Draft] = field(init=False, default_factory=dict)
    _lines: Journal | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.path is None:
            return
        about = {"kvrsim": __version__} | to_json(self.setting)
        self._lines = Journal(path=self.path, form=_FORMAT, about=about, work="table build", argument="output")
        self.drafts = {draft.key: draft for draft in self._lines.resume(self._decoded)}

    @property
    def note(self) -> str:
        """How many entries were found; empty where there are none."""
        return f"{self.path}: {len(self.drafts)} entries searched before" if self.drafts else ""

    def add(self, draft: Draft) -> None:
        """Append an entry durably; raises NotWrittenError where the disk is full."""
        if self._lines is not None:
            self._lines.append(to_json(draft))

    def remove(self) -> None:
        """Remove the journal after the table was written."""
        if self._lines is not None:
            self._lines.remove()

    def close(self) -> None:
        """Release the lock and keep the entries."""
        if self._lines is not None:
            self._lines.close()

    def _decoded(self, line: JsonObject) -> Draft:
        draft = read(Draft, line)
        new_tokens = draft.context_len - self.setting.cached_prefix
        for key, chunks in (("partition", draft.partition), ("balanced", draft.balanced)):
            if len(chunks) != draft.num_gpus or sum(chunks) != new_tokens:
                raise line.error(key, f"{draft.num_gpus} chunks of {new_tokens} tokens in all")
        return draft
