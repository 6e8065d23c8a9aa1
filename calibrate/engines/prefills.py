"""Whole prefills of other sources on the engines that have records; no fit of terms uses them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from calibrate.engines.fit import ENGINES
from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.execution import Execution, place
from kvrsim.executors.run import run_partition
from kvrsim.io.schema import JsonObject
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import get_strategy

_NAMES = Path(__file__).with_name("names.json")
_STEP_TOKENS = 8192  # tokens of a step, unless the engine is old, its GPU small, or the row says otherwise


@dataclass(frozen=True, kw_only=True)
class EnginePrefill:
    """A measured prefill, and what the record of its engine predicts."""

    case: str  # description
    scenario: Scenario
    execution: Execution  # the scenario placed for the row's strategy
    partition: Partition
    tokens: int  # tokens of all prompts together
    measured_s: float

    @cached_property
    def predicted_s(self) -> float:
        """TTFT by the record of the engine."""
        return run_partition(self.execution, self.partition).ttft_s


def read_prefills(path: Path) -> list[EnginePrefill]:
    """Read the prefills that kvrsim can predict with ENGINES.

    The file has the columns engine, engine_version, model, gpu, n_gpus, strategy, dtype, context, batch, value, note.
    """
    import pandas

    names = JsonObject.read(_NAMES, "engines").fields
    prefills = []
    for row in pandas.read_csv(path).to_dict("records"):
        prefill = _prefill(row, names)
        if prefill is not None:
            prefills.append(prefill)
    return prefills


def _prefill(row: Mapping[str, Any], names: Mapping[str, Any]) -> EnginePrefill | None:
    """One row; None where kvrsim has no such engine or GPU, or cannot plan the model."""
    engine = {"tensorrt-llm": "trtllm"}.get(row["engine"].lower(), row["engine"].lower())
    gpus = [gpu for gpu in names["gpus"] if gpu in re.sub("[^a-z0-9]", "", row["gpu"].lower())]
    if engine not in ENGINES or not gpus or not str(row["n_gpus"]).isdigit() or "do not use" in str(row["note"]):
        return None
    cluster, profile = names["gpus"][gpus[0]]
    try:
        scenario, _ = make_scenario(
            ctx=int(row["context"]),
            batch=int(row["batch"]),
            gpus=int(row["n_gpus"]),
            model=names["same_shape"].get(row["model"], row["model"]),
            cluster=cluster,
            profile=profile,
            engine=engine,
            dtype="fp8" if row["dtype"] == "fp8" else None,
        )
        name, pieces = steps_of(row, engine)
        execution = place(scenario, get_strategy(name))
    except InputError:
        return None
    partition = Partition.even(execution.request.new_tokens, execution.cluster.num_gpus)
    if pieces is not None:
        partition = Partition(chunk_lens=tuple(pieces))
    return EnginePrefill(
        case=f"{row['model']} {row['context']} x {row['batch']} on {row['n_gpus']} {row['gpu']}, {row['engine']}",
        scenario=scenario,
        execution=execution,
        partition=partition,
        tokens=int(row["context"]) * int(row["batch"]),
        measured_s=row["value"],
    )


def steps_of(row: Mapping[str, Any], engine: str) -> tuple[str, Sequence[int] | None]:
    """The strategy of a prefill and the tokens of its steps; None: one step.

    A prompt longer than the engine's step takes several steps. Default steps of engines: vLLM takes 2048 tokens
    before version 0.8 (if max_model_len is above 32k), and 8192 from 0.8 on; SGLang takes 4096 on GPUs of less than
    60 GB, else 8192; TensorRT-LLM takes 8192. A row's note may give another number.
    """
    step = _STEP_TOKENS
    if engine == "vllm" and re.match(r"0\.[0-7]\.", str(row["engine_version"])):
        step = 2048
    if engine == "sglang" and "40GB" in row["gpu"]:
        step = 4096
    match = re.search(r"max_num_batched_tokens ([0-9]+)", str(row["note"]))
    if match:
        step = int(match[1])
    tokens = int(row["context"])
    tensor = () if row["strategy"] == "single" else (f"tp{row['n_gpus']}",)
    if tokens <= step:
        return "+".join(tensor) or "single", None
    pieces = [min(step, tokens - first) for first in range(0, tokens, step)]
    return "+".join((*tensor, "pp1")), pieces
