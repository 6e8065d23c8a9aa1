"""Deployments of a plan's strategies on serving engines: commands with their flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvrsim.errors import InputError
from kvrsim.io.schema import fields_to_json
from kvrsim.layout import Layout
from kvrsim.model.spec import ModelSpec
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import Strategy, get_strategy
from kvrsim.units import format_bytes
from planner.candidates import Candidate, all_for, execution_of
from planner.deploy_engines import DeployEngine, deploy_engine, engines_with, layout_on_gpus

Role = Literal["prefill", "decode"]
_VALUE = re.compile(r"{(\w+)}")  # placeholder in the template of a flag
_PAGE = 128  # step sizes are multiples of this number of tokens, so that they fit all page sizes of engines (1 to 128)
_CONNECTOR = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'  # for vLLM, both for prefill and decode


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
        templates = [one for one in self.engine.flags if all(values[key] for key in _VALUE.findall(one))]
        without_value = {f"{{{key}}}" for key, value in values.items() if value is True}
        words = [word for one in templates for word in one.split() if word not in without_value]
        return tuple(word.format(**values) for word in words)

    @property
    def values(self) -> dict[str, Any]:
        """Values of the flags. Flags with None, 0 or False are omitted; flags with True have no value."""
        layout = self.layout
        scenario = self.scenario
        dtype = scenario.request.dtype
        step_tokens = None
        if self.pieces:
            step_tokens = -(-max(self.pieces) * scenario.request.batch // _PAGE) * _PAGE
        spread = layout.is_mixture and layout.expert_parallel > 1
        context = layout.context > 1
        latent = context and self.engine.context_models[layout.scheme or ""][scenario.model.model_type] != "gathered"
        return {
            "model": self.model,
            "dtype": "float32" if dtype == "fp32" else "auto",  # the checkpoint's dtype: some models do not run in fp16
            "fp8": dtype == "fp8",
            "kv_dtype": "fp8" if self.fp8_kv else "auto",
            "kv_dtype_e4m3": "fp8_e4m3" if self.fp8_kv else "auto",
            "tensor": layout.tensor,
            "stage_gpus": layout.stage_gpus if layout.is_mixture else layout.stage_gpus // layout.data,
            "pipeline": layout.pipeline,
            "context": layout.context if context else None,
            "scheme": layout.scheme if context else None,
            "data": layout.data if layout.data > 1 else None,
            "attention_data": layout.data if layout.data > 1 and layout.is_mixture else None,
            "replicas": layout.data if layout.data > 1 and not layout.is_mixture else None,
            "expert_parallel": spread,
            "expert_ranks": layout.expert_parallel if spread else None,
            "expert_copies": layout.expert_data if layout.is_mixture and layout.expert_data > 1 else None,
            "deepep": latent and layout.scheme == "zigzag",
            "in_pieces": len(self.pieces) > 1,
            "searched": layout.pieces == "searched",
            "step_tokens": step_tokens,
            "steps_of_groups": step_tokens and step_tokens * (layout.data if layout.is_mixture else 1),
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
        return 1 if per_node is None else -(-self.scenario.num_gpus // per_node)

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
        about = {"context": layout.context > 1, "searched": layout.pieces == "searched", "data": layout.data > 1}
        about |= {"nodes": self.nodes > 1, "deepep": bool(self.values["deepep"])}
        yield from (engine.notes[what] for what, holds in about.items() if holds and what in engine.notes)
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
    return tuple(one.name for one in all_for(scenario)[0] if engine.has(one, scenario))


def layout_for(engine: DeployEngine, scenario: Scenario, strategy: Strategy) -> Layout:
    """The layout in which an engine runs a strategy. If it lacks the strategy, InputError names those it has."""
    lacks = engine.lacks(strategy, scenario)
    if lacks is None:
        return layout_on_gpus(strategy, scenario)
    names = ", ".join(names_for(scenario, engine.name, "emit"))
    others = " and ".join(map(" ".join, engines_with(strategy, scenario).items())) or "no engine that was looked at"
    accepted = f"a best strategy that {engine.title} has, not {strategy.name} ({lacks}), which {others} has"
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


def deployment_of(
    scenario: Scenario,
    engine_name: str,
    strategy: str | Strategy,
    partition: Sequence[int],
    *,
    model: str,
    layers: Sequence[int] | None = None,
) -> Deployment:
    """The deployment of a strategy with its partition (pieces, for a pipeline) on the scenario's GPUs.

    layers: layers of each stage of a pipeline; None: even. model: the model's name for the engine.
    Raises InputError if the engine lacks the strategy; the error names the strategies that it has.
    """
    engine = deploy_engine(engine_name)
    own = strategy if isinstance(strategy, Strategy) else get_strategy(strategy)
    layout = layout_for(engine, scenario, own)
    _check_fits(scenario, engine, own, partition)
    pieces = tuple(partition) if layout.pieces != "none" else (scenario.request.new_tokens,)
    max_len = longest_sequence(scenario.model, scenario.request.context_len)
    stages = None if layers is None else tuple(layers)
    server = Server(
        engine=engine, scenario=scenario, layout=layout, model=model, max_len=max_len, pieces=pieces, layers=stages
    )
    length = "the longest sequence is the prompt and one output token: add the output tokens that you need"
    if max_len == scenario.request.context_len:
        length = f"{scenario.model.name} has {max_len} positions: the prompt must leave room for the output"
    notes = [*server.notes(), length]
    placement = scenario.prefix_placement
    if scenario.request.cached_prefix and placement.place != "all":
        notes.append(f"no flag here places the cached prefix ({placement.describe()}): set it up in the engine")
    return Deployment.of(server, own.name, notes, server.files)


def _check_fits(scenario: Scenario, engine: DeployEngine, strategy: Strategy, partition: Sequence[int]) -> None:
    """Raise InputError if the partition needs more memory than the GPUs have."""
    execution = execution_of(scenario, strategy)
    planned = Candidate(scenario=scenario, execution=execution, partition=Partition(chunk_lens=tuple(partition)))
    if not planned.fits:
        most = format_bytes(max(memory.total for memory in planned.memory))
        limit = scenario.memory_limit.describe()
        raise InputError("emit", engine.name, f"a plan that fits: {strategy.name} needs {most} on a GPU ({limit})")
