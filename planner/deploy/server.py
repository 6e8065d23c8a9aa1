"""A server of an engine: the arguments that launch it, and the file that they name."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from kvrsim.scenario import Scenario
from planner.deploy.engines import Degrees, DeployEngine, needs_of

Role = Literal["prefill", "decode"]
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp8": "auto"}
_KV_CONNECTOR = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'  # vLLM's, for prefill and decode alike


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
        return tuple({"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}[self.engine.name](self))

    @property
    def command(self) -> str:
        """For a shell."""
        return shlex.join([*self.engine.launcher, *self.args])

    @property
    def files(self) -> Mapping[str, str]:
        """Contents by name."""
        return {self.config: _yaml(self)} if self.engine.name == "trtllm" else {}

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
        """What has to be said beside the flags."""
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


def _vllm(server: Server) -> Iterator[str]:
    degrees, scenario = server.degrees, server.scenario
    yield from (server.model, "--dtype", _DTYPES[scenario.request.dtype])
    if scenario.request.dtype == "fp8":
        yield from ("--quantization", "fp8")
    yield from ("--kv-cache-dtype", "fp8" if server.fp8_kv else "auto")
    yield from ("--tensor-parallel-size", str(degrees.tensor), "--pipeline-parallel-size", str(degrees.pipeline))
    if degrees.context > 1:
        yield from ("--prefill-context-parallel-size", str(degrees.context))
    if scenario.expert_parallel:
        yield "--enable-expert-parallel"
    if server.in_pieces:
        yield "--enable-chunked-prefill"
    if server.step_tokens is not None:
        yield from ("--max-num-batched-tokens", str(server.step_tokens))
    if server.max_sequences is not None:
        yield from ("--max-num-seqs", str(server.max_sequences))
    yield from ("--max-model-len", str(server.max_len))
    if server.role is not None:
        yield from ("--kv-transfer-config", _KV_CONNECTOR)
    yield from ("--gpu-memory-utilization", f"{scenario.memory_fraction:g}")
    if server.nodes > 1:
        yield from ("--nnodes", str(server.nodes))


def _sglang(server: Server) -> Iterator[str]:
    degrees, scenario = server.degrees, server.scenario
    yield from ("--model-path", server.model, "--dtype", _DTYPES[scenario.request.dtype])
    if scenario.request.dtype == "fp8":
        yield from ("--quantization", "fp8")
    yield from ("--kv-cache-dtype", "fp8_e4m3" if server.fp8_kv else "auto")
    yield from ("--tp-size", str(degrees.tensor * degrees.context), "--pp-size", str(degrees.pipeline))
    if degrees.context > 1:
        yield from ("--attn-cp-size", str(degrees.context), "--enable-prefill-cp", "--cp-strategy", "zigzag")
    if scenario.expert_parallel:
        yield from ("--ep-size", str(degrees.tensor * degrees.context))
    if server.step_tokens is not None:
        tokens = str(server.step_tokens)
        yield from ("--chunked-prefill-size", tokens, "--max-prefill-tokens", tokens)
    if degrees.uneven_pieces:
        yield "--enable-dynamic-chunking"
    if server.max_sequences is not None:
        yield from ("--max-running-requests", str(server.max_sequences))
    if server.role is not None:
        yield from ("--disaggregation-mode", server.role)
    yield from ("--context-length", str(server.max_len), "--mem-fraction-static", f"{scenario.memory_fraction:g}")
    if server.nodes > 1:
        yield from ("--nnodes", str(server.nodes))


def _trtllm(server: Server) -> Iterator[str]:
    degrees, scenario = server.degrees, server.scenario
    yield from (server.model, "--tp_size", str(degrees.tensor), "--pp_size", str(degrees.pipeline))
    if scenario.expert_parallel:
        yield from ("--ep_size", str(degrees.tensor))
    if server.in_pieces:
        yield "--enable_chunked_prefill"
    if server.step_tokens is not None:
        yield from ("--max_num_tokens", str(server.step_tokens))
    if server.max_sequences is not None:
        yield from ("--max_batch_size", str(server.max_sequences))
    yield from ("--max_seq_len", str(server.max_len))
    yield from ("--free_gpu_memory_fraction", f"{scenario.memory_fraction:g}", "--config", server.config)


def _yaml(server: Server) -> str:
    """What trtllm-serve takes from a file only."""
    dtype = _DTYPES[server.scenario.request.dtype]
    cache = "fp8" if server.fp8_kv else "auto"
    fraction = f"{server.scenario.memory_fraction:g}"
    lines = [f"dtype: {dtype}", "kv_cache_config:", f"  dtype: {cache}", f"  free_gpu_memory_fraction: {fraction}"]
    if server.role == "prefill":
        lines.append("disable_overlap_scheduler: true")
    if server.role is not None:
        lines += ["cache_transceiver_config:", "  backend: DEFAULT"]
    return "\n".join([*lines, ""])
