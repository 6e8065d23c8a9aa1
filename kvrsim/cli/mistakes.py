"""Errors on the command line: parameters are spelled as options (`gpus` is --gpus), Click's errors look the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

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


def error_line(error: KvrsimError, command: Any) -> str:
    """One line for an error; parameters that are options of `command` (Click's) are spelled as options.

    This includes an InputError that a rank has reported, which `faults` names. The line suggests a
    similar accepted value, if there is one.
    """
    options = options_of(command)

    def option(match: re.Match[str]) -> str:
        names = (f"--{one.replace('_', '-')}" for one in (match["name"], _SAME.get(match["name"], "")))
        return next((one for one in names if one in options), match[0])

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
        text = text.replace(f": {name}: got", f": {first_name(name)}: got")
    return text


def nearest(text: str, names: Iterable[str]) -> str | None:
    """The known word nearest to a misspelt one; None if no word is near or `text` is known."""
    words = list(names)
    near = [word for word in words if len(text) > 2 and word.startswith(text.lower())]
    near += get_close_matches(text.lower(), words, n=1, cutoff=0.7)
    return near[0] if near and text not in words else None


def options_of(command: Any) -> list[str]:
    """Names of the long options of a Click command."""
    return sorted(option for param in command.params for option in param.opts if option.startswith("--"))


def command_of(arguments: Sequence[str], program: Any) -> Any:
    """The innermost command that the first arguments name."""
    for word in arguments:
        if not hasattr(program, "get_command") or (inner := program.get_command(None, word)) is None:
            break
        program = inner
    return program


def usage_line(error: click.ClickException, command: Any) -> str:
    """Click's error about a command in kvrsim's form: argument, value, accepted values, suggestion."""
    context: Any = getattr(error, "ctx", None)
    message = error.format_message()
    full = "" if context is None else context.command_path
    match error:
        case click.NoSuchOption() if context is not None:
            options = [*options_of(context.command), "--help"]
            if (size := _SIZE.fullmatch(error.option_name)) and "--strategies" in options:
                return f"{error.option_name}: no such option of {full}, accepted: --strategies {size[1]}8 or tp4+pp2"
            guess = nearest(error.option_name, options)
            accepted = ", ".join(options) if guess is None else f"those of {full} --help"
            return _with_hint(f"{error.option_name}: no such option of {full}, accepted: {accepted}", guess)
        case click.MissingParameter() if error.param is not None:
            return f"{_spelling(error.param)} is missing, accepted: {_accepted_values(error.param)}"
        case click.BadOptionUsage():
            option = next((param for param in command.params if error.option_name in param.opts), None)
            if option is not None and option.is_flag:
                return f"{error.option_name}: got a value, accepted: the option alone"
            return f"{error.option_name}: its value is missing, accepted: {_accepted_values(option)}"
    group: Any = getattr(context, "command", None)
    if hasattr(group, "list_commands"):
        commands = group.list_commands(context)
        match = _NO_SUCH_COMMAND.search(message)
        guess = nearest(match[1], commands) if match else None
        accepted = ", ".join(commands) if guess is None else f"those of {full} --help"
        problem = f": got '{match[1]}'" if match else " is missing"
        return _with_hint(f"command of {full}{problem}, accepted: {accepted}", guess and f"{full} {guess}")
    if extra := _EXTRA_ARGUMENT.search(message):
        return f"arguments: got '{extra[1]}', accepted: none but the options of {full}"
    return str(message)


def _with_hint(line: str, guess: str | None) -> str:
    return line if guess is None else f"{line}; did you mean {guess}?"


def _spelling(param: Any) -> str:
    return str(param.opts[0] if param.param_type_name == "option" else param.metavar or param.name)


def _accepted_values(param: Any) -> str:
    text = (getattr(param, "about", None) or getattr(param, "help", None) or "").rstrip(".")
    return f"{getattr(param, 'metavar', None) or 'a value'} ({text})" if text else "a value"
