"""Random models with many kinds of heads, windows and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvrsim.io.schema import JsonObject
from kvrsim.kernels.gemm import Product, join_products
from kvrsim.model.gemm import Gemm, Split
from kvrsim.model.load import read_config
from kvrsim.model.mixers import Attention, LatentAttention, Mixer, Recurrence
from kvrsim.model.spec import LayerSpec, ModelSpec
from tests.building.drawing import Draws, strategy_of

ARCHITECTURES = ("llama", "gemma2", "mistral", "mixtral", "qwen3_moe", "falcon")
EXPERT_KEYS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
QUANTISED: tuple[dict[str, Any], ...] = (
    {"quant_method": "fp8"},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["self_attn", "layers.1"]},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["mlp"]},
    {"quant_method": "gptq", "bits": 8, "group_size": 32, "lm_head": True},
    {"quant_method": "mxfp4"},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
)


def any_model(
    rng: Draws, *, layers: tuple[int, int] = (1, 4), kind: str | None = None, divisible: bool = False
) -> ModelSpec:
    """A random model with shared or separate KV heads, windows or experts on all or some layers; 30 % are quantised.

    divisible: whether groups of four GPUs divide the heads, and divide or repeat the KV heads.
    """
    kv_heads = rng.choice([1, 2, 4])
    least = 4 // kv_heads if divisible else 1
    heads = kv_heads * rng.choice([size for size in (1, 2, 4) if size >= least])
    head_dim = rng.choice([8, 32, 64, 128])
    model_type = kind or rng.choice(ARCHITECTURES)
    config: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": rng.randint(*layers),
        "intermediate_size": rng.choice([16, 500, 4000]),
        "vocab_size": rng.choice([50, 5000, 50000]),
    }
    if model_type in ("gemma2", "mistral"):
        config["sliding_window"] = rng.choice([1, 7, 64, 500, 4096])
    if model_type == "mixtral":
        config |= {"num_local_experts": 4, "num_experts_per_tok": rng.randint(1, 4), "sliding_window": None}
        del config["head_dim"]  # derived by kvrsim; with this key the class of transformers would be needed
    if model_type == "qwen3_moe":
        config |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": rng.choice([8, 700])}
        config |= {"decoder_sparse_step": rng.choice([1, 2])}
    if model_type == "falcon":
        config |= {"alibi": rng.random() < 0.5, "parallel_attn": rng.random() < 0.5}
        config |= {"multi_query": rng.random() < 0.5}
    if rng.random() < 0.3:
        config["quantization_config"] = rng.choice(QUANTISED)
    return _read(config)


def _read(config: dict[str, Any]) -> ModelSpec:
    """Read a config.json; one with experts on every second layer is two models, since its class takes 0.2 s to read."""
    if config.get("decoder_sparse_step") != 2:
        return read_config(JsonObject(fields=config, where="test"), "random")
    experts = _read(config | {"decoder_sparse_step": 1})
    dense = _read({key: value for key, value in config.items() if key not in EXPERT_KEYS} | {"model_type": "qwen3"})
    layers = list(dense.layers)
    layers[1::2] = experts.layers[1::2]
    return replace(experts, layers=tuple(layers))


def gemm(name: str, in_features: int, out_features: int, *, split: Split = "whole") -> Gemm:
    return Gemm(name=name, in_features=in_features, out_features=out_features, split=split)


def with_mixers(model: ModelSpec, **changes: Any) -> ModelSpec:
    """The same model with these fields of every layer's mixer changed."""
    layers = (replace(layer, mixer=layer.mixer and replace(layer.mixer, **changes)) for layer in model.layers)
    return replace(model, layers=tuple(layers))


def weights_of(model: ModelSpec) -> int:
    """Number of weights in the layers' matrices that are used for one token, without the router."""
    return sum(
        sum(part.num_weights for part in layer.matrices if part is not layer.router)
        + max(1, layer.num_experts_per_tok) * sum(part.num_weights for part in layer.mlp)
        for layer in model.layers
    )


def products_of(model: ModelSpec) -> list[Product]:
    """The distinct matrix products of the model, both single and merged as a serving engine merges them."""
    result: dict[Product, None] = {}
    for layer in model.layer_kinds:
        mixer = () if layer.mixer is None else (layer.mixer.projections, layer.mixer.output)
        for gemms in (*mixer, layer.mlp):
            alone = [Product(gemm.in_features, gemm.out_features) for gemm in gemms]
            result |= dict.fromkeys((*alone, *join_products(alone)))
    return list(result)


def any_mixed_model(rng: Draws, *, layers: tuple[int, int] = (1, 4), divisible: bool = False) -> ModelSpec:
    """A random model whose layers differ: full, windowed or chunked attention, latents, states, or only an MLP."""
    model = any_model(rng, layers=layers, divisible=divisible)
    least_heads = 4 if divisible else 2
    own = [rng.choice([layer, *_others(rng, model, layer, least_heads)]) for layer in model.layers]
    if all(layer.mixer is None for layer in own):
        own[0] = model.layers[0]
    return replace(model, layers=tuple(own))


def _others(rng: Draws, model: ModelSpec, layer: LayerSpec, least_heads: int) -> list[LayerSpec]:
    """The layer with other mixers, without a mixer, and without an MLP."""
    hidden, heads = model.hidden_size, least_heads * rng.choice([1, 2, 4])
    nope, rope, width, rank = rng.choice([16, 128]), rng.choice([8, 64]), rng.choice([16, 128]), rng.choice([32, 512])
    latent = LatentAttention(
        projections=(
            gemm("q_proj", hidden, heads * (nope + rope), split="columns"),
            gemm("kv_a_proj", hidden, rank + rope),
        ),
        expand=gemm("kv_b_proj", rank, heads * (nope + width), split="columns"),
        output=(gemm("o_proj", heads * width, hidden, split="rows"),),
        num_attention_heads=heads,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=width,
    )
    channels = heads * (2 * nope + width)
    recurrence = Recurrence(
        kind=rng.choice(["gated_delta", "kda", "mamba2"]),
        projections=(gemm("in_proj", hidden, channels + 2 * heads, split="columns"),),
        output=(gemm("out_proj", heads * width, hidden, split="rows"),),
        num_key_heads=heads,
        num_value_heads=heads,
        key_head_dim=nope,
        value_head_dim=width,
        conv_channels=channels,
        conv_kernel=4,
    )
    mixers = (latent, recurrence, *_narrower(rng, layer))
    alone = replace(layer, mlp=(), shared_mlp=(), num_experts=0, num_experts_per_tok=0, router=None)
    return [*(replace(layer, mixer=mixer) for mixer in mixers), replace(layer, mixer=None), alone]


def _narrower(rng: Draws, layer: LayerSpec) -> list[Mixer]:
    mixer = layer.mixer
    return [replace(mixer, attention_chunk=rng.choice([64, 500]))] if isinstance(mixer, Attention) else []


models = strategy_of(any_model)
