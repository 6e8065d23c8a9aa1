"""Configurations of published models, read and planned one by one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvrsim
from kvrsim.errors import InputError
from kvrsim.model.load import load_model
from kvrsim.model.spec import ModelSpec

COUNTS = Path(__file__).parents[1] / "data" / "model_counts.json"
_NODES = Path(__file__).with_name("h200-nodes.json")
_MACHINES: tuple[tuple[int, str], ...] = ((8, "h200-nvlink"), (16, str(_NODES)), (32, str(_NODES)))
_STRATEGIES = ("tp", "pp", "kvr-e")  # those that hold a share of the weights a GPU, and one that holds all of them
CONTEXT = "4k"
_SUFFIX, _BESIDE = "_config.json", "_hf_quant_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The plan of one model: the fastest strategy that fits, on as few GPUs as hold it."""

    strategy: str
    num_gpus: int
    ttft_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One configuration."""

    name: str  # of the checkpoint, such as "openai/gpt-oss-20b"
    model: ModelSpec | None  # None: it cannot be read
    plan: Planned | None  # None: it cannot be planned, or fits nowhere
    refused: str  # why not; empty if planned
    reference: int | None  # parameters as transformers counts or others state them
    source: str  # of the reference


def configurations(folder: Path) -> dict[str, Path]:
    """The files of a folder of configurations, by the names of their checkpoints."""
    paths = (path for path in sorted(folder.glob(f"*{_SUFFIX}")) if not path.name.endswith(_BESIDE))
    return {path.name.removesuffix(_SUFFIX).replace("--", "/"): path for path in paths}


def read_counts() -> dict[str, Any]:
    """`counted` by transformers, and `stated` by others of models that it does not have."""
    counts: dict[str, Any] = json.loads(COUNTS.read_text("utf-8"))
    return counts


def count(paths: Mapping[str, Path]) -> dict[str, Any]:
    """The file of counts anew; what others state stays."""
    from calibrate.reference import counted_parameters, transformers_version

    known = read_counts()
    found = {name: counted_parameters(json.loads(path.read_text("utf-8"))) for name, path in paths.items()}
    counted = {name: number for name, number in found.items() if number is not None}
    return known | {"transformers": transformers_version(), "counted": counted}


def row(name: str, path: Path, counts: Mapping[str, Any]) -> Row:
    """One configuration read and planned."""
    reference, source = counts["counted"].get(name), f"transformers {counts['transformers']}"
    if reference is None and name in counts["stated"]:
        reference, source = counts["stated"][name]["parameters"], counts["stated"][name]["source"]
    try:
        model = load_model(path)
    except InputError as error:
        return Row(name=name, model=None, plan=None, refused=_reason(error), reference=reference, source=source)
    plan, refused = _planned(path)
    return Row(name=name, model=model, plan=plan, refused=refused, reference=reference, source=source)


def _planned(path: Path) -> tuple[Planned | None, str]:
    """The plan, or why there is none."""
    for num_gpus, cluster in _MACHINES:
        try:
            plan = kvrsim.plan(gpus=num_gpus, ctx=CONTEXT, cluster=cluster, model=path, strategies=_STRATEGIES)
        except InputError as error:
            return None, _reason(error)
        if plan.feasible:
            best = plan.best
            return Planned(strategy=best.strategy, num_gpus=num_gpus, ttft_s=best.ttft_s), ""
    return None, f"does not fit on {_MACHINES[-1][0]} GPUs"


def _reason(error: InputError) -> str:
    """What was found and what is wanted, without the path of the file."""
    return f"{error.parameter.rpartition(': ')[2]} is {error.value}; accepted: {error.accepted}"
