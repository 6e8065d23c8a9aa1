"""Falcon: one KV head (7B), groups of heads (40B and later), or plain heads with ALiBi (RW)."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.parts import Norms, Reader, assemble, plain_mlp, read_inner, read_shape
from kvrsim.model.spec import ModelSpec


def falcon(config: JsonObject, name: str) -> ModelSpec:
    return _falcon(config, name, grouped=config.flag("new_decoder_architecture", False), variant=True)


def refined_web(config: JsonObject, name: str) -> ModelSpec:
    """Falcon 40B under its first name: always grouped KV heads, two parallel norms."""
    return _falcon(config, name, grouped=True, variant=True)


def refined_web_model(config: JsonObject, name: str) -> ModelSpec:
    """Falcon 7B and RW under their first name: multi_query and parallel_attn start as false."""
    return _falcon(config, name, grouped=False, variant=False)


def _falcon(config: JsonObject, name: str, *, grouped: bool, variant: bool) -> ModelSpec:
    """`variant` is what multi_query and parallel_attn are where the file does not tell."""
    multi_query = config.flag("multi_query", variant) and not grouped
    parallel, bias = config.flag("parallel_attn", variant), config.flag("bias", False)
    shape = read_shape(config, own_head_dim=False)
    if not grouped:  # the number of KV heads in the file then counts for nothing
        shape = replace(shape, kv_heads=1 if multi_query else shape.heads)
    count = _num_norms(config, parallel, grouped)
    norms = Norms(count=count, before=count if parallel else 1, has_bias=True)
    inner = read_inner(config, "ffn_hidden_size", 4 * shape.hidden)
    alibi = config.flag("alibi", False)
    mixer = shape.attention(shape.fused_qkv("query_key_value", bias), "dense", bias, rotary=not alibi)
    layer = norms.layer(shape, mixer, plain_mlp("dense_h_to_4h", "dense_4h_to_h", shape.hidden, inner, bias))
    layers = [layer] * shape.layers
    return assemble(config, name, shape, layers, norms, inner=inner, tied=True, alibi=alibi, parallel=parallel)


def _num_norms(config: JsonObject, parallel: bool, grouped: bool) -> int:
    """In parallel, attention and MLP share a norm unless num_ln_in_parallel_attn is 2 (as in the 40B)."""
    if not parallel:
        return 2
    return config.integer("num_ln_in_parallel_attn", 2 if grouped else 1, maximum=2)


READERS: dict[str, Reader] = {
    "falcon": falcon,
    "RefinedWeb": refined_web,  # Falcon 40B as first published
    "RefinedWebModel": refined_web_model,  # Falcon 7B and the RefinedWeb models as first published
}
