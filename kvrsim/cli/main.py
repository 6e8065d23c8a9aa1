"""The console entry: `run()`; every way to fail ends in one line on standard error and an exit code."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kvrsim import __version__
from kvrsim.cli import clusters, models, plan, profiles, simulate, validate
from kvrsim.errors import KvrsimError

WRONG_USE = 2
BUG = 70
INTERRUPTED = 130
BROKEN_PIPE = 141  # as a shell reports a process that died of SIGPIPE

app = typer.Typer(
    name="kvrsim",
    help="Simulate and plan the prefill of large language models over several GPUs.",
    epilog="Begin with: kvrsim plan --gpus 8 --ctx 16k",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.add_typer(profiles.app, name="profiles")
app.add_typer(models.app, name="models")
app.add_typer(clusters.app, name="clusters")
app.add_typer(validate.app, name="validate")


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without × still gets its table
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code and raises nothing."""
    try:
        code = app(args=list(arguments), prog_name="kvrsim", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # Typer has caught the Ctrl-C
            return _fail("interrupted", INTERRUPTED)
        return code if isinstance(code, int) else 0
    except KvrsimError as error:
        return _fail(f"error: {error}", error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        return _fail_unexpectedly(error)


def _fail(message: str, code: int) -> int:
    typer.echo(f"kvrsim: {' '.join(message.split())}", err=True)
    return code


def _fail_unexpectedly(error: Exception) -> int:
    """Wrong use of the command line, which Typer raises as Click's exceptions; or a bug."""
    if isinstance(error, _click_exception()):
        return _fail(f"error: {_wrong_use(error)}", WRONG_USE)
    if os.environ.get("KVRSIM_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    what = " ".join(f"{type(error).__name__}: {error}".split())
    advice = "this is a bug in kvrsim; KVRSIM_TRACEBACK=1 shows where, please report it"
    return _fail(f"error: {what} ({advice})", BUG)


def _click_exception() -> type[Exception]:
    """Click's base class, wherever this Typer keeps it: newer ones carry Click inside."""
    return next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _wrong_use(error: Any) -> str:
    """An error of the command line in kvrsim's words: argument, value, what is accepted."""
    context: Any = getattr(error, "ctx", None)
    name = type(error).__name__
    if name == "NoSuchOption":
        options = ", ".join(_options(context))
        return f"{error.option_name}: no such option of {context.command_path}, accepted: {options}"
    if name == "MissingParameter" and error.param is not None:
        return f"{_spelling(error.param)}: got nothing, accepted: {_accepted(error.param)}"
    if name == "BadOptionUsage":
        known = {option: param for param in context.command.params for option in param.opts}
        param = known.get(error.option_name)
        if param is None or getattr(param, "is_flag", False):
            return f"{error.option_name}: got a value, accepted: no value, the option alone"
        return f"{error.option_name}: got nothing, accepted: {_accepted(param)}"
    commands = getattr(getattr(context, "command", None), "commands", None)
    if commands and "No such command" in error.format_message():
        wrong = error.format_message().split("'")[1]
        return f"command of {context.command_path}: got '{wrong}', accepted: {', '.join(commands)}"
    return str(error.format_message())


def _options(context: Any) -> list[str]:
    return sorted(
        {option for param in context.command.get_params(context) for option in param.opts if "--" in option}
    )


def _spelling(param: Any) -> str:
    return param.opts[0] if param.param_type_name == "option" else str(param.make_metavar(None)).strip("[]")


def _accepted(param: Any) -> str:
    return f"{param.metavar or 'a value'} ({(param.help or '').rstrip('.')})"


if __name__ == "__main__":
    run()
