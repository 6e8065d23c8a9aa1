"""The command that makes sense after this one, with the options that were typed; shown on terminals alone."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from kvrsim.cli.lazy import made
from kvrsim.cli.outputs import typed

_OUTPUTS = ("--json", "--format", "--plot", "--trace", "--html", "--output", "--emit", "--breakdown")


def again(command: str, *words: str) -> str:
    """The command with the words, and with what was typed of the question, where it takes that and they do not say it.

    command: of the first level.
    """
    options = {name: param for param in made(command).params for name in param.opts if name.startswith("--")}
    said = set(words)
    kept = [
        word
        for name, value in _options(typed)
        if name in options and name not in said and name not in _OUTPUTS
        for word in ((name,) if options[name].is_flag else (name, value))
    ]
    return shlex.join(("kvrsim", command, *words, *kept))


def was_typed(option: str) -> bool:
    """Whether the command line has the option."""
    return any(name == option for name, _ in _options(typed))


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Long options and the words after them."""
    for number, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name.startswith("--"):
            yield name, value if has_value else next(iter(words[number + 1 : number + 2]), "")
