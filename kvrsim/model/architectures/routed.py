"""Mixtures of experts as DeepSeek has them: routed experts, shared ones as one wider MLP, dense layers first."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.experts import Experts, read_experts
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


def beside_shared(experts: Experts, shared_inner: int, place: str = "mlp.") -> Experts:
    """The same with a shared expert of a width (0: none) and no gate of its own; `place`: of all in a layer."""
    return replace(
        experts,
        shared_inner=shared_inner or None,
        shared_gate=False,
        router=f"{place}gate",
        place=f"{place}experts.0.",
        shared_place=f"{place}shared_experts.",
    )


def latent_projections(hidden: int, latent: int, names: tuple[str, str], place: str) -> tuple[Gemm, Gemm]:
    """To the width of the routed experts, and back; every token passes through both."""
    down, up = names
    return gemm(f"{place}{down}", hidden, latent), gemm(f"{place}{up}", latent, hidden)


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
    experts = read_experts(config, "n_routed_experts")
    shared = experts.inner * config.integer("n_shared_experts", 0, minimum=0, maximum=MAX_WIDTH // experts.inner)
    routed = beside_shared(experts, shared).sparse(dense_mlp(hidden, read_inner(config)), hidden)
    dense = dense_mlp(hidden, read_inner(config))
    return [routed if sparse else dense for sparse in read_sparse(config, num_layers, first_dense)]


def left_out(config: JsonObject) -> tuple[str, ...]:
    """A sentence on layers for further tokens, where the file has such."""
    found = any(config.integer(key, 0, minimum=0) for key in _FURTHER_KEYS)
    return (FURTHER_TOKENS,) if found else ()
