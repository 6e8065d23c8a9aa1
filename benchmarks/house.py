"""Measures of the code: `python benchmarks/house.py` prints them; `--list` prints the places, too.

Blank lines, comments and docstrings are not lines of code; `__init__` files are modules. tests/test_house.py
holds those measures that are laws: class names are unique, nothing imports in a circle, and nothing imports upward.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:  # so that `python benchmarks/house.py` finds the packages
    sys.path.insert(0, str(ROOT))
PACKAGES = ("kvrsim", "calibrate", "planner", "validate")
MOST_PARAMETERS = 8
PRONOUNS = frozenset({"one", "own", "each", "some"})
SCENARIOS = frozenset({"scenario", "per_rank"})
NUM_SHARED_LINES = 1000  # densities are per this number of code lines

# Modules whose numeric constants steer a search: nobody can derive these values from the machine.
TUNED = ("planner/search", "planner/candidates", "planner/work", "planner/capacity", "planner/grid", "kvrsim/executors")

# The strategies, and the grammar of layouts, in which tp and pp are parts of a name.
NAMES_STRATEGIES = ("kvrsim/strategies/", "kvrsim/layout.py")

# Layers of the code, the ground first. A module belongs to the last prefix that matches it.
LAYERS = (
    ("kvrsim",),
    ("calibrate", "planner"),
    ("kvrsim.views", "kvrsim.prefills"),
    ("validate",),
    ("kvrsim.cli", "kvrsim.__main__"),
)

_NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_MODULE_NAME = re.compile(r"(kvrsim|calibrate|planner|validate)(\.\w+)+")
_PLAN = """
import contextlib, io, sys
from kvrsim.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    main.main(["plan", "--gpus", "8", "--ctx", "16k"])
print(sum(name.split(".")[0] in {packages} for name in sys.modules))
"""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A module of the packages, parsed."""

    path: Path

    @cached_property
    def text(self) -> str:
        """The source."""
        return self.path.read_text("utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @property
    def place(self) -> str:
        """Path from the root of the repository."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        """Dotted name."""
        parts = list(self.path.relative_to(ROOT).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        return ".".join(parts)

    @cached_property
    def code_lines(self) -> int:
        """Number of lines with code."""
        docstrings = _docstring_lines(self.tree)
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _NOT_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
        return len(lines - docstrings)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All functions and methods."""
        for node in ast.walk(self.tree):
            if isinstance(node, _FUNCTIONS):
                yield node


def _docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node):
            docstring = node.body[0]
            lines.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def source_files(*packages: str) -> list[SourceFile]:
    """The modules of these packages; all packages by default."""
    paths = [path for package in packages or PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [SourceFile(path=path) for path in paths]


# -- density


def tuple_assignments(file: SourceFile) -> Iterator[str]:
    """Assignments of several values to several names in one statement."""
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        if any(isinstance(target, ast.Tuple) for target in node.targets):
            yield f"{file.place}:{node.lineno}"


def conditional_expressions(file: SourceFile) -> Iterator[str]:
    """Expressions `a if b else c`."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.IfExp):
            yield f"{file.place}:{node.lineno}"


def comprehensions(file: SourceFile) -> Iterator[str]:
    """Comprehensions and generator expressions."""
    for node in ast.walk(file.tree):
        if isinstance(node, _COMPREHENSIONS):
            yield f"{file.place}:{node.lineno}"


def pronoun_locals(file: SourceFile) -> Iterator[str]:
    """Parameters, loop variables and assigned names that are pronouns, outside comprehensions."""
    in_comprehensions: set[ast.AST] = set()
    for node in ast.walk(file.tree):
        if isinstance(node, _COMPREHENSIONS):
            in_comprehensions.update(ast.walk(node))
    for node in ast.walk(file.tree):
        if node in in_comprehensions:
            continue
        is_assigned = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in PRONOUNS
        is_parameter = isinstance(node, ast.arg) and node.arg in PRONOUNS
        if is_assigned or is_parameter:
            yield f"{file.place}:{node.lineno}"


def untyped_parameters(file: SourceFile) -> Iterator[str]:
    """Parameters and fields whose annotation is Any, alone or with None."""
    for node in ast.walk(file.tree):
        annotation = getattr(node, "annotation", None)
        if annotation is not None and re.fullmatch(r"Any( \| None)?", ast.unparse(annotation)):
            yield f"{file.place}:{node.lineno}"


# -- names and signatures


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Names of the parameters, without `self` and `cls`."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]


def wide_functions(file: SourceFile) -> Iterator[str]:
    """Functions with more than MOST_PARAMETERS parameters."""
    for function in file.functions():
        if len(parameters_of(function)) > MOST_PARAMETERS:
            yield f"{file.place}:{function.lineno} {function.name}"


def scenario_and_strategy(file: SourceFile) -> Iterator[str]:
    """Functions that take a scenario and a strategy: values that belong together."""
    for function in file.functions():
        names = set(parameters_of(function))
        if "strategy" in names and names & SCENARIOS:
            yield f"{file.place}:{function.lineno} {function.name}"


def repeated_class_names(files: Sequence[SourceFile]) -> dict[str, list[str]]:
    """Class names that several classes have, with their places."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.place}:{node.lineno}")
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def tuning_constants(file: SourceFile) -> Iterator[str]:
    """Numbers that a module of TUNED declares under a name in capitals."""
    if not file.place.startswith(TUNED):
        return
    for statement in file.tree.body:
        if not isinstance(statement, ast.Assign):
            continue
        for target in statement.targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = statement.value.elts if isinstance(statement.value, ast.Tuple) else [statement.value] * len(names)
            for name, value in zip(names, values, strict=False):
                if isinstance(name, ast.Name) and name.id.isupper() and _has_number(value):
                    yield f"{file.place}:{name.lineno} {name.id}"


