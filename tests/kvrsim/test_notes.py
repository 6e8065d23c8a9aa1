"""Notes: each has a code, and its text uses the values that it is given."""

from __future__ import annotations

import string

import pytest

from kvrsim.notes import _FIRST, _LAST, _UNKNOWN, NOTES, arranged, note


@pytest.mark.parametrize("code", NOTES)
def test_a_note_has_its_code_and_its_values(code: str) -> None:
    names = {name for _, name, _, _ in string.Formatter().parse(NOTES[code]) if name}
    one = note(code, **dict.fromkeys(names, 7))
    assert one.code == code
    assert one.count("7") >= len(names)
    assert "{" not in one


RANGE = {"low": 1, "high": 8, "profile": "mine"}


def test_notes_for_readers_say_first_why_the_answer_may_be_wrong() -> None:
    routine = note("cannot fit", names="single", nearest="it", least="2 GiB", limit="1 GiB")
    alarming = note("roofline")
    plain = "a line without a code"
    assert arranged([routine, plain, alarming]) == [alarming, plain, routine]
    assert arranged(arranged([routine, plain, alarming])) == [alarming, plain, routine]


def test_notes_of_one_kind_are_one_line_that_keeps_all_values() -> None:
    context = note("context-range", what="context", value=4711, **RANGE)
    gpus = note("GPUs-range", what="GPUs", value=16, **RANGE)
    model = note("engine, model", engine="vllm", what="llama")
    gpu = note("engine, gpu", engine="vllm", what="h100")
    lines = arranged([context, model, gpus, gpu])
    assert len(lines) == 2
    for said in ("context 4711 (1 to 8)", "GPUs 16 (1 to 8)", "mine", "of a llama", "on h100"):
        assert said in " ".join(lines)
    assert arranged([context, model]) == [model, context]


def test_codes_that_are_arranged_exist() -> None:
    assert {*_FIRST, *_LAST, *_UNKNOWN} <= NOTES.keys()
