"""Journals: results of interrupted work are read again; files of other work are not changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrsim.errors import InputError
from kvrsim.io import journal as module
from kvrsim.io.journal import Journal, append, read_results

ABOUT = {"work": "x", "batch": 1}


def interrupt(path: Path, *results: object) -> None:
    with pytest.raises(KeyboardInterrupt), Journal(path, ABOUT) as journal:
        for result in results:
            journal.append(result)
        raise KeyboardInterrupt


def test_results_of_interrupted_work_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "t.journal"
    interrupt(path, {"a": 1}, [2.5, None])
    assert module.kept == [path]
    append(path, "three")
    with Journal(path, ABOUT) as journal:
        assert journal.results == read_results(path) == [{"a": 1}, [2.5, None], "three"]
        journal.remove()
    assert not path.exists()
    assert read_results(path) == []


@pytest.mark.parametrize("cut", [1, 5, 14, 15, 20])
def test_a_line_that_was_cut_short_is_left_out(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "t.journal"
    interrupt(path, {"a": 1}, {"b": "two"})
    path.write_bytes(path.read_bytes()[:-cut])
    whole = [{"a": 1}] if path.read_bytes().count(b"\n") == 2 else []
    with Journal(path, ABOUT) as journal:
        assert journal.results == whole
        journal.append(3)
    assert read_results(path) == [*whole, 3]


def test_a_file_without_results_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "t.journal"
    interrupt(path)
    assert module.kept == []
    assert not path.exists()


@pytest.mark.parametrize(
    "content", ["precious\n", '{"batch": 2, "work": "x"}\n[1]\n', '{"batch": 1, "work": "x"}\n[1\n']
)
def test_a_file_of_other_work_is_refused_and_kept(content: str, tmp_path: Path) -> None:
    path = tmp_path / "t.journal"
    path.write_text(content)
    with pytest.raises(InputError, match="accepted: the journal of the same work"):
        Journal(path, ABOUT).__enter__()
    assert path.read_text() == content


def test_a_file_in_use_or_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path, link = tmp_path / "t.journal", tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with Journal(path, ABOUT), pytest.raises(InputError, match="by one process"):
        Journal(path, ABOUT).__enter__()
    for wrong in (tmp_path, tmp_path / "none" / "t", link):
        with pytest.raises(InputError, match="output: got"):
            Journal(wrong, ABOUT).__enter__()
    assert not (tmp_path / "elsewhere").exists()
