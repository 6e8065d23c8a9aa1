"""Style of all figures and pages: a colour per strategy and per kind of operation, font and text colours.

The colours of two families of strategies, and of two kinds of operations, differ clearly for normal vision and for each
of the three kinds of colour blindness; they have contrast to the background and to labels on them
(tests/kvrsim/views/test_style.py). This module does not need matplotlib.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

from kvrsim.strategies import STRATEGIES

Ground = Literal["light", "dark"]


@dataclass(frozen=True, slots=True)
class Colour:
    """One colour as #rrggbb, for a light and for a dark background."""

    light: str
    dark: str

    def on(self, ground: Ground) -> str:
        """The colour for this background."""
        return self.light if ground == "light" else self.dark

    def mix(self, other: Colour, share: float) -> Colour:
        """This colour mixed with `share` (0 to 1) of another."""
        return Colour(_mix(self.light, other.light, share), _mix(self.dark, other.dark, share))


@dataclass(frozen=True, slots=True)
class Operation:
    """Style of a kind of operation: its label in a legend, and its colour."""

    label: str
    colour: Colour


GROUND = Colour("#ffffff", "#16191d")
TEXT = Colour("#2b2f36", "#e6e8eb")
FAINT_TEXT = Colour("#5b616b", "#a3a9b3")
INK = TEXT.light
DIM = FAINT_TEXT.light

_TABLE = json.loads((Path(__file__).parents[1] / "data" / "colours.json").read_text("utf-8"))
# Colours by family, then by strategy: strategies of a family have similar colours.
FAMILIES: dict[str, dict[str, Colour]] = {}
for _strategy in STRATEGIES.values():
    if _strategy.colour is not None:
        FAMILIES.setdefault(_strategy.family, {})[_strategy.name] = Colour(*_strategy.colour)
STRATEGY_COLOURS = {name: colour for members in FAMILIES.values() for name, colour in members.items()}
# Styles by payload of a transfer or kind of computation, in the order of the legend.
OPERATIONS = {name: Operation(label, Colour(*colours)) for name, (label, *colours) in _TABLE["operations"].items()}
WAITING_LINES = Colour("#c4c4c4", "#565c66")  # colour of the hatching

_TENSOR = re.compile(r"tp(\d+)(?:\+(.+))?")
_STAGES = re.compile(r"pp\d+(-s)?(?:\+cp(\d+))?")
_OF_STAGES = 0.05  # share by which a stage with context ranks differs from a tensor group of the same size

# Names of models, clusters and files are not formulas: a $ in a name is a dollar sign.
_RC: dict[Any, Any] = {"font.family": "DejaVu Sans", "hatch.linewidth": 0.6, "text.parse_math": False}


def strategy_colour(name: str) -> Colour:
    """The colour of a strategy, the same in every figure and page.

    cp4 has the colour of zigzag, tp4 of tp, pp4 of pp. A hybrid has the colour of the strategy between its groups; the
    larger the groups, the nearer it is to the colour of text. A strategy without a `colour`, such as a user's, mixes
    two colours chosen by its name.
    """
    if name in STRATEGY_COLOURS:
        return STRATEGY_COLOURS[name]
    if name.startswith("cp") and name[2:].isdecimal():
        return STRATEGY_COLOURS["zigzag"]
    if tensor := _TENSOR.fullmatch(name):
        if tensor[2] is None:
            return STRATEGY_COLOURS["tp"]
        return strategy_colour(tensor[2]).mix(TEXT, _share(int(tensor[1])))
    if stages := _STAGES.fullmatch(name):
        split = STRATEGY_COLOURS["pp-s" if stages[1] else "pp"]
        return split if stages[2] is None else split.mix(TEXT, _share(int(stages[2])) - _OF_STAGES)
    colours = list(STRATEGY_COLOURS.values())
    number = crc32(name.encode())
    first = number % len(colours)
    further = 1 + number // len(colours) % (len(colours) - 1)
    return colours[first].mix(colours[(first + further) % len(colours)], 0.5)


def operation_of(kind: str, op: str) -> Operation:
    """Style of a span; `kind` and `op` are those of kvrsim.results.timeline.Span."""
    if kind == "wait" and op != "collective":
        return OPERATIONS["waiting"]
    return OPERATIONS["embedding" if op == "head" else op]


def text_on(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour (relative luminance of WCAG 2)."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    luminance = sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000000" if luminance > 0.179 else "#ffffff"


def fade(colour: str, ground: Ground = "light", *, share: float = 0.42) -> str:
    """Fade a colour towards the background, as for odd layers."""
    return _mix(colour, GROUND.on(ground), share)


def _share(size: int) -> float:
    """Share of the colour of text in a hybrid with groups of this size."""
    return min(0.4, 0.1 + 0.08 * log2(max(size, 1)))


def _mix(one: str, other: str, share: float) -> str:
    pairs = ((int(one[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(first + share * (second - first)):02x}" for first, second in pairs)


@contextmanager
def chart_style(more: Mapping[Any, Any] | None = None) -> Iterator[None]:
    """Context in which figures have kvrsim's style, and the further settings `more` of matplotlib."""
    import matplotlib

    with matplotlib.rc_context(_RC | dict(more or {})):
        yield


# Colours as CSS variables

WAITING = "--op-waiting"


def variable(group: str, name: str) -> str:
    """The CSS variable of a strategy or operation: `variable("op", "output+mlp")` is "--op-output-mlp"."""
    return f"--{group}-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def variable_of(kind: str, op: str) -> str:
    """CSS variable of a span's colour; `kind` and `op` are those of Span, WAITING is a rank's wait."""
    operation = operation_of(kind, op)
    return next(variable("op", name) for name, one in OPERATIONS.items() if one is operation)


def rules(strategies: Iterable[str]) -> str:
    """CSS rules with the variables for a light and a dark background.

    strategies: further strategies, such as hybrids.
    """
    return f":root{{{_values('light', strategies)}}}\n:root[data-theme=dark]{{{_values('dark', strategies)}}}\n"


def _values(ground: Ground, strategies: Iterable[str]) -> str:
    values = {"--ink": TEXT, "--dim": FAINT_TEXT, "--card": GROUND, "--hatch": WAITING_LINES}
    for name, operation in OPERATIONS.items():
        values[variable("op", name)] = operation.colour
    for name in (*STRATEGY_COLOURS, *STRATEGIES, *strategies):
        values[variable("strategy", name)] = strategy_colour(name)
    return ";".join(f"{name}:{colour.on(ground)}" for name, colour in values.items())
