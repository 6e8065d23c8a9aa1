"""Commands and their options: recorded in flags.json, with help for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from kvrsim.cli import main as cli
from tests.building.snapshot import assert_recorded


def commands(command: Any, path: str = "") -> dict[str, Any]:
    """Every command under its path."""
    found = {path: command} if path == "" or not hasattr(command, "commands") else {}
    for name, child in getattr(command, "commands", {}).items():
        found |= commands(child, f"{path} {name}".strip())
    return found


COMMANDS = commands(typer.main.get_command(cli.app))


def test_flags_are_recorded() -> None:
    found = {
        path: [param.opts[0] if param.param_type_name == "option" else param.metavar for param in command.params]
        for path, command in COMMANDS.items()
    }
    assert_recorded(Path(__file__).parent / "flags.json", found)


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_help(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*path.split(), "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"Usage: kvrsim {path}".strip())
    assert err == ""
