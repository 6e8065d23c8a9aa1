"""Journals: nothing torn is read, nothing foreign is taken or rewritten, one process at a time, on the disk at once."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrsim.errors import InputError, NotWrittenError
from kvrsim.io.journal import Journal
from kvrsim.io.schema import MAX_DEPTH, parse_json

ROOT = Path(__file__).parents[3]
ABOUT = {"model": {"hidden_size": 64}, "threads": 1}
VALUES = st.lists(st.integers(0, 9) | st.text(max_size=5), max_size=8)
AS_LAWS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


def journal_at(path: Path, **changes: Any) -> Journal:
    return Journal(**({"path": path, "form": "test 1", "about": ABOUT, "work": "test", "argument": "output"} | changes))


def resumed(journal: Journal) -> list[Any]:
    return journal.resume(lambda line: line.fields["value"])


def left_behind(path: Path, values: list[Any]) -> bytes:
    """What a process leaves that has written these and was killed."""
    path.unlink(missing_ok=True)
    journal = journal_at(path)
    assert resumed(journal) == []
    for value in values:
        journal.append({"value": value})
    content = path.read_bytes()
    journal.close()
    path.write_bytes(content)
    return content


@given(values=VALUES, cut=st.integers(0, 600), more=VALUES)
@AS_LAWS
def test_a_kill_at_any_byte_loses_at_most_the_line_being_written(
    tmp_path: Path, values: list[Any], cut: int, more: list[Any]
) -> None:
    path = tmp_path / "j"
    content = left_behind(path, values)[:cut]
    path.write_bytes(content)
    whole = content[: content.rfind(b"\n") + 1]
    kept = values[: max(0, whole.count(b"\n") - 1)]  # after the header
    journal = journal_at(path)
    assert resumed(journal) == kept
    assert not kept or path.read_bytes().startswith(whole), "what was whole has been rewritten"
    for value in more:
        journal.append({"value": value})
    journal.close()
    assert resumed(journal_at(path)) == [*kept, *more]


@given(about=st.dictionaries(st.sampled_from(["model", "threads", "x"]), st.integers() | st.text(), max_size=3))
@AS_LAWS
def test_other_work_is_refused_by_name_and_left_alone(tmp_path: Path, about: dict[str, Any]) -> None:
    path = tmp_path / "j"
    before = left_behind(path, [1])
    other = sorted(key for key in {*ABOUT, *about} if ABOUT.get(key) != about.get(key))
    with pytest.raises(InputError, match=f"output.*of the same {other[0]}.*finish that one"):
        resumed(journal_at(path, about=about))
    assert path.read_bytes() == before


def test_other_work_without_results_is_in_nobodys_way(tmp_path: Path) -> None:
    path = tmp_path / "j"
    left_behind(path, [])
    other = journal_at(path, about={"x": 1})
    assert resumed(other) == []
    other.append({"value": 1})
    other.close()
    assert resumed(journal_at(path, about={"x": 1})) == [1]


HEAD = json.dumps({"format": "test 1", "about": ABOUT}) + "\n"


@pytest.mark.parametrize(
    "content",
    [
        "precious notes\n",
        '{"format": "test 1"}\n',
        '{"format": "another 1", "about": {}}\n',
        '{"value": 1}\n',  # without its head
        "[]\n",
        HEAD + "[1]\n",
        HEAD + "\0\0\0\n",
        HEAD + '{"value": ' + "[" * 100_000 + "]" * 100_000 + "}\n",
        "[" * 100_000 + "\n",
    ],
)
def test_what_is_no_journal_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "j"
    path.write_text(content)
    with pytest.raises(InputError, match=r"output.*journal of an interrupted test"):
        resumed(journal_at(path))
    assert path.read_text() == content


def test_no_link_is_followed_and_no_pipe_waited_for(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "folder").mkdir()
    names = ("fifo", "link", "nowhere", "folder", "no/j", "x" * 300, "null\0byte", "/dev/null")
    for path in (tmp_path / name for name in names):
        with pytest.raises(InputError, match="output"):
            resumed(journal_at(path))
    assert sorted(os.listdir(tmp_path)) == ["fifo", "folder", "link", "nowhere", "precious"]
    assert (tmp_path / "precious").read_text() == ""


OTHER_PROCESS = f"""
import sys
from pathlib import Path
from kvrsim.io.journal import Journal
journal = Journal(path=Path(sys.argv[1]), form="test 1", about={ABOUT!r}, work="test", argument="output")
journal.resume(lambda line: line)
journal.append({{"value": "theirs"}})
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_told_who_has_it_until_that_one_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "j"
    command = [sys.executable, "-c", OTHER_PROCESS, str(path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        before = path.read_bytes()
        with pytest.raises(InputError, match=r"no other .* is writing: wait for it"):
            resumed(journal_at(path))
        assert path.read_bytes() == before
        other.send_signal(signal.SIGKILL)
    assert resumed(journal_at(path)) == ["theirs"]


def test_the_lock_is_on_the_file_that_is_there(tmp_path: Path) -> None:
    """A journal that was removed while another waited to open it is not what the other goes on with."""
    path = tmp_path / "j"
    first = journal_at(path)
    resumed(first)
    first.append({"value": 1})
    path.unlink()
    second = journal_at(path)
    assert resumed(second) == []
    first.close()
    assert path.exists()


def test_a_copy_adds_to_a_file_that_is_there_and_creates_none(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = journal_at(path)
    resumed(journal)
    copy: Journal = pickle.loads(pickle.dumps(journal))
    copy.append({"value": 1})
    journal.append({"value": 2})
    journal.close()
    again = journal_at(path)
    assert resumed(again) == [1, 2]
    again.remove()
    with pytest.raises(NotWrittenError, match=str(path)):
        copy.append({"value": 3})
    assert not path.exists()


@pytest.mark.parametrize("opened", [True, False], ids=["the first process", "a copy"])
def test_a_full_disk_is_named_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    path, write = tmp_path / "j", os.write
    journal = journal_at(path)
    resumed(journal)
    journal.append({"value": 1})

    def half(handle: int, data: bytes) -> int:
        if len(data) < 9:
            raise OSError(28, "No space left on device")
        return write(handle, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    writer = journal if opened else pickle.loads(pickle.dumps(journal))
    with pytest.raises(NotWrittenError, match=f"{path}.*No space left on device") as caught:
        writer.append({"value": 2})
    assert caught.value.exit_code == 74
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    monkeypatch.undo()
    journal.append({"value": 3})
    journal.close()
    assert resumed(journal_at(path)) == [1, 3]


def test_every_line_is_on_the_disk_when_it_was_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (sizes.append(os.fstat(handle).st_size), sync(handle))[1])
    journal = journal_at(tmp_path / "j")
    resumed(journal)
    for value in range(3):
        journal.append({"value": value})
        assert sizes[-1] == (tmp_path / "j").stat().st_size


def nested(depth: int) -> Any:
    value: Any = 0
    for level in range(depth):
        value = [1, value] if level % 2 else {"a": value, "b": 1}
    return value


@pytest.mark.parametrize("encode", [json.dumps, lambda value: json.dumps(value, indent=1)])
@given(depth=st.integers(0, 2 * MAX_DEPTH))
@settings(deadline=None, max_examples=40)
def test_json_is_read_down_to_a_depth_and_no_further(encode: Callable[[Any], str], depth: int) -> None:
    value = nested(depth)
    if depth < MAX_DEPTH:
        assert parse_json(encode(value)) == value
    else:
        with pytest.raises(ValueError, match="levels deep"):
            parse_json(encode(value))
