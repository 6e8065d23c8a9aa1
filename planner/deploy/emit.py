"""The launch of a plan's best strategy on a serving engine: arguments, files, and what has to be said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrsim.errors import InputError
from kvrsim.io.schema import fields_to_json
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy, get_strategy
from planner.deploy.engines import Degrees, DeployEngine, degrees_of, deploy_engine, deployable, deployed_by
from planner.deploy.server import Server
from planner.strategies_for import all_for


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How an engine is started for a strategy, or for the groups of a fleet."""

    engine: str
    version: str  # that was looked at
    strategy: str  # of a fleet: its first groups'
    command: str  # for a shell: the launcher and the arguments
    args: tuple[str, ...]  # after the launcher
    files: Mapping[str, str] = field(default_factory=dict)  # contents by name
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return fields_to_json(self)


def names_for(scenario: Scenario, engine_name: str, parameter: str) -> tuple[str, ...]:
    """Names of all strategies that an engine can run here; raises InputError for an unknown engine."""
    engine = deploy_engine(engine_name, parameter)
    return tuple(one.name for one in deployable(scenario, engine, all_for(scenario)[0]))


def only_deployable(
    scenario: Scenario, engine_name: str, asked: Sequence[str] | None, parameter: str
) -> tuple[str, ...]:
    """Of the strategies asked for (None or "all": of all), those that an engine can run here.

    Raises InputError where there are none.
    """
    names = names_for(scenario, engine_name, parameter)
    if asked is None or "all" in asked:
        return names
    engine = deploy_engine(engine_name, parameter)
    kept = tuple(name for name in asked if engine.has(get_strategy(name, "strategies"), scenario))
    if not kept:
        raise InputError("strategies", ",".join(asked), f"what {engine.title} has here: {', '.join(names)}")
    return kept


def degrees_on(engine: DeployEngine, scenario: Scenario, strategy: Strategy) -> Degrees:
    """How an engine splits a strategy's GPUs; InputError names what it has, where it has not got the strategy."""
    degrees = degrees_of(strategy.name, scenario.num_gpus)
    if degrees is not None and engine.has(strategy, scenario):
        return degrees
    names = ", ".join(names_for(scenario, engine.name, "emit"))
    others = " and ".join(deployed_by(strategy, scenario)) or "no engine that was looked at"
    accepted = f"a best strategy that {engine.title} has, not {strategy.name}, which {others} has; here it has {names}"
    raise InputError("emit", engine.name, accepted)


def launch_of(
    scenario: Scenario,
    engine_name: str,
    strategy: str | Strategy,
    partition: Sequence[int],
    *,
    model: str,
    layers: Sequence[int] | None = None,
) -> Launch:
    """The launch of a strategy with its partition (pieces, for a pipeline) on the scenario's GPUs.

    layers: of each stage of a pipeline; None: even. model: what the engine loads.
    Raises InputError naming what the engine can run, where it has not got the strategy.
    """
    engine, chosen = deploy_engine(engine_name), strategy if isinstance(strategy, Strategy) else get_strategy(strategy)
    degrees = degrees_on(engine, scenario, chosen)
    pieces = tuple(partition) if degrees.pipeline > 1 else (scenario.request.new_tokens,)
    server = Server(
        engine=engine,
        scenario=scenario,
        degrees=degrees,
        model=model,
        max_len=scenario.request.context_len + 1,
        step_tokens=max(pieces) * scenario.request.batch,
        in_pieces=len(pieces) > 1,
    )
    return Launch(
        engine=engine.name,
        version=engine.version,
        strategy=chosen.name,
        command=server.command,
        args=server.args,
        files=server.files,
        notes=(
            *server.notes(),
            *about_pieces(degrees, pieces, layers or ()),
            "the longest sequence is the prompt and one token: add your output tokens",
            *_about_prefix(scenario),
        ),
    )


def _about_prefix(scenario: Scenario) -> Iterator[str]:
    placement = scenario.prefix_placement
    if scenario.request.cached_prefix and placement.place != "all":
        yield f"no flag here places the cached prefix ({placement.describe()}): set it up in the engine"


def about_pieces(degrees: Degrees, pieces: Sequence[int], layers: Sequence[int]) -> Iterator[str]:
    """What the flags cannot say of pieces and of layers; layers: of each stage of a pipeline, () where even."""
    if degrees.uneven_pieces:
        yield f"kvrsim's pieces: {', '.join(map(str, pieces))} tokens"
        if len(set(layers)) > 1:
            shown = ",".join(map(str, layers))
            yield f"stages were planned with uneven layers: set SGLANG_PP_LAYER_PARTITION={shown}"
    if len(pieces) == 1:
        yield "the prompt is one step, as it was simulated; smaller steps need less memory and take longer"
