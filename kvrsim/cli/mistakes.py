"""Errors for users of the command line: parameters as options (`gpus` is --gpus), Click's errors in the same form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import typer

from kvrsim.errors import InputError, KvrsimError

_FIRST_NAME = re.compile(r"^[a-z][a-z0-9_]*(?=$|[: ])")
_QUOTED_NAME = re.compile(r"`([a-z][a-z0-9_]*)`")
_SAME = {"strategy": ("strategies",), "strategies": ("strategy",)}  # a command has one of the two
# Click says these in its messages alone.
_NO_SUCH_COMMAND = re.compile(r"No such command '([^']*)'")
_EXTRA_ARGUMENT = re.compile(r"unexpected extra argument.*\(([^()]*)\)$")


def as_options(error: KvrsimError, command: Any) -> str:
    """The error's line; a parameter that is an option of `command` (Click's) is spelled as that option.

    Also that of an InputError which a rank has reported: the error's `faults` name it.
    """
    options = _long_options(command)

    def spelled(name: str) -> str | None:
        names = (name, *_SAME.get(name, ()))
        return next((option for one in names if (option := "--" + one.replace("_", "-")) in options), None)

    def first_name(text: str) -> str:
        return _FIRST_NAME.sub(lambda match: spelled(match[0]) or match[0], text, count=1)

    if isinstance(error, InputError):
        accepted = _QUOTED_NAME.sub(lambda match: spelled(match[1]) or match[0], error.accepted)
        return str(InputError(first_name(error.parameter), error.value, accepted))
    text = str(error)
    for name in {fault.parameter for fault in getattr(error, "faults", ()) if fault.parameter}:
        text = text.replace(f": {name}: got", f": {first_name(name)}: got")
    return text


def command_of(arguments: Sequence[str], program: Any) -> Any:
    """The innermost command that the first arguments name."""
    command = program
    for word in arguments:
        inner = getattr(command, "commands", {}).get(word)
        if inner is None:
            break
        command = inner
    return command


def _long_options(command: Any) -> set[str]:
    return {option for param in command.params for option in param.opts if option.startswith("--")}


def click_exception() -> type[Exception]:
    """Click's base class, wherever this Typer keeps it: newer ones carry Click inside."""
    return next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def wrong_use(error: Any, command: Any) -> str:
    """Click's error about a command in kvrsim's form: argument, value, what is accepted."""
    context: Any = getattr(error, "ctx", None)
    message = error.format_message()
    match type(error).__name__:
        case "NoSuchOption" if context is not None:
            options = ", ".join(_options(context.command))
            return f"{error.option_name}: no such option of {context.command_path}, accepted: {options}"
        case "MissingParameter" if error.param is not None:
            return f"{_spelling(error.param)}: got nothing, accepted: {_accepted(error.param)}"
        case "BadOptionUsage":
            option = next((param for param in command.params if error.option_name in param.opts), None)
            if option is not None and option.is_flag:
                return f"{error.option_name}: got a value, accepted: the option alone"
            return f"{error.option_name}: got nothing, accepted: {_accepted(option)}"
    commands = getattr(getattr(context, "command", None), "commands", None)
    if commands:
        got = _NO_SUCH_COMMAND.search(message)
        shown = "nothing" if got is None else f"'{got[1]}'"
        return f"command of {context.command_path}: got {shown}, accepted: {', '.join(commands)}"
    if extra := _EXTRA_ARGUMENT.search(message):
        return f"arguments: got '{extra[1]}', accepted: none but the options of {context.command_path}"
    return str(message)


def _options(command: Any) -> list[str]:
    """Long options of a command, besides --help."""
    return sorted(_long_options(command))


def _spelling(param: Any) -> str:
    return str(param.opts[0] if param.param_type_name == "option" else param.metavar or param.name)


def _accepted(param: Any) -> str:
    text = (getattr(param, "help", None) or "").rstrip(".")
    return f"{getattr(param, 'metavar', None) or 'a value'} ({text})" if text else "a value"
