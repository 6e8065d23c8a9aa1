"""Launches that `--emit` prints, resolved by the engines' own code and compared with the plan's layout.

`python -m validate.engine_flags vllm=PYTHON sglang=PYTHON` rewrites docs/results/engine_flags.md. PYTHON is the
interpreter of an environment where the engine is installed (PYTHONPATH may name an unpacked wheel); no GPU is needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.executors.access import execution_of
from kvrsim.hardware import load_cluster
from kvrsim.io.schema import JsonObject
from kvrsim.layout import Layout
from kvrsim.model.load import config_path
from kvrsim.strategies import get_strategy
from planner.candidates import Search
from planner.deploy import Deployment, deployment_of
from planner.deploy_engines import DeployEngine, deploy_engine
from validate.report import RESULTS, fill, table, write_page

PAGE = RESULTS / "engine_flags.md"
QUESTIONS = JsonObject.read(Path(__file__).with_suffix(".json"), "questions").children("questions")
SIZES = ("tensor", "pipeline", "context", "data", "expert_parallel", "expert_data")
ENGINES = ("vllm", "sglang")  # engines that resolve_launches.py can run


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolution:
    """Result of resolving the launches with an engine's code."""

    engine: DeployEngine
    version: str  # version of the engine's package
    launches: int
    refused: Mapping[str, str]  # reason of the refusal, by launch
    differs: Mapping[str, str]  # sizes that differ from the plan's, by launch


def launches(engine: str) -> Iterator[tuple[str, Deployment, Layout]]:
    """Yield a name, a launch and its layout for each question."""
    for question in (dict(one.fields) for one in QUESTIONS):
        strategies = map(get_strategy, question.pop("strategies"))
        scenario, _ = make_scenario(**{"ctx": "16k", "gpus": 8} | question)
        for strategy in strategies:
            execution = execution_of(scenario, strategy)
            if deploy_engine(engine).has(execution):
                candidate = Search().candidate(execution)
                launch = deployment_of(candidate, engine, model=str(question["model"]))
                yield (f"{question['model']}, {question['cluster']}, {strategy.name}", launch, execution.layout)


def resolve_all(engine: DeployEngine, python: str) -> Resolution:
    """Resolve all single-server launches with an interpreter's engine; InputError if the engine cannot be imported."""
    cases = list(launches(engine.name))
    request = {"engine": engine.name, "launches": [_request(what, launch) for what, launch, _ in cases]}
    process = subprocess.run(
        [python, str(Path(__file__).with_name("resolve_launches.py"))],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        last = process.stderr.strip().splitlines()[-1:] or ["it ended without a message"]
        raise InputError(engine.name, python, f"an interpreter with {engine.name} installed ({last[0]})")
    content = json.loads(process.stdout.splitlines()[-1])
    refused = {}
    differs = {}
    for (what, _, layout), answer in zip(cases, content["answers"], strict=True):
        planned = {name: getattr(layout, name) for name in SIZES}
        if not layout.is_mixture:  # an engine resolves these sizes for dense models, too, which have no experts
            answer = answer | {name: 1 for name in ("expert_parallel", "expert_data") if name in answer}
            planned |= {"expert_parallel": 1, "expert_data": 1}
        other = {name: answer[name] for name in SIZES if name in answer and answer[name] != planned[name]}
        if "refused" in answer:
            refused[what] = answer["refused"]
        elif other:
            differs[what] = ", ".join(f"{name} {size}, not {planned[name]}" for name, size in other.items())
    return Resolution(engine=engine, version=content["version"], launches=len(cases), refused=refused, differs=differs)


def _request(what: str, launch: Deployment) -> dict[str, Any]:
    model, cluster_name, _ = what.split(", ")
    cluster = load_cluster(cluster_name)
    config = json.loads(config_path(model, "model").read_text("utf-8"))
    return {
        "args": list(launch.args),
        "config": {name: value for name, value in config.items() if not name.startswith("_")},
        "capability": 10 if "B200" in cluster.gpu.name else 9,
        "gpu": cluster.gpu.name,
        "memory_bytes": cluster.gpu.memory_bytes,
        "num_sms": cluster.gpu.num_sms,
        "gpus_per_node": cluster.gpus_per_node or 8,
    }


def page(engines: Sequence[Resolution]) -> list[str]:
    """Markdown lines of the page."""
    heads = ("engine", "version", "launches", "refused", "other layout than planned")
    rows = [(one.engine.name, one.version, one.launches, len(one.refused), len(one.differs)) for one in engines]
    lines = [
        f"- {one.engine.name}, {what}: {why}" for one in engines for what, why in {**one.refused, **one.differs}.items()
    ]
    return fill("engine_flags", engines=table(heads, rows), found=[*lines, ""] if lines else "")


def main(arguments: Sequence[str]) -> int:
    """Resolve all launches and write the page; return 1 if an engine refuses a launch or resolves another layout."""
    engines = []
    for argument in arguments:
        name, _, python = argument.partition("=")
        if name not in ENGINES or not python:
            raise InputError("argument", argument, f"NAME=PYTHON with NAME one of {', '.join(ENGINES)}")
        engines.append(resolve_all(deploy_engine(name), python))
    write_page(PAGE, page(engines))
    print(PAGE.read_text("utf-8"))
    return 1 if any(one.refused or one.differs for one in engines) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
