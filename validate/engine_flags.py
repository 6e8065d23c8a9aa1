"""Launches that `--emit` prints, read by the engines' own argument parsers.

`python -m validate.engine_flags vllm=PYTHON sglang=PYTHON` rewrites docs/results/engine_flags.md. PYTHON is the
interpreter of an environment where the engine is installed; no GPU is needed. The parser reads each launch, and each
option of kvrsim/data/deploy.json with each listed value.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvrsim.arguments import FleetArgs
from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.layout import Layout
from kvrsim.strategies import get_strategy
from planner.candidates import Search
from planner.capacity.launch import launch_of_fleet
from planner.capacity.plan import plan_capacity
from planner.capacity.request import make_request
from planner.capacity.times import StrategyPolicy
from planner.deploy import DeployEngine, Launch, deploy_engine, launch_of, layout_on_gpus
from validate.report import RESULTS, fill, table, write_page

PAGE = RESULTS / "engine_flags.md"
_LATENT = {"model": "deepseek-v3", "cluster": "h200-nvlink"}
_MIXTURE = {"model": "qwen3-235b-a22b", "cluster": "h200-nvlink"}
QUESTIONS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"model": "llama-3.1-70b", "cluster": "h100-nvlink"}, ("tp", "pp", "pp-s", "tp4+pp2", "dp2+tp4")),
    ({"model": "llama-3.1-70b", "cluster": "h100-nvlink", "ctx": "128k"}, ("tp", "tp2+pp4")),
    ({"model": "llama-3.1-70b", "cluster": "b200-nvlink5", "ctx": "10000"}, ("tp", "pp")),
    ({"model": "llama-3.1-8b", "cluster": "h100-nvlink", "dtype": "bf16", "batch": 4}, ("single", "tp", "dp8")),
    ({"model": "llama-3.1-8b", "cluster": "h100-nvlink", "dtype": "fp8"}, ("tp",)),
    ({"model": "llama-3.1-70b", "cluster": "h100-2x8-ndr400", "gpus": 16}, ("tp8+pp2", "pp-s", "dp2+tp8")),
    ({"model": "gemma-3-27b", "cluster": "h100-nvlink", "ctx": "32k"}, ("tp", "tp4+pp2")),
    ({"model": "gpt-oss-120b", "cluster": "h100-nvlink"}, ("tp", "tp+ep", "dp8+ep8")),
    (_MIXTURE, ("tp4+ep4+pp2", "tp+ep", "cp8", "cp8+ep8", "tp4+cp2+edp2", "tp4+cp2", "dp8+ep8", "dp2+tp4")),
    (_LATENT, ("tp", "tp+ep", "cp8+ep8", "tp4+pp2", "tp4+cp2", "dp8+ep8", "dp8", "tp+ep4", "pp-s")),
    (_LATENT | {"cluster": "h100-2x8-ndr400", "gpus": 16}, ("tp8+pp2", "dp16+ep16", "dp2+tp8+ep16", "tp8+pp2+ep8")),
    ({"model": "deepseek-v3.2", "cluster": "h200-nvlink"}, ("tp", "cp8-i", "tp2+cp4-i", "cp8+ep8", "dp8+ep8")),
)
TRAFFIC = "synthetic:poisson,rate=4,requests=300,context=lognormal:1k:1,max=16k,output=lognormal:150:0.5"
# By engine: its package, and the code that creates `parser` in its interpreter.
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
refused = []
for arguments in json.load(sys.stdin):
    try:
        parser.parse_args(arguments)
    except (SystemExit, ValueError):
        refused.append(arguments)
print("\\n" + json.dumps({{"version": importlib.metadata.version("{package}"), "refused": refused}}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """Launches and options that an engine's parser has read."""

    engine: DeployEngine
    version: str  # of the parser
    launches: int
    refused_launches: tuple[str, ...]
    options: int
    refused_options: tuple[str, ...]


