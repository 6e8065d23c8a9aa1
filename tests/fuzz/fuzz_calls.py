"""Random calls of the Python API; some arguments have a wrong type."""

from __future__ import annotations

import inspect
import random
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_commands import COMMANDS
from fuzz_law import check_call

import kvrsim

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**70, -(10**400), float("nan"), float("inf"), 1j, 2 + 0j),
    *("", " ", "x", "all", "-1", "8", "1e9", "\0", "\x1b[2J", "a,b", "1,2", b"tsp", Path("nowhere"), object(), len),
    *([], [1], [[1, 2], [3]], (), {}, {"a": 1}, {1, 2}, [None], [1.5, 2.5], ["tsp", 3], [float("nan")]),
    *(np.int64(2), np.float32(1.5), np.bool_(True), np.array(4), np.array([1, 2]), np.array([1.5]), np.array([])),
    *(np.array([[1, 2]]), np.array(["tsp"]), np.datetime64("2020-01-01"), Decimal(2), Fraction(1, 2), range(3)),
)

_FUNCTIONS = {  # function of each command
    **{("plan",): "plan", ("simulate",): "simulate", ("map",): "map_strategies", ("capacity",): "capacity"},
    ("table", "build"): "build_table",
}
_SWITCHES = dict.fromkeys(("timeline", "breakdown", "sure", "uniform_only"), (False, True))


def random_call(rng: random.Random) -> bool:
    """Make one random call with values of the fuzzer of commands; return whether it succeeded."""
    words, always, sometimes, _ = rng.choice([command for command in COMMANDS if command[0] in _FUNCTIONS])
    function = getattr(kvrsim, _FUNCTIONS[words])
    options = {key.removeprefix("--").replace("-", "_"): pool for key, pool in (always | sometimes).items()}
    known = inspect.signature(function).parameters
    values = {key: pool for key, pool in (options | _SWITCHES).items() if key in known}
    chosen = {*list(values)[: len(always)], *rng.sample(list(values), rng.randint(0, 4))}
    arguments = {key: _typed(rng, rng.choice(values[key])) for key in sorted(chosen)}
    if arguments.get("ctx") == "1m":  # a search would take too long
        arguments["gpus"] = 1
    for key in rng.sample(sorted(arguments), rng.choice((0, 1, 1, 1, 2))):
        arguments[key] = rng.choice(ODD)
    return check_call(function, arguments, f"kvrsim.{function.__name__}(**{arguments!r})")


def _typed(rng: random.Random, value: Any) -> Any:
    """Return a value of an option as text, as a number or as a list."""
    if isinstance(value, str) and value.isdecimal():
        return rng.choice((value, int(value), np.int64(value)))
    return rng.choice((value, value.split(","))) if isinstance(value, str) and "," in value else value
