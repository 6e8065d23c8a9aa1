"""Whole prefills of other sources than the settings; the fits of engines' terms use those of the newest builds only."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from calibrate.engines.fit import ENGINES
from calibrate.engines.settings import model_folder
from kvrsim.builder import make_scenario
from kvrsim.engine import PRIOR_ENGINE, is_before, load_engine
from kvrsim.errors import InputError
from kvrsim.execution import Execution, place
from kvrsim.executors.run import run_partition
from kvrsim.io.schema import JsonObject
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import get_strategy

_FOLDER = Path(__file__).parent
_RIG_FOLDERS = (_FOLDER / "rigs", _FOLDER.parents[1] / "examples" / "clusters")
_STEP_TOKENS = 8192  # tokens of a step, unless the engine is old, its GPU small, or the row says otherwise
_PROFILE_OF_OLD_ROWS = {"a100": "a100-flash", "a800": "a100-flash", "h100": "h100-flash", "h800": "h100-flash"}
_PREFILL_METRICS = ("ttft_s", "prefill_s")


@dataclass(frozen=True, kw_only=True)
class EnginePrefill:
    """A measured prefill, and how kvrsim simulates it."""

    case: str  # description
    source: str  # who published it
    engine: str  # one of ENGINES, or PRIOR_ENGINE for all others
    version: str  # of the engine, as the source states it
    asked: Mapping[str, Any]  # arguments of make_scenario, without an engine
    strategy: str
    pieces: tuple[int, ...] | None  # tokens of the engine's steps; None: one step
    tokens: int  # tokens of all prompts together
    measured_s: float

    @cached_property
    def scenario(self) -> Scenario:
        """The scenario with the engine's record, of older builds if it ran one of these."""
        engine = self.engine
        older = load_engine(engine).older
        if older is not None and self.version[:1].isdigit() and is_before(self.version, older.before):
            engine = f"{engine}@{self.version}"
        return make_scenario(**self.asked, engine=engine)[0]

    @cached_property
    def execution(self) -> Execution:
        """The scenario placed for the strategy."""
        return place(self.scenario, get_strategy(self.strategy))

    @cached_property
    def partition(self) -> Partition:
        """The engine's steps, or one chunk per rank."""
        if self.pieces is not None:
            return Partition(chunk_lens=self.pieces)
        return Partition.even(self.execution.request.new_tokens, self.execution.cluster.num_gpus)

    @cached_property
    def predicted_s(self) -> float:
        """TTFT by the record of the engine."""
        return run_partition(self.execution, self.partition).ttft_s


def parser_of(module: str, description: str) -> ArgumentParser:
    """The parser of a module's command line, which names the settings, the models' configurations and the prefills."""
    parser = ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("settings", type=Path, metavar="SETTINGS.csv")
    parser.add_argument("--configs", type=Path, required=True, metavar="FOLDER", help="the models' configurations")
    parser.add_argument(
        "--prefills", type=_paths_of, required=True, metavar="FILE.csv,FILE.csv", help="prefills of other sources"
    )
    return parser


def _paths_of(text: str) -> list[Path]:
    """Paths with commas between them."""
    return [Path(name) for name in text.split(",")]


def read_prefills(path: Path, configs: Path | None = None, folder: Path | None = None) -> list[EnginePrefill]:
    """Read the prefills that kvrsim can simulate.

    The file has the columns source, engine, engine_version, model, gpu, n_gpus, nodes, strategy, dtype, context, batch,
    metric, value, note, and optionally cached; or, for engines of 2023 and 2024, kvrsim's names in the columns model,
    cluster, strategy and engine_name. configs: a folder with configurations of models; folder: where their models are
    made. Without them, models that only a configuration describes are left out.
    """
    import pandas

    names = JsonObject.read(_FOLDER / "names.json", "engines").fields
    comment = "#" if path.read_text("utf-8").startswith("#") else None
    frame = pandas.read_csv(path, comment=comment, dtype={"note": str})
    if "note" in frame:
        frame["note"] = frame.note.fillna("")
    prefills = []
    for row in frame.to_dict("records"):
        if "engine_name" in row:
            prefill = _old_prefill(row)
        else:
            prefill = _prefill(row, names, configs, folder)
        if prefill is not None and _can_be_simulated(prefill):
            prefills.append(prefill)
    return prefills


