"""The console entry `run()`. Each failure ends in one line on standard error and an exit code.

A command is imported on first use, so that it does not wait for the import of others.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvrsim.errors import KvrsimError
from kvrsim.text import printable
from kvrsim.version import __version__

WRONG_USE = 2
BUG = 70
INTERRUPTED = 130
BROKEN_PIPE = 141  # exit code of a process that SIGPIPE ended, as shells report it
ENDED = (129, 143)  # exit codes after SIGHUP and SIGTERM, as shells report them
_EXAMPLE = "Example: "
_ROOM = "kvrsim.cli.commands"
# Commands by title in the help: summary, module, and the name of the function or typer.Typer in the module.
GROUPS = {
    "Plan": {
        "plan": ("Say what to run, which TTFT to promise, and what limits it.", "plan:plan"),
        "simulate": ("Simulate one strategy's prefill, rank by rank.", "simulate:simulate"),
        "map": ("Find the fastest strategy over contexts and GPUs.", "map:strategy_map"),
        "capacity": ("Find the smallest or cheapest fleet for a TTFT target.", "capacity:capacity"),
        "table": ("Build and look up partition tables.", "table:app"),
        "compare": ("Show saved answers side by side.", "compare:compare"),
        "serve": ("Answer questions in a browser, on this machine alone.", "serve:serve"),
        "predictor": ("Build and look up a TTFT predictor for routers.", "predictor:app"),
    },
    "Your machine": {
        "calibrate": ("Measure a machine, and fit a profile to it.", "calibrate:app"),
        "run": ("Measure one strategy's prefill on this machine.", "run:run"),
        "confirm": ("Measure a plan's candidates on this machine.", "confirm:confirm"),
    },
    "Look up": {
        "strategies": ("Ways to run one prefill on several GPUs.", "catalogue:strategies"),
        "models": ("Built-in models, or any Hugging Face config.json.", "catalogue:models"),
        "clusters": ("GPUs and the links between them.", "catalogue:clusters"),
        "profiles": ("Calibration profiles: measured rates of machines.", "catalogue:profiles"),
        "engines": ("Serving engines: the time that their software adds.", "catalogue:engines"),
    },
    "Check": {
        "validate": ("Compare the simulator with published measurements.", "validate:app"),
    },
}
COMMANDS = {name: about for commands in GROUPS.values() for name, about in commands.items()}


class Command(TyperCommand):
    """A command whose docstring may end with a paragraph `Example: kvrsim ...`."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the docstring without its example."""
        whole = self.help
        self.help = (whole or "").partition(_EXAMPLE)[0].rstrip()
        super().format_help_text(ctx, formatter)
        self.help = whole

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options by section."""
        write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the example."""
        if example := " ".join((self.help or "").partition(_EXAMPLE)[2].split()):
            with formatter.section("Example"):
                formatter.write(f"{' ' * formatter.current_indent}{example}\n")


class Group(TyperGroup):
    """Commands with one-line summaries; `list` is the default command of a group that has it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `kvrsim models` and `kvrsim models --json` as `kvrsim models list ...`."""
        if "list" in self.commands and (not args or args[0] in ("--json", "--format")):
            args = ["list", *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, then the options."""
        self.format_commands(ctx, formatter)
        write_options(self, ctx, formatter)


class LazyGroup(Group):
    """The program's commands; each is imported on first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        """List the commands in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Make a command; None if the name is unknown."""
        return made(cmd_name) if cmd_name in COMMANDS else None

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """List commands by purpose, without importing them, then options."""
        width = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), summary) for name, (summary, _) in commands.items()])
        write_options(self, ctx, formatter)


@cache
def made(name: str) -> Any:
    """Import a command, and let Typer make it."""
    summary, where = COMMANDS[name]
    module, _, attribute = where.partition(":")
    command = getattr(import_module(f"{_ROOM}.{module}"), attribute)
    program = typer.Typer(add_completion=False, rich_markup_mode=None)
    program.callback()(lambda: None)  # keeps the group even if it has a single command
    if isinstance(command, typer.Typer):
        for one in command.registered_commands:
            one.cls = Command
        program.add_typer(command, name=name, cls=Group, help=summary)
    else:
        program.command(name, cls=Command)(command)
    return typer.main.get_group(program).commands[name]


