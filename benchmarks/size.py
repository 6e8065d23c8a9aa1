"""The size of the project's code: `python benchmarks/size.py`.

Blank lines, comments and docstrings are not lines of code; `__init__` files are modules. The script also lists
functions with more than eight parameters, and counts the project modules that the default plan imports.
"""

from __future__ import annotations

import ast
import io
import statistics
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvrsim", "calibrate", "planner", "validate")
MOST_PARAMETERS = 8
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_PLAN = """
import contextlib, io, sys
from kvrsim.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    main.main(["plan", "--gpus", "8", "--ctx", "16k"])
print(sum(name.split(".")[0] in {packages} for name in sys.modules))
"""


def code_lines(text: str) -> int:
    """Number of lines with code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            held = node.body[0]
            docstrings.update(range(held.lineno, (held.end_lineno or held.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def wide_functions() -> list[str]:
    """Functions of the packages with more than MOST_PARAMETERS parameters; `self` and `cls` are not counted."""
    wide = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                    count = sum(argument.arg not in ("self", "cls") for argument in arguments)
                    if count > MOST_PARAMETERS:
                        wide.append(f"{path.relative_to(ROOT)}:{node.name} ({count})")
    return wide


def modules_of_the_default_plan() -> int:
    """Number of project modules that `kvrsim plan --gpus 8 --ctx 16k` imports."""
    code = _PLAN.format(packages=PACKAGES)
    command = [sys.executable, "-c", code]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Print one row per package, the sums, and the other figures."""
    print(f"{'package':10} {'code lines':>10} {'modules':>8} {'median lines of a module':>25}")
    sizes: list[int] = []
    total = 0
    for package in (*PACKAGES, "tests"):
        if package == "tests":
            print(f"{'packages':10} {total:10} {len(sizes):8} {statistics.median(sizes):25.0f}")
        texts = [path.read_text("utf-8") for path in sorted((ROOT / package).rglob("*.py"))]
        lengths = [len(text.splitlines()) for text in texts]
        code = sum(map(code_lines, texts))
        print(f"{package:10} {code:10} {len(texts):8} {statistics.median(lengths):25.0f}")
        total, sizes = total + code, sizes + lengths
    wide = wide_functions()
    print(f"functions with more than {MOST_PARAMETERS} parameters: {len(wide)}", *wide, sep="\n  ")
    print(f"project modules that the default plan imports: {modules_of_the_default_plan()}")


if __name__ == "__main__":
    main()
