"""Commands of Click and the form of their help: options by section, an example at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click

from kvrsim.choices import ALL_OPTIONS, FEW_OPTIONS, FIRST_OPTIONS, SECTIONS

_EXAMPLE = "Example: "
SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Place(click.Argument):
    """An argument that is given by position; the help describes it."""

    def __init__(self, names: Sequence[str], *, about: str, metavar: str, required: bool, nargs: int = 1) -> None:
        super().__init__(names, metavar=metavar, required=required, nargs=nargs)
        self.about = about

    def make_metavar(self, ctx: click.Context) -> str:
        """Return the argument's form in the usage line."""
        return f"{{{self.metavar}}}" if self.required else f"[{self.metavar}]"

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return the argument's row in the help."""
        return str(self.metavar), f"{self.about}{'  [required]' * self.required}"


class Command(click.Command):
    """A command. A last paragraph `Example: kvrsim ...` of its docstring is printed at the end of its help."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        text, _, example = (self.help or "").partition(_EXAMPLE)
        self.help = text.rstrip()
        self.example = " ".join(example.split())

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments, then options by section."""
        write_options(self, ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example."""
        if self.example:
            with formatter.section("Example"):
                formatter.write(f"{' ' * formatter.current_indent}{self.example}\n")


class CommandGroup(click.Group):
    """Commands with a common first word, such as `kvrsim models`. `kvrsim models` alone means `kvrsim models list`."""

    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse `kvrsim models` and `kvrsim models --json` as `kvrsim models list ...`."""
        if "list" in self.commands and (not args or args[0] in ("--json", "--format")):
            args = ["list", *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands in the order of the code."""
        return list(self.commands)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, then the options."""
        self.format_commands(ctx, formatter)
        write_options(self, ctx, formatter)


def write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the parameters that the help shows, by section."""
    for title, records in sections_of(command, ctx, every=ALL_OPTIONS in ctx.meta):
        with formatter.section(title):
            formatter.write_dl(records)


def sections_of(
    command: click.Command, ctx: click.Context, *, every: bool = True
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """List parameters with their help, by section: arguments, then options.

    every: list all options of a long command; by default the most important ones.
    """
    params = command.get_params(ctx)
    options = [param for param in params if isinstance(param, click.Option)]
    is_long = len(options) > FEW_OPTIONS + 2
    shown = {param.name for param in options}
    if is_long and not every:
        shown = _first_options(params)
    sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", *SECTIONS, "Options")}
    for param in params:
        record = param.get_help_record(ctx)
        if record is None:
            continue
        if param not in options:
            title = "Arguments"
        elif param.name not in shown and "--help" not in param.opts:
            continue
        elif is_long and every:
            title = getattr(param, "section", "Output")
        else:
            title = "Options"
        sections[title].append(record)
    return ((title, records) for title, records in sections.items() if records)


def _first_options(params: Sequence[click.Parameter]) -> set[str]:
    """Names of the options that the short help of a long command shows: the required ones, then FIRST_OPTIONS."""
    options = [param for param in params if isinstance(param, click.Option)]
    shown = {param.name for param in options if param.required}
    places = {str(param.name).rstrip("_") for param in params if param not in options}
    others = {param.name for param in options} - shown - places
    first = [name for name in FIRST_OPTIONS if name in others]
    shown.update(first[: FEW_OPTIONS - len(shown)])
    shown.add("help_all")
    return shown
