"""Statements of a launch: the flags that an engine gets agree with the plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvrsim.errors import InputError
from kvrsim.executors.access import execution_of
from kvrsim.strategies import get_strategy
from planner.candidates import Candidate
from planner.deploy import deployment_of
from validate.statements.claims import Claim
from validate.statements.plans import Entry, PlannedCase
from validate.statements.questions import NODE

_ROUNDING = 128  # tokens to which the length of a step is rounded up
_SIZES = {  # flags whose product is the number of GPUs, by engine
    "vllm": (
        "--tensor-parallel-size",
        "--pipeline-parallel-size",
        "--prefill-context-parallel-size",
        "--data-parallel-size",
    ),
    "sglang": ("--tp-size", "--pp-size", "--dp-size"),  # its tensor size counts context and attention data ranks
    "trtllm": ("--tp_size", "--pp_size"),
}
_LENGTH = {"vllm": "--max-model-len", "sglang": "--context-length", "trtllm": "--max_seq_len"}
_STEP = {"vllm": "--max-num-batched-tokens", "sglang": "--max-prefill-tokens", "trtllm": "--max_num_tokens"}
_NODES = {"vllm": "--nnodes", "sglang": "--nnodes"}
_MEMORY = {
    "vllm": "--gpu-memory-utilization",
    "sglang": "--mem-fraction-static",
    "trtllm": "--free_gpu_memory_fraction",
}


def flags_of(args: Sequence[str]) -> dict[str, str]:
    """The flags of a launch with their values; a flag without a value has an empty text."""
    flags: dict[str, str] = {}
    for place, word in enumerate(args):
        if word.startswith("--"):
            following = args[place + 1] if place + 1 < len(args) else "--"
            flags[word] = "" if following.startswith("--") else following
    return flags


def check_launch(case: PlannedCase) -> Iterator[Claim]:
    """The launch of the fastest fitting strategy of each engine: GPUs, stages, nodes, step, length, memory."""
    engines = {engine for entry in case.entries.values() if entry["fits"] for engine in entry["engines"]}
    if "engine" in case.options:
        engines &= {case.options["engine"]}
    for engine in sorted(engines):
        entry = next(entry for entry in case.entries.values() if entry["fits"] and engine in entry["engines"])
        yield from _claims(case, engine, entry)


def _claims(case: PlannedCase, engine: str, entry: Entry) -> Iterator[Claim]:
    try:
        strategy = get_strategy(entry["strategy"])
        if entry.get("layers") is not None:
            strategy = replace(strategy, stage_layers=tuple(entry["layers"]))
        candidate = Candidate.of(execution_of(case.scenario, strategy), entry["partition"])
        launch = deployment_of(candidate, engine, model=case.options["model"])
    except InputError as error:
        longer = case.said["context_len"] > (case.scenario.model.max_position_embeddings or math.inf)
        yield Claim(kind="launch", said=f"{engine} has {entry['strategy']}", found=f"no launch: {error}", holds=longer)
        return
    flags = flags_of(launch.args)
    name = f"{engine}: {entry['strategy']}"
    for what, said, found in _values(case, engine, entry, flags):
        yield Claim(
            kind="launch", said=f"{name} with {what} {said}", found=f"the plan has {found}", holds=said == found
        )
    step = flags.get(_STEP[engine])
    if step is not None:
        longest = max(entry["partition"]) * case.said["question"]["batch"]
        if entry["layout"]["pieces"] == "none":
            longest = sum(entry["partition"]) * case.said["question"]["batch"]
        yield Claim(
            kind="launch",
            said=f"{name} with steps of {step} tokens",
            found=f"the longest piece has {longest}",
            holds=longest <= int(step) < longest + _ROUNDING,
        )
    length = int(flags[_LENGTH[engine]])
    tokens = case.said["context_len"]
    most = case.scenario.model.max_position_embeddings or math.inf
    yield Claim(
        kind="launch",
        said=f"{name} for {length} tokens",
        found=f"the prompt has {tokens}, the model {most} positions",
        holds=tokens <= length <= most,
    )
    yield from _memory(case, engine, entry, float(flags[_MEMORY[engine]]), name)


def _memory(case: PlannedCase, engine: str, entry: Entry, fraction: float, name: str) -> Iterator[Claim]:
    """The share of the memory that an engine takes: the plan's, or the part of it that each engine counts.

    vLLM counts everything, SGLang weights and cache, TensorRT-LLM the cache as a share of what the weights leave.
    """
    ranks = case.simulate_entry(entry).per_rank
    gpu_bytes = case.said["cluster"]["gpu"]["memory_bytes"]
    room = fraction * gpu_bytes
    needed = max(rank.memory.total for rank in ranks)
    if engine == "sglang":
        needed = max(rank.memory.weights + rank.memory.kv_cache for rank in ranks)
    if engine == "trtllm":
        room = min(fraction * (gpu_bytes - rank.memory.weights) for rank in ranks)
        needed = max(rank.memory.kv_cache for rank in ranks)
    yield Claim(
        kind="launch",
        said=f"{name} with {fraction:g} of the memory, {room / 1e9:.2f} GB",
        found=f"at least {needed / 1e9:.2f} GB are needed, at most {case.said['memory_fraction']:g} may be taken",
        holds=needed <= room * (1 + 1e-3) and (engine == "trtllm" or fraction <= case.said["memory_fraction"] + 1e-4),
    )


def _values(case: PlannedCase, engine: str, entry: Entry, flags: Mapping[str, str]) -> Iterator[tuple[str, Any, Any]]:
    """What a flag says and what the plan has: GPUs, stages, nodes, and the type of weights."""
    gpus = math.prod(int(flags.get(flag) or 1) for flag in _SIZES[engine])
    yield "GPUs", gpus, 1 if entry["strategy"] == "single" else case.num_gpus
    stages = int(flags.get("--pp_size" if engine == "trtllm" else _SIZES[engine][1]) or 1)
    yield "stages", stages, entry["layout"]["pipeline"]
    if engine in _NODES:
        nodes = int(flags.get(_NODES[engine]) or 1)
        yield "nodes", nodes, max(1, gpus // NODE)
    if engine != "trtllm":
        fp8 = flags.get("--quantization") == "fp8"
        yield "fp8", fp8, case.said["question"]["dtype"] == "fp8"
