"""Deployments of a plan's strategies on serving engines: commands with their flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvrsim.errors import InputError
from kvrsim.execution import Execution
from kvrsim.executors.access import execution_of
from kvrsim.io.schema import fields_to_json
from kvrsim.layout import Layout
from kvrsim.model.spec import ModelSpec
from kvrsim.results.results import StrategyResult
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from kvrsim.units import format_bytes
from planner.candidates import Candidate, all_for
from planner.deploy_engines import DeployEngine, deploy_engine, engines_with

Role = Literal["prefill", "decode"]
_VALUE = re.compile(r"{(\w+)}")  # placeholder in the template of a flag
_PAGE = 128  # step sizes are multiples of this number of tokens, so that they fit all page sizes of engines (1 to 128)
_CONNECTOR = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'  # for vLLM, both for prefill and decode


def _several(number: int) -> int | None:
    """The number as the value of a flag; None, which omits the flag, for 1."""
    if number == 1:
        return None
    return number


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A server of an engine on one group of GPUs."""

    engine: DeployEngine
    scenario: Scenario  # GPUs, model and data types; its request's lengths are not used
    layout: Layout
    model: str  # the model's name for the engine
    max_len: int  # tokens of the longest sequence, its output included
    pieces: tuple[int, ...] = ()  # tokens of each step of a prompt; empty: the engine chooses them
    layers: tuple[int, ...] | None = None  # number of layers per stage of a pipeline; None: equal numbers
    role: Role | None = None  # role of the server if separate fleets prefill and decode
    max_sequences: int | None = None  # largest number of simultaneous sequences; None: the engine's default
    config: str = "trtllm.yaml"  # file name of the settings for which trtllm-serve has no options

    @property
    def args(self) -> tuple[str, ...]:
        """Arguments of the launcher."""
        values = self.values
        without_value = {f"{{{key}}}" for key, value in values.items() if value is True}
        args = []
        for template in self.engine.flags:
            if not all(values[key] for key in _VALUE.findall(template)):
                continue
            words = [word for word in template.split() if word not in without_value]
            args += [word.format(**values) for word in words]
        return tuple(args)

    @property
    def values(self) -> dict[str, Any]:
        """Values of the flags. Flags with None, 0 or False are omitted; flags with True have no value."""
        return {
            "model": self.model,
            "max_sequences": self.max_sequences,
            "max_len": self.max_len,
            "memory_fraction": f"{self.scenario.memory_fraction:g}",
            "nodes": _several(self.nodes),
            "config": self.config,
            "role": self.role,
            "connector": self.role and _CONNECTOR,
            **self._dtype_values(),
            **self._size_values(),
            **self._expert_values(),
            **self._piece_values(),
        }

    def _dtype_values(self) -> dict[str, str | bool]:
        """Values of the flags for number formats of computations and of the cache."""
        dtype = self.scenario.request.dtype
        values: dict[str, str | bool] = {"dtype": "auto", "fp8": dtype == "fp8"}
        if dtype == "fp32":  # else the checkpoint's dtype: some models do not run in fp16
            values["dtype"] = "float32"
        values["kv_dtype"] = "auto"
        values["kv_dtype_e4m3"] = "auto"
        if self.fp8_kv:
            values["kv_dtype"] = "fp8"
            values["kv_dtype_e4m3"] = "fp8_e4m3"
        return values

    def _size_values(self) -> dict[str, Any]:
        """Values of the flags for the sizes of the layout."""
        layout = self.layout
        values = {
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "context": _several(layout.context),
            "scheme": layout.scheme,
            "data": _several(layout.data),
            "stage_gpus": layout.stage_gpus,
            "attention_data": _several(layout.data),
            "replicas": None,
            "deepep": False,
            "dispatch": False,
        }
        if not layout.is_mixture:  # data groups of a dense model are copies of the server
            values["stage_gpus"] = layout.stage_gpus // layout.data
            values["attention_data"] = None
            values["replicas"] = _several(layout.data)
        if layout.context > 1 and layout.scheme == "zigzag":
            way = self.engine.context_models[layout.scheme][self.scenario.model.model_type]
            values["deepep"] = way != "gathered"
        per_node = self.scenario.cluster.gpus_per_node
        if layout.dispatches_tokens and per_node is not None and layout.stage_gpus > per_node:
            values["dispatch"] = True
            values["deepep"] = True
        return values

    def _expert_values(self) -> dict[str, Any]:
        """Values of the flags for the placement of the experts."""
        layout = self.layout
        if not layout.is_mixture:
            return {"expert_parallel": False, "expert_ranks": None, "expert_copies": None}
        return {
            "expert_parallel": layout.expert_parallel > 1,
            "expert_ranks": _several(layout.expert_parallel),
            "expert_copies": _several(layout.expert_data),
        }

    def _piece_values(self) -> dict[str, Any]:
        """Values of the flags for the steps in which a prompt is computed."""
        step_tokens = None
        steps_of_groups = None
        if self.pieces:
            step_tokens = -(-max(self.pieces) * self.scenario.request.batch // _PAGE) * _PAGE
            steps_of_groups = step_tokens
            if self.layout.is_mixture:
                steps_of_groups = step_tokens * self.layout.data
        return {
            "in_pieces": len(self.pieces) > 1,
            "searched": self.layout.pieces == "searched",
            "step_tokens": step_tokens,
            "steps_of_groups": steps_of_groups,
        }

    @property
    def command(self) -> str:
        """The command, quoted for a shell."""
        return shlex.join([*self.engine.launcher, *self.args])

    @property
    def files(self) -> Mapping[str, str]:
        """Contents of the files that the deployment needs, by name."""
        if self.engine.name != "trtllm":
            return {}
        lines = [
            f"dtype: {self.values['dtype']}",
            "kv_cache_config:",
            f"  dtype: {self.values['kv_dtype']}",
            f"  free_gpu_memory_fraction: {self.values['memory_fraction']}",
        ]
        if self.layout.data > 1:
            lines.append("enable_attention_dp: true")
        if self.role == "prefill":
            lines.append("disable_overlap_scheduler: true")
        if self.role is not None:
            lines += ["cache_transceiver_config:", "  backend: DEFAULT"]
        return {self.config: "\n".join([*lines, ""])}

    @property
    def nodes(self) -> int:
        """Number of nodes that the group spans."""
        per_node = self.scenario.cluster.gpus_per_node
        if per_node is None:
            return 1
        return -(-self.scenario.num_gpus // per_node)

    @property
    def fp8_kv(self) -> bool:
        """Whether the KV cache has 8 bits."""
        quantization = self.scenario.model.quantization
        return quantization is not None and quantization.kv_cache_bits == 8

    def notes(self) -> Iterator[str]:
        """Notes that the user must know in addition to the flags."""
        engine = self.engine
        scenario = self.scenario
        yield f"flags as documented for {engine.name} {engine.version}, read on {engine.looked_at}"
        if "/" not in self.model:
            yield f"{self.model} is kvrsim's name of the model: replace it by the name or path of your checkpoint"
        layout = self.layout
        features = {
            "context": layout.context > 1,
            "searched": layout.pieces == "searched",
            "data": layout.data > 1,
            "nodes": self.nodes > 1,
            "deepep": bool(self.values["deepep"]),
            "dispatch": bool(self.values["dispatch"]),
        }
        for feature, is_present in features.items():
            if is_present and feature in engine.notes:
                yield engine.notes[feature]
        if engine.name != "vllm":
            yield f"{engine.name}'s memory fraction does not include activations: reduce it if memory runs out"
        quantization = scenario.model.quantization
        if scenario.request.dtype == "fp8" and engine.name == "trtllm":
            yield "trtllm-serve takes FP8 from the checkpoint: quantise it first"
        elif quantization is not None and scenario.request.dtype != "fp8":
            yield f"the checkpoint is quantised ({quantization.describe()}): no flag is needed"
        if self.nodes > 1:
            yield f"{self.nodes} nodes: start one process on each, with its rank and the first node's address"
        if layout.pieces == "searched" and self.pieces:
            yield f"kvrsim's pieces: {', '.join(map(str, self.pieces))} tokens"
            if len(set(self.layers or ())) > 1:
                layers = ",".join(map(str, self.layers or ()))
                yield f"stages were planned with uneven layers: set SGLANG_PP_LAYER_PARTITION={layers}"
        if len(self.pieces) == 1:
            yield "the plan computes the prompt in one step; smaller steps need less memory and take longer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """Command and files that start an engine for a strategy, or for the groups of a fleet."""

    engine: str
    version: str  # engine version for which the flags were checked
    strategy: str  # strategy; for a fleet, that of its first groups
    command: str  # launcher and arguments, quoted for a shell
    args: tuple[str, ...]  # arguments of the launcher
    files: Mapping[str, str] = field(default_factory=dict)  # contents of files, by name
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, server: Server, strategy: str, notes: Iterable[str], files: Mapping[str, str]) -> Deployment:
        """The deployment of a server."""
        engine = {"engine": server.engine.name, "version": server.engine.version, "strategy": strategy}
        return cls(**engine, command=server.command, args=server.args, files=files, notes=tuple(notes))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return fields_to_json(self)


def names_for(scenario: Scenario, engine_name: str, parameter: str) -> tuple[str, ...]:
    """Names of all strategies that an engine can run here; raises InputError for an unknown engine."""
    engine = deploy_engine(engine_name, parameter)
    executions, _ = all_for(scenario)
    return tuple(execution.strategy.name for execution in executions if engine.has(execution))


def layout_for(engine: DeployEngine, execution: Execution) -> Layout:
    """The layout in which an engine runs a strategy. If it lacks the strategy, InputError names those it has."""
    lacks = engine.lacks(execution)
    if lacks is None:
        return execution.layout
    names = ", ".join(names_for(execution.scenario, engine.name, "emit"))
    others = " and ".join(map(" ".join, engines_with(execution).items())) or "no engine that was looked at"
    accepted = f"a best strategy that {engine.title} has, not {execution.strategy.name} ({lacks}), which {others} has"
    raise InputError("emit", engine.name, f"{accepted}; here it has {names}")


def longest_sequence(model: ModelSpec, tokens: int) -> int:
    """The --max-model-len for the prompt and one new token; raises InputError if the model has fewer positions."""
    most = model.max_position_embeddings
    if most is None or tokens < most:
        return tokens + 1
    if tokens == most:
        return most
    accepted = f"at most {most} tokens, which {model.name} has positions for; set rope scaling in its config.json first"
    raise InputError("ctx", tokens, accepted)


def planned(scenario: Scenario, result: StrategyResult) -> Candidate:
    """The candidate of a plan's result: its strategy, with the layers of its stages, and its partition."""
    strategy = replace(get_strategy(result.strategy), stage_layers=result.layers)
    return Candidate.of(execution_of(scenario, strategy), result.partition)


def deployment_of(candidate: Candidate, engine_name: str, *, model: str) -> Deployment:
    """The deployment of a strategy with its partition (pieces, for a pipeline) on the scenario's GPUs.

    model: the model's name for the engine.
    Raises InputError if the engine lacks the strategy, naming the strategies that it has, or if the memory is short.
    """
    engine = deploy_engine(engine_name)
    scenario = candidate.scenario
    strategy = candidate.strategy
    layout = layout_for(engine, candidate.execution)
    _check_fits(candidate, engine)
    pieces = candidate.partition.chunk_lens
    if layout.pieces == "none":
        pieces = (scenario.request.new_tokens,)
    max_len = longest_sequence(scenario.model, scenario.request.context_len)
    server = Server(
        engine=engine,
        scenario=scenario,
        layout=layout,
        model=model,
        max_len=max_len,
        pieces=pieces,
        layers=strategy.stage_layers,
    )
    length = "the longest sequence is the prompt and one output token: add the output tokens that you need"
    if max_len == scenario.request.context_len:
        length = f"{scenario.model.name} has {max_len} positions: the prompt must leave room for the output"
    notes = [*server.notes(), length]
    placement = scenario.prefix_placement
    if scenario.request.cached_prefix and placement.place != "all":
        notes.append(f"no flag here places the cached prefix ({placement.describe()}): set it up in the engine")
    return Deployment.of(server, strategy.name, notes, server.files)


def _check_fits(candidate: Candidate, engine: DeployEngine) -> None:
    """Raise InputError if the partition needs more memory than the GPUs have."""
    if candidate.fits:
        return
    most = format_bytes(max(memory.total for memory in candidate.memory))
    limit = candidate.scenario.memory_limit.describe()
    accepted = f"a plan that fits: {candidate.strategy.name} needs {most} on a GPU ({limit})"
    raise InputError("emit", engine.name, accepted)
