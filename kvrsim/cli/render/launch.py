"""The launch of a plan on a serving engine, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kvrsim.cli.outputs import tell
from kvrsim.text import printable

if TYPE_CHECKING:
    from planner.deploy.emit import Launch


def show_launch(launch: Launch) -> None:
    """The command first, then its files; notes go to standard error."""
    typer.echo(printable(launch.command))
    for name, text in launch.files.items():
        typer.echo(f"\n# {printable(name)}\n{text.rstrip()}")
    typer.echo("")
    for note in launch.notes:
        tell(f"note: {note}")
