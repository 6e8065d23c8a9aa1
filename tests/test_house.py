"""The structure of the repository: light imports, no import cycles, a test for each invariant, the Makefile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("kvrsim", "calibrate", "planner", "validate")
HEAVY = ("torch", "transformers", "pandas", "scipy", "matplotlib", "simpy")

# Joined here, so that this file does not contain the strings that it looks for.
PRIVATE_PATHS = ("/wor" + "k/", "../sha" + "red", ".libr" + "ary")


def repository_files() -> list[Path]:
    """Tracked files, and new files that are not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in os.fsdecode(listed.stdout).split("\0") if name)
    return [path for path in paths if path.is_file()]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make without the variables of an outer make."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def targets_in_help() -> list[str]:
    return re.findall(r"^  ([a-z-]+) {2,}\S", make("help").stdout, flags=re.MULTILINE)


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    offenders = []
    for path in repository_files():
        content = path.read_bytes()
        offenders += [
            f"{path.relative_to(ROOT)}: {private}" for private in PRIVATE_PATHS if private.encode() in content
        ]
    assert offenders == []


def test_pages_name_no_scratch_folder_and_no_package_that_no_index_has() -> None:
    """kvrsim is installed from a checkout, as '.[hardware]'."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    sources = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    extra = "kvrsim" + "[hardware]"
    assert [path.name for path in (*pages, *sources) if extra in path.read_text("utf-8")] == []
    assert [path.name for path in pages if "/tmp/" in path.read_text("utf-8")] == []


# -- imports


def imports(package: bool) -> dict[str, set[str]]:
    """Direct imports of each module or package, without type-checking imports and without the command line.

    A package is a folder such as kvrsim.model; a module in no such folder is its own package.
    """
    graph = grimp.build_graph(*ROOMS, exclude_type_checking_imports=True, cache_dir=None)
    edges: dict[str, set[str]] = {}
    for name in graph.modules:
        if not re.match(r"kvrsim\.(cli\b|__)", name):
            whole = {one: ".".join(one.split(".")[: 2 if package else None]) for one in (name, *graph.modules)}
            targets = {whole[one] for one in graph.find_modules_directly_imported_by(name)}
            edges.setdefault(whole[name], set()).update(targets - {whole[name]})
    return edges


@pytest.mark.parametrize("package", [False, True])
def test_nothing_imports_in_a_circle(package: bool) -> None:
    edges = imports(package)
    assert edges["planner.api"]
    TopologicalSorter(edges).prepare()  # CycleError names the cycle


# -- invariants


def invariants() -> list[tuple[str, str]]:
    """Number and test of each row of the page of invariants."""
    page = (ROOT / "docs" / "explanation" / "invariants.md").read_text("utf-8")
    rows = [line.split("|")[1:4] for line in page.splitlines() if re.match(r"\| [A-Z]\d+ \|", line)]
    return [(number.strip(), test) for number, _, tests in rows for test in re.findall(r"`([^`]+)`", tests)]


def test_the_test_of_each_invariant_exists() -> None:
    result = invariants()
    assert len(result) >= 30
    missing = []
    for number, test in result:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text("utf-8") if (ROOT / file).is_file() else ""
        if f"def {name or 'test_'}" not in text:
            missing.append(f"{number}: {test}")
    assert missing == []


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_help_lists_targets_that_exist() -> None:
    targets = targets_in_help()
    assert {"plan", "test", "check", "results", "fit", "clean", "help"} <= set(targets)
    for target in targets:
        done = make("--dry-run", target)
        assert done.returncode == 0, f"make {target}: {done.stderr}"


def test_the_architecture_page_names_every_folder_of_code() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text("utf-8")
    folders = {path.parent for room in ROOMS for path in (ROOT / room).glob("*/*.py")}
    missing = [
        f"{folder.relative_to(ROOT)}/"
        for folder in sorted(folders)
        if f"`{folder.relative_to(ROOT)}/`" not in page and f"`{folder.name}/`" not in page
    ]
    assert missing == []


def test_files_that_the_architecture_page_names_exist() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text("utf-8")
    named = re.findall(r"`((?:kvrsim|planner|calibrate|validate|tests)/[\w/.]+)`", page)
    assert len(named) > 30
    assert [path for path in named if not (ROOT / path).exists()] == []
