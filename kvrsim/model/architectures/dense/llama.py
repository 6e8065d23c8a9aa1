"""Llama and its dense relatives: a gated MLP, RMS norms, rotary embeddings."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.parts import Norms, Reader, Shape, assemble, gated_mlp, gemm, read_inner, read_shape
from kvrsim.model.architectures.windows import Windows, qwen_windows, same_window
from kvrsim.model.spec import LayerSpec, ModelSpec

_TWO_NORMS = Norms(count=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How a relative differs from Llama."""

    qkv_bias: bool = False  # biases on the projections to Q, K, V
    output_bias: bool = False  # a bias on the attention's output projection
    mlp_bias: bool = False  # biases in the MLP
    head_dim: int | None = None  # where the key is absent; None: hidden_size over the heads
    norms: Norms = _TWO_NORMS  # of each layer
    tied: bool = False  # tie_word_embeddings where the key is absent
    fused_qkv: str | None = None  # name of one matrix for Q, K, V; None: three
    fused_mlp: bool = False  # the MLP's gate in one matrix with its up projection


def llama_like(config: JsonObject, name: str, family: Family, windows: Windows) -> ModelSpec:
    """A model whose layers differ at most in their window."""
    shape = read_shape(config, head_dim=family.head_dim)
    layers = dense_layers(config, shape, family, windows)
    inner = read_inner(config)
    return assemble(config, name, shape, layers, family.norms, inner=inner, tied=family.tied)


def dense_layers(config: JsonObject, shape: Shape, family: Family, windows: Windows) -> list[LayerSpec]:
    """One layer for each window."""
    hidden, inner = shape.hidden, read_inner(config)
    qkv, mlp = shape.separate_qkv(family.qkv_bias), gated_mlp(hidden, inner, family.mlp_bias)
    if family.fused_qkv is not None:
        qkv = shape.fused_qkv(family.fused_qkv, family.qkv_bias)
    if family.fused_mlp:
        mlp = (gemm("gate_up_proj", hidden, 2 * inner, family.mlp_bias, "columns"), mlp[-1])
    mixer = shape.attention(qkv, "o_proj", family.output_bias, qk_norm=family.norms.qk)
    kinds = {
        window: family.norms.layer(shape, replace(mixer, sliding_window=window), mlp, gated=True)
        for window in set(windows)
    }
    return [kinds[window] for window in windows]


def llama(config: JsonObject, name: str) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    family = Family(qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias", False))
    return llama_like(config, name, family, [None] * read_shape(config).layers)


def mistral(config: JsonObject, name: str) -> ModelSpec:
    return llama_like(config, name, Family(), same_window(config, 4096))


def qwen2(config: JsonObject, name: str) -> ModelSpec:
    windows = qwen_windows(config, lambda layer, boundary: layer >= boundary)
    return llama_like(config, name, Family(qkv_bias=True), windows)


def qwen3(config: JsonObject, name: str) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    family = Family(qkv_bias=bias, output_bias=bias, head_dim=128, norms=Norms(count=2, qk=True))
    return llama_like(config, name, family, qwen_windows(config, lambda layer, boundary: layer >= boundary))


def phi3(config: JsonObject, name: str) -> ModelSpec:
    return llama_like(config, name, Family(fused_qkv="qkv_proj", fused_mlp=True), same_window(config))


READERS: dict[str, Reader] = {
    "llama": llama,
    "mimo": qwen2,
    "mistral": mistral,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2_5_vl_text": qwen2,
    "qwen2_vl_text": qwen2,
    "qwen3": qwen3,
    "qwen3_vl_text": qwen3,
}
