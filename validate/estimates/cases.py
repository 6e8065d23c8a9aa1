"""The prefills that are compared, and the operations that both sides are divided into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from kvrsim.model.load import load_model
from kvrsim.model.spec import ModelSpec

NUM_GPUS = 8
TOKENS = (4096, 32768)

Experts = Literal["tensor", "expert"]  # how routed experts lie on the GPUs: a slice of each, or whole ones
Framework = Literal["sglang", "trtllm"]
FRAMEWORKS: dict[Framework, str] = {"sglang": "SGLang", "trtllm": "TensorRT-LLM"}

# Rows of the comparison, in the order in which the page has them.
OPERATIONS = {
    "projections": "projections before attention",
    "attention": "attention",
    "window": "attention to a window",
    "scan": "convolution and scan",
    "output": "output projections",
    "router": "router",
    "experts": "routed experts",
    "shared": "shared expert",
    "dense": "dense MLP",
    "norms": "norms and residuals",
    "steps": "rotary embedding, gates, copies",
    "all_reduce": "all-reduces",
    "ends": "embedding, head",
    "clock": "the clock under load",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model, and what the package calls it."""

    name: str  # kvrsim's own
    title: str
    package_name: str  # on the Hugging Face hub
    cache_and_attention: str | None = None  # type of cache and attention that the package is asked for; None: its own

    def spec(self) -> ModelSpec:
        """As kvrsim reads it."""
        return _spec(self.name)


class Gpu(NamedTuple):
    """A GPU by the names of both sides."""

    title: str
    profile: str
    cluster: str
    system: str  # of the package


MODELS = (
    # By itself the package takes an FP8 cache and FP8 attention, of which its tables for Hopper have no rows.
    Model(
        name="deepseek-v3",
        title="DeepSeek-V3",
        package_name="deepseek-ai/DeepSeek-V3",
        cache_and_attention="bfloat16",
    ),
    Model(name="gpt-oss-120b", title="GPT-OSS 120B", package_name="openai/gpt-oss-120b"),
    Model(name="qwen3-235b-a22b", title="Qwen3-235B-A22B", package_name="Qwen/Qwen3-235B-A22B"),
    Model(name="qwen3.5-397b-a17b", title="Qwen3.5-397B-A17B", package_name="Qwen/Qwen3.5-397B-A17B"),
)
GPUS = (
    Gpu("H100", "h100-flash", "h100-nvlink", "h100_sxm"),
    Gpu("H200", "h200-flash", "h200-nvlink", "h200_sxm"),
    Gpu("B200", "b200-flash", "b200-nvlink5", "b200_sxm"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One prefill on eight GPUs, batch 1."""

    model: Model
    gpu: Gpu
    experts: Experts
    tokens: int


def cases() -> Iterator[Case]:
    """All that the page has."""
    for model in MODELS:
        for gpu in GPUS:
            for experts in ("tensor", "expert"):
                for tokens in TOKENS:
                    yield Case(model=model, gpu=gpu, experts=experts, tokens=tokens)


@cache
def _spec(name: str) -> ModelSpec:
    return load_model(name)