def write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """Write the parameters that the help shows, by section."""
    from kvrsim.choices import ALL_OPTIONS

    for title, records in sections_of(command, ctx, every=ALL_OPTIONS in ctx.meta):
        with formatter.section(title):
            formatter.write_dl(records)


def sections_of(command: Any, ctx: Any, *, every: bool = True) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Parameters with their help: arguments, then options; many options are listed by section.

    every: all options; else the most important ones.
    """
    from kvrsim.choices import FEW_OPTIONS, FIRST_OPTIONS, SECTIONS

    params = [param for param in command.get_params(ctx) if param.get_help_record(ctx)]
    places = {param.name.rstrip("_") for param in params if param.param_type_name != "option"}
    options = [param for param in params if param.param_type_name == "option"]
    if is_long := len(options) > FEW_OPTIONS + 2:  # then --help shows few options, and --help-all all
        matters = {param.name for param in options if param.required}
        others = {param.name for param in options} - matters - places
        first = [name for name in FIRST_OPTIONS if name in others]
        matters |= {"help", "help_all", *first[: FEW_OPTIONS - len(matters)]}
    sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", *SECTIONS, "Options")}
    for param in params:
        is_option = param in options
        if is_option and is_long and not every and param.name not in matters:
            continue
        title = getattr(param, "rich_help_panel", None) or "Output"
        title = "Arguments" if not is_option else title if is_long and every else "Options"
        sections[title].append(param.get_help_record(ctx))
    return ((title, records) for title, records in sections.items() if records)


app = typer.Typer(
    name="kvrsim",
    cls=LazyGroup,
    help="Simulate and plan the prefill of large language models over several GPUs.",
    epilog="Begin with: kvrsim plan llama-3.1-70b 2x8xh100 --ctx 32k. Options of a command: kvrsim help COMMAND.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def _kvrsim(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"kvrsim {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run() -> None:
    """Run the command line and leave with its exit code."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # escapes characters that the terminal's encoding lacks
    code = main(sys.argv[1:])
    gc.freeze()  # else the exit visits every object of torch, which takes a second
    sys.exit(code)


def _open_closed_streams() -> None:
    """Open closed standard streams (`>&-`) on /dev/null; else the next opened files would get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            handle = os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - open for the process's lifetime


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; raises nothing."""
    from kvrsim.cli.output import NOT_WRITTEN

    arguments = list(arguments)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    try:
        code = app(args=arguments, prog_name="kvrsim", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # Typer has handled Ctrl-C
            return _fail(_interrupted(), INTERRUPTED)
        return code if isinstance(code, int) else 0
    except KvrsimError as error:
        from kvrsim.cli.mistakes import command_of, error_line

        return _fail(f"error: {error_line(error, command_of(arguments, _program()))}", error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail(_interrupted(), INTERRUPTED)
    except (BrokenPipeError, SystemExit) as error:  # Typer turns a broken pipe into an exit
        if isinstance(error, SystemExit) and error.code in (0, *ENDED):
            return int(error.code or 0)  # after shell completion, or after a signal while ranks ran
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit needs an open file
        return BROKEN_PIPE
    except OSError as error:  # for example, the disk is full
        return _fail(f"error: {error.strerror or error}: {error.filename or 'standard output'}", NOT_WRITTEN)
    except Exception as error:
        return _fail_unexpectedly(error, arguments)


def _interrupted() -> str:
    """Describe in one line which files remain after an interruption."""
    from kvrsim.io.journal import kept

    if not kept:
        return "interrupted: nothing is kept; the same command begins anew"
    return f"interrupted: {', '.join(map(str, kept))} keeps what was done; the same command resumes"


def _program() -> Any:
    return typer.main.get_command(app)


def _fail(message: str, code: int) -> int:
    try:
        typer.echo(f"kvrsim: {printable(' '.join(message.split()))}", err=True)
    except OSError:  # the exit code still reports the failure
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the flush at exit needs an open file
    return code


def _fail_unexpectedly(error: Exception, arguments: Sequence[str]) -> int:
    """Report wrong use of the command line, which Typer raises as Click's exceptions, or a bug."""
    from kvrsim.cli.mistakes import click_exception, command_of, usage_line
    from kvrsim.cli.output import reason_of

    if isinstance(error, click_exception()):
        return _fail(f"error: {usage_line(error, command_of(arguments, _program()))}", WRONG_USE)
    return _fail(f"error: {reason_of(error)}", BUG)


if __name__ == "__main__":
    run()
