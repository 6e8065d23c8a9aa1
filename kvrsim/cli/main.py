"""The console entry `run()`. Each failure ends in one line on standard error and an exit code.

The module of a command is imported when the command runs; the other commands cost no time.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module

import click
from click.exceptions import Exit

from kvrsim.cli.help import SETTINGS, Command, CommandGroup, write_options
from kvrsim.cli.progress import write_error
from kvrsim.errors import EXIT_NOT_WRITTEN, KvrsimError
from kvrsim.text import printable
from kvrsim.version import __version__, data_digest

# Exit codes; those above 128 are 128 plus the number of a signal, as in shells.
EXIT_WRONG_USE = 2
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141  # the program that reads the output has ended
EXIT_SIGNALS = (129, 143)  # the terminal was closed, or another process ended this one
_ROOM = "kvrsim.cli.commands"
# Commands by title in the help: summary, module, and the name of the function or Group in the module.
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
    "Check": {"validate": ("Check predictions against your measurements, or published ones.", "validate:app")},
}
COMMANDS = {name: about for commands in GROUPS.values() for name, about in commands.items()}


class CommandLine(CommandGroup):
    """The program; each command is imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Make a command; None if the name is unknown."""
        return make_command(cmd_name) if cmd_name in COMMANDS else None

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; an interruption ends it without the empty line that Click would print."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Exit(EXIT_INTERRUPTED) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List commands by purpose, without importing them, then options."""
        width = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), summary) for name, (summary, _) in commands.items()])
        write_options(self, ctx, formatter)


@cache
def make_command(name: str) -> click.Command:
    """Import a command."""
    summary, where = COMMANDS[name]
    module, _, attribute = where.partition(":")
    function = getattr(import_module(f"{_ROOM}.{module}"), attribute)
    command: click.Command = function if isinstance(function, CommandGroup) else click.command(cls=Command)(function)
    command.name = name
    command.help = command.help or summary
    return command


@click.group(
    "kvrsim",
    cls=CommandLine,
    help="Simulate and plan the prefill of large language models over several GPUs.",
    epilog="Begin with: kvrsim plan llama-3.1-70b 2x8xh100 --ctx 32k. Options of a command: kvrsim help COMMAND.",
    context_settings=SETTINGS,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
)
@click.option("--version", is_flag=True, help="Print the version and the digest of the shipped data.")
@click.pass_context
def app(context: click.Context, version: bool) -> None:
    """Print the version or the help; a command follows otherwise."""
    if version:
        click.echo(f"kvrsim {__version__}, data {data_digest()}")
        context.exit()
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run() -> None:
    """Run the command line and leave with its exit code."""
    gc.set_threshold(100_000)  # at Python's default, 700, it visits the objects of imported modules many times
    if sys.argv[1:2] and sys.argv[1] in GROUPS["Plan"] | GROUPS["Look up"]:  # the others may measure with all cores
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads take 40 ms to start; matrices are small
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # escapes characters that the terminal's encoding lacks
    code = main(sys.argv[1:])
    gc.freeze()  # without it, Python visits every object of torch at exit, which takes a second
    exec("")  # after Ctrl-C in an `exec` of a library, Python would otherwise end itself by SIGINT, not by `code`
    sys.exit(code)


def _open_closed_streams() -> None:
    """Open standard streams that the shell has closed (`>&-`) on /dev/null; other files must not get their numbers."""
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
    arguments = list(arguments)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    try:
        code = app(args=arguments, prog_name="kvrsim", standalone_mode=False)
        sys.stdout.flush()
        if code == EXIT_INTERRUPTED:
            return _fail(_interrupt_line(), EXIT_INTERRUPTED)
        return code if isinstance(code, int) else 0
    except KvrsimError as error:
        from kvrsim.cli.mistakes import command_of, error_line

        return _fail(f"error: {error_line(error, command_of(arguments, app))}", error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _fail(_interrupt_line(), EXIT_INTERRUPTED)
    except (BrokenPipeError, SystemExit) as error:  # Click raises SystemExit for a broken pipe
        if isinstance(error, SystemExit) and error.code in EXIT_SIGNALS:  # while ranks ran
            return _fail(_interrupt_line(), int(error.code))
        if isinstance(error, SystemExit) and error.code == 0:  # after shell completion
            return 0
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit needs an open file
        return EXIT_CLOSED_PIPE
    except OSError as error:  # for example, the disk is full
        return _fail(f"error: {error.strerror or error}: {error.filename or 'standard output'}", EXIT_NOT_WRITTEN)
    except Exception as error:
        return _fail_unexpectedly(error, arguments)


def _interrupt_line() -> str:
    """Describe in one line which files remain after an interruption."""
    from kvrsim.io.journal import kept

    if not kept:
        return "interrupted: nothing is kept; the same command begins anew"
    return f"interrupted: {', '.join(map(str, kept))} keeps what was done; the same command resumes"


def _fail(message: str, code: int) -> int:
    write_error(f"kvrsim: {printable(' '.join(message.split()))}\n")
    return code


def _fail_unexpectedly(error: Exception, arguments: Sequence[str]) -> int:
    """Report wrong use of the command line, which Click raises, or a bug."""
    from kvrsim.cli.mistakes import command_of, usage_line
    from kvrsim.cli.output import reason_of

    if isinstance(error, click.ClickException):
        return _fail(f"error: {usage_line(error, command_of(arguments, app))}", EXIT_WRONG_USE)
    return _fail(f"error: {reason_of(error)}", EXIT_BUG)


if __name__ == "__main__":
    run()
