"""Random models: heads, windows and experts within wide limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvrsim.io.json_text import JsonObject
from kvrsim.model.architectures import read_config
from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers import RECURRENCE_TITLES, Recurrence
from kvrsim.model.spec import ModelSpec
from kvrsim.profile.rates.gemm import Product, merged
from tests.building.drawing import Draws, strategy_of

ARCHITECTURES = ("llama", "gemma2", "mistral", "mixtral", "qwen3_moe", "falcon")
QUANTISED: tuple[dict[str, Any], ...] = (
    {"quant_method": "fp8"},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["self_attn", "layers.1"]},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["mlp"]},
    {"quant_method": "gptq", "bits": 8, "group_size": 32, "lm_head": True},
    {"quant_method": "mxfp4"},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
)


def any_model(rng: Draws, *, layers: tuple[int, int] = (1, 4), kind: str | None = None) -> ModelSpec:
    """Heads shared or not, windows on all or on alternate layers, experts on all or on some layers; some quantised."""
    kv_heads = rng.choice([1, 2, 4])
    heads = kv_heads * rng.choice([1, 2, 4])
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
    if model_type == "qwen3_moe":
        config |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": rng.choice([8, 700])}
        config |= {"decoder_sparse_step": rng.choice([1, 2])}
    if model_type == "falcon":
        config |= {"alibi": rng.random() < 0.5, "parallel_attn": rng.random() < 0.5}
        config |= {"multi_query": rng.random() < 0.5}
    if rng.random() < 0.3:
        config["quantization_config"] = rng.choice(QUANTISED)
    return read_config(JsonObject(fields=config, where="test"), "random")


def with_layers(model: ModelSpec, **changes: Any) -> ModelSpec:
    """The same with fields of every layer changed."""
    return replace(model, layers=tuple(replace(layer, **changes) for layer in model.layers))


def with_mixers(model: ModelSpec, **changes: Any) -> ModelSpec:
    """The same with fields of every layer's mixer changed."""
    layers = (replace(layer, mixer=layer.mixer and replace(layer.mixer, **changes)) for layer in model.layers)
    return replace(model, layers=tuple(layers))


def any_hybrid(rng: Draws, *, layers: tuple[int, int] = (1, 4)) -> ModelSpec:
    """Layers of attention, layers with a state and layers of an MLP alone, in any order."""
    model = any_model(rng, layers=layers, kind="llama")
    heads, dim = rng.choice([1, 4, 16]), rng.choice([16, 64, 128])
    width, hidden = heads * dim, model.hidden_size
    state = Recurrence(
        kind=rng.choice(list(RECURRENCE_TITLES)),
        projections=(Gemm(name="in_proj", in_features=hidden, out_features=4 * width),),
        output=(Gemm(name="out_proj", in_features=width, out_features=hidden),),
        num_key_heads=heads,
        num_value_heads=heads,
        key_head_dim=dim,
        value_head_dim=dim,
        conv_channels=rng.choice([0, 3 * width]),
        conv_kernel=4,
    )
    drawn = [rng.choice(["attention", "state", "state", "mlp"]) for _ in model.layers]
    drawn[rng.randint(0, len(drawn) - 1)] = "state"
    changed = {
        "attention": lambda layer: layer,
        "state": lambda layer: replace(layer, mixer=state),
        "mlp": lambda layer: replace(layer, mixer=None, norms_before_mixer=0),
    }
    return replace(model, layers=tuple(changed[kind](layer) for kind, layer in zip(drawn, model.layers, strict=True)))


def weights_of(model: ModelSpec) -> int:
    """Of the layers' matrices, those that a token passes through."""
    return sum(
        sum(part.num_weights for part in layer.matrices if part is not layer.router)
        + max(1, layer.num_experts_per_tok) * sum(part.num_weights for part in layer.mlp)
        for layer in model.layers
    )


def products_of(model: ModelSpec) -> list[Product]:
    """Of the model's products, alone and as a serving engine merges them."""
    found: dict[Product, None] = {}
    for layer in model.layer_kinds:
        for gemms in (layer.mixer.projections, layer.mixer.output, layer.mlp):
            alone = [Product(gemm.in_features, gemm.out_features) for gemm in gemms]
            found |= dict.fromkeys((*alone, *merged(alone)))
    return list(found)


models = strategy_of(any_model)
