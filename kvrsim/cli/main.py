"""The console entry: `run()`; every way to fail ends in one line on standard error and an exit code."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kvrsim.cli.lazy import LazyGroup
from kvrsim.cli.mistakes import as_options, click_exception, command_of, wrong_use
from kvrsim.cli.outputs import ADVICE, NOT_WRITTEN, interrupted, remember
from kvrsim.errors import KvrsimError
from kvrsim.text import printable
from kvrsim.version import __version__

ASKED = "__complete"  # the first word of a shell that completes a command line
WRONG_USE = 2
BUG = 70
INTERRUPTED = 130
BROKEN_PIPE = 141  # as a shell reports a process that died of SIGPIPE
ENDED = (129, 143)  # likewise of SIGHUP and SIGTERM

app = typer.Typer(
    name="kvrsim",
    cls=LazyGroup,
    help="Simulate and plan the prefill of large language models over several GPUs.",
    epilog="Begin with: kvrsim plan --gpus 8 --ctx 16k. The options of a command: kvrsim help COMMAND.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
    add_completion=False,
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
            stream.reconfigure(errors="backslashreplace")  # a terminal without × still gets its table
    sys.exit(main(sys.argv[1:]))


def _open_closed_streams() -> None:
    """Let what goes to a stream that is closed (`>&-`) go nowhere, rather than into the next file that is opened."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            handle = os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - as long as the process lives


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code and raises nothing."""
    remember(arguments)
    try:
        if arguments[:1] == [ASKED]:
            return _complete(arguments[1:])
        code = app(args=list(arguments), prog_name="kvrsim", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # Typer has caught the Ctrl-C
            return _fail(interrupted(), INTERRUPTED)
        return code if isinstance(code, int) else 0
    except KvrsimError as error:
        command, path = command_of(arguments, typer.main.get_command(app))
        return _fail(f"error: {as_options(error, command, path)}", error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail(interrupted(), INTERRUPTED)
    except (BrokenPipeError, SystemExit) as error:  # Typer turns the one into the other
        if isinstance(error, SystemExit) and error.code in ENDED:
            return int(error.code)  # a signal, while ranks were at work
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return BROKEN_PIPE
    except OSError as error:  # a full disk, say
        return _fail(f"error: {error.strerror or error}: {error.filename or 'standard output'}", NOT_WRITTEN)
    except Exception as error:
        return _fail_unexpectedly(error, arguments)


def _complete(words: Sequence[str]) -> int:
    """Answer a shell."""
    from kvrsim.cli.guide.completion import answer

    for line in answer(words, typer.main.get_command(app)):
        typer.echo(line)
    return 0


def _fail(message: str, code: int) -> int:
    try:
        typer.echo(f"kvrsim: {printable(' '.join(message.split()))}", err=True)
    except OSError:  # the exit code says it, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # for the flush at exit
    return code


def _fail_unexpectedly(error: Exception, arguments: Sequence[str]) -> int:
    """Wrong use of the command line, which Typer raises as Click's exceptions; or a bug."""
    if isinstance(error, click_exception()):
        program = typer.main.get_command(app)
        return _fail(f"error: {wrong_use(error, command_of(arguments, program)[0], arguments, program)}", WRONG_USE)
    if os.environ.get("KVRSIM_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return _fail(f"error: {what} ({ADVICE})", BUG)


if __name__ == "__main__":
    run()
