"""Launches of a plan's strategies on serving engines: which strategies an engine has, and the flags that start one.

kvrsim/data/deploy.json has the engines: their versions, strategies, flags and documented options.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from kvrsim.choices import DEPLOY_ENGINES
from kvrsim.errors import InputError
from kvrsim.io.schema import fields_to_json
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy, get_strategy
from planner.candidates import all_for

_DATA = Path(__file__).parents[1] / "kvrsim" / "data" / "deploy.json"  # both packages are installed in one folder
OptionKind = str | Sequence[str]  # "int", "float", "str", "flag", or the choices
Role = Literal["prefill", "decode"]
_VALUE = re.compile(r"{(\w+)}")  # in a template of flags
_PART = re.compile(r"(tp|pp|cp)(\d*)(-s)?")
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp8": "auto"}
_CONNECTOR = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'  # vLLM's, for prefill and decode alike


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """How many GPUs split what; the product is the number of GPUs."""

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
    flags: tuple[str, ...]  # templates with names of Server.values
    strategies: Mapping[str, bool]  # "tensor", "pipeline", "context", "uneven_pieces"
    context_models: tuple[str, ...]  # model_type of those whose context it splits
    notes: Mapping[str, str]  # by the same
    options: Mapping[str, OptionKind]

    @property
    def title(self) -> str:
        """With its version: "sglang (0.5.23)"."""
        return f"{self.name} ({self.version})"

    def has(self, strategy: Strategy, scenario: Scenario) -> bool:
        """Whether it runs a strategy on the scenario's GPUs, with its model."""
        degrees = degrees_of(strategy.name, scenario.num_gpus)
        if degrees is None or (degrees.context > 1 and scenario.model.model_type not in self.context_models):
            return False
        return all(self.strategies[need] for need in needs_of(degrees))


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
    sizes = {"tp": 1, "pp": 1, "cp": 1}
    uneven, rest = False, None
    for part in name.split("+"):
        matched = _PART.fullmatch("cp" if part == "zigzag" else part)
        if matched is None:
            return None
        if matched[2]:
            sizes[matched[1]] = int(matched[2])
        else:
            rest = matched[1]
        uneven = uneven or matched[3] is not None
    if rest is not None:
        sizes[rest] = num_gpus // math.prod(sizes.values())
    if math.prod(sizes.values()) != num_gpus:
        return None
    return Degrees(tensor=sizes["tp"], pipeline=sizes["pp"], context=sizes["cp"], uneven_pieces=uneven)


@cache
def deploy_engine(name: str, parameter: str = "emit") -> DeployEngine:
    """An engine by its name; raises InputError where there is none."""
    if name not in DEPLOY_ENGINES:
        raise InputError(parameter, name, f"one of {', '.join(DEPLOY_ENGINES)}")
    content: dict[str, Any] = json.loads(_DATA.read_text("utf-8"))[name]
    content |= {key: tuple(content[key]) for key in ("sources", "launcher", "flags", "context_models")}
    return DeployEngine(name=name, **content)


def engines_with(strategy: Strategy, scenario: Scenario) -> dict[str, str]:
    """Which engines have a strategy on the scenario's GPUs, each with its version that was looked at."""
    engines = (deploy_engine(name) for name in DEPLOY_ENGINES)
    return {engine.name: engine.version for engine in engines if engine.has(strategy, scenario)}


