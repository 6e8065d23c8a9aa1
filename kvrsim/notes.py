"""Notes on an answer: codes for programs and texts for people, from data/notes.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

# Texts of the notes, by code.
NOTES: Mapping[str, str] = json.loads((Path(__file__).parent / "data" / "notes.json").read_text("utf-8"))


class Note(str):
    """A line of text next to an answer, with a code for programs; JSON contains the text."""

    __slots__ = ("code",)
    code: str

    def __new__(cls, text: str, code: str) -> Note:
        note = super().__new__(cls, text)
        note.code = code
        return note

    def __reduce__(self) -> tuple[type[Note], tuple[str, str]]:
        return Note, (str(self), self.code)


def with_code(notes: Iterable[str], *codes: str) -> list[str]:
    """Return the notes that have one of these codes."""
    return [note for note in notes if isinstance(note, Note) and note.code in codes]


def without(notes: Iterable[str], *codes: str) -> list[str]:
    """Return the notes that have none of these codes."""
    return [note for note in notes if not (isinstance(note, Note) and note.code in codes)]


def note(code: str, **values: object) -> Note:
    """Make the note of a code; `values` replace the names in its text."""
    return Note(NOTES[code].format(**values), code)
