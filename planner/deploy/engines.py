"""Engines that plans are launched on, and which strategies each has: kvrsim/data/deploy.json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvrsim.choices import DEPLOY_ENGINES
from kvrsim.errors import InputError
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy

_DATA = Path(__file__).parents[2] / "kvrsim" / "data" / "deploy.json"  # installed side by side
Kind = str | Sequence[str]  # "int", "float", "str", "flag", or the choices
_PART = re.compile(r"(tp|pp|cp)(\d*)(-s)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """GPUs that share what; their product is the number of GPUs."""

    tensor: int = 1
    pipeline: int = 1  # stages
    context: int = 1  # ranks of balanced context parallelism
    uneven_pieces: bool = False  # of a pipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class DeployEngine:
    """An engine at the version that was looked at."""

    name: str
    version: str
    looked_at: str  # date
    sources: tuple[str, ...]
    launcher: tuple[str, ...]
    strategies: Mapping[str, bool]  # "tensor", "pipeline", "context", "uneven_pieces"
    context_models: tuple[str, ...]  # model_type of those whose context it splits
    notes: Mapping[str, str]  # by the same
    options: Mapping[str, Kind]

    @property
    def title(self) -> str:
        """With its version: "sglang (0.5.23)"."""
        return f"{self.name} ({self.version})"

    def has(self, strategy: Strategy, scenario: Scenario) -> bool:
        """Whether it runs a strategy on the scenario's GPUs, with its model."""
        found = degrees_of(strategy.name, scenario.num_gpus)
        if found is None or (found.context > 1 and scenario.model.model_type not in self.context_models):
            return False
        return all(self.strategies[need] for need in needs_of(found))


def needs_of(degrees: Degrees) -> tuple[str, ...]:
    """What an engine must have."""
    needs = [name for name in ("tensor", "pipeline", "context") if getattr(degrees, name) > 1]
    return (*needs, *(("uneven_pieces",) if degrees.uneven_pieces else ()))


def degrees_of(name: str, num_gpus: int) -> Degrees | None:
    """What a strategy's name says of its GPUs; None: no engine has it.

    >>> degrees_of("tp2+pp", 8)
    Degrees(tensor=2, pipeline=4, context=1, uneven_pieces=False)
    """
    if name == "single":
        return Degrees()
    found = {"tp": 1, "pp": 1, "cp": 1}
    uneven, rest = False, None
    for part in name.split("+"):
        matched = _PART.fullmatch("cp" if part == "zigzag" else part)
        if matched is None:
            return None
        if matched[2]:
            found[matched[1]] = int(matched[2])
        else:
            rest = matched[1]
        uneven = uneven or matched[3] is not None
    if rest is not None:
        found[rest] = num_gpus // (found["tp"] * found["pp"] * found["cp"])
    if found["tp"] * found["pp"] * found["cp"] != num_gpus:
        return None
    return Degrees(tensor=found["tp"], pipeline=found["pp"], context=found["cp"], uneven_pieces=uneven)


@cache
def deploy_engine(name: str, parameter: str = "emit") -> DeployEngine:
    """An engine by its name; raises InputError where there is none."""
    if name not in DEPLOY_ENGINES:
        raise InputError(parameter, name, f"one of {', '.join(DEPLOY_ENGINES)}")
    content: dict[str, Any] = json.loads(_DATA.read_text("utf-8"))[name]
    content |= {key: tuple(content[key]) for key in ("sources", "launcher", "context_models")}
    return DeployEngine(name=name, **content)


def deployable(scenario: Scenario, engine: DeployEngine, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Those that the engine runs on the scenario's GPUs."""
    return tuple(one for one in strategies if one.approximate is None and engine.has(one, scenario))


def engines_with(strategy: Strategy, scenario: Scenario) -> dict[str, str]:
    """Which engines have a strategy on the scenario's GPUs, each with its version that was looked at."""
    engines = (deploy_engine(name) for name in DEPLOY_ENGINES)
    return {engine.name: engine.version for engine in engines if engine.has(strategy, scenario)}


def engines_for(strategy: Strategy) -> tuple[str, ...]:
    """Names of the engines that have a strategy on some number of GPUs, with some model."""
    found = degrees_of(strategy.name, math.prod(strategy.sizes(2**12)))
    if found is None or strategy.approximate is not None:
        return ()
    engines = (deploy_engine(name) for name in DEPLOY_ENGINES)
    return tuple(engine.name for engine in engines if all(engine.strategies[need] for need in needs_of(found)))


def deployed_by(strategy: Strategy, scenario: Scenario) -> tuple[str, ...]:
    """The same in words: "sglang 0.5.23"."""
    return tuple(f"{name} {version}" for name, version in engines_with(strategy, scenario).items())