def engines_for(strategy: Strategy) -> tuple[str, ...]:
    """Names of the engines that have a strategy on some number of GPUs, with some model."""
    degrees = degrees_of(strategy.name, math.prod(strategy.sizes(2**12)))
    if degrees is None or strategy.approximate is not None:
        return ()
    engines = (deploy_engine(name) for name in DEPLOY_ENGINES)
    return tuple(engine.name for engine in engines if all(engine.strategies[need] for need in needs_of(degrees)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """One group of GPUs that an engine serves with."""

    engine: DeployEngine
    scenario: Scenario  # its GPUs; of the request, the types count
    degrees: Degrees
    model: str  # what the engine loads
    max_len: int  # tokens of the longest sequence, its output included
    step_tokens: int | None = None  # of all sequences of the longest step; None: the engine's own
    in_pieces: bool = False
    role: Role | None = None  # where one fleet prefills and another one decodes
    max_sequences: int | None = None  # at once; None: the engine's own
    config: str = "trtllm.yaml"  # name of the file with what trtllm-serve has no options for

    @property
    def args(self) -> tuple[str, ...]:
        """After the launcher."""
        values = self.values
        templates = [one for one in self.engine.flags if all(values[key] for key in _VALUE.findall(one))]
        without_value = {f"{{{key}}}" for key, value in values.items() if value is True}
        words = [word for one in templates for word in one.split() if word not in without_value]
        return tuple(word.format(**values) for word in words)

    @property
    def values(self) -> dict[str, Any]:
        """Values of the flags. Flags of None, 0 or False are left out; those of True have no value."""
        degrees, scenario = self.degrees, self.scenario
        return {
            "model": self.model,
            "dtype": _DTYPES[scenario.request.dtype],
            "fp8": scenario.request.dtype == "fp8",
            "kv_dtype": "fp8" if self.fp8_kv else "auto",
            "kv_dtype_e4m3": "fp8_e4m3" if self.fp8_kv else "auto",
            "tensor": degrees.tensor,
            "tensor_and_context": degrees.tensor * degrees.context,
            "pipeline": degrees.pipeline,
            "context": degrees.context if degrees.context > 1 else None,
            "expert_parallel": scenario.expert_parallel,
            "expert_ranks": degrees.tensor * degrees.context * scenario.expert_parallel,
            "in_pieces": self.in_pieces,
            "uneven_pieces": degrees.uneven_pieces,
            "step_tokens": self.step_tokens,
            "max_sequences": self.max_sequences,
            "max_len": self.max_len,
            "role": self.role,
            "connector": _CONNECTOR if self.role else None,
            "memory_fraction": f"{scenario.memory_fraction:g}",
            "nodes": self.nodes if self.nodes > 1 else None,
            "config": self.config,
        }

    @property
    def command(self) -> str:
        """For a shell."""
        return shlex.join([*self.engine.launcher, *self.args])

    @property
    def files(self) -> Mapping[str, str]:
        """Contents by name."""
        if self.engine.name != "trtllm":
            return {}
        lines = [
            f"dtype: {self.values['dtype']}",
            "kv_cache_config:",
            f"  dtype: {self.values['kv_dtype']}",
            f"  free_gpu_memory_fraction: {self.values['memory_fraction']}",
        ]
        if self.role == "prefill":
            lines.append("disable_overlap_scheduler: true")
        if self.role is not None:
            lines += ["cache_transceiver_config:", "  backend: DEFAULT"]
        return {self.config: "\n".join([*lines, ""])}

    @property
    def nodes(self) -> int:
        """That the group spans."""
        per_node = self.scenario.cluster.gpus_per_node
        return 1 if per_node is None else -(-self.scenario.num_gpus // per_node)

    @property
    def fp8_kv(self) -> bool:
        """Whether the KV cache has 8 bits."""
        quantization = self.scenario.model.quantization
        return quantization is not None and quantization.kv_cache_bits == 8

    def notes(self) -> Iterator[str]:
        """What the user must know next to the flags."""
        engine, scenario = self.engine, self.scenario
        yield f"flags as documented at {engine.name} {engine.version}, looked at on {engine.looked_at}"
        if "/" not in self.model:
            yield f"{self.model} is kvrsim's name of the model: put your checkpoint's name or path in its place"
        for need in needs_of(self.degrees):
            if need in engine.notes:
                yield engine.notes[need]
        if engine.name != "vllm":
            yield f"{engine.name}'s memory fraction leaves out activations: make it smaller where memory runs out"
        quantization = scenario.model.quantization
        if scenario.request.dtype == "fp8" and engine.name == "trtllm":
            yield "trtllm-serve takes FP8 from the checkpoint: quantise it first"
        elif quantization is not None and scenario.request.dtype != "fp8":
            yield f"the checkpoint says how it is quantised ({quantization.describe()})"
        if self.nodes > 1:
            yield f"{self.nodes} nodes: start one process on each, with its rank and the first node's address"


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

    @classmethod
    def of(cls, server: Server, strategy: str, notes: Iterable[str], files: Mapping[str, str]) -> Launch:
        """The launch of a server."""
        return cls(
            engine=server.engine.name,
            version=server.engine.version,
            strategy=strategy,
            command=server.command,
            args=server.args,
            files=files,
            notes=tuple(notes),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return fields_to_json(self)


def names_for(scenario: Scenario, engine_name: str, parameter: str) -> tuple[str, ...]:
    """Names of all strategies that an engine can run here; raises InputError for an unknown engine."""
    engine = deploy_engine(engine_name, parameter)
    exact = (one for one in all_for(scenario)[0] if one.approximate is None)
    return tuple(one.name for one in exact if engine.has(one, scenario))


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
    names_here = tuple(name for name in asked if engine.has(get_strategy(name, "strategies"), scenario))
    if not names_here:
        raise InputError("strategies", ",".join(asked), f"what {engine.title} has here: {', '.join(names)}")
    return names_here


def degrees_on(engine: DeployEngine, scenario: Scenario, strategy: Strategy) -> Degrees:
    """How an engine splits a strategy's GPUs; InputError names what it has, where it has not got the strategy."""
    degrees = degrees_of(strategy.name, scenario.num_gpus)
    if degrees is not None and engine.has(strategy, scenario):
        return degrees
    names = ", ".join(names_for(scenario, engine.name, "emit"))
    others = " and ".join(map(" ".join, engines_with(strategy, scenario).items())) or "no engine that was looked at"
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
    notes = [
        *server.notes(),
        *about_pieces(degrees, pieces, layers or ()),
        "the longest sequence is the prompt and one token: add your output tokens",
    ]
    placement = scenario.prefix_placement
    if scenario.request.cached_prefix and placement.place != "all":
        notes.append(f"no flag here places the cached prefix ({placement.describe()}): set it up in the engine")
    return Launch.of(server, chosen.name, notes, server.files)


def about_pieces(degrees: Degrees, pieces: Sequence[int], layers: Sequence[int]) -> Iterator[str]:
    """Notes on pieces and layers, which no flag sets; layers: of each stage of a pipeline, () where even."""
    if degrees.uneven_pieces:
        yield f"kvrsim's pieces: {', '.join(map(str, pieces))} tokens"
        if len(set(layers)) > 1:
            shown = ",".join(map(str, layers))
            yield f"stages were planned with uneven layers: set SGLANG_PP_LAYER_PARTITION={shown}"
    if len(pieces) == 1:
        yield "the prompt is one step, as it was simulated; smaller steps need less memory and take longer"
