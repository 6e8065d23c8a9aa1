"""Answers on standard output, lines on standard error, and files beside an answer.

Files are written once the answer is printed, so that a picture that fails costs the picture alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from kvrsim.errors import KvrsimError
from kvrsim.text import printable

NOT_WRITTEN = 74  # exit code: the answer is there, but not all that was to be written
ADVICE = "this is a bug in kvrsim; KVRSIM_TRACEBACK=1 shows where, please report it"


def print_json(content: dict[str, Any]) -> None:
    """One JSON object on standard output; NaN and infinity, which JSON has not got, are refused."""
    typer.echo(json.dumps(content, indent=2, allow_nan=False))


def tell_once(note: str) -> None:
    """A line on standard error, from the first rank alone."""
    from kvrsim.io.files import is_first_rank

    if is_first_rank():
        tell(note)


def tell(line: str) -> None:
    """A line for people on standard error."""
    typer.echo(printable(f"kvrsim: {line}"), err=True)


typed: list[str] = []  # the words of this command line
_kept: list[str] = []  # journals of interrupted work


def remember(words: Sequence[str]) -> None:
    """The command line that runs now."""
    typed[:] = words
    _kept.clear()


@contextmanager
def resumable(journal: Path) -> Iterator[None]:
    """Work that can be resumed from its journal: if interrupted, the message names the journal, if there is one."""
    try:
        yield
    except KeyboardInterrupt:
        if journal.exists():
            _kept.append(str(journal))
        raise


def interrupted() -> str:
    """What an interruption has left, and how to go on, in one line."""
    if not _kept:
        return "interrupted: nothing is kept; the same command begins anew"
    return f"interrupted: {', '.join(_kept)} keeps what was done; the same command resumes"


def write_beside(*outputs: tuple[str | None, Callable[[str], object]]) -> None:
    """Write the files that were asked for, each by its own function of the path; None: not asked for.

    One line on standard error for each: where it is, or why it failed; then typer.Exit with NOT_WRITTEN if any failed,
    after all have been tried.
    """
    sys.stdout.flush()
    failed = False
    for path, write in outputs:
        if path is None:
            continue
        try:
            write(path)
        except Exception as error:
            failed = True
            tell(f"error: {path}: not written, the answer is complete: {_why(error)}")
        else:
            tell(f"written: {path}")
    if failed:
        raise typer.Exit(NOT_WRITTEN)


def _why(error: Exception) -> str:
    """In one line; a bug is called one."""
    if os.environ.get("KVRSIM_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    message = " ".join(str(error).split())
    if isinstance(error, KvrsimError | OSError):
        return message
    return f"{type(error).__name__}: {message} ({ADVICE})"
