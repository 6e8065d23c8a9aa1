"""Mixtures of experts as DeepSeek has them: routed experts, shared ones as one wider MLP, dense layers first."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from kvrsim.io.json_text import JsonObject
from kvrsim.model.architectures.parts import MAX_WIDTH, gated_mlp, gemm, read_inner
from kvrsim.model.gemm import Gemm
from kvrsim.model.spec import LayerSpec

FURTHER_TOKENS = "the layers that predict further tokens are left out: a prefill does not run them"
Kind = TypeVar("Kind")
_FURTHER_KEYS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")


def dense_mlp(hidden: int, inner: int, *, norms: int = 2) -> LayerSpec:
    """A layer with a gated MLP and no mixer yet; `norms` over hidden_size, of which one is before the mixer."""
    return LayerSpec(
        mixer=None,
        mlp=gated_mlp(hidden, inner, place="mlp."),
        gated_mlp=True,
        norms_after_mixer=norms - 1,
        other_parameters=norms * hidden,
    )


def routed_mlp(
    hidden: int,
    count: int,
    per_token: int,
    inner: int,
    *,
    shared_inner: int = 0,
    latent: int | None = None,
    latent_names: tuple[str, str] = ("", ""),
    place: str = "mlp.",
) -> LayerSpec:
    """A layer with routed experts and no mixer yet; shared_inner: width of all shared experts together, 0: none.

    latent: width in which the routed experts work (None: hidden), behind a projection to it and before one back.
    """
    shared: tuple[Gemm, ...] = gated_mlp(hidden, shared_inner, place=f"{place}shared_experts.") if shared_inner else ()
    if latent is not None:
        shared = (*shared, *latent_projections(hidden, latent, latent_names, place))
    return replace(
        dense_mlp(hidden, inner),
        mlp=gated_mlp(hidden if latent is None else latent, inner, place=f"{place}experts.0."),
        num_experts=count,
        num_experts_per_tok=per_token,
        router=gemm(f"{place}gate", hidden, count),
        shared_mlp=shared,
    )


def latent_projections(hidden: int, latent: int, names: tuple[str, str], place: str) -> tuple[Gemm, Gemm]:
    """To the width of the routed experts, and back; every token passes through both."""
    down, up = names
    return gemm(f"{place}{down}", hidden, latent), gemm(f"{place}{up}", latent, hidden)


def read_counts(config: JsonObject, count_key: str, per_token_key: str) -> tuple[int, int]:
    """Routed experts, and how many of them a token passes through."""
    count = config.integer(count_key, maximum=MAX_WIDTH)
    return count, config.integer(per_token_key, maximum=count)


def read_sparse(config: JsonObject, num_layers: int, first_dense: int) -> list[bool]:
    """For each layer whether it has experts: by mlp_layer_types, else all but the first."""
    kinds = read_kinds(config, "mlp_layer_types", num_layers, {"dense": False, "sparse": True})
    return kinds or [layer >= first_dense for layer in range(num_layers)]


def read_kinds(config: JsonObject, key: str, num_layers: int, known: dict[str, Kind]) -> list[Kind]:
    """What a list of names, one a layer, stands for; empty where the key is absent."""
    names = config.sequence(key)
    accepted = f"an array of {num_layers}, one a layer, each {' or '.join(known)}"
    if names and (len(names) < num_layers or any(name not in known for name in names if isinstance(name, str))):
        raise config.error(key, accepted)
    if not all(isinstance(name, str) for name in names):
        raise config.error(key, accepted)
    return [known[str(name)] for name in names[:num_layers]]


def deepseek_mlps(config: JsonObject, hidden: int, num_layers: int) -> list[LayerSpec]:
    """For each layer its MLP, no mixer yet; num_experts of a file is n_routed_experts of others."""
    config.integer("moe_layer_freq", 1, maximum=1)  # transformers knows experts in every layer after the first
    first_dense = config.integer("first_k_dense_replace", minimum=0)
    count, per_token = read_counts(config, "n_routed_experts", "num_experts_per_tok")
    inner = read_inner(config, "moe_intermediate_size")
    shared = inner * config.integer("n_shared_experts", 0, minimum=0, maximum=MAX_WIDTH // inner)
    routed = routed_mlp(hidden, count, per_token, inner, shared_inner=shared)
    dense = dense_mlp(hidden, read_inner(config))
    return [routed if sparse else dense for sparse in read_sparse(config, num_layers, first_dense)]


def left_out(config: JsonObject) -> tuple[str, ...]:
    """A sentence on layers for further tokens, where the file has such."""
    found = any(config.integer(key, 0, minimum=0) for key in _FURTHER_KEYS)
    return (FURTHER_TOKENS,) if found else ()
