"""Kimi Linear and Kimi K3: Kimi delta attention, and latent attention in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.experts import read_experts
from kvrsim.model.architectures.latent.parts import LatentShape, read_latent_shape
from kvrsim.model.architectures.parts import MAX_WIDTH, Norms, Reader, assemble, gated_mlp, gemm, read_inner
from kvrsim.model.architectures.routed import beside_shared, dense_mlp, latent_projections, read_kinds, read_sparse
from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers import Mixer, Recurrence
from kvrsim.model.spec import LayerSpec, ModelSpec

_LATENT_NAMES = ("routed_expert_down_proj", "routed_expert_up_proj")
BLOCK_RESIDUALS = "attention over earlier blocks' residuals is counted by its parameters alone"


def kimi_linear(config: JsonObject, name: str) -> ModelSpec:
    shape, blocks = read_latent_shape(config), config.integer("attn_res_block_size", 0, minimum=0)
    gate = gemm("g_proj", shape.hidden, shape.heads * shape.v_head_dim, split="columns")
    gated = gate if config.flag("mla_use_output_gate", False) else None
    # Neither model rotates the queries and keys of its latent attention: order comes from the recurrence.
    kinds: dict[bool, tuple[Mixer, int]] = {
        True: (shape.attention(rotary=False, gate=gated), shape.norm_parameters),
        False: _delta_attention(config, shape.hidden),
    }
    residual = 2 * shape.hidden if blocks else 0  # a norm and a vector that scores blocks
    layers = []
    for layer, full in zip(_mlps(config, shape), _full_attention(config, shape.layers), strict=True):
        mixer, others = kinds[full]
        layers.append(replace(layer, mixer=mixer, other_parameters=layer.other_parameters + others + 2 * residual))
    model = assemble(config, name, shape.plain, layers, Norms(count=2), inner=read_inner(config))
    final, sentences = model.final_norm_parameters + residual, (BLOCK_RESIDUALS,) if blocks else ()
    return replace(model, final_norm_parameters=final, approximations=sentences)


def _mlps(config: JsonObject, shape: LatentShape) -> list[LayerSpec]:
    """Of each layer; with routed_expert_hidden_size the experts work in a latent, with a norm behind them."""
    first_dense = config.integer("first_k_dense_replace", 1, minimum=0)
    config.integer("moe_layer_freq", 1, maximum=1)
    count = config.first_of("num_experts", "num_local_experts")
    chosen = config.first_of("num_experts_per_token", "num_experts_per_tok")
    experts = read_experts(config, count, per_token_key=chosen)
    shared_key = config.first_of("num_shared_experts", "n_shared_experts")
    shared = experts.inner * config.integer(shared_key, minimum=0, maximum=MAX_WIDTH // experts.inner)
    dense = dense_mlp(shape.hidden, read_inner(config))
    routed = beside_shared(experts, shared).sparse(dense, shape.hidden)
    if config.has("routed_expert_hidden_size"):
        latent = read_inner(config, "routed_expert_hidden_size")
        projections = latent_projections(shape.hidden, latent, _LATENT_NAMES, "mlp.")
        norm = latent if config.flag("latent_moe_use_norm", False) else 0
        routed = replace(
            routed,
            mlp=gated_mlp(latent, experts.inner, place="mlp.experts.0."),
            shared_mlp=(*projections, *routed.shared_mlp),
            other_parameters=routed.other_parameters + norm,
        )
    return [routed if sparse else dense for sparse in read_sparse(config, shape.layers, first_dense)]


def _full_attention(config: JsonObject, num_layers: int) -> list[bool]:
    """For each layer whether it is latent attention: by layer_types, else by the numbers from 1 of full_attn_layers."""
    full = read_kinds(config, "layer_types", num_layers, {"full_attention": True, "linear_attention": False})
    linear = config.child("linear_attn_config") if config.has("linear_attn_config") else config
    if not full and linear.has("full_attn_layers"):
        latent, recurrent = linear.sequence("full_attn_layers"), linear.sequence("kda_layers")
        if sorted(map(str, (*latent, *recurrent))) != sorted(map(str, range(1, num_layers + 1))):
            raise linear.error("full_attn_layers", f"with kda_layers each number from 1 to {num_layers} once")
        full = [layer + 1 in latent for layer in range(num_layers)]
    return full or [layer > 0 and layer % 4 == 0 for layer in range(num_layers)]


def _delta_attention(config: JsonObject, hidden: int) -> tuple[Recurrence, int]:
    """The mixer, and what it has besides matrices: convolution, decays and their biases, a norm over a head."""
    linear = config.child("linear_attn_config") if config.has("linear_attn_config") else config
    heads = linear.integer(linear.first_of("num_heads", "linear_num_heads"), 32, maximum=MAX_WIDTH)
    head_dim = linear.integer(linear.first_of("head_dim", "linear_head_dim"), 128, maximum=MAX_WIDTH)
    kernel = linear.integer(linear.first_of("short_conv_kernel_size", "linear_conv_kernel_dim"), 4)
    width, place = heads * head_dim, "self_attn."
    gates: tuple[Gemm, ...] = (gemm(f"{place}g_proj", hidden, width, split="columns"),)
    if not linear.flag("use_full_rank_gate", False):
        gates = (gemm(f"{place}g_a_proj", hidden, head_dim), gemm(f"{place}g_b_proj", head_dim, width, split="columns"))
    mixer = Recurrence(
        kind="kda",
        projections=(
            *(gemm(f"{place}{name}_proj", hidden, width, split="columns") for name in "qkv"),
            gemm(f"{place}f_a_proj", hidden, head_dim),
            gemm(f"{place}f_b_proj", head_dim, width, split="columns"),
            gemm(f"{place}b_proj", hidden, heads, split="columns"),
            *gates,
        ),
        output=(gemm(f"{place}o_proj", width, hidden, split="rows"),),
        num_key_heads=heads,
        num_value_heads=heads,
        key_head_dim=head_dim,
        value_head_dim=head_dim,
        conv_channels=3 * width,
        conv_kernel=kernel,
    )
    return mixer, 3 * width * kernel + width + heads + head_dim


READERS: dict[str, Reader] = {"kimi_linear": kimi_linear}
