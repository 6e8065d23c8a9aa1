"""Own arithmetic of memory from a model's config.json: parameters, weights, KV cache and activations.

Computed are models of plain layers only: attention over heads (all, grouped or latent), gated, plain or routed MLPs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvrsim

_CONFIGS = Path(kvrsim.__file__).parent / "data" / "models"
_GATED = (
    "llama",
    "internlm",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "minimax_m2",
)  # MLP of three matrices
_PLAIN = ("falcon", "bloom", "gptj")  # MLP of two matrices, four times the hidden size
_LATENT = ("deepseek_v3", "kimi_k2")
_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Elements of a model, from its config.json."""

    hidden: int  # hidden size
    num_layers: int
    num_heads: int
    kv_elements: int  # elements of the cache per token and layer
    head_elements: int  # elements of Q, K, V and the output per token
    mlp_elements: int  # elements between the matrices of an MLP per token
    embedding: int  # parameters of the embedding, and again of the head
    layer_parameters: float  # mean parameters of a layer
    is_dense: bool
    is_quantised: bool

    @property
    def parameters(self) -> float:
        """Parameters of the layers; the embedding is left out, because engines spread or tie it."""
        return self.num_layers * self.layer_parameters


def sizes_of(model: str) -> Sizes | None:
    """The sizes of a built-in model; None where its layers are of other kinds, or only some have a whole cache."""
    config: dict[str, Any] = json.loads((_CONFIGS / f"{model}.json").read_text("utf-8"))
    config |= config.pop("text_config", {})
    kind = config["model_type"]
    if kind not in (*_GATED, *_PLAIN, *_LATENT) or config.get("layer_types"):
        return None
    if config.get("use_sliding_window") or (kind == "mistral" and config.get("sliding_window")):
        return None
    hidden = _first(config, "hidden_size", "n_embed", "n_embd")
    layers = _first(config, "num_hidden_layers", "n_layer")
    heads = _first(config, "num_attention_heads", "n_head")
    width = config.get("head_dim") or hidden // heads
    if kind in _LATENT:
        rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        key, value = config["qk_nope_head_dim"], config["v_head_dim"]
        queries = config["q_lora_rank"]
        attention = hidden * queries + queries * heads * (key + rope) + hidden * (rank + rope)
        attention += rank * heads * (key + value) + heads * value * hidden
        kv_elements, head_elements = rank + rope, 2 * heads * (key + rope + value)
    else:
        kv_heads = _kv_heads(config, kind, heads)
        attention = 2 * hidden * heads * width + 2 * hidden * kv_heads * width
        kv_elements, head_elements = 2 * kv_heads * width, 2 * (heads + kv_heads) * width
    inner = config.get("intermediate_size") or config.get("n_inner") or config.get("ffn_hidden_size") or 4 * hidden
    matrices = 2 if kind in _PLAIN else 3
    experts = _first(config, "n_routed_experts", "num_local_experts", "num_experts", default=0)
    mlp = float(matrices * hidden * inner)
    if experts:
        routed = config.get("moe_intermediate_size") or inner
        shared = config.get("n_shared_experts") or 0
        dense = config.get("first_k_dense_replace", 0)
        mixture = 3 * hidden * routed * (experts + shared)
        mlp = (dense * mlp + (layers - dense) * mixture) / layers
    return Sizes(
        hidden=hidden,
        num_layers=layers,
        num_heads=heads,
        kv_elements=kv_elements,
        head_elements=head_elements,
        mlp_elements=matrices * inner,
        embedding=config["vocab_size"] * hidden,
        layer_parameters=attention + mlp,
        is_dense=not experts,
        is_quantised="quantization_config" in config,
    )


def _first(config: dict[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    assert default is not None, f"none of {names}"
    return default


def _kv_heads(config: dict[str, Any], kind: str, heads: int) -> int:
    if kind == "falcon" and not config.get("new_decoder_architecture") and config.get("multi_query", True):
        return 1
    return _first(config, "num_key_value_heads", "num_kv_heads", default=heads)


@dataclass(frozen=True, kw_only=True)
class MemoryLoad:
    """What GPUs hold during a prefill."""

    sizes: Sizes
    context_len: int  # tokens
    batch: int
    weight_bytes: float  # least bytes of a parameter
    element_bytes: int  # bytes of an element of activations and cache

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.context_len * self.batch

    @property
    def least_bytes(self) -> float:
        """Bytes that all GPUs together hold at least: each weight once, and each token's K and V once."""
        return self.sizes.parameters * self.weight_bytes + self._cache_bytes

    @property
    def _cache_bytes(self) -> float:
        return float(self.sizes.num_layers * self.sizes.kv_elements * self.tokens * self.element_bytes)

    def most_bytes(self, *, tensor: int, stage_layers: int, longest: int) -> float:
        """Bytes that a GPU of a dense model holds at most, with fused attention.

        tensor: GPUs that split each matrix. stage_layers: layers that the GPU holds. longest: tokens that it computes
        at a time, times the batch. Counted are the layers' weights, embedding and head whole, the whole cache twice in
        one layer and once in the others, activations with a ring's results in fp32, logits in two types, and the
        runtime.
        """
        sizes, width = self.sizes, self.element_bytes
        weights = (stage_layers * sizes.layer_parameters / tensor + 2 * sizes.embedding) * width
        heads = max(sizes.kv_elements / tensor, 2 * sizes.head_elements / 4 / sizes.num_heads)
        cache = (stage_layers + 2) * heads * self.tokens * width
        expanded = sizes.head_elements * width + 18 * sizes.head_elements
        activations = longest * (4 * sizes.hidden * width + expanded + sizes.mlp_elements * width)
        logits = self.batch * sizes.embedding / sizes.hidden * (width + 4)
        return weights + cache + activations + logits + 1.5 * _GB
