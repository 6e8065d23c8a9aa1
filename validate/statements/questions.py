"""Random questions: models, clusters, contexts, engines, batches, data types and cached prefixes of the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from numpy.random import Generator

import kvrsim
from kvrsim.units import parse_tokens

_Value = TypeVar("_Value")

GPUS = ("a100-80gb", "a100-40gb", "h100", "h200", "h20", "b200", "l40s")
NODE = 8  # GPUs of a node
NUM_GPUS = {1: 0.15, 2: 0.2, 4: 0.25, 8: 0.33, 16: 0.05, 32: 0.01, 128: 0.005, 1024: 0.005}  # their shares
CONTEXTS = ("1k", "2k", "4k", "5000", "8k", "16k", "22000", "32k", "64k", "128k", "256k", "1m", "10m")
SHORT_CONTEXTS = ("1k", "4k", "16k")
LONG_CONTEXTS = ("256k", "1m", "4m", "10m")
ENGINES = ("vllm", "sglang", "trtllm")
LARGE = 64  # more GPUs are asked only for models that are cheap to simulate
DENSE = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "qwen3-32b")


def choose(rng: Generator, values: Sequence[_Value]) -> _Value:
    """One of the values, each as likely as the others."""
    return values[int(rng.integers(len(values)))]


def cluster_name(num_gpus: int, gpu: str) -> str:
    """The name of a cluster of this size: "4xh100", or "2x8xh100" for several nodes."""
    if num_gpus <= NODE:
        return f"{num_gpus}x{gpu}"
    return f"{num_gpus // NODE}x{NODE}x{gpu}"


def draw_plan(rng: Generator) -> dict[str, str]:
    """Draw the options of a plan."""
    num_gpus = int(rng.choice(list(NUM_GPUS), p=list(NUM_GPUS.values())))
    model = choose(rng, DENSE if num_gpus > LARGE else kvrsim.models())
    options = {"model": model, "cluster": cluster_name(num_gpus, choose(rng, GPUS)), "ctx": choose(rng, CONTEXTS)}
    if num_gpus > LARGE:
        options["ctx"] = choose(rng, ("256k", "1m"))
    if options["cluster"].endswith("xl40s"):  # a bus, on which each message is simulated
        options["ctx"] = choose(rng, SHORT_CONTEXTS)
        options["cluster"] = cluster_name(min(num_gpus, 4), "l40s")
    if rng.random() < 0.8:
        options["search_budget"] = "0.1s"
    if rng.random() < 0.5:
        options["engine"] = choose(rng, ENGINES)
    if rng.random() < 0.15:
        options["batch"] = choose(rng, ("2", "4", "16"))
    if rng.random() < 0.15:
        options["dtype"] = "fp8"
    if rng.random() < 0.15:
        context = parse_tokens(options["ctx"], "ctx")
        options["cached_prefix"] = str(int(context * choose(rng, (0.25, 0.5, 0.9))))
    return options


def draw_tight(rng: Generator) -> dict[str, str]:
    """Draw the options of a plan that probably does not fit: a large model or a long context on few GPUs."""
    options = draw_plan(rng)
    if rng.random() < 0.5:
        options["model"] = choose(rng, ("llama-3.1-405b", "deepseek-v3", "kimi-k2", "falcon-180b", "bloom-176b"))
        options["cluster"] = cluster_name(choose(rng, (1, 2, 4, 8)), choose(rng, GPUS))
    else:
        options["ctx"] = choose(rng, LONG_CONTEXTS)
        options["cluster"] = cluster_name(choose(rng, (1, 2, 4, 8)), choose(rng, ("a100-40gb", "h100")))
        options["batch"] = choose(rng, ("1", "4", "16"))
    options.pop("cached_prefix", None)
    return options
