"""Random calls of the Python API; some arguments have a wrong type."""

from __future__ import annotations

import random
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_law import check_call

import kvrsim

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**70, -(10**400), float("nan"), float("inf"), 1j, 2 + 0j),
    *("", " ", "x", "all", "-1", "8", "1e9", "\0", "\x1b[2J", "a,b", "1,2", b"tsp", Path("nowhere"), object(), len),
    *([], [1], [[1, 2], [3]], (), {}, {"a": 1}, {1, 2}, [None], [1.5, 2.5], ["tsp", 3], [float("nan")]),
    *(np.int64(2), np.float32(1.5), np.bool_(True), np.array(4), np.array([1, 2]), np.array([1.5]), np.array([])),
    *(np.array([[1, 2]]), np.array(["tsp"]), np.datetime64("2020-01-01"), Decimal(2), Fraction(1, 2), range(3)),
)

_SHARED: dict[str, tuple[Any, ...]] = {
    "ctx": ("1k", 512, np.int64(256), "4k", 64),
    "gpus": (1, 2, "2", 4, np.int32(2)),
    "model": ("llama-7b", "qwen3-8b"),
    "profile": ("roofline", "a100-flash", None),
    "cluster": ("h100-nvlink", None),
    "link_bandwidth": ("10GB/s", 1e10, None),
    "link_latency": ("5us", 0, None),
    "topology": ("switch", "bus", "chain", None),
    "attention": ("flash", None),
    "batch": (1, 2, "2"),
    "cached_prefix": (0, "0", 16),
    "dtype": ("fp16", "bf16", None),
    "memory_fraction": (0.9, "0.5", 1),
}
_NOISE = {"noise": (None, "jitter:0.1", "paper"), "samples": (5, 20), "seed": (0, 3, np.int64(7))}
_FUNCTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "make_scenario": _SHARED,
    "plan": _SHARED
    | _NOISE
    | {
        "strategies": ("tsp", ["tsp", "kvr-e"], ("single",), "single,tsp"),
        "method": ("auto", "analytical"),
        "stride": (None, 64, "64"),
        "timeline": (False, True),
    },
    "simulate": _SHARED
    | _NOISE
    | {
        "strategy": ("tsp", "kvr-e", "ring"),
        "partition": (None, [256, 256], np.array([128, 128]), (64,)),
        "executor": (None, "batch", "event"),
        "timeline": (False, True),
        "breakdown": (False, True),
    },
    "build_table": _SHARED | {"ctx": ("512", [256, 512]), "gpus": ("2", [2]), "jobs": (1,)},
    "map_strategies": _SHARED
    | {
        "ctx": ("512", ["1k"]),
        "gpus": ("2", (2,), np.array([2])),
        "link_bandwidths": (None, ["10GB/s", 1e10]),
        "strategies": ("tsp", ["tsp", "ring"]),
    },
    "capacity": {
        "model": ("llama-7b",),
        "cluster": ("a100-nvlink", "2xa100"),
        "requests": ("synthetic:poisson,rate=1,requests=20,context=256",),
        "slo_ttft": ("2s", 3.0),
        "percentile": (99, "50"),
        "max_gpus": (4, None),
        "group_sizes": ("1,2", [1, 2]),
        "replications": (1, 2),
        "profile": ("roofline",),
        "strategies": (None, "tp", ["single", "tsp"]),
        "tpot": (None, "50ms"),
        "kv_transfer_bandwidth": (None, "10GB/s", 5e10),
        "price_per_gpu_hour": (None, 2.0, "1=2,2=2", {1: 2.0, 2: 3.0}),
        "seed": (0, 3),
        "sure": (False, True),
    },
}
_ALWAYS = {"plan": ("ctx",), "simulate": ("ctx", "strategy"), "make_scenario": ("ctx",), "build_table": ("ctx", "gpus")}
_ALWAYS |= {
    "map_strategies": ("ctx", "gpus"),
    "capacity": ("model", "cluster", "requests", "slo_ttft", "max_gpus", "replications"),
}


def random_call(rng: random.Random) -> bool:
    """Make one random call; return whether it succeeded."""
    name = rng.choice(list(_FUNCTIONS))
    values = _FUNCTIONS[name]
    chosen = {*_ALWAYS[name], *rng.sample(list(values), rng.randint(0, 4)), *(("gpus",) if "gpus" in values else ())}
    arguments = {key: rng.choice(values[key]) for key in sorted(chosen)}
    for key in rng.sample(sorted(arguments), rng.choice((0, 1, 1, 1, 2))):
        arguments[key] = rng.choice(ODD)
    return check_call(getattr(kvrsim, name), arguments, f"kvrsim.{name}(**{arguments!r})")
