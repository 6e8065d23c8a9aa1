"""Colours as CSS variables: the same for a strategy and a kind of operation as in every other picture."""

from __future__ import annotations

import re

from kvrsim.plots.lanes import _LINKS, _WORK

WAIT = "--wait"


def variable(group: str, name: str) -> str:
    """The CSS variable of a strategy or operation: `variable("op", "output+mlp")` is "--op-output-mlp"."""
    return f"--{group}-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def variables() -> str:
    """A rule with the variables of all strategies and kinds of operations."""
    ops = {**_WORK, **_LINKS}
    return ":root{" + "".join(f"{variable('op', op)}:{colour};" for op, (_, colour) in ops.items()) + "}"


def variable_of(kind: str, op: str) -> str | None:
    """The variable of a span's colour; None: the rank waits."""
    if kind == "wait" and op != "collective":
        return None
    return variable("op", op)


def label_of(kind: str, op: str) -> str:
    """What the colour of a span means."""
    if kind == "wait" and op != "collective":
        return "waiting"
    return {**_WORK, **_LINKS}[op][0]
