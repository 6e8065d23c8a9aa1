"""The structure of the repository: light imports, no circles, a test for each invariant, the Makefile."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("kvrsim", "calibrate", "planner", "validate")
HEAVY = ("torch", "transformers", "pandas", "scipy", "matplotlib", "simpy")

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


# -- imports


def modules() -> dict[str, Path]:
    """The path of every module of the packages, by its dotted name."""
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


def imported(path: Path, known: Collection[str]) -> set[str]:
    """The known modules that a module imports when it runs, inside functions too; a type may name what comes later."""
    names: list[str] = []
    tree = ast.parse(path.read_text("utf-8"))
    types = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    only_types = {part for block in types for part in ast.walk(block)}
    for node in ast.walk(tree):
        if node in only_types:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    found = set()
    for name in names:
        while name and name not in known:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {""}


def circles(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """Sets of nodes that all lead to each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            new = edges.get(left.pop(), set()) - seen
            seen |= new
            left += new
        return seen

    beyond = {node: reached(node) for node in edges}
    return {frozenset(other for other in found if node in beyond.get(other, ())) for node, found in beyond.items()} - {
        frozenset()
    }


def imports_below_the_facade() -> dict[str, set[str]]:
    """What each module imports, without the lazy facade and the command line, which import from above."""
    known = modules()
    below = {
        name: path for name, path in known.items() if name != "kvrsim" and not re.match(r"kvrsim\.(cli\b|__)", name)
    }
    return {name: imported(path, known) - {name} for name, path in below.items()}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(imports_below_the_facade()) == set()


def test_no_packages_import_each_other_in_a_circle() -> None:
    """A package is a folder such as kvrsim.model; a module beside such folders stands for itself."""

    def package(module: str) -> str:
        return ".".join(module.split(".")[:2])

    edges: dict[str, set[str]] = {}
    for module, targets in imports_below_the_facade().items():
        edges.setdefault(package(module), set()).update(package(target) for target in targets)
    apart = {name: targets - {name} for name, targets in edges.items()}
    assert circles(apart) == set()


# -- invariants


def invariants() -> list[tuple[str, str]]:
    """Number and test of each row of the page."""
    page = (ROOT / "docs" / "explanation" / "invariants.md").read_text("utf-8")
    rows = [line.split("|")[1:4] for line in page.splitlines() if re.match(r"\| [A-Z]\d+ \|", line)]
    return [(number.strip(), test) for number, _, tests in rows for test in re.findall(r"`([^`]+)`", tests)]


def test_the_test_of_each_invariant_exists() -> None:
    found = invariants()
    assert len(found) >= 30
    missing = []
    for number, test in found:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text("utf-8") if (ROOT / file).is_file() else ""
        if f"def {name or 'test_'}" not in text:
            missing.append(f"{number}: {test}")
    assert missing == []


def test_each_invariant_has_a_number_of_its_own() -> None:
    page = (ROOT / "docs" / "explanation" / "invariants.md").read_text("utf-8")
    numbers = re.findall(r"^\| ([A-Z]\d+) \|", page, re.M)
    assert len(numbers) == len(set(numbers))


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
