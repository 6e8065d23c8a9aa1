"""Claim: a statement of kvrsim, and what an independent computation finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrsim.arguments import PlanArgs, ScenarioArgs, options_of

Options = Mapping[str, str]  # values of options by the name of the Python argument, as text


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement, and whether it is true."""

    kind: str  # key of KINDS
    said: str  # the statement in words
    found: str  # what the independent computation gives
    holds: bool


def command_of(name: str, options: Options) -> str:
    """The command that asks the question: "kvrsim plan --model llama-7b --ctx 16k"."""
    words = [f"--{key.replace('_', '-')} {value}".removesuffix(" True") for key, value in options.items()]
    return " ".join(("kvrsim", name, *words))


def with_change(options: Options, change: Sequence[str]) -> dict[str, str]:
    """The options of a question after the words of a change, such as ("--dtype", "fp8"), are added to its command."""
    changed = dict(options)
    flags = {
        name for group in (ScenarioArgs, PlanArgs) for name, option in options_of(group).items() if not option.metavar
    }
    words = list(change)
    while words:
        name = words.pop(0).removeprefix("--").replace("-", "_")
        changed[name] = "True" if name in flags else words.pop(0)
    return changed


def arguments_of(options: Options) -> dict[str, Any]:
    """The arguments of the Python function for these options."""
    arguments: dict[str, Any] = dict(options)
    for name, value in options.items():
        if value == "True":
            arguments[name] = True
    return arguments
