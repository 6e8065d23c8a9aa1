"""The JSON answers to a fixed grid of questions, recorded and compared: what a change of the code changes.

python benchmarks/answers.py record FILE          ask every question, write the answers
python benchmarks/answers.py compare OLD NEW      list the differences; exit code 1 where there are any
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Differ between two runs of the same code.
VOLATILE = {"seconds", "version", "created", "search_s"}
TOLERANCE = 1e-9  # relative, of numbers


def questions(folder: Path) -> Iterator[str]:
    """Command lines of `plan`, `simulate`, `table`, `map` and `capacity`."""
    for gpus, ctx, model in itertools.product((1, 2, 4, 8), ("1k", "4k", "16k"), ("llama-7b", "falcon-7b", "qwen3-8b")):
        yield f"plan --gpus {gpus} --ctx {ctx} --model {model}"
    for model, cluster, gpus, ctx in [
        ("llama-3-8b", "h100-nvlink", 4, "32k"),
        ("llama-3-8b", "h200-nvlink", 8, "128k"),
        ("llama-3-70b", "h100-nvlink", 8, "32k"),
        ("llama-3-70b", "h100-2x8-ndr400", 16, "32k"),
        ("qwen3-30b-a3b", "h100-nvlink", 4, "16k"),
        ("mixtral-8x7b", "a100-nvlink", 4, "8k"),
        ("mistral-7b", "a100-nvlink", 4, "32k"),
        ("llama-3-8b", "b200-nvlink5", 8, "64k"),
        ("llama-3-8b", "l40s-pcie", 2, "8k"),
    ]:
        for extra in ("", " --strategies all", " --batch 2", " --cached-prefix 2k"):
            yield f"plan --model {model} --cluster {cluster} --gpus {gpus} --ctx {ctx}{extra}"
    for extra in (
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
    ):
        yield f"plan --gpus 3 --ctx 6k --strategies single,tsp,kvr-e,kvr-s {extra}"
    strategies = [
        "single",
        "tsp",
        "kvr-e",
        "kvr-s",
        "kvr-direct",
        "ring",
        "striped",
        "zigzag",
        "ulysses",
        "tp",
        "pp",
        "tp2+kvr-s",
        "tp2+zigzag",
        "tp2+pp",
    ]
    for strategy, executor, ctx in itertools.product(strategies, ("batch", "event"), ("2k", "8k")):
        gpus = 1 if strategy == "single" else 4
        yield f"simulate --strategy {strategy} --gpus {gpus} --ctx {ctx} --executor {executor}"
    for strategy, model in itertools.product(strategies[1:], ("llama-3-8b", "qwen3-30b-a3b")):
        yield f"simulate --strategy {strategy} --gpus 4 --ctx 12k --model {model} --cluster h100-nvlink"
    for extra in (
        "--strategy kvr-s --partition 5000,3192 --gpus 2 --ctx 8k",
        "--strategy kvr-e --gpus 4 --ctx 8k --noise paper --seed 1",
        "--strategy tsp --gpus 4 --ctx 8k --noise paper --seed 1",
        "--strategy ring --gpus 4 --ctx 4k --noise paper --seed 1",
        "--strategy kvr-e --gpus 4 --ctx 8k --requests 5 --every 200ms",
        "--strategy kvr-s --gpus 4 --ctx 8k --topology bus --link-bandwidth 10GB/s",
        "--strategy tsp --gpus 4 --ctx 8k --topology bus --link-bandwidth 10GB/s",
        "--strategy tsp --gpus 4 --ctx 8k --breakdown",
        "--strategy kvr-s --gpus 4 --ctx 8k --breakdown",
    ):
        yield f"simulate {extra}"
    table = folder / "table.json"
    yield f"table build --gpus 2,4 --ctx 2k:6k:2k --jobs 1 -o {table}"
    for gpus, ctx in itertools.product((2, 4), ("2k", "3000", "4k", "5k", "8k")):
        yield f"table lookup {table} --gpus {gpus} --ctx {ctx}"
    yield f"simulate --strategy kvr-p --gpus 4 --ctx 5000 --table {table}"
    yield "map --ctx 1k:16k:x4 --gpus 2,4,8"
    yield "map --ctx 2k,8k --gpus 2,4 --link-bandwidths 10GB/s,200GB/s"
    yield "map --ctx 8k,32k --gpus 2,8 --model llama-3-8b --cluster h100-nvlink --strategies all"
    workload = "--requests synthetic:poisson,rate=4,requests=500,context=lognormal:3000:0.8,max=12k --slo-ttft 2s"
    for extra in (
        "",
        "--uniform-only",
        "--percentile 90",
        "--mtbf 600s",
        "--order shortest-first",
        "--pack-tokens 4k",
    ):
        yield f"capacity {workload} --replications 2 {extra}"
    yield f"capacity {workload} --replications 2 --model llama-3-8b --cluster h100-nvlink"
    yield "profiles show a100-eager"
    yield "models show qwen3-8b"
    yield "clusters show h100-2x8-ndr400"


def record(path: Path) -> None:
    """Ask every question in this process and write `{question: {"code", "answer"}}`."""
    from kvrsim.cli import main as cli

    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        asked = list(questions(Path(folder)))
        for number, question in enumerate(asked, 1):
            out, errors = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
                code = cli.main([*question.split(), "--json"])
            text = out.getvalue() or errors.getvalue()
            answer = json.loads(text) if text.startswith("{") else text
            answers[question.replace(folder, "FOLDER")] = {"code": code, "answer": answer}
            if number % 20 == 0:
                print(f"{number} of {len(asked)} questions", file=sys.stderr, flush=True)
    path.write_text(json.dumps(answers, indent=1))


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """One line for each place where two answers differ."""
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
    """Print the differences of two recordings, question by question."""
    before, after = json.loads(old.read_text()), json.loads(new.read_text())
    differing = 0
    for question in dict.fromkeys((*before, *after)):
        found = list(differences(before.get(question), after.get(question)))
        if found:
            differing += 1
            print(question, *found, sep="\n    ")
    print(f"{len({*before, *after})} questions, {differing} answered differently")
    return int(differing > 0)


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("record").add_argument("file", type=Path)
    both = commands.add_parser("compare")
    both.add_argument("old", type=Path)
    both.add_argument("new", type=Path)
    asked = parser.parse_args()
    if asked.command == "record":
        record(asked.file)
        return 0
    return compare(asked.old, asked.new)


if __name__ == "__main__":
    sys.exit(main())
