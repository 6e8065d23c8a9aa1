"""Lines of code (no blanks, comments, docstrings) and modules of the four packages: `python benchmarks/size.py`."""

from __future__ import annotations

import ast
import io
import statistics
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvrsim", "calibrate", "planner", "validate")
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Lines that hold code."""
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


def main() -> None:
    """One row a package, and the sum."""
    print(f"{'package':10} {'code lines':>10} {'modules':>8} {'median lines of a module':>25}")
    sizes: list[int] = []
    total = 0
    for package in PACKAGES:
        paths = [path for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py"]
        texts = [path.read_text("utf-8") for path in sorted((ROOT / package).rglob("*.py"))]
        lengths = [len(path.read_text("utf-8").splitlines()) for path in paths]
        code = sum(map(code_lines, texts))
        print(f"{package:10} {code:10} {len(paths):8} {statistics.median(lengths):25.0f}")
        total, sizes = total + code, sizes + lengths
    print(f"{'all':10} {total:10} {len(sizes):8} {statistics.median(sizes):25.0f}")


if __name__ == "__main__":
    main()
