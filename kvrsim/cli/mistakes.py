"""Errors on the command line: parameters are spelled as options (`gpus` is --gpus), Click's errors look the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

import click

from kvrsim.errors import ABSENT, InputError, KvrsimError

_FIRST_NAME = re.compile(r"^(?P<name>[a-z][a-z0-9_]*)(?=$|[: ])")
_NAME = re.compile(r"[^\s,]+")  # values that may be misspelt names
_QUOTED_NAME = re.compile(r"`(?P<name>[a-z][a-z0-9_]*)`")
_SAME = {"strategy": "strategies", "strategies": "strategy"}  # each command has only one of the two options
_LISTED = {"--model": "models", "--cluster": "clusters", "--profile": "profiles", "--engine": "engines"}
_SIZE = re.compile(r"--(tp|pp|cp|dp)(?:-size)?")  # engines' options for the sizes of a deployment
_MANY_NAMES = re.compile(r"[\w.+@-]+(?:, [\w.+@-]+){11,}")
# Click gives the wrong command or argument only in the texts of its messages.
_NO_SUCH_COMMAND = re.compile(r"No such command '([^']*)'")
_EXTRA_ARGUMENT = re.compile(r"unexpected extra argument.*\(([^()]*)\)$")


def error_line(error: KvrsimError, command: click.Command) -> str:
    """One line for an error; parameters that are options of `command` (Click's) are spelled as options.

    This includes an InputError that a rank has reported, which `faults` names. The line suggests a
    similar accepted value, if there is one.
    """
    options = options_of(command)

    def option(match: re.Match[str]) -> str:
        for name in (match["name"], _SAME.get(match["name"], "")):
            spelling = f"--{name.replace('_', '-')}"
            if spelling in options:
                return spelling
        return match[0]

    def first_name(text: str) -> str:
        return _FIRST_NAME.sub(option, text, count=1)

    if isinstance(error, InputError):
        name = first_name(error.parameter)
        accepted = _QUOTED_NAME.sub(option, error.accepted)
        guess = error.guess
        if guess is None and _NAME.fullmatch(str(error.value)) and error.value is not ABSENT:
            guess = nearest(str(error.value), re.findall(r"\b(?<![\w.+@-])[a-z][\w.+@-]*", accepted))
        if name in _LISTED:
            accepted = _MANY_NAMES.sub(f"those of kvrsim {_LISTED[name]} list", accepted)
        return str(InputError(name, error.value, accepted, guess))
    text = str(error)
    for name in {fault.parameter for fault in getattr(error, "faults", ()) if fault.parameter}:
        text = re.sub(rf"(^|: ){re.escape(name)}: got", rf"\1{first_name(name)}: got", text)
    return text


def nearest(text: str, names: Iterable[str]) -> str | None:
    """The known word nearest to a misspelt one; None if no word is near or `text` is known."""
    words = list(names)
    if text in words:
        return None
    if len(text) > 2:
        for word in words:
            if word.startswith(text.lower()):
                return word
    near = get_close_matches(text.lower(), words, n=1, cutoff=0.7)
    if not near:
        return None
    return near[0]


def options_of(command: click.Command) -> list[str]:
    """Names of the long options of a Click command."""
    return sorted(option for param in command.params for option in param.opts if option.startswith("--"))


def command_of(arguments: Sequence[str], program: click.Command) -> click.Command:
    """The innermost command that the first arguments name."""
    command = program
    for word in arguments:
        if not isinstance(command, click.Group):
            break
        inner = command.get_command(click.Context(command), word)
        if inner is None:
            break
        command = inner
    return command


def usage_line(error: click.ClickException, command: click.Command) -> str:
    """Click's error about a command in kvrsim's form: argument, value, accepted values, suggestion."""
    context = getattr(error, "ctx", None)
    if isinstance(error, click.NoSuchOption) and context is not None:
        return _no_such_option(error.option_name, context)
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return f"{_spelling(error.param)} is missing, accepted: {_accepted_values(error.param)}"
    if isinstance(error, click.BadOptionUsage):
        return _bad_value(error.option_name, command)
    message = error.format_message()
    if context is None:
        return message
    if isinstance(context.command, click.Group):
        return _no_such_command(message, context, context.command)
    extra = _EXTRA_ARGUMENT.search(message)
    if extra is not None:
        return f"arguments: got '{extra[1]}', accepted: none but the options of {context.command_path}"
    return message


def _no_such_option(name: str, context: click.Context) -> str:
    path = context.command_path
    options = [*options_of(context.command), "--help"]
    size = _SIZE.fullmatch(name)
    if size is not None and "--strategies" in options:
        return f"{name}: no such option of {path}, accepted: --strategies {size[1]}8 or tp4+pp2"
    return _with_guess(f"{name}: no such option of {path}", path, options, nearest(name, options))


def _bad_value(name: str, command: click.Command) -> str:
    for param in command.params:
        if name not in param.opts:
            continue
        if isinstance(param, click.Option) and param.is_flag:
            return f"{name}: got a value, accepted: the option alone"
        return f"{name}: its value is missing, accepted: {_accepted_values(param)}"
    return f"{name}: its value is missing, accepted: a value"


def _no_such_command(message: str, context: click.Context, group: click.Group) -> str:
    path = context.command_path
    commands = group.list_commands(context)
    wrong = _NO_SUCH_COMMAND.search(message)
    if wrong is None:
        return _with_guess(f"command of {path} is missing", path, commands, None)
    guess = nearest(wrong[1], commands)
    return _with_guess(f"command of {path}: got '{wrong[1]}'", path, commands, guess, before=f"{path} ")


def _with_guess(problem: str, path: str, accepted: Sequence[str], guess: str | None, *, before: str = "") -> str:
    """The line of an error: what is accepted, or the help that lists it and a suggestion, which follows `before`."""
    if guess is None:
        return f"{problem}, accepted: {', '.join(accepted)}"
    return f"{problem}, accepted: those of {path} --help; did you mean {before}{guess}?"


def _spelling(param: click.Parameter) -> str:
    if isinstance(param, click.Option):
        return param.opts[0]
    return param.metavar or str(param.name)


def _accepted_values(param: click.Parameter) -> str:
    help_text = getattr(param, "about", None) or getattr(param, "help", None)
    if not help_text:
        return "a value"
    return f"{param.metavar or 'a value'} ({help_text.rstrip('.')})"
