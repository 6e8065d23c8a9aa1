"""Mutated files, read by commands: models, clusters, profiles, tables, traces, measurements."""

from __future__ import annotations

import contextlib
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from fuzz_law import check_command

import kvrsim
from calibrate.data import Measurement, write_measurements

_DATA = Path(kvrsim.__file__).parent / "data"
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 10**400, 2**63, 1e300, -1e300, float("nan"), float("inf"), 1e-300),
    *("", "x", "nan", "\0", "\x1b[31m", "$\\frac{$", "<script>", "a" * 5000, "\ud800"),
    *([], {}, [[[]]], [1, "x", None], {"a": {"b": []}}, [0] * 100),
)
_TEXTS = (
    *('"', "{", "}", "[", ",", ":", "\n", "\0", "NaN", "Infinity", "1e999", "-", "9" * 400, "\ufeff", "\x1b[2J"),
    "é",
)
_COMMANDS: dict[str, tuple[str, ...]] = {
    "model.json": ("plan --ctx 512 --gpus 2 --model {} --json", "models show {} --json", "models show {}"),
    "quantised.json": ("plan --ctx 512 --gpus 2 --model {} --json", "models show {} --json"),
    "cluster.json": ("plan --ctx 512 --gpus 2 --cluster {} --json", "clusters show {} --json", "clusters show {}"),
    "profile.json": (*("plan --ctx 512 --gpus 2 --profile {} --json", "profiles show {} --json", "profiles show {}"),),
    "table.json": (
        *("table show {}", "table show {} --json", "table lookup {} --gpus 2 --ctx 700"),
        *(
            "table lookup {} --gpus 2 --ctx 5000 --json",
            "simulate --strategy kvr-p --gpus 2 --ctx 700 --table {} --json",
        ),
    ),
    "trace.csv": ("capacity --requests {} --slo-ttft 2s --max-gpus 2 --json",),
    "azure.csv": ("capacity --requests {} --slo-ttft 2s --max-gpus 2",),
    "mooncake.jsonl": ("capacity --requests {} --slo-ttft 2s --max-gpus 2 --json",),
    "links.csv": ("calibrate fit --compute {} --gpu h100 -o p.json", "calibrate fit --links {} -o p.json --gpu h100"),
}


def _quantised() -> dict[str, Any]:
    """A model file with every kind of key that describes the storage of weights."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": False}
    group = {"targets": ["Linear", "re:.*mlp.*"], "weights": weights, "input_activations": {"num_bits": 8}}
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*", "model.layers.*.mlp"],
        "kv_cache_scheme": {"num_bits": 8},
    }
    model: dict[str, Any] = json.loads((_DATA / "models" / "llama-7b.json").read_text(encoding="utf-8"))
    return model | {"quantization_config": config}


@cache
def originals() -> dict[str, bytes]:
    """The content of a valid file of each kind; the first call writes links.csv into the current folder."""
    table = kvrsim.build_table(ctx=[512, 1024], gpus=[2], profile="roofline").to_dict()
    about: dict[str, Any] = {"operation": "send_recv", "kernel": "gloo", "device": "h100", "source": "made"}
    about |= {"ranks": 2, "nodes": 1, "src": 0, "dst": 1}
    rows = [Measurement(**about, bytes=2**size, median_s=1e-5 * size) for size in range(10, 20)]
    write_measurements("links.csv", rows, origin={"gpu": "h100"})
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,100,10\n2023-11-16 18:15:48.68,300,20\n"
    request = {"timestamp": 1000, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}
    texts = {
        "model.json": (_DATA / "models" / "llama-7b.json").read_text(encoding="utf-8"),
        "quantised.json": json.dumps(_quantised()),
        "cluster.json": (_DATA / "clusters" / "h100-2x8-ndr400.json").read_text(encoding="utf-8"),
        "profile.json": (_DATA / "profiles" / "a100-eager.json").read_text(encoding="utf-8"),
        "table.json": json.dumps(table),
        "trace.csv": "arrival_s,context_tokens,output_tokens\n0.5,100,10\n2.5,300,20\n",
        "azure.csv": azure,
        "mooncake.jsonl": f"{json.dumps(request)}\n{json.dumps(request | {'timestamp': 3000})}\n",
        "links.csv": Path("links.csv").read_text(encoding="utf-8"),
    }
    return {name: text.encode() for name, text in texts.items()}


def random_file(rng: random.Random) -> int:
    """Write one mutated file into the current folder and run a command that reads it; return the exit code."""
    name = rng.choice(sorted(_COMMANDS))
    content = originals()[name]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        content = _mutated(content, rng)
    Path(name).write_bytes(content)
    try:
        return check_command([word.format(name) for word in rng.choice(_COMMANDS[name]).split()])
    except AssertionError as broken:
        raise AssertionError(f"{broken}\n{name}: {content[:3000]!r}") from None


def _mutated(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.6:
        with contextlib.suppress(ValueError, RecursionError):
            return _json_mutated(content, rng)
    at, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    match rng.randrange(6):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + content[min(end, at + 20) :]
        case 2:
            return content[:end] + content[at:]
        case 3:
            return content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
        case 4:
            return content[:at] + b"[" * 5000 + content[at:]
        case _:
            return content[:at] + rng.choice(_TEXTS).encode() + content[at:]


def _json_mutated(content: bytes, rng: random.Random) -> bytes:
    """Replace, remove or duplicate one value of the JSON text, or of one line if each line is a JSON text."""
    lines = content.decode().splitlines()
    which = rng.randrange(len(lines)) if lines and lines[0].startswith('{"') and len(lines) > 1 else None
    value = json.loads(content if which is None else lines[which])
    places: list[tuple[Any, Any]] = []
    level = [value]
    while level:
        outer = level.pop()
        keys = list(outer) if isinstance(outer, dict) else list(range(len(outer))) if isinstance(outer, list) else []
        places += [(outer, key) for key in keys]
        level += [outer[key] for key in keys]
    if not places:
        raise ValueError("nothing to change")
    outer, key = rng.choice(places)
    match rng.randrange(4):
        case 0:
            del outer[key]
        case 1 if isinstance(outer, dict):
            outer[rng.choice(("surprise", "", "\x1b", key + "x"))] = outer.pop(key)
        case _:
            outer[key] = rng.choice(_VALUES)
    text = json.dumps(value)
    if which is not None:
        lines[which] = text
        text = "\n".join(lines) + "\n"
    return text.encode("utf-8", errors="surrogatepass")
