"""Written files have the old or the new content, follow links, keep the user's file mode, and are on the disk."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrsim.errors import InputError
from kvrsim.io.files import check_writable, read_text, write_atomically
from tests.building.commands import Capture, refusal


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def wrote(path: Path | str, data: bytes = b"new") -> None:
    write_atomically(path, data, argument="output")


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_new_file_gets_what_the_umask_leaves_and_an_old_one_keeps_its_mode(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        for name, mode in (("new", 0o666 & ~umask), ("old", 0o640)):
            path = tmp_path / name
            if name == "old":
                path.write_bytes(b"old")
                path.chmod(mode)
            wrote(path)
            assert (path.read_bytes(), mode_of(path)) == (b"new", mode)
    finally:
        os.umask(before)


@pytest.mark.parametrize("there", [True, False], ids=["target there", "dangling"])
def test_a_link_stays_a_link_and_its_target_is_written(tmp_path: Path, there: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, first, second = tmp_path / "elsewhere" / "target", tmp_path / "first", tmp_path / "second"
    if there:
        target.write_bytes(b"old")
        target.chmod(0o600)
    first.symlink_to(Path("elsewhere") / "target")
    second.symlink_to(first)
    wrote(second)
    assert (first.is_symlink(), second.is_symlink()) == (True, True)
    assert target.read_bytes() == b"new"
    assert not there or mode_of(target) == 0o600
    assert sorted(os.listdir(tmp_path / "elsewhere")) == ["target"]


def unusable(folder: Path) -> Iterator[Path]:
    """Paths that cannot be written as files."""
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "to fifo").symlink_to(folder / "fifo")
    (folder / "nowhere").symlink_to(folder / "missing" / "file")
    (folder / "folder").mkdir()
    yield from (folder / name for name in ("fifo", "loop", "to fifo", "nowhere", "folder", "missing/file"))
    yield from (Path("/dev/null"), Path("/dev/full"), folder / ("x" * 300), folder / "null\0byte")


def test_what_is_no_file_is_refused_before_the_work_and_at_its_end(tmp_path: Path) -> None:
    for path in unusable(tmp_path):
        with pytest.raises(InputError, match="output"):
            check_writable(path, "output")
        with pytest.raises(InputError, match="output"):
            wrote(path)
    assert sorted(os.listdir(tmp_path)) == ["fifo", "folder", "loop", "nowhere", "to fifo"]


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    for path in unusable(tmp_path):
        with pytest.raises(InputError, match="model"):
            read_text(path, "model", what="a JSON file", most_bytes=100)


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--ctx", "1k", "--model", "FIFO"),
        ("plan", "--ctx", "1k", "--cluster", "FIFO"),
        ("plan", "--ctx", "1k", "--engine", "FIFO"),
        ("plan", "--ctx", "1k", "--profile", "FIFO"),
        ("plan", "--ctx", "1k", "--strategies", "kvr-p", "--table", "FIFO"),
        ("plan", "--ctx", "1k", "--strategies", "FIFO.py:MINE"),
        ("models", "show", "FIFO"),
        ("compare", "FIFO", "FIFO"),
        ("table", "lookup", "FIFO", "--gpus", "4", "--ctx", "1k"),
        ("predictor", "lookup", "FIFO", "--ctx", "1k"),
        ("calibrate", "prefills", "FIFO", "--profile", "h100-flash", "--check"),
        ("calibrate", "import", "FIFO", "-o", "OUT"),
        ("capacity", "llama-3.1-8b", "8xh100", "--requests", "FIFO", "--slo-ttft", "1s"),
    ],
    ids=" ".join,
)
def test_no_command_waits_for_the_writer_of_a_pipe(tmp_path: Path, words: tuple[str, ...], capsys: Capture) -> None:
    os.mkfifo(tmp_path / "fifo")
    os.mkfifo(tmp_path / "fifo.py")
    paths = {"FIFO": tmp_path / "fifo", "FIFO.py:MINE": f"{tmp_path}/fifo.py:MINE", "OUT": tmp_path / "out.json"}
    assert "a regular file, not a pipe" in refusal(capsys, *(paths.get(word, word) for word in words))


@given(name=st.text(min_size=1, max_size=255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_every_name_that_the_system_takes_is_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    try:
        path.write_bytes(b"old")
    except (OSError, ValueError):
        with pytest.raises(InputError, match="output"):
            wrote(path)
        return
    wrote(path)
    assert path.read_bytes() == b"new"
    path.unlink()


def test_the_content_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure after the rename must not leave an empty file, because the journal is removed next."""
    seen: list[str] = []
    sync, rename = os.fsync, os.replace

    def synced(handle: int) -> None:
        seen.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else f"{os.fstat(handle).st_size} bytes")
        sync(handle)

    def renamed(old: Path, new: Path) -> None:
        seen.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    wrote(tmp_path / "a", b"12345")
    assert seen == ["5 bytes", "rename", "folder"]


@pytest.mark.parametrize("failing", ["fsync", "replace", "fchmod"])
def test_a_failure_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "a").write_bytes(b"old")
    monkeypatch.setattr(os, failing, full)
    with pytest.raises(InputError, match=r"output.*No space left"):
        wrote(tmp_path / "a")
    assert (os.listdir(tmp_path), (tmp_path / "a").read_bytes()) == (["a"], b"old")


def test_a_working_folder_that_was_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for write in (lambda: check_writable("x.html", "plot"), lambda: write_atomically("x.html", b"", argument="plot")):
        with pytest.raises(InputError, match=r"plot: got .* a file in a folder that exists"):
            write()
