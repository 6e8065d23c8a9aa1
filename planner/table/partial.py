"""Partial: entries as they are searched, beside the table to be, so that interrupted work goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvrsim.io.journal import Journal
from kvrsim.io.json_text import JsonObject
from kvrsim.io.schema import read, to_json
from kvrsim.version import __version__
from planner.table.entry import Draft
from planner.table.setting import TableSetting

SUFFIX = ".partial"
_FORMAT = "kvrsim partition table, unfinished 2"


@dataclass(slots=True)
class Partial:
    """A journal of entries, locked while it is open; a path of None keeps nothing.

    The file goes when the table is done, and stays when the work is interrupted. Raises InputError naming --output
    where it is of other settings or another version, holds something else, or is at work in another process.
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
        """What was found; empty where that is nothing."""
        return f"{self.path}: {len(self.drafts)} entries searched before" if self.drafts else ""

    def add(self, draft: Draft) -> None:
        """Keep one more; when this returns, no kill takes it away. NotWrittenError where the disk is full."""
        if self._lines is not None:
            self._lines.append(to_json(draft))

    def remove(self) -> None:
        """The table stands elsewhere now."""
        if self._lines is not None:
            self._lines.remove()

    def close(self) -> None:
        """Let others go on with the entries."""
        if self._lines is not None:
            self._lines.close()

    def _decoded(self, line: JsonObject) -> Draft:
        draft = read(Draft, line)
        new_tokens = draft.context_len - self.setting.cached_prefix
        for key, chunks in (("partition", draft.partition), ("balanced", draft.balanced)):
            if len(chunks) != draft.num_gpus or sum(chunks) != new_tokens:
                raise line.error(key, f"{draft.num_gpus} chunks of {new_tokens} tokens in all")
        return draft
