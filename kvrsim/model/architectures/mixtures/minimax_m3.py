"""MiniMax M3: an indexer chooses blocks of keys, experts after the first dense layers."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.defaults import filled
from kvrsim.model.architectures.experts import read_experts
from kvrsim.model.architectures.parts import MAX_WIDTH, Norms, Reader, Shape, assemble, gemm, read_inner, read_shape
from kvrsim.model.architectures.routed import beside_shared, dense_mlp, read_kinds
from kvrsim.model.mixers import Indexer
from kvrsim.model.spec import LayerSpec, ModelSpec

# Keys of sparse_attention_config, and what transformers calls them.
_SPARSE_KEYS = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
}


def minimax_m3(config: JsonObject, name: str) -> ModelSpec:
    sparse = config.child("sparse_attention_config") if config.has("sparse_attention_config") else None
    given = {key: sparse.fields[old] for key, old in _SPARSE_KEYS.items() if sparse is not None and sparse.has(old)}
    config = filled(replace(config, fields={**config.fields, **given}), "minimax_m3_vl_text")
    _refuse_other_attention(config)
    shape = read_shape(config)
    full = shape.attention(shape.separate_qkv(bias=False), "o_proj", qk_norm=True)
    indexer, norms = _indexer(config, shape)
    kinds = {False: (full, 2 * shape.head_dim), True: (replace(full, indexer=indexer), 2 * shape.head_dim + norms)}
    layers = []
    for layer, chosen in zip(_mlps(config, shape.hidden, shape.layers), _chosen(config, shape.layers), strict=True):
        mixer, others = kinds[chosen]
        layers.append(replace(layer, mixer=mixer, other_parameters=layer.other_parameters + others))
    return assemble(config, name, shape, layers, Norms(count=2, qk=True), inner=read_inner(config))


def _refuse_other_attention(config: JsonObject) -> None:
    """What transformers' layers do not have."""
    if config.flag("attention_output_gate", False):
        raise config.error("attention_output_gate", "false")
    if not config.flag("use_qk_norm", True):
        raise config.error("use_qk_norm", "true")
    if config.text("qk_norm_type", "per_head") != "per_head":
        raise config.error("qk_norm_type", "per_head")


def _chosen(config: JsonObject, num_layers: int) -> list[bool]:
    """For each layer whether its indexer chooses keys: by layer_types, else by sparse_attention_freq."""
    kinds = {"full_attention": False, "minimax_m3_sparse": True}
    chosen = read_kinds(config, "layer_types", num_layers, kinds)
    sparse = config.child("sparse_attention_config") if config.has("sparse_attention_config") else None
    if not chosen and sparse is not None and sparse.flag("use_sparse_attention", True):
        chosen = _flags(sparse, "sparse_attention_freq", num_layers)
    return chosen or [False] * num_layers


def _flags(config: JsonObject, key: str, num_layers: int) -> list[bool]:
    flags = config.sequence(key)
    if flags and (len(flags) != num_layers or any(flag not in (0, 1) for flag in flags)):
        raise config.error(key, f"an array of {num_layers}, one a layer, each 0 or 1")
    return [bool(flag) for flag in flags]


def _mlps(config: JsonObject, hidden: int, num_layers: int) -> list[LayerSpec]:
    """By mlp_layer_types, else by moe_layer_freq; all with experts without either."""
    sparse = read_kinds(config, "mlp_layer_types", num_layers, {"dense": False, "sparse": True})
    sparse = sparse or _flags(config, "moe_layer_freq", num_layers) or [True] * num_layers
    experts = read_experts(config, "num_local_experts", inner=read_inner(config))
    experts = beside_shared(experts, read_inner(config, "shared_intermediate_size"), place="block_sparse_moe.")
    dense = dense_mlp(hidden, read_inner(config, "dense_intermediate_size"))
    routed = experts.sparse(dense, hidden)
    # The published weights, and lists of quantised modules, name an expert's matrices w1, w3 and w2.
    names = zip(routed.mlp, ("w1", "w3", "w2"), strict=True)
    routed = replace(routed, mlp=tuple(replace(one, name=f"{experts.place}{name}") for one, name in names))
    return [routed if here else dense for here in sparse]


def _indexer(config: JsonObject, shape: Shape) -> tuple[Indexer, int]:
    """The indexer and the parameters of its norms; keys are cached in half precision.

    With as many heads as there are KV heads, each chooses for one: SGLang splits them over GPUs as these.
    """
    hidden = shape.hidden
    heads, head_dim = config.integer("index_n_heads", maximum=MAX_WIDTH), config.integer("index_head_dim")
    block, by_kv_head = config.integer("index_block_size"), heads == shape.kv_heads
    indexer = Indexer(
        num_heads=heads,
        head_dim=head_dim,
        top_k=config.integer("index_topk_blocks") * block,
        block=block,
        projections=(
            gemm("self_attn.index_q_proj", hidden, heads * head_dim, split="kv_heads" if by_kv_head else "whole"),
            gemm("self_attn.index_k_proj", hidden, head_dim),
        ),
        key_bytes=2 * head_dim,
    )
    return indexer, 2 * head_dim


READERS: dict[str, Reader] = {"minimax_m3": minimax_m3, "minimax_m3_vl_text": minimax_m3}