def _has_number(value: ast.expr) -> bool:
    constants = [node.value for node in ast.walk(value) if isinstance(node, ast.Constant)]
    return any(isinstance(constant, int | float) and not isinstance(constant, bool) for constant in constants)


def strategy_names(file: SourceFile) -> Iterator[str]:
    """Tuples, lists, sets and dicts outside NAMES_STRATEGIES that list strategies by name."""
    if file.place.startswith(NAMES_STRATEGIES):
        return
    from kvrsim.strategies import STRATEGIES

    for node in ast.walk(file.tree):
        elements: Sequence[ast.expr | None] = ()
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            elements = node.elts
        elif isinstance(node, ast.Dict):
            elements = node.keys
        names = [element.value for element in elements if isinstance(element, ast.Constant)]
        if len(set(names) & set(STRATEGIES)) > 1:
            yield f"{file.place}:{node.lineno}"


# -- imports


def layer_of(module: str) -> int:
    """Number of the module's layer; the ground is 0."""
    matches = [
        (len(prefix), number)
        for number, prefixes in enumerate(LAYERS)
        for prefix in prefixes
        if module == prefix or module.startswith(f"{prefix}.")
    ]
    return max(matches)[1]


def imported_modules(file: SourceFile, modules: frozenset[str]) -> Iterator[tuple[str, int]]:
    """Project modules that a file imports, with the line: by statement, for types only, or by text."""
    for node in ast.walk(file.tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        for name in names:
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and _MODULE_NAME.fullmatch(target):
                yield target, node.lineno


def upward_imports(files: Sequence[SourceFile]) -> Iterator[str]:
    """Imports from a layer of a layer above it; the facade `kvrsim/__init__.py` has no layer."""
    modules = frozenset(file.module for file in files)
    for file in files:
        if file.module == "kvrsim":
            continue
        lines = dict(imported_modules(file, modules))
        for target, line in lines.items():
            if layer_of(target) > layer_of(file.module):
                yield f"{file.place}:{line} {target}"


def import_graph(files: Sequence[SourceFile], *, for_types: bool = True) -> dict[str, set[str]]:
    """Modules that each module imports, by statement or by text; `for_types`: imports under TYPE_CHECKING, too."""
    modules = frozenset(file.module for file in files)
    graph: dict[str, set[str]] = {}
    for file in files:
        skipped: set[int] = set()
        if not for_types:
            skipped = _type_checking_lines(file.tree)
        targets = {target for target, line in imported_modules(file, modules) if line not in skipped}
        graph[file.module] = targets - {file.module}
    return graph


def _type_checking_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def modules_of_the_default_plan() -> int:
    """Number of project modules that `kvrsim plan --gpus 8 --ctx 16k` imports."""
    code = _PLAN.format(packages=PACKAGES)
    command = [sys.executable, "-c", code]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


# -- the report


def _print_sizes() -> None:
    print(f"{'package':12} {'code lines':>10} {'modules':>8} {'median lines of a module':>25}")
    for title, packages in (
        *((package, (package,)) for package in PACKAGES),
        ("packages", PACKAGES),
        ("tests", ("tests",)),
    ):
        files = source_files(*packages)
        lengths = [len(file.text.splitlines()) for file in files]
        code_lines = sum(file.code_lines for file in files)
        print(f"{title:12} {code_lines:10} {len(files):8} {statistics.median(lengths):25.0f}")


def _print_measure(title: str, places: Sequence[str], code_lines: int | None, is_listed: bool) -> None:
    """Print a count, or the count per NUM_SHARED_LINES code lines where `code_lines` is given."""
    if code_lines is None:
        print(f"{title:70} {len(places):8}")
    else:
        print(f"{title + f', per {NUM_SHARED_LINES} lines':70} {len(places) * NUM_SHARED_LINES / code_lines:8.1f}")
    if is_listed:
        for place in places:
            print(f"    {place}")


def main() -> None:
    """Print the sizes, then a line for each measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the places of each measure")
    is_listed = parser.parse_args().list
    _print_sizes()
    print()
    files = source_files()
    code_lines = sum(file.code_lines for file in files)

    def places_of(measure: Callable[[SourceFile], Iterator[str]]) -> list[str]:
        return [place for file in files for place in measure(file)]

    densities: dict[str, Callable[[SourceFile], Iterator[str]]] = {
        "parallel tuple assignments": tuple_assignments,
        "conditional expressions": conditional_expressions,
        "comprehensions": comprehensions,
        "locals named one, own, each or some": pronoun_locals,
        "parameters and fields annotated Any": untyped_parameters,
    }
    for title, measure in densities.items():
        _print_measure(title, places_of(measure), code_lines, is_listed)
    counts: dict[str, Callable[[SourceFile], Iterator[str]]] = {
        f"functions with more than {MOST_PARAMETERS} parameters": wide_functions,
        "functions that take a scenario and a strategy": scenario_and_strategy,
        "tuning constants of search, candidates, capacity and executors": tuning_constants,
        "lists of strategies by name outside kvrsim/strategies": strategy_names,
    }
    for title, measure in counts.items():
        _print_measure(title, places_of(measure), None, is_listed)
    repeated = [f"{name}: {', '.join(found)}" for name, found in repeated_class_names(files).items()]
    _print_measure("class names used more than once", repeated, None, is_listed)
    _print_measure("imports upward, also for types and by text", list(upward_imports(files)), None, is_listed)
    print(f"{'project modules that the default plan imports':70} {modules_of_the_default_plan():8}")


if __name__ == "__main__":
    main()
