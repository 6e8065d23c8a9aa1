"""DeepSeek-V3.2 and GLM-5: latent attention to the keys that an indexer chooses."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.latent.parts import LatentShape, read_latent_shape
from kvrsim.model.architectures.parts import MAX_WIDTH, Norms, Reader, assemble, gemm, read_inner, read_num_layers
from kvrsim.model.architectures.routed import deepseek_mlps, read_kinds
from kvrsim.model.mixers import Indexer
from kvrsim.model.spec import ModelSpec

SHARED_INDEXERS = "layers with a shared indexer take the choice of the layer before them at no cost"


def index_key_bytes(head_dim: int) -> int:
    """FP8 with a scale of fp32 for 128 elements, as vLLM and SGLang cache it: 132 for a head_dim of 128."""
    return head_dim + 4 * -(-head_dim // 128)


def read_indexer(config: JsonObject, shape: LatentShape) -> tuple[Indexer, int]:
    """The indexer, and the parameters of its LayerNorm; its queries come from the queries' latent."""
    heads = config.integer("index_n_heads", maximum=MAX_WIDTH)
    head_dim = config.integer("index_head_dim", maximum=MAX_WIDTH)
    if shape.q_lora_rank is None:
        raise config.error("q_lora_rank", "a whole number: the indexer takes its queries from that latent")
    place = "self_attn.indexer."
    projections = (
        gemm(f"{place}wq_b", shape.q_lora_rank, heads * head_dim),
        gemm(f"{place}wk", shape.hidden, head_dim),
        gemm(f"{place}weights_proj", shape.hidden, heads),
    )
    top_k = config.integer("index_topk")
    indexer = Indexer(
        num_heads=heads,
        head_dim=head_dim,
        top_k=top_k,
        projections=projections,
        key_bytes=index_key_bytes(head_dim),
    )
    return indexer, 2 * head_dim


def deepseek_v32(config: JsonObject, name: str) -> ModelSpec:
    return _sparse(config, name, [True] * read_num_layers(config))


def glm_moe_dsa(config: JsonObject, name: str) -> ModelSpec:
    """Some layers take the choice of the layer before them."""
    return _sparse(config, name, _own_indexers(config, read_latent_shape(config).layers))


def _own_indexers(config: JsonObject, num_layers: int) -> list[bool]:
    """For each layer whether it has an indexer: indexer_types, else index_topk_pattern, else every so many."""
    own = read_kinds(config, "indexer_types", num_layers, {"full": True, "shared": False})
    if not own and config.has("index_topk_pattern"):
        pattern = config.text("index_topk_pattern")
        if set(pattern) - set("FS") or len(pattern) < num_layers:
            raise config.error("index_topk_pattern", f"{num_layers} letters, one a layer, each F or S")
        own = [letter == "F" for letter in pattern[:num_layers]]
    if not own:
        frequency = config.integer("index_topk_freq", 1)
        offset = config.integer("index_skip_topk_offset", 2, minimum=0)
        own = [max(layer - offset + 1, 0) % frequency == 0 for layer in range(num_layers)]
    if not own[0]:
        raise config.error("indexer_types", "full for the first layer, which has none before it")
    return own


def _sparse(config: JsonObject, name: str, own_indexers: list[bool]) -> ModelSpec:
    shape = read_latent_shape(config)
    indexer, indexer_norm = read_indexer(config, shape)
    kinds = {
        True: (shape.attention(indexer=indexer), shape.norm_parameters + indexer_norm),
        False: (shape.attention(indexer=replace(indexer, projections=(), shared=True)), shape.norm_parameters),
    }
    layers = []
    for layer, own in zip(deepseek_mlps(config, shape.hidden, shape.layers), own_indexers, strict=True):
        mixer, norms = kinds[own]
        layers.append(replace(layer, mixer=mixer, other_parameters=layer.other_parameters + norms))
    model = assemble(config, name, shape.plain, layers, Norms(count=2), inner=read_inner(config))
    shared = () if all(own_indexers) else (SHARED_INDEXERS,)
    return replace(model, approximations=shared)


READERS: dict[str, Reader] = {"deepseek_v32": deepseek_v32, "glm_moe_dsa": glm_moe_dsa}