def launches(engine: str) -> Iterator[tuple[str, Launch, Layout | None]]:
    """By question and layout, on several machines and models, each with its layout; then those of fleets."""
    for question, names in QUESTIONS:
        scenario, _ = make_scenario(**{"ctx": "16k", "gpus": 8} | question)
        for strategy in map(get_strategy, names):
            if deploy_engine(engine).has(strategy, scenario):
                candidate = Search().candidate(scenario, strategy)
                cut, layers = candidate.partition.chunk_lens, candidate.strategy.stage_layers
                launch = launch_of(
                    scenario, engine, candidate.strategy, cut, model=str(question["model"]), layers=layers
                )
                yield f"{question['model']}, {strategy.name}", launch, layout_on_gpus(strategy, scenario)
    for name in ("llama-3.1-8b", "llama-3.1-70b"):
        yield f"{name}, fleet", _fleet(engine, name), None


def _fleet(engine: str, model: str) -> Launch:
    scenario, _ = make_scenario(ctx=1, gpus=1, model=model, cluster="h100-nvlink")
    request = make_request(FleetArgs(requests=TRAFFIC, slo_ttft="2s", tpot="50ms", replications=1))
    plan = plan_capacity(scenario, request, StrategyPolicy(engines=(deploy_engine(engine),)))
    return launch_of_fleet(plan, engine, model="org/model")


def option_arguments(engine: DeployEngine) -> Iterator[list[str]]:
    """Arguments with one of the listed options each, once for each of its values."""
    examples = {"int": ("2",), "float": ("0.5",), "str": ("x",)}
    for option, kind in engine.options.items():
        if kind == "flag":
            yield [option]
        elif option == "--kv-transfer-config":
            yield [option, '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}']
        else:
            yield from ([option, value] for value in (examples[kind] if isinstance(kind, str) else kind))


def parse_all(engine: DeployEngine, python: str) -> Parsed:
    """Read all launches and options with an interpreter's parser. Raises InputError if the parser cannot be created."""
    launch_arguments = [list(launch.args) for _, launch, _ in launches(engine.name)]
    required = ["--model-path", "x"] if engine.name == "sglang" else []
    options = {" ".join(words): words for words in option_arguments(engine)}
    option_lines = {
        text: words if words[0] == "--model-path" else [*required, *words] for text, words in options.items()
    }
    package, code = PARSERS[engine.name]
    process = subprocess.run(
        [python, "-c", code + _READ.format(package=package)],
        input=json.dumps([*launch_arguments, *option_lines.values()]),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"VLLM_TARGET_DEVICE": "cpu"},  # vLLM needs a device to create its options
    )
    if process.returncode:
        last = process.stderr.strip().splitlines()[-1:] or ["it ended without a message"]
        raise InputError(engine.name, python, f"an interpreter with {package} installed ({last[0]})")
    answer = json.loads(process.stdout.splitlines()[-1])
    return Parsed(
        engine=engine,
        version=answer["version"],
        launches=len(launch_arguments),
        refused_launches=tuple(" ".join(words) for words in launch_arguments if words in answer["refused"]),
        options=len(options),
        refused_options=tuple(text for text, words in option_lines.items() if words in answer["refused"]),
    )


def page(engines: Sequence[Parsed]) -> list[str]:
    """Lines of the page, Markdown."""
    command = " ".join(f"{one.engine.name}=PYTHON" for one in engines)
    heads = ("engine", "version of the parser", "launches", "refused", "options and values", "refused")
    rows = [
        (one.engine.name, one.version, one.launches, len(one.refused_launches), one.options, len(one.refused_options))
        for one in engines
    ]
    refused = [(one.engine.name, text) for one in engines for text in (*one.refused_launches, *one.refused_options)]
    return fill(
        "engine_flags",
        command=command,
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        engines=table(heads, rows),
        refused="".join(f"- {name} refuses `{text}`\n" for name, text in refused) + "\n" * bool(refused),
    )


def main(arguments: Sequence[str]) -> int:
    """Read all launches and write the page; 1 where something is refused."""
    engines = []
    for argument in arguments:
        name, _, python = argument.partition("=")
        if name not in PARSERS or not python:
            raise InputError("argument", argument, f"NAME=PYTHON with NAME one of {', '.join(PARSERS)}")
        engines.append(parse_all(deploy_engine(name), python))
    write_page(PAGE, page(engines))
    print(PAGE.read_text("utf-8"))
    return 1 if any(one.refused_launches or one.refused_options for one in engines) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
