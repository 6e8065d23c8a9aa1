"""Errors for users of the command line: parameters as options (`gpus` is --gpus), Click's errors in the same form."""

from __future__ import annotations

import itertools
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


def as_options(error: KvrsimError, command: Any, path: str = "") -> str:
    """The error's line; a parameter that is an option of `command` (Click's) is spelled as that option.

    Also that of an InputError which a rank has reported: the error's `faults` name it. path: the command's, without
    `kvrsim`. Where a value is near to one that is accepted, the line ends with that one.
    """
    options = _long_options(command)

    def spelled(name: str) -> str | None:
        names = (name, *_SAME.get(name, ()))
        return next((option for one in names if (option := "--" + one.replace("_", "-")) in options), None)

    def first_name(text: str) -> str:
        return _FIRST_NAME.sub(lambda match: spelled(match[0]) or match[0], text, count=1)

    if isinstance(error, InputError):
        accepted = _QUOTED_NAME.sub(lambda match: spelled(match[1]) or match[0], error.accepted)
        return _with_value(first_name(error.parameter), error.value, accepted, command, path)
    text = str(error)
    for name in {fault.parameter for fault in getattr(error, "faults", ()) if fault.parameter}:
        text = text.replace(f": {name}: got", f": {first_name(name)}: got")
    return text


def _with_value(name: str, value: object, accepted: str, command: Any, path: str) -> str:
    """The line of an InputError, with the value that was meant."""
    param = next((param for param in command.params if name in (*param.opts, param.metavar)), None)
    if param is None or not isinstance(value, str):
        return str(InputError(name, value, accepted))
    from kvrsim.cli.guide.suggest import meant_value, shortened

    meant = meant_value(value, name, param, command, path, accepted)
    return _hinted(str(InputError(name, value, accepted if meant is None else shortened(accepted, param, path))), meant)


def _hinted(line: str, meant: str | None) -> str:
    return line if meant is None else f"{line}; did you mean {meant}?"


def command_of(arguments: Sequence[str], program: Any) -> tuple[Any, str]:
    """The innermost command that the first arguments name, and these."""
    command, words = program, []
    for word in arguments:
        inner = getattr(command, "commands", {}).get(word)
        if inner is None:
            break
        command = inner
        words.append(word)
    return command, " ".join(words)


def _long_options(command: Any) -> set[str]:
    return {option for param in command.params for option in param.opts if option.startswith("--")}


def click_exception() -> type[Exception]:
    """Click's base class, wherever this Typer keeps it: newer ones carry Click inside."""
    return next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def wrong_use(error: Any, command: Any, arguments: Sequence[str], program: Any) -> str:
    """Click's error about a command in kvrsim's form: argument, value, what is accepted, what was meant."""
    from kvrsim.cli.guide import suggest

    context: Any = getattr(error, "ctx", None)
    message = error.format_message()
    full = "" if context is None else context.command_path
    path = full.partition(" ")[2]
    match type(error).__name__:
        case "NoSuchOption" if context is not None:
            given = _as_typed(error.option_name, arguments)
            meant = suggest.meant_option(given, context.command, path, program)
            options = ", ".join(_options(context.command)) if meant is None else f"those of {full} --help"
            return _hinted(f"{given}: no such option of {full}, accepted: {options}", meant)
        case "MissingParameter" if error.param is not None:
            line = f"{_spelling(error.param)}: got nothing, accepted: {_accepted(error.param)}"
            words = _words_alone(context, arguments)
            meant = suggest.meant_words(words, _before(words, arguments), context.command, path) if words else None
            return _hinted(line, meant)
        case "BadOptionUsage":
            option = next((param for param in command.params if error.option_name in param.opts), None)
            if option is not None and option.is_flag:
                return f"{error.option_name}: got a value, accepted: the option alone"
            return f"{error.option_name}: got nothing, accepted: {_accepted(option)}"
    commands = getattr(getattr(context, "command", None), "commands", None)
    if commands:
        got = _NO_SUCH_COMMAND.search(message)
        shown = "nothing" if got is None else f"'{got[1]}'"
        words = (
            [] if got is None else list(arguments[list(arguments).index(got[1]) :]) if got[1] in arguments else [got[1]]
        )
        meant = suggest.meant_command(words, context.command, full) if words else None
        accepted = ", ".join(commands) if meant is None else f"those of {full} --help"
        return _hinted(f"command of {full}: got {shown}, accepted: {accepted}", meant)
    if extra := _EXTRA_ARGUMENT.search(message):
        if (option := _without_value(context.command, arguments)) is not None:
            return f"{option.opts[0]}: got nothing, accepted: {_accepted(option)}"
        words = _words_alone(context, arguments) or extra[1].split()
        meant = suggest.meant_words(words, _before(words, arguments), context.command, path)
        return _hinted(f"arguments: got '{extra[1]}', accepted: none but the options of {full}", meant)
    return str(message)


def _as_typed(option: str, arguments: Sequence[str]) -> str:
    """An option of one dash and several letters (-gpus), of which Click names the first letter alone."""
    letter = option[1:2]
    return next((one for one in arguments if re.fullmatch(r"-[a-z][\w-]+(=.*)?", one) and letter in one), option)


def _without_value(command: Any, arguments: Sequence[str]) -> Any:
    """The option that has taken the next option for its value; None: none has."""
    options = {name: param for param in command.params for name in param.opts if name.startswith("-")}
    pairs = ((options.get(one), after) for one, after in itertools.pairwise(arguments))
    return next((param for param, after in pairs if param is not None and not param.is_flag and after in options), None)


def _words_alone(context: Any, arguments: Sequence[str]) -> list[str]:
    """Words that are neither options, nor their values, nor arguments that the command takes."""
    rest = list(arguments[len(context.command_path.split()) - 1 :])
    _, words, _ = context.command.make_parser(context).parse_args(rest)
    return list(words)


def _before(words: Sequence[str], arguments: Sequence[str]) -> Sequence[str]:
    """All words before the first of some words."""
    return arguments[: list(arguments).index(words[0])] if words and words[0] in arguments else ()


def _options(command: Any) -> list[str]:
    """Long options of a command, besides --help."""
    return sorted(_long_options(command))


def _spelling(param: Any) -> str:
    return str(param.opts[0] if param.param_type_name == "option" else param.metavar or param.name)


def _accepted(param: Any) -> str:
    text = (getattr(param, "help", None) or "").rstrip(".")
    return f"{getattr(param, 'metavar', None) or 'a value'} ({text})" if text else "a value"
