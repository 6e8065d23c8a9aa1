"""LazyGroup: commands that are imported when they are asked for, so that one does not pay for the others."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

# Of each command the module and what it calls it there: a function, or a typer.Typer with commands of its own.
COMMANDS = {
    "plan": ("kvrsim.cli.commands.plan", "plan"),
    "simulate": ("kvrsim.cli.commands.simulate", "simulate"),
    "confirm": ("kvrsim.cli.commands.confirm", "confirm"),
    "run": ("kvrsim.cli.commands.run", "run"),
    "map": ("kvrsim.cli.commands.map", "strategy_map"),
    "capacity": ("kvrsim.cli.commands.capacity", "capacity"),
    "table": ("kvrsim.cli.commands.table", "app"),
    "predictor": ("kvrsim.cli.commands.predictor", "app"),
    "calibrate": ("kvrsim.cli.commands.calibrate", "app"),
    "profiles": ("kvrsim.cli.commands.profiles", "app"),
    "models": ("kvrsim.cli.commands.models", "app"),
    "clusters": ("kvrsim.cli.commands.clusters", "app"),
    "engines": ("kvrsim.cli.commands.engines", "app"),
    "validate": ("kvrsim.cli.commands.validate", "app"),
}


class _Commands(dict[str, Any]):
    """The commands by name, each made when it is looked at."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(COMMANDS))

    def __getitem__(self, name: str) -> Any:
        if super().__getitem__(name) is None:
            self[name] = _made(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - dict.get would not make it

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]


def _made(name: str) -> Any:
    """As Typer makes a command of a program."""
    module, attribute = COMMANDS[name]
    made = getattr(import_module(module), attribute)
    program = typer.Typer(add_completion=False, rich_markup_mode=None)
    program.callback()(_nothing)  # so that one command is one of a group
    if isinstance(made, typer.Typer):
        program.add_typer(made, name=name)
    else:
        program.command(name)(made)
    return typer.main.get_group(program).commands[name]


def _nothing() -> None:
    """A program needs something to say."""


class LazyGroup(TyperGroup):
    """The program's commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order of COMMANDS."""
        return list(COMMANDS)
