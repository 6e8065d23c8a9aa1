"""Record the JSON answers to a fixed grid of questions; compare recordings to see the effect of a code change.

python benchmarks/answers.py record FILE          ask every question, write the answers (--only REGEX: some)
python benchmarks/answers.py compare OLD NEW      list the differences; the exit code is 1 if there are any
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Keys whose values differ between two runs of the same code.
VOLATILE = {"seconds", "version", "created", "search_s"}
TOLERANCE = 1e-9  # relative tolerance of numbers


DENSE = "--model llama-3-8b --cluster h100-nvlink"
TWO_GPUS = f"{DENSE} --gpus 2"
WORKLOAD = "--requests synthetic:poisson,rate=4,requests=500,context=lognormal:3000:0.8,max=12k --slo-ttft 2s"
STRATEGIES = (
    *("single", "tsp", "kvr-e", "kvr-s", "kvr-direct", "ring", "striped", "zigzag", "ulysses", "tp", "pp"),
    *("tp2+kvr-s", "tp2+zigzag", "tp2+pp"),
)
MACHINES = (  # model, cluster, GPUs, context
    ("llama-3-8b", "h100-nvlink", 4, "32k"),
    ("llama-3-8b", "h200-nvlink", 8, "128k"),
    ("llama-3-70b", "h100-nvlink", 8, "32k"),
    ("llama-3-70b", "h100-2x8-ndr400", 16, "32k"),
    ("qwen3-30b-a3b", "h100-nvlink", 4, "16k"),
    ("mixtral-8x7b", "a100-nvlink", 4, "8k"),
    ("mistral-7b", "a100-nvlink", 4, "32k"),
    ("llama-3-8b", "b200-nvlink5", 8, "64k"),
    ("llama-3-8b", "l40s-pcie", 2, "8k"),
)
SETTINGS = (  # options of plans on 3 GPUs
    "--method grid",
    "--method analytical",
    "--topology bus --link-bandwidth 10GB/s",
    "--topology chain",
    "--link-latency 50us",
    "--dtype bf16",
    "--profile roofline",
    "--profile a100-flash",
    "--profile a100-vidur",
    "--noise paper --seed 3",
    "--stride 64",
    "--profile h100-flash --cluster h100-nvlink",
    "--method grid --stride 32",
    "--attention sdpa --profile roofline",
)
SIMULATIONS = (
    "--strategy kvr-s --partition 5000,3192 --gpus 2 --ctx 8k",
    "--strategy kvr-e --gpus 4 --ctx 8k --noise paper --seed 1",
    "--strategy tsp --gpus 4 --ctx 8k --noise paper --seed 1",
    "--strategy ring --gpus 4 --ctx 4k --noise paper --seed 1",
    "--strategy kvr-s --gpus 4 --ctx 8k --topology bus --link-bandwidth 10GB/s",
    "--strategy tsp --gpus 4 --ctx 8k --topology bus --link-bandwidth 10GB/s",
    "--strategy tsp --gpus 4 --ctx 8k --breakdown",
    "--strategy kvr-s --gpus 4 --ctx 8k --breakdown",
)
MODELS = (  # model, cluster, GPUs, context, all kinds of layers
    ("deepseek-v3", "h200-nvlink", 8, "16k"),
    ("deepseek-v3.2", "b200-nvlink5", 8, "32k"),
    ("glm-5", "b300-nvlink5", 8, "32k"),
    ("kimi-k2", "b300-nvlink5", 8, "16k"),
    ("gpt-oss-120b", "h100-nvlink", 4, "16k"),
    ("gpt-oss-20b", "l40s-pcie", 2, "8k"),
    ("qwen3-235b-a22b", "h200-nvlink", 8, "32k"),
    ("qwen3-next-80b-a3b", "h200-nvlink", 4, "32k"),
    ("qwen3.5-397b-a17b", "b300-nvlink5", 8, "32k"),
    ("qwen3.5-27b", "h100-nvlink", 2, "8k"),
    ("nemotron-h-56b", "h200-nvlink", 4, "16k"),
    ("nemotron-3-super-120b-a12b", "h200-nvlink", 4, "16k"),
    ("gemma-3-27b", "h100-nvlink", 4, "32k"),
    ("llama-4-scout", "b200-nvlink5", 8, "64k"),
    ("minimax-m2.5", "h200-nvlink", 4, "16k"),
    ("llama-3.1-405b", "h100-2x8-ndr400", 16, "16k"),
    ("bloom-176b", "a100-nvlink", 8, "2k"),
)
RECURRENT = ("qwen3-next", "qwen3.5", "nemotron")  # models whose recurrent layers zigzag cannot split
ENGINES = ("hf-2023", "vllm-2023", "tensorrt-llm-0.5", "lmdeploy-0.1", "loongserve-2024", "mooncake-vllm-0.11")
LISTS = (
    *(f"{kind} list" for kind in ("profiles", "models", "clusters", "engines")),
    *(f"profiles show {name}" for name in ("a100-eager", "h200-flash", "b200-flash")),
    *(f"models show {name}" for name in ("qwen3-8b", "deepseek-v3.2", "qwen3-next-80b-a3b", "gpt-oss-120b")),
    "models show nemotron-h-56b",
    "clusters show h100-2x8-ndr400",
    "engines show serving",
)


def questions(folder: Path) -> Iterator[str]:
    """Yield command lines of `plan`, `simulate`, `table`, `map`, `capacity` and other commands."""
    kinds = (plans(), simulations(), models(), engines(), tables(folder), maps(), fleets(), predictors(folder))
    yield from itertools.chain(*kinds, LISTS)


def plans() -> Iterator[str]:
    """Plans of small models on few GPUs, of several machines, with slow links, and with all settings of a search."""
    for gpus, ctx, model in itertools.product((1, 2, 4, 8), ("1k", "4k", "16k"), ("llama-7b", "falcon-7b", "qwen3-8b")):
        yield f"plan --gpus {gpus} --ctx {ctx} --model {model}"
    for model, cluster, gpus, ctx in MACHINES:
        for extra in ("", " --strategies all", " --batch 2", " --cached-prefix 2k"):
            yield f"plan --model {model} --cluster {cluster} --gpus {gpus} --ctx {ctx}{extra}"
    for extra in SETTINGS:
        yield f"plan --gpus 3 --ctx 6k --strategies single,tsp,kvr-e,kvr-s {extra}"
    for gpus, link in itertools.product((2, 3, 8), ("1GB/s", "10GB/s")):
        yield f"plan --gpus {gpus} --ctx 8k --link-bandwidth {link} --strategies tsp,kvr-e,kvr-s"
        yield f"plan --gpus {gpus} --ctx 4k --topology bus --link-bandwidth {link} --strategies tsp,kvr-e,kvr-s,pp-s"


def simulations() -> Iterator[str]:
    """Simulations of all strategies, with both executors, on several networks, with noise and with cached prefixes."""
    for strategy, executor, ctx in itertools.product(STRATEGIES, ("batch", "event"), ("2k", "8k")):
        gpus = 1 if strategy == "single" else 4
        yield f"simulate --strategy {strategy} --gpus {gpus} --ctx {ctx} --executor {executor}"
    for strategy, model in itertools.product(STRATEGIES[1:], ("llama-3-8b", "qwen3-30b-a3b")):
        yield f"simulate --strategy {strategy} --gpus 4 --ctx 12k --model {model} --cluster h100-nvlink"
    yield from (f"simulate {one}" for one in SIMULATIONS)
    noise = "--noise jitter:0.05 --seed 7 --samples 8"
    for strategy, extra in itertools.product(
        ("kvr-s", "kvr-b", "tsp", "zigzag", "zigzag-ring", "ring", "ulysses", "tp", "pp-s", "kvr-direct", "tp2+pp2"),
        (
            "--cached-prefix 4k",
            "--topology bus --link-bandwidth 20GB/s",
            "--batch 4",
            "--engine serving",
            "--topology chain --link-latency 20us",
            noise,
        ),
    ):
        if extra != noise or strategy not in ("tp", "pp-s", "tp2+pp2"):  # noise is defined per GPU
            yield f"simulate --strategy {strategy} --gpus 4 --ctx 8k {DENSE} {extra}"
    for strategy, placement in itertools.product(
        ("kvr-s", "tsp", "zigzag", "ring", "pp-s", "kvr-e"), ("all", "sharded", "host", "remote:10GB/s")
    ):
        if (strategy, placement) != ("pp-s", "sharded"):
            prefix = f"--cached-prefix 8k --prefix-placement {placement}"
            yield f"simulate --strategy {strategy} --gpus 4 --ctx 16k {DENSE} {prefix}"


def models() -> Iterator[str]:
    """Plans and simulations of all kinds of models, and of two data types."""
    for model, cluster, gpus, ctx in MODELS:
        machine = f"--model {model} --cluster {cluster} --gpus {gpus} --ctx {ctx}"
        context = "" if model.startswith(RECURRENT) else ",zigzag"
        prefix = "--cached-prefix " + ("1k" if ctx == "2k" else "4k")
        for extra in ("", "--engine serving", f"--strategies tp,pp,pp-s,tp2+pp{context}", prefix):
            yield f"plan {machine} {extra}".strip()
        yield f"simulate --strategy tp {machine} --breakdown"
    for extra in ("", "--expert-parallel", "--batch 3"):
        yield f"plan --model qwen3-30b-a3b --cluster h200-nvlink --gpus 8 --ctx 24k --strategies all {extra}"
    for dtype, cluster in itertools.product(("bf16", "fp8"), ("h100-nvlink", "b200-nvlink5", "l40s-pcie")):
        yield f"plan --model llama-3.1-70b --cluster {cluster} --gpus 8 --ctx 8k --dtype {dtype}"


def engines() -> Iterator[str]:
    """Plans with the terms of an engine, and launches."""
    for engine in ENGINES:
        yield f"plan --model llama-2-13b --cluster a100-nvlink --gpus 4 --ctx 4k --engine {engine}"
    for emit, option in itertools.product(("vllm", "sglang", "trtllm"), ("--emit", "--only-deployable")):
        yield f"plan --model llama-3.1-70b --cluster h100-nvlink --gpus 8 --ctx 32k {option} {emit}"


def tables(folder: Path) -> Iterator[str]:
    """A table, its lookups, and the strategy that uses it."""
    table = folder / "table.json"
    yield f"table build --gpus 2,4 --ctx 2k:6k:2k --jobs 1 -o {table}"
    for gpus, ctx in itertools.product((2, 4), ("2k", "3000", "4k", "5k", "8k")):
        yield f"table lookup {table} --gpus {gpus} --ctx {ctx}"
    yield f"simulate --strategy kvr-p --gpus 4 --ctx 5000 --table {table}"


def maps() -> Iterator[str]:
    """Maps of strategies."""
    yield "map --ctx 1k:16k:x4 --gpus 2,4,8"
    yield "map --ctx 2k,8k --gpus 2,4 --link-bandwidths 10GB/s,200GB/s"
    yield "map --ctx 8k,32k --gpus 2,8 --model llama-3-8b --cluster h100-nvlink --strategies all"


def fleets() -> Iterator[str]:
    """Capacity plans."""
    for extra in ("", "--uniform-only", "--percentile 90", "--max-num-batched-tokens 4k", "--sure"):
        yield f"capacity llama-7b a100-nvlink {WORKLOAD} --replications 2 {extra}"
    yield f"capacity {WORKLOAD} --replications 2 {DENSE}"
    decoding = "--tpot 30ms --kv-transfer-bandwidth 50GB/s --price-per-gpu-hour 2"
    yield f"capacity {WORKLOAD} --replications 2 --group-sizes 1,2 {DENSE} {decoding}"


def predictors(folder: Path) -> Iterator[str]:
    """A predictor and its lookups."""
    predictor = folder / "predictor.json"
    yield f"predictor build {TWO_GPUS} --ctx 8k --strategy tp --jobs 1 -o {predictor}"
    for ctx, cached in itertools.product(("1k", "3000", "6k"), (0, 512)):
        yield f"predictor lookup {predictor} --ctx {ctx} --cached-prefix {cached}"


def record(path: Path, only: str = "") -> None:
    """Answer the questions that match a regular expression in this process; write `{question: {"code", "answer"}}`."""
    from kvrsim.cli import main as cli

    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        asked = [question for question in dict.fromkeys(questions(Path(folder))) if re.search(only, question)]
        for number, question in enumerate(asked, 1):
            started = time.perf_counter()
            out, errors = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
                code = cli.main([*question.split(), "--json"])
            text = (out.getvalue() or errors.getvalue()).replace(folder, "FOLDER")
            answer = json.loads(text) if text.startswith("{") else text
            answers[question.replace(folder, "FOLDER")] = {"code": code, "answer": answer}
            if code == 2:
                print(f"refused: {question}: {text}", file=sys.stderr, flush=True)
            if (took := time.perf_counter() - started) > 5:
                print(f"{took:.0f} s: {question}", file=sys.stderr, flush=True)
            if number % 20 == 0:
                print(f"{number} of {len(asked)} questions", file=sys.stderr, flush=True)
    path.write_text(json.dumps(answers, indent=1))


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Yield one line for each place where two answers differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            if key not in VOLATILE:
                if key not in old or key not in new:
                    yield f"{where}.{key}: {'added' if key not in old else 'removed'}"
                else:
                    yield from differences(old[key], new[key], f"{where}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{where}[{index}]")
    elif isinstance(old, float | int) and isinstance(new, float | int) and not isinstance(old, bool):
        if abs(old - new) > TOLERANCE * max(abs(old), abs(new)):
            yield f"{where}: {old!r} -> {new!r}"
    elif old != new:
        yield f"{where}: {old!r} -> {new!r}"


def compare(old: Path, new: Path) -> int:
    """Print the differences of two recordings, question by question; return 1 if there are any, else 0."""
    before, after = json.loads(old.read_text()), json.loads(new.read_text())
    differing = 0
    if set(after) < set(before):  # NEW was recorded with --only
        before = {question: before[question] for question in after}
    for question in dict.fromkeys((*before, *after)):
        if question not in before or question not in after:
            found = ["added" if question in after else "removed"]
        else:
            found = list(differences(before[question], after[question]))
        if found:
            differing += 1
            print(question, *found, sep="\n    ")
    print(f"{len({*before, *after})} questions, {differing} answered differently")
    return int(differing > 0)


def main() -> int:
    """Record answers or compare two recordings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    recorder = commands.add_parser("record")
    recorder.add_argument("file", type=Path)
    recorder.add_argument("--only", default="", help="a regular expression: only the questions that it matches")
    both = commands.add_parser("compare")
    both.add_argument("old", type=Path)
    both.add_argument("new", type=Path)
    asked = parser.parse_args()
    if asked.command == "record":
        record(asked.file, asked.only)
        return 0
    return compare(asked.old, asked.new)


if __name__ == "__main__":
    sys.exit(main())
