"""Launches that `--emit` prints, read by the engines' own argument parsers.

`python -m validate.engine_flags vllm=PYTHON sglang=PYTHON` rewrites docs/results/engine_flags.md. PYTHON is the
interpreter of an environment where the engine is installed; its options need no GPU. Each launch is parsed, and each
option that kvrsim/data/deploy.json lists is tried with all the values that it lists.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvrsim.arguments import FleetArgs
from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.io.files import write_atomically
from planner.capacity.launch import launch_of_fleet
from planner.capacity.plan import plan_capacity
from planner.capacity.request import make_request
from planner.capacity.times import StrategyPolicy
from planner.deploy import DeployEngine, Launch, deploy_engine, launch_of, names_for

PAGE = Path(__file__).parents[1] / "docs" / "results" / "engine_flags.md"
QUESTIONS: tuple[dict[str, Any], ...] = (
    {"model": "llama-3-70b", "cluster": "h100-nvlink"},
    {"model": "llama-3-8b", "cluster": "h100-nvlink", "dtype": "bf16", "batch": 4, "cached_prefix": "4k"},
    {"model": "llama-3-8b", "cluster": "h100-nvlink", "dtype": "fp8"},
    {"model": "qwen3-235b-a22b", "cluster": "h100-nvlink", "expert_parallel": True},
    {"model": "deepseek-v3", "cluster": "b200-nvlink5"},
    {"model": "llama-3-70b", "cluster": "h100-2x8-ndr400", "gpus": 16},
)
TRAFFIC = "synthetic:poisson,rate=4,requests=300,context=lognormal:1k:1,max=16k,output=lognormal:150:0.5"
# What makes `parser` in the engine's interpreter, and the package whose version is read.
PARSERS = {
    "vllm": (
        "vllm",
        "from vllm.entrypoints.common.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = make_arg_parser(FlexibleArgumentParser())",
    ),
    "sglang": (
        "sglang",
        "import argparse\nfrom sglang.srt.server_args import ServerArgs\n"
        "parser = argparse.ArgumentParser()\nServerArgs.add_cli_args(parser)",
    ),
}
_READ = """
import importlib.metadata, json, sys
asked = json.load(sys.stdin)
refused = []
for arguments in asked:
    try:
        parser.parse_args(arguments)
    except (SystemExit, ValueError) as error:
        refused.append(arguments)
print("\\n" + json.dumps({{"version": importlib.metadata.version("{package}"), "refused": refused}}))
"""


_TITLE = """# Flags read by the engines

`python -m validate.engine_flags {command}` on {date}. Launches are those that `kvrsim plan --emit`
prints for every strategy that the engine has, for six models and machines, and those of two fleets of
`kvrsim capacity --emit`. The engine's own argument parser, from the package of this version, reads each. It also reads
each option that [kvrsim/data/deploy.json](../../kvrsim/data/deploy.json) lists, once with each listed value. Nothing is
started: whether a model, the GPUs and the version support a combination is not checked.

| engine | version of the parser | launches | refused | options and values | refused |
|---|---|---|---|---|---|"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """What an engine's parser says."""

    engine: DeployEngine
    version: str  # of the parser
    launches: int
    refused_launches: tuple[str, ...]
    options: int
    refused_options: tuple[str, ...]


def launches(engine: str) -> Iterator[Launch]:
    """Of every strategy that an engine has, on several machines and models; and of a fleet that decodes elsewhere."""
    for question in QUESTIONS:
        about: dict[str, Any] = {"ctx": "16k", "gpus": 8} | question
        scenario, _ = make_scenario(**about)
        tokens = scenario.request.new_tokens
        for name in names_for(scenario, engine, "emit"):
            pieces = (tokens // 2, tokens - tokens // 2) if "pp" in name else (tokens,)
            yield launch_of(scenario, engine, name, pieces, model="org/model")
    yield from (_fleet(engine, name) for name in ("llama-3-8b", "llama-3-70b"))


def _fleet(engine: str, model: str) -> Launch:
    scenario, _ = make_scenario(ctx=1, gpus=1, model=model, cluster="h100-nvlink")
    request = make_request(FleetArgs(requests=TRAFFIC, slo_ttft="2s", tpot="50ms", replications=1))
    plan = plan_capacity(scenario, request, StrategyPolicy(engines=(deploy_engine(engine),)))
    return launch_of_fleet(plan, engine, model="org/model")


def of_options(engine: DeployEngine) -> Iterator[list[str]]:
    """Arguments with one of the stored options each, once for each of its values."""
    given = {"int": ("2",), "float": ("0.5",), "str": ("x",)}
    for option, kind in engine.options.items():
        if kind == "flag":
            yield [option]
        elif option == "--kv-transfer-config":
            yield [option, '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}']
        else:
            yield from ([option, value] for value in (given[kind] if isinstance(kind, str) else kind))


def parsed(engine: DeployEngine, python: str) -> Parsed:
    """What the parser in an interpreter says of all launches and options; raises InputError where it cannot be made."""
    shown = [list(launch.args) for launch in launches(engine.name)]
    needed = ["--model-path", "x"] if engine.name == "sglang" else []
    single = list(of_options(engine))
    options = [one if one[0] == "--model-path" else [*needed, *one] for one in single]
    package, code = PARSERS[engine.name]
    ran = subprocess.run(
        [python, "-c", code + _READ.format(package=package)],
        input=json.dumps([*shown, *options]),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"VLLM_TARGET_DEVICE": "cpu"},  # vLLM looks for its device to make its options
    )
    if ran.returncode:
        last = ran.stderr.strip().splitlines()[-1:] or ["it ended without a message"]
        raise InputError(engine.name, python, f"an interpreter with {package} installed ({last[0]})")
    told = json.loads(ran.stdout.splitlines()[-1])
    return Parsed(
        engine=engine,
        version=told["version"],
        launches=len(shown),
        refused_launches=tuple(" ".join(one) for one in shown if one in told["refused"]),
        options=len(single),
        refused_options=tuple(
            " ".join(one) for one, asked in zip(single, options, strict=True) if asked in told["refused"]
        ),
    )


def page(found: Sequence[Parsed]) -> str:
    """The page, Markdown."""
    command = " ".join(f"{one.engine.name}=PYTHON" for one in found)
    lines = [_TITLE.format(command=command, date=f"{datetime.now(UTC):%Y-%m-%d}")]
    for one in found:
        numbers = (one.launches, len(one.refused_launches), one.options, len(one.refused_options))
        lines.append(f"| {one.engine.name} | {one.version} | {' | '.join(map(str, numbers))} |")
    refused = [(one.engine.name, text) for one in found for text in (*one.refused_launches, *one.refused_options)]
    lines += ["", *(f"- {name} refuses `{text}`" for name, text in refused)] if refused else []
    missing = (
        "TensorRT-LLM's package on the index is a placeholder, so its options are checked against its source only."
    )
    return "\n".join([*lines, "", missing, ""])


def main(arguments: Sequence[str]) -> int:
    """Parse, and write the page; 1 where something is refused."""
    found = []
    for argument in arguments:
        name, _, python = argument.partition("=")
        if name not in PARSERS or not python:
            raise InputError("argument", argument, f"NAME=PYTHON with NAME one of {', '.join(PARSERS)}")
        found.append(parsed(deploy_engine(name), python))
    write_atomically(PAGE, page(found).encode(), argument="page")
    sys.stdout.write(page(found))
    return 1 if any(one.refused_launches or one.refused_options for one in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
