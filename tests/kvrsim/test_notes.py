"""Notes: each has a code, and its text uses the values that it is given."""

from __future__ import annotations

import string

import pytest

from kvrsim.notes import NOTES, note


@pytest.mark.parametrize("code", NOTES)
def test_a_note_has_its_code_and_its_values(code: str) -> None:
    names = {name for _, name, _, _ in string.Formatter().parse(NOTES[code]) if name}
    one = note(code, **dict.fromkeys(names, 7))
    assert one.code == code
    assert one.count("7") >= len(names)
    assert "{" not in one
