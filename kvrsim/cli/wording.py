"""An error's parameter names as the options of the command that was run: `gpus` is --gpus."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvrsim.errors import InputError

_FIRST_NAME = re.compile(r"^[a-z][a-z0-9_]*(?=$|[: ])")
_QUOTED_NAME = re.compile(r"`([a-z][a-z0-9_]*)`")


def as_options(error: InputError, command: Any) -> str:
    """The error's line; a parameter that is an option of `command` (Click's) is spelled as that option."""
    options = _long_options(command)

    def spelled(name: str) -> str | None:
        option = "--" + name.replace("_", "-")
        return option if option in options else None

    parameter = _FIRST_NAME.sub(lambda match: spelled(match[0]) or match[0], error.parameter, count=1)
    accepted = _QUOTED_NAME.sub(lambda match: spelled(match[1]) or match[0], error.accepted)
    return str(InputError(parameter, error.value, accepted))


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
