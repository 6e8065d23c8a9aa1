"""The structure of the repository: imports run one way, a test for each invariant, the Makefile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from benchmarks.house import (
    SourceFile,
    import_graph,
    imported_modules,
    repeated_class_names,
    source_files,
    upward_imports,
)

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


def package_of(module: str) -> str:
    """The folder of a module, such as kvrsim.model; a module in no such folder is its own package."""
    return ".".join(module.split(".")[:2])


@cache
def sources() -> list[SourceFile]:
    return source_files()


@cache
def modules_imported() -> dict[str, set[str]]:
    return import_graph(sources(), for_types=False)


def imports(package: bool) -> dict[str, set[str]]:
    """Modules or packages that each module or package imports, also by text; imports for types are left out."""
    graph = modules_imported()
    if not package:
        return graph
    edges: dict[str, set[str]] = {}
    for module, targets in graph.items():
        packages = {package_of(target) for target in targets}
        edges.setdefault(package_of(module), set()).update(packages - {package_of(module)})
    return edges


@pytest.mark.parametrize("package", [False, True])
def test_nothing_imports_in_a_circle(package: bool) -> None:
    edges = imports(package)
    assert edges["planner.api"]
    TopologicalSorter(edges).prepare()  # CycleError names the cycle


def test_nothing_imports_upward() -> None:
    """Layers are in benchmarks/house.py; imports for types and by text count."""
    assert list(upward_imports(sources())) == []


def test_imports_by_text_and_for_types_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    from planner.plan import make_plan\n"
        "def show():\n"
        "    import_module('kvrsim.views.plan')\n"
    )
    modules = frozenset({"planner.plan", "kvrsim.views.plan"})
    assert set(imported_modules(SourceFile(path=path), modules)) == {("kvrsim.views.plan", 5), ("planner.plan", 3)}


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


def test_class_names_are_unique() -> None:
    """A name in a traceback or an import says which class is meant."""
    assert repeated_class_names(sources()) == {}
