"""The launch of a plan's best strategy on a serving engine: arguments, files, and what has to be said."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrsim.errors import InputError
from kvrsim.io.schema import fields_to_json
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy, get_strategy
from planner.deploy.engines import Degrees, DeployEngine, degrees_of, deploy_engine, deployable, deployed_by, needs_of
from planner.strategies_for import all_for

_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp8": "auto"}
CONFIG = "trtllm.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How an engine is started for a strategy."""

    engine: str
    version: str  # that was looked at
    strategy: str
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
    engine, num_gpus = deploy_engine(engine_name, parameter), scenario.num_gpus
    kept = tuple(name for name in asked if engine.has(get_strategy(name, "strategies"), num_gpus))
    if not kept:
        raise InputError("strategies", ",".join(asked), f"what {_named(engine)} has here: {', '.join(names)}")
    return kept


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
    degrees = degrees_of(chosen.name, scenario.num_gpus)
    if degrees is None or not engine.has(chosen, scenario.num_gpus):
        names = ", ".join(names_for(scenario, engine_name, "emit"))
        others = " and ".join(deployed_by(chosen, scenario.num_gpus)) or "no engine that was looked at"
        accepted = (
            f"a best strategy that {_named(engine)} has, not {chosen.name}, which {others} has; here it has {names}"
        )
        raise InputError("emit", engine_name, accepted)
    pieces = tuple(partition) if degrees.pipeline > 1 else (scenario.request.new_tokens,)
    about = _About(
        scenario=scenario, engine=engine, degrees=degrees, pieces=pieces, model=model, layers=tuple(layers or ())
    )
    args = tuple({"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}[engine.name](about))
    content = {CONFIG: _yaml(about)} if CONFIG in args else {}
    return Launch(
        engine=engine.name,
        version=engine.version,
        strategy=chosen.name,
        command=shlex.join([*engine.launcher, *args]),
        args=args,
        files=content,
        notes=tuple(_notes(about)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _About:
    scenario: Scenario
    engine: DeployEngine
    degrees: Degrees
    pieces: tuple[int, ...]  # tokens of one sequence
    model: str
    layers: tuple[int, ...]  # of each stage; empty: even

    @property
    def step_tokens(self) -> int:
        """Tokens of all sequences in the first step, which is the longest."""
        return max(self.pieces) * self.scenario.request.batch

    @property
    def in_pieces(self) -> bool:
        return len(self.pieces) > 1

    @property
    def max_len(self) -> int:
        """The prompt and one output token."""
        return self.scenario.request.context_len + 1

    @property
    def fp8_kv(self) -> bool:
        quantization = self.scenario.model.quantization
        return quantization is not None and quantization.kv_cache_bits == 8

    @property
    def nodes(self) -> int:
        per_node = self.scenario.cluster.gpus_per_node
        return 1 if per_node is None else -(-self.scenario.num_gpus // per_node)


def _vllm(about: _About) -> Iterator[str]:
    degrees, scenario = about.degrees, about.scenario
    yield from ("--model", about.model, "--dtype", _DTYPES[scenario.request.dtype])
    if scenario.request.dtype == "fp8":
        yield from ("--quantization", "fp8")
    yield from ("--kv-cache-dtype", "fp8" if about.fp8_kv else "auto")
    yield from ("--tensor-parallel-size", str(degrees.tensor), "--pipeline-parallel-size", str(degrees.pipeline))
    if degrees.context > 1:
        yield from ("--prefill-context-parallel-size", str(degrees.context))
    if scenario.expert_parallel:
        yield "--enable-expert-parallel"
    if about.in_pieces:
        yield "--enable-chunked-prefill"
    yield from ("--max-num-batched-tokens", str(about.step_tokens), "--max-model-len", str(about.max_len))
    yield from ("--gpu-memory-utilization", f"{scenario.memory_fraction:g}")
    if about.nodes > 1:
        yield from ("--nnodes", str(about.nodes))


def _sglang(about: _About) -> Iterator[str]:
    degrees, scenario = about.degrees, about.scenario
    yield from ("--model-path", about.model, "--dtype", _DTYPES[scenario.request.dtype])
    if scenario.request.dtype == "fp8":
        yield from ("--quantization", "fp8")
    yield from ("--kv-cache-dtype", "fp8_e4m3" if about.fp8_kv else "auto")
    yield from ("--tp-size", str(degrees.tensor * degrees.context), "--pp-size", str(degrees.pipeline))
    if degrees.context > 1:
        yield from ("--attn-cp-size", str(degrees.context), "--enable-prefill-cp", "--cp-strategy", "zigzag")
    if scenario.expert_parallel:
        yield from ("--ep-size", str(degrees.tensor * degrees.context))
    yield from ("--chunked-prefill-size", str(about.step_tokens), "--max-prefill-tokens", str(about.step_tokens))
    if degrees.uneven_pieces:
        yield "--enable-dynamic-chunking"
    yield from ("--context-length", str(about.max_len), "--mem-fraction-static", f"{scenario.memory_fraction:g}")
    if about.nodes > 1:
        yield from ("--nnodes", str(about.nodes))


def _trtllm(about: _About) -> Iterator[str]:
    degrees, scenario = about.degrees, about.scenario
    yield from (about.model, "--tp_size", str(degrees.tensor), "--pp_size", str(degrees.pipeline))
    if scenario.expert_parallel:
        yield from ("--ep_size", str(degrees.tensor))
    if about.in_pieces:
        yield "--enable_chunked_prefill"
    yield from ("--max_num_tokens", str(about.step_tokens), "--max_seq_len", str(about.max_len))
    yield from ("--free_gpu_memory_fraction", f"{scenario.memory_fraction:g}", "--config", CONFIG)


def _yaml(about: _About) -> str:
    """What trtllm-serve takes from a file only."""
    dtype = _DTYPES[about.scenario.request.dtype]
    cache = "fp8" if about.fp8_kv else "auto"
    fraction = f"{about.scenario.memory_fraction:g}"
    return f"dtype: {dtype}\nkv_cache_config:\n  dtype: {cache}\n  free_gpu_memory_fraction: {fraction}\n"


def _notes(about: _About) -> Iterator[str]:
    engine, scenario = about.engine, about.scenario
    yield f"flags as documented at {engine.name} {engine.version}, looked at on {engine.looked_at}"
    if "/" not in about.model:
        yield f"{about.model} is kvrsim's name of the model: put your checkpoint's name or path in its place"
    for need in needs_of(about.degrees):
        if need in engine.notes:
            yield engine.notes[need]
    if about.degrees.uneven_pieces:
        yield f"kvrsim's pieces: {', '.join(map(str, about.pieces))} tokens"
    if about.degrees.uneven_pieces and len(set(about.layers)) > 1:
        layers = ",".join(map(str, about.layers))
        yield f"stages were planned with uneven layers: set SGLANG_PP_LAYER_PARTITION={layers}"
    if not about.in_pieces:
        yield "the prompt is one step, as it was simulated; smaller steps need less memory and take longer"
    yield "the longest sequence is the prompt and one token: add your output tokens"
    if engine.name != "vllm":
        yield f"{engine.name}'s memory fraction leaves out activations: make it smaller where memory runs out"
    quantization = scenario.model.quantization
    if scenario.request.dtype == "fp8" and engine.name == "trtllm":
        yield "trtllm-serve takes FP8 from the checkpoint: quantise it first"
    elif quantization is not None and scenario.request.dtype != "fp8":
        yield f"the checkpoint says how it is quantised ({quantization.describe()})"
    if about.nodes > 1:
        yield f"{about.nodes} nodes: start one process on each, with its rank and the first node's address"


def _named(engine: DeployEngine) -> str:
    return f"{engine.name} ({engine.version})"
