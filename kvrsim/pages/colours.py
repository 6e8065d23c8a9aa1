"""Colours as CSS variables: the same for a strategy and a kind of operation as in every other picture."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvrsim.plots.style import (
    FAINT_TEXT,
    GROUND,
    OPERATIONS,
    STRATEGY_COLOURS,
    TEXT,
    WAITING_LINES,
    Ground,
    operation_of,
    strategy_colour,
)

WAITING = "--op-waiting"


def variable(group: str, name: str) -> str:
    """The CSS variable of a strategy or operation: `variable("op", "output+mlp")` is "--op-output-mlp"."""
    return f"--{group}-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def variable_of(kind: str, op: str) -> str:
    """Of a span: `kind` and `op` as of kvrsim.results.timeline.Span; WAITING: the rank waits."""
    operation = operation_of(kind, op)
    return next(variable("op", name) for name, one in OPERATIONS.items() if one is operation)


def rules(strategies: Iterable[str]) -> str:
    """The variables on a light and on a dark ground.

    strategies: names beyond those that kvrsim has itself, such as hybrids.
    """
    return f":root{{{_values('light', strategies)}}}\n:root[data-theme=dark]{{{_values('dark', strategies)}}}\n"


def _values(ground: Ground, strategies: Iterable[str]) -> str:
    found = {"--ink": TEXT, "--dim": FAINT_TEXT, "--card": GROUND, "--hatch": WAITING_LINES}
    found |= {variable("op", name): one.colour for name, one in OPERATIONS.items()}
    found |= {variable("strategy", name): strategy_colour(name) for name in (*STRATEGY_COLOURS, *strategies)}
    return ";".join(f"{name}:{colour.on(ground)}" for name, colour in found.items())
