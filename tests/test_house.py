"""What the house promises of itself: light imports, no private paths, short files, a working Makefile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("kvrsim", "calibrate", "planner", "validate")
HEAVY = ("torch", "transformers", "pandas", "scipy", "matplotlib", "simpy")
MAX_LINES = 400

# Put together here, so that this file does not hold what it looks for.
PRIVATE_PATHS = ("/wor" + "k/", "../sha" + "red", ".libr" + "ary")
SKIPPED_FOLDERS = {".git", ".venv", "build", "dist", "node_modules"}


def repository_files() -> list[Path]:
    """Every file that is, or is about to be, tracked; without git, every file outside caches."""
    listed = None
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listed is not None and listed.returncode == 0:
        paths = [ROOT / name for name in os.fsdecode(listed.stdout).split("\0") if name]
        return [path for path in paths if path.is_file()]
    found = []
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in SKIPPED_FOLDERS and not name.endswith(("cache", "cache__", ".egg-info"))
        ]
        found += [Path(folder, name) for name in names]
    return found


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make as from a fresh shell, also when the tests were started by make."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def targets_in_help() -> list[str]:
    return re.findall(r"^  ([a-z-]+) {2,}\S", make("help").stdout, flags=re.MULTILINE)


@pytest.mark.parametrize("module", ["kvrsim", "kvrsim.cli.main"])
def test_import_is_light(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"{module} imports what only some commands need"


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    offenders = []
    for path in repository_files():
        content = path.read_bytes()
        offenders += [
            f"{path.relative_to(ROOT)}: {private}" for private in PRIVATE_PATHS if private.encode() in content
        ]
    assert offenders == []


def test_pages_name_no_scratch_folder_and_no_package_that_no_index_has() -> None:
    """kvrsim is installed from a checkout: '.[hardware]'."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    sources = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    extra = "kvrsim" + "[hardware]"
    assert [path.name for path in (*pages, *sources) if extra in path.read_text("utf-8")] == []
    assert [path.name for path in pages if "/tmp/" in path.read_text("utf-8")] == []


@pytest.mark.parametrize("room", ROOMS)
def test_python_files_are_short(room: str) -> None:
    paths = sorted((ROOT / room).rglob("*.py"))
    assert paths, f"{room} holds no Python file"
    lengths = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in paths}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_help_lists_targets_that_exist() -> None:
    targets = targets_in_help()
    assert {"plan", "test", "check", "bench", "accuracy", "fit", "clean", "help"} <= set(targets)
    for target in targets:
        done = make("--dry-run", target)
        assert done.returncode == 0, f"make {target}: {done.stderr}"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_alone_prints_the_help() -> None:
    assert make().stdout == make("help").stdout
