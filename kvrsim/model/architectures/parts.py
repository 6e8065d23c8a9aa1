"""What all architectures are put together from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrsim.io.schema import JsonObject
from kvrsim.model.gemm import Gemm, Split
from kvrsim.model.mixers import Attention
from kvrsim.model.spec import LayerSpec, ModelSpec

Reader = Callable[[JsonObject, str], ModelSpec]  # of a config.json and a name

MAX_LAYERS = 10_000
MAX_WIDTH = 2**31


def gemm(name: str, in_features: int, out_features: int, bias: bool = False, split: Split = "whole") -> Gemm:
    return Gemm(name=name, in_features=in_features, out_features=out_features, bias=bias, split=split)


def gated_mlp(hidden: int, inner: int, bias: bool = False, place: str = "") -> tuple[Gemm, ...]:
    """`place`: of its matrices in the layer, such as "mlp."."""
    up = (gemm(f"{place}{name}", hidden, inner, bias, "columns") for name in ("gate_proj", "up_proj"))
    return (*up, gemm(f"{place}down_proj", inner, hidden, bias, "rows"))


def plain_mlp(up: str, down: str, hidden: int, inner: int, bias: bool) -> tuple[Gemm, ...]:
    return (gemm(up, hidden, inner, bias, "columns"), gemm(down, inner, hidden, bias, "rows"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The widths of a decoder layer's attention, checked against each other."""

    layers: int  # num_hidden_layers
    hidden: int  # hidden_size
    heads: int  # num_attention_heads
    kv_heads: int  # num_key_value_heads
    head_dim: int  # features of a query or key head
    v_head_dim: int | None = None  # features of a value head; None: as of a key head

    @property
    def value_dim(self) -> int:
        """Features of a value head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def q(self) -> int:
        """Features of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Features of all key heads."""
        return self.kv_heads * self.head_dim

    def separate_qkv(self, bias: bool, place: str = "") -> tuple[Gemm, ...]:
        return (
            gemm(f"{place}q_proj", self.hidden, self.q, bias, "columns"),
            gemm(f"{place}k_proj", self.hidden, self.kv, bias, "kv_heads"),
            gemm(f"{place}v_proj", self.hidden, self.kv_heads * self.value_dim, bias, "kv_heads"),
        )

    def fused_qkv(self, name: str, bias: bool) -> tuple[Gemm, ...]:
        return (gemm(name, self.hidden, self.q + 2 * self.kv, bias, "qkv_heads"),)

    def attention(
        self,
        projections: tuple[Gemm, ...],
        output: str,
        bias: bool = False,
        *,
        qk_norm: bool = False,
        rotary: bool = True,
    ) -> Attention:
        """Multi-head or grouped-query attention of these widths; `output`: name of its projection back."""
        return Attention(
            projections=projections,
            output=(gemm(output, self.heads * self.value_dim, self.hidden, bias, "rows"),),
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.value_dim,
            qk_norm=qk_norm,
            rotary=rotary,
        )


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
    qk_of_heads: bool = False  # of these, each over the features of all heads instead

    @property
    def per_feature(self) -> int:
        """Parameters a feature."""
        return 2 if self.has_bias else 1

    def parameters(self, shape: Shape) -> int:
        """Parameters of all norms of a layer."""
        qk = shape.q + shape.kv if self.qk_of_heads else 2 * shape.head_dim
        return self.per_feature * (self.count * shape.hidden + (qk if self.qk else 0))

    def layer(self, shape: Shape, mixer: Attention, mlp: tuple[Gemm, ...], *, gated: bool = False) -> LayerSpec:
        """A dense layer with these norms."""
        return LayerSpec(
            mixer=mixer,
            mlp=mlp,
            gated_mlp=gated,
            norms_before_mixer=self.before,
            norms_after_mixer=self.count - self.before,
            other_parameters=self.parameters(shape),
        )


def assemble(
    config: JsonObject,
    name: str,
    shape: Shape,
    layers: Sequence[LayerSpec],
    norms: Norms,
    *,
    inner: int,
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
        intermediate_size=inner,
        vocab_size=vocab,
        max_position_embeddings=config.integer(positions) if config.has(positions) else None,
        tie_word_embeddings=config.flag("tie_word_embeddings", tied),
        alibi=alibi,
        parallel_attn=parallel,
        learned_positions=learned_positions,
        final_norm_parameters=norms.per_feature * shape.hidden,
        embedding_norm_parameters=embedding_norm_parameters,
        lm_head=gemm("lm_head", shape.hidden, vocab, head_bias),
        layers=tuple(layers),
    )