def _can_be_simulated(prefill: EnginePrefill) -> bool:
    try:
        return bool(prefill.execution)
    except InputError:
        return False


def _old_prefill(row: Mapping[str, Any]) -> EnginePrefill | None:
    """A row in kvrsim's names, of an engine of 2023 or 2024; None: a single operation, or left out by a rule."""
    profile = _PROFILE_OF_OLD_ROWS.get(str(row["cluster"]).partition("-")[0])
    if row["left_out"] == row["left_out"] or profile is None or "attention" in str(row["quantity"]):
        return None
    return EnginePrefill(
        case=f"{row['model']} {row['context_len']} x {row['batch']} on {row['num_gpus']} {row['gpu']}, {row['engine']}",
        source=str(row["set"]),
        engine=PRIOR_ENGINE,
        version=str(row["engine_name"]),
        asked={
            "ctx": int(row["context_len"]),
            "batch": int(row["batch"]),
            "gpus": int(row["num_gpus"]),
            "model": row["model"],
            "cluster": row["cluster"],
            "profile": profile,
            "dtype": row["dtype"],
        },
        strategy=row["strategy"],
        pieces=None,
        tokens=int(row["context_len"]) * int(row["batch"]),
        measured_s=float(row["seconds"]),
    )


def _prefill(
    row: Mapping[str, Any], names: Mapping[str, Any], configs: Path | None, folder: Path | None
) -> EnginePrefill | None:
    """One row; None where kvrsim has no such GPU, or the row is left out."""
    plain_gpu = re.sub("[^a-z0-9]", "", row["gpu"].lower())
    gpus = [gpu for gpu in names["gpus"] if gpu in plain_gpu]
    remark = f"{row['source']} {row['note']}"
    is_left_out = any(words in remark for words in names["left_out"])
    if not gpus or not str(row["n_gpus"]).isdigit() or is_left_out or row["metric"] not in _PREFILL_METRICS:
        return None
    engine = {"tensorrt-llm": "trtllm"}.get(row["engine"].lower(), row["engine"].lower())
    cluster, profile = names["gpus"][gpus[0]]
    nodes = int(row.get("nodes") or 1)
    if nodes > 1:
        cluster = f"{nodes}x{int(row['n_gpus']) // nodes}x{gpus[0]}"
    rigs = [rig for words, rig in names["rigs"].items() if words in row["note"]]
    if rigs:
        cluster = rigs[0]
        profile = None
    rig_files = [folder / f"{cluster}.json" for folder in _RIG_FOLDERS]
    rig_file = next((path for path in rig_files if path.exists()), None)
    model = names["same_shape"].get(row["model"], row["model"])
    if model.startswith("config:"):
        if configs is None or folder is None:
            return None
        model = str(model_folder(folder, configs, model.removeprefix("config:")))
    cached = int(row.get("cached") or 0)
    asked: dict[str, Any] = {
        "ctx": int(row["context"]) + cached,
        "batch": int(row["batch"]),
        "gpus": int(row["n_gpus"]),
        "model": model,
        "cluster": cluster if rig_file is None else str(rig_file),
        "dtype": "fp8" if row["dtype"] == "fp8" else None,
    }
    if profile is not None:
        asked["profile"] = profile
    if cached:
        asked |= {"cached_prefix": cached, "prefix_placement": "sharded"}
    strategy = names["strategies"].get(row["strategy"], row["strategy"])
    pieces = None
    if engine in ENGINES:
        strategy, pieces = steps_of(row, engine)
    return EnginePrefill(
        case=f"{row['model']} {row['context']} x {row['batch']} on {row['n_gpus']} {row['gpu']}, {row['engine']}",
        source=row["source"],
        engine=engine if engine in ENGINES else PRIOR_ENGINE,
        version=str(row["engine_version"]),
        asked=asked,
        strategy=strategy,
        pieces=None if pieces is None else tuple(pieces),
        tokens=int(row["context"]) * int(row["batch"]),
        measured_s=float(row["value"]),
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
