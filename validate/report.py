"""Write pages of results: templates of prose, Markdown tables, and the kvrsim commands that produce the results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvrsim.errors import KvrsimError
from kvrsim.io.files import write_atomically
from validate.results import BENCHMARKS, DOCS, ROOT, with_origin

RESULTS = ROOT / DOCS
_TEMPLATES = Path(__file__).parent / "pages"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, rule: str = "---") -> list[str]:
    """Lines of a Markdown table and an empty line; `rule` aligns the columns after the first ("---:": to the right)."""
    rules = ["---", *[rule] * (len(heads) - 1)]
    return [*(f"| {' | '.join(map(str, cells))} |" for cells in (heads, rules, *rows)), ""]


def numbers_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table in which all columns after the first are aligned right."""
    return table(heads, rows, rule="---:")


def fill(name: str, **values: object) -> list[str]:
    """Lines of the template validate/pages/NAME.md with values in place of its {fields}; a list gives several lines."""
    texts = {key: "\n".join(value).rstrip() if isinstance(value, list) else value for key, value in values.items()}
    return [*(_TEMPLATES / f"{name}.md").read_text("utf-8").format(**texts).rstrip().split("\n"), ""]


def summary(rel_errors: Sequence[float], inside: Sequence[bool]) -> dict[str, Any]:
    """Number of predictions, absolute relative errors, the median with its sign, and the share inside the intervals."""
    if not rel_errors:
        return {"n": 0} | dict.fromkeys(("mape", "median_ape", "max_ape", "median", "coverage"))
    size = np.abs(rel_errors)
    return {
        "n": len(rel_errors),
        "mape": float(size.mean()),
        "median_ape": float(np.median(size)),
        "max_ape": float(size.max()),
        "median": float(np.median(rel_errors)),
        "coverage": float(np.mean(inside)),
    }


def write_page(path: Path, lines: Iterable[str], command: str | None = None) -> None:
    """Write a page with its origin, completely or not at all. Raises InputError if the file cannot be written.

    command: the command that wrote the page, if it is not the one in validate/results.json.
    """
    text = "\n".join(with_origin(path, lines, command)).rstrip() + "\n"
    write_atomically(path, text.encode(), argument="page")


def write_benchmark(name: str, lines: Iterable[str], command: str | None = None) -> None:
    """Write and print the results of a benchmark; for the arguments see `write_page`."""
    path = ROOT / BENCHMARKS / f"{name}.md"
    write_page(path, [f"# {name}", "", *lines], command)
    print(path.read_text("utf-8"))


class CommandError(Exception):
    """A command that failed; the message gives the reason."""


def kvrsim(*words: object, timeout_s: float, accepted: Sequence[int] = (0,)) -> dict[str, Any]:
    """Run a kvrsim command and return its JSON object. Raises CommandError as `output_of` does, or without JSON."""
    try:
        answer: dict[str, Any] = json.loads(output_of(*words, "--json", timeout_s=timeout_s, accepted=accepted))
    except ValueError:
        raise CommandError(f"kvrsim {words[0]} printed no JSON") from None
    return answer


def output_of(*words: object, timeout_s: float, accepted: Sequence[int] = (0,)) -> str:
    """Run a kvrsim command and return its standard output. Processes that the command started end with it.

    Raises CommandError, with the last line of standard error, if the exit code is not accepted or the time limit is
    exceeded.
    """
    command = [sys.executable, "-m", "kvrsim", *map(str, words)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise CommandError(f"kvrsim {words[0]} has not ended within {timeout_s:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    last = [line for line in errors.splitlines() if line.strip()] or ["nothing"]
    if process.returncode not in accepted:
        raise CommandError(f"kvrsim {words[0]} ended with {process.returncode}: {last[-1].strip()}")
    return output


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command of this package and return its exit code; a user's mistake gives one line on standard error.

    command: returns its exit code; None is 0.
    """
    try:
        return command() or 0
    except KvrsimError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
