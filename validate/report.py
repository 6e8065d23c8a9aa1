"""Pages of docs/results: templates of prose, Markdown tables, and commands that write a page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvrsim.errors import KvrsimError
from kvrsim.io.files import write_atomically

RESULTS = Path(__file__).parents[1] / "docs" / "results"
_TEMPLATES = Path(__file__).parent / "pages"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, rule: str = "---") -> list[str]:
    """Lines of a Markdown table and an empty line; `rule`: of all columns but the first, "---:" aligns them right."""
    rules = ["---", *[rule] * (len(heads) - 1)]
    return [*(f"| {' | '.join(map(str, cells))} |" for cells in (heads, rules, *rows)), ""]


def numbers_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table with all columns but the first aligned right."""
    return table(heads, rows, rule="---:")


def fill(name: str, **values: object) -> list[str]:
    """Lines of the template validate/pages/NAME.md, with values in place of its {fields}; a list is joined as lines."""
    texts = {key: "\n".join(value).rstrip() if isinstance(value, list) else value for key, value in values.items()}
    return [*(_TEMPLATES / f"{name}.md").read_text("utf-8").format(**texts).rstrip().split("\n"), ""]


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
