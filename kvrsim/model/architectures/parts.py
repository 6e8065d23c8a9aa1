"""What all architectures are put together from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrsim.io.json_text import JsonObject
from kvrsim.model.spec import Gemm, LayerSpec, ModelSpec

MAX_LAYERS = 10_000
MAX_WIDTH = 2**31


def gemm(name: str, in_features: int, out_features: int, bias: bool = False) -> Gemm:
    return Gemm(name=name, in_features=in_features, out_features=out_features, bias=bias)


def gated_mlp(hidden: int, inner: int, bias: bool = False) -> tuple[Gemm, ...]:
    up = (gemm("gate_proj", hidden, inner, bias), gemm("up_proj", hidden, inner, bias))
    return (*up, gemm("down_proj", inner, hidden, bias))


def plain_mlp(up: str, down: str, hidden: int, inner: int, bias: bool) -> tuple[Gemm, ...]:
    return (gemm(up, hidden, inner, bias), gemm(down, inner, hidden, bias))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The widths of a decoder layer's attention, checked against each other."""

    layers: int  # num_hidden_layers
    hidden: int  # hidden_size
    heads: int  # num_attention_heads
    kv_heads: int  # num_key_value_heads
    head_dim: int  # features of a head

    @property
    def q(self) -> int:
        """Features of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Features of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    def separate_qkv(self, bias: bool) -> tuple[Gemm, ...]:
        widths = {"q_proj": self.q, "k_proj": self.kv, "v_proj": self.kv}
        return tuple(gemm(name, self.hidden, width, bias) for name, width in widths.items())

    def fused_qkv(self, name: str, bias: bool) -> tuple[Gemm, ...]:
        return (gemm(name, self.hidden, self.q + 2 * self.kv, bias),)


def read_num_layers(config: JsonObject) -> int:
    return config.integer(config.first_of("num_hidden_layers", "n_layer"), maximum=MAX_LAYERS)


def read_inner(config: JsonObject, key: str = "intermediate_size", default: int | None = None) -> int:
    """The width of an MLP."""
    return config.integer(key, default, maximum=MAX_WIDTH)


def read_shape(config: JsonObject, *, head_dim: int | None = None, own_head_dim: bool = True) -> Shape:
    """Read the widths.

    `head_dim` is what the architecture takes where the key is absent (None: hidden_size over the heads);
    without `own_head_dim` the architecture knows no such key.
    """
    hidden = config.integer(config.first_of("hidden_size", "n_embed", "n_embd"), maximum=MAX_WIDTH)
    heads_key = config.first_of("num_attention_heads", "n_head")
    heads = config.integer(heads_key, maximum=MAX_WIDTH)
    if own_head_dim and config.has("head_dim"):
        head_dim = config.integer("head_dim", maximum=MAX_WIDTH)
    if head_dim is None:
        if hidden % heads:
            raise config.error(heads_key, f"a divisor of the hidden size {hidden}")
        head_dim = hidden // heads
    kv_key = config.first_of("num_key_value_heads", "num_kv_heads", "n_head_kv")
    kv_heads = config.integer(kv_key, heads, maximum=MAX_WIDTH)
    if heads % kv_heads:
        raise config.error(kv_key, f"a divisor of the {heads} attention heads")
    layers = read_num_layers(config)
    return Shape(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class Norms:
    """The norms of a layer."""

    count: int  # norms over hidden_size in each layer
    before: int = 1  # of these, how many come before attention
    has_bias: bool = False  # a LayerNorm has a weight and a bias, an RMSNorm only a weight
    qk: bool = False  # a norm over head_dim for queries and one for keys

    @property
    def per_feature(self) -> int:
        """Parameters a feature."""
        return 2 if self.has_bias else 1

    def parameters(self, shape: Shape) -> int:
        """Parameters of all norms of a layer."""
        features = self.count * shape.hidden + (2 * shape.head_dim if self.qk else 0)
        return self.per_feature * features


def assemble(
    config: JsonObject,
    name: str,
    shape: Shape,
    layers: Sequence[LayerSpec],
    norms: Norms,
    *,
    inner: int,
    gated: bool = False,
    tied: bool = False,
    alibi: bool = False,
    parallel: bool = False,
    head_bias: bool = False,
    embedding_norm_parameters: int = 0,
    learned_positions: int = 0,
) -> ModelSpec:
    """The model; `tied` is what the architecture takes where tie_word_embeddings is absent."""
    vocab = config.integer("vocab_size", maximum=MAX_WIDTH)
    positions = config.first_of("max_position_embeddings", "n_positions", "seq_length")
    return ModelSpec(
        name=name,
        model_type=config.text("model_type"),
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=inner,
        vocab_size=vocab,
        max_position_embeddings=config.integer(positions) if config.has(positions) else None,
        tie_word_embeddings=config.flag("tie_word_embeddings", tied),
        gated_mlp=gated,
        alibi=alibi,
        parallel_attn=parallel,
        qk_norm=norms.qk,
        learned_positions=learned_positions,
        norms_before_attention=norms.before,
        norms_after_attention=norms.count - norms.before,
        final_norm_parameters=norms.per_feature * shape.hidden,
        embedding_norm_parameters=embedding_norm_parameters,
        lm_head=gemm("lm_head", shape.hidden, vocab, head_bias),
        layers=tuple(layers),
    )
