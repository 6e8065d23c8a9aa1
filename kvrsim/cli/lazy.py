"""LazyGroup: commands that are imported when they are asked for, so that one does not pay for the others."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer

from kvrsim.cli.guide.help import Command, Group, write_options

_ROOM = "kvrsim.cli.commands"
# Under the title that help shows them under: of each command its summary, its module and what it is called there: a
# function, or a typer.Typer with commands of its own.
GROUPS = {
    "Plan": {
        "plan": ("Compare strategies for one prefill, each at its best.", f"{_ROOM}.plan:plan"),
        "simulate": ("Simulate one strategy's prefill, rank by rank.", f"{_ROOM}.simulate:simulate"),
        "map": ("Find the fastest strategy over contexts and GPUs.", f"{_ROOM}.map:strategy_map"),
        "capacity": ("Find the smallest or cheapest fleet for a TTFT target.", f"{_ROOM}.capacity:capacity"),
        "table": ("Build and look up partition tables.", f"{_ROOM}.table:app"),
        "predictor": ("Build and look up a TTFT predictor for routers.", f"{_ROOM}.predictor:app"),
    },
    "Your machine": {
        "calibrate": ("Measure a machine, and fit a profile to it.", f"{_ROOM}.calibrate:app"),
        "run": ("Measure one strategy's prefill on this machine.", f"{_ROOM}.run:run"),
        "confirm": ("Measure a plan's candidates on this machine.", f"{_ROOM}.confirm:confirm"),
    },
    "Look up": {
        "strategies": ("Ways to run one prefill on several GPUs.", f"{_ROOM}.catalogue:strategies"),
        "models": ("Built-in models, or any Hugging Face config.json.", f"{_ROOM}.catalogue:models"),
        "clusters": ("GPUs and the links between them.", f"{_ROOM}.catalogue:clusters"),
        "profiles": ("Calibration profiles: measured rates of machines.", f"{_ROOM}.catalogue:profiles"),
        "engines": ("Serving engines: the time that their software adds.", f"{_ROOM}.catalogue:engines"),
    },
    "Check and set up": {
        "validate": ("Compare the simulator with published measurements.", f"{_ROOM}.validate:app"),
        "completion": ("Print a script for a shell that completes kvrsim.", "kvrsim.cli.guide.completion:completion"),
        "help": ("Print the help of a command.", "kvrsim.cli.guide.topics:show_help"),
    },
}
COMMANDS = {name: found for commands in GROUPS.values() for name, found in commands.items()}


class _Commands(dict[str, Any]):
    """The commands by name, each made when it is looked at."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(COMMANDS))

    def __getitem__(self, name: str) -> Any:
        if super().__getitem__(name) is None:
            self[name] = made(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - dict.get would not make it

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]


def made(name: str) -> Any:
    """A command, as Typer makes one of a program."""
    summary, where = COMMANDS[name]
    module, _, attribute = where.partition(":")
    found = getattr(import_module(module), attribute)
    program = typer.Typer(add_completion=False, rich_markup_mode=None)
    program.callback()(_nothing)  # so that one command is one of a group
    if isinstance(found, typer.Typer):
        for command in found.registered_commands:
            command.cls = Command
        program.add_typer(found, name=name, cls=Group, help=summary)
    else:
        program.command(name, cls=Command)(found)
    return typer.main.get_group(program).commands[name]


def _nothing() -> None:
    """A program needs something to say."""


class LazyGroup(Group):
    """The program's commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order of COMMANDS."""
        return list(COMMANDS)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Commands by what they are for, none of them imported; then options."""
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(max(map(len, COMMANDS))), text) for name, (text, _) in commands.items()]
                )
        write_options(self, ctx, formatter)
