"""Help: options in sections, an example at the end; written without importing what a command runs on."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

_EXAMPLE = "Example: "
_FEW = 8  # options that need no sections


class Command(TyperCommand):
    """A command whose docstring may end with a paragraph `Example: kvrsim ...`."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """The docstring without its example."""
        whole = self.help
        self.help = (whole or "").partition(_EXAMPLE)[0].rstrip()
        super().format_help_text(ctx, formatter)
        self.help = whole

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, then options by section."""
        write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The example."""
        if example := example_of(self):
            with formatter.section("Example"):
                formatter.write(f"{' ' * formatter.current_indent}{example}\n")


class Group(TyperGroup):
    """Commands with a summary in one line each."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Commands first: what a reader of this help looks for."""
        self.format_commands(ctx, formatter)
        write_options(self, ctx, formatter)


def example_of(command: Any) -> str:
    """The command line that a command's help ends with; "" where there is none."""
    return " ".join((command.help or "").partition(_EXAMPLE)[2].split())


def write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """The parameters that help shows, by section."""
    for title, records in sections_of(command, ctx).items():
        with formatter.section(title):
            formatter.write_dl(records)


def sections_of(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Parameters with their help: arguments, then options, of which many come in sections."""
    from kvrsim.cli.guide.sections import in_order, place_of

    path = ctx.command_path.partition(" ")[2]
    shown = [(param, record) for param in command.get_params(ctx) if (record := param.get_help_record(ctx))]
    options = [(param.opts, record) for param, record in shown if param.param_type_name == "option"]
    found: dict[str, dict[int, tuple[str, str]]] = {}
    for names, record in options if len(options) > _FEW else ():
        title, number = place_of(path, next(name for name in names if name.startswith("--")))
        found.setdefault(title, {})[number] = record
    parts = {"Arguments": [record for param, record in shown if param.param_type_name == "argument"]}
    parts |= {title: [found[title][number] for number in sorted(found[title])] for title in in_order(set(found))}
    parts |= {} if found else {"Options": [record for _, record in options]}
    return {title: records for title, records in parts.items() if records}
