"""Notes on an answer: codes for programs and texts for people, from data/notes.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

# Texts of the notes, by code.
NOTES: Mapping[str, str] = json.loads((Path(__file__).parent / "data" / "notes.json").read_text("utf-8"))


_RANGES = ("context-range", "GPUs-range", "hidden_size-range", "head_dim-range")
# Codes of notes that say why the answer may be wrong, in the order in which answers list them.
_FIRST = (
    *(
        "roofline",
        "table setting",
        "quantised, not modelled",
        "GPU",
        "sibling",
        "power limit",
        "power limit, profile",
        "layout",
        "interval",
        "engine, unknown",
    ),
    *("engine", "engine, model", "engine, gpu", "engine, version", "engine, short", "default cluster", "network"),
    *("links, given", "links, nominal", "max position", "model"),
)
# Codes of notes that nearly every answer has, in the order in which answers list them, after all others.
_LAST = (
    *_RANGES,
    *("ranges", "experts", "links, messages", "quantised", "shape", "size", "cannot fit", "not compared"),
)
_UNKNOWN = {"engine, model": "of a {what}", "engine, gpu": "on {what}"}  # code: its part of "engine, unknown"


class Note(str):
    """A line of text next to an answer, with a code for programs; JSON contains the text."""

    __slots__ = ("code", "values")
    code: str
    values: Mapping[str, object]  # values of the names in the text of the code

    def __new__(cls, text: str, code: str, values: Mapping[str, object] | None = None) -> Note:
        note = super().__new__(cls, text)
        note.code = code
        note.values = values or {}
        return note

    def __reduce__(self) -> tuple[type[Note], tuple[str, str, Mapping[str, object]]]:
        return Note, (str(self), self.code, self.values)


def with_code(notes: Iterable[str], *codes: str) -> list[Note]:
    """Return the notes that have one of these codes."""
    return [note for note in notes if isinstance(note, Note) and note.code in codes]


def without(notes: Iterable[str], *codes: str) -> list[str]:
    """Return the notes that have none of these codes."""
    return [note for note in notes if not (isinstance(note, Note) and note.code in codes)]


def note(code: str, **values: object) -> Note:
    """Make the note of a code; `values` replace the names in its text."""
    return Note(NOTES[code].format(**values), code, values)


def arranged(notes: Iterable[str]) -> list[str]:
    """The notes for a reader: those that say why the answer may be wrong first, routine ones last.

    Values outside the ranges of a profile are one note, and so are the unknown model and GPU of an engine.
    """
    joined = _joined(list(notes))
    places = {code: place for place, code in enumerate(_FIRST)}
    places |= {code: len(_FIRST) + 1 + place for place, code in enumerate(_LAST)}

    def place(line: str) -> int:
        return places.get(line.code, len(_FIRST)) if isinstance(line, Note) else len(_FIRST)

    return sorted(joined, key=place)


def _joined(notes: list[str]) -> list[str]:
    """The notes, with those that belong together as one, at the place of the first of them."""
    ranges = [line for line in notes if isinstance(line, Note) and line.code in _RANGES and line.values]
    if len(ranges) > 1:
        spans = ", ".join("{what} {value} ({low} to {high})".format_map(line.values) for line in ranges)
        whole = note("ranges", profile=ranges[0].values["profile"], ranges=spans)
        notes = [whole if line is ranges[0] else line for line in notes if line not in ranges[1:]]
    unknown = [line for line in notes if isinstance(line, Note) and line.code in _UNKNOWN and line.values]
    if len(unknown) > 1:
        what = " and none ".join(_UNKNOWN[line.code].format_map(line.values) for line in unknown)
        whole = note("engine, unknown", engine=unknown[0].values["engine"], what=what)
        notes = [whole if line is unknown[0] else line for line in notes if line not in unknown[1:]]
    return notes
