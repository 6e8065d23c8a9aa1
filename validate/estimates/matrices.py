"""Weights that a token meets on one of eight GPUs, as kvrsim shares a model out and as the package does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from kvrsim.cost.tensor_parallel import share_of
from kvrsim.model.load import load_model
from validate.estimates.cases import NUM_GPUS

FRAMEWORK = "sglang"
_GATE = 1e-3  # of a layer's weights

# Built-in models that the package's tables of operations divide into products; by its names for them.
MODELS: Mapping[str, str] = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.1-405b": "meta-llama/Meta-Llama-3.1-405B",
    "llama-4-scout": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "qwen3.5-27b": "Qwen/Qwen3.5-27B",
    "qwen3.5-35b-a3b": "Qwen/Qwen3.5-35B-A3B",
    "qwen3.5-397b-a17b": "Qwen/Qwen3.5-397B-A17B",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "minimax-m2.5": "nvidia/MiniMax-M2.5-NVFP4",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "nemotron-h-56b": "nvidia/Nemotron-H-56B-Base-8K",
    "nemotron-3-nano-30b-a3b": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nemotron-3-super-120b-a12b": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
}
REASONS: Mapping[str, str] = {
    "deepseek-v3": "the package counts experts in the first three layers, too, which have a dense MLP",
    "llama-4-scout": "the package leaves out the shared expert",
    "nemotron-3-super-120b-a12b": (
        "the package splits the projections to the latent of the experts and back; TensorRT-LLM holds them whole on"
        " each GPU, as kvrsim does"
    ),
}


class Weights(NamedTuple):
    """That a token meets in the layers of one GPU, the head and the embedding left out."""

    products: float  # all but routed experts
    experts: float  # of its routed experts, a slice of each


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """One model on both sides."""

    model: str
    ours: Weights
    theirs: Weights

    @property
    def is_equal(self) -> bool:
        """But for a gate of one feature, which the package leaves out."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return all(abs(mine - other) <= _GATE * other for mine, other in pairs)


def counted(stored: Mapping[str, Sequence[float]]) -> tuple[Counted, ...]:
    """All models; `stored`: the package's weights."""
    return tuple(Counted(model=name, ours=own_weights(name), theirs=Weights(*stored[name])) for name in MODELS)


@cache
def own_weights(model: str) -> Weights:
    """Of a built-in model."""
    layers = share_of(load_model(model), NUM_GPUS).layers
    dense = (layer.mlp for layer in layers if not layer.num_experts)
    products = [gemm.num_weights for layer in layers for gemm in layer.matrices]
    products += [gemm.num_weights for mlp in dense for gemm in mlp]
    experts = [layer.num_experts_per_tok * gemm.num_weights for layer in layers for gemm in layer.mlp]
    return Weights(float(sum(products)), float(sum(experts)))


def package_weights(model: str) -> Weights:
    """Of the installed package's operations of a prefill: products by their shapes, experts by theirs."""
    sdk = "aiconfigurator_core.sdk"
    build = import_module(f"{sdk}.config_builders").build_model_config
    slices = NUM_GPUS if load_model(model).active_parameters < load_model(model).num_parameters else 1
    config = build(tp_size=NUM_GPUS, pp_size=1, attention_dp_size=1, moe_tp_size=slices, moe_ep_size=1)
    operations = import_module(f"{sdk}.models").get_model(MODELS[model], config, FRAMEWORK).context_ops
    products = experts = 0.0
    for one in _divided(operations):
        kind = type(one).__name__
        if kind == "GEMM" and "logits" not in one._name:
            products += one._scale_factor * one._n * one._k
        elif kind == "MoE":
            width = one._inter_size // one._moe_tp_size
            experts += one._scale_factor * one._topk * one._hidden_size * width * (3 if one._is_gated else 2)
    return Weights(products, experts)


def _divided(operations: Sequence[Any]) -> Iterator[Any]:
    """Of a module what the package falls back to."""
    for one in operations:
        parts = getattr(one, "_fallback", None)
        yield from _divided(parts) if parts else (one,)
