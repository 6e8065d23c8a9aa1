"""`kvrsim help`: the help of a command, as its --help prints it."""

from __future__ import annotations

from typing import Annotated

import typer

Words = Annotated[
    list[str] | None, typer.Argument(metavar="[COMMAND]...", help="A command, such as plan or table build.")
]


def show_help(words: Words = None) -> None:
    """Print the help of a command.

    Example: kvrsim help table build
    """
    from kvrsim.cli.main import main

    raise typer.Exit(main([*(words or ()), "--help"]))
