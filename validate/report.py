"""Pages of docs/results: Markdown tables and paragraphs, and the command that writes a page."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvrsim.errors import KvrsimError
from kvrsim.io.files import write_atomically

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, rule: str = "---") -> list[str]:
    """Lines of a Markdown table and an empty line; `rule`: of all columns but the first, "---:" aligns them right."""
    rules = ["---", *[rule] * (len(heads) - 1)]
    return [*(f"| {' | '.join(map(str, cells))} |" for cells in (heads, rules, *rows)), ""]


def numbers_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table with all columns but the first aligned right."""
    return table(heads, rows, rule="---:")


def paragraph(*sentences: str) -> list[str]:
    """Prose, wrapped, and an empty line."""
    return [*textwrap.wrap(" ".join(sentences), width=118, break_on_hyphens=False, break_long_words=False), ""]


def write_page(path: Path, lines: Iterable[str]) -> None:
    """Write a page whole or not at all. Raises InputError where the file cannot be written."""
    write_atomically(path, ("\n".join(lines).rstrip() + "\n").encode(), argument="page")


def run_command(command: Callable[[], object]) -> int:
    """Run a command of this package and return its exit code; a user's mistake is one line on standard error."""
    try:
        command()
    except KvrsimError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
