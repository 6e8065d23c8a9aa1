"""DeepSeek-V4: attention to a window and to compressed entries, hyper-connections, experts in all layers.

The first layers choose experts by a table of token numbers; the router of such a layer only weights them.
Matrices have the names of the published weights, which lists of quantised modules use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.defaults import filled
from kvrsim.model.architectures.experts import read_experts
from kvrsim.model.architectures.latent.deepseek_v32 import index_key_bytes
from kvrsim.model.architectures.parts import MAX_WIDTH, Norms, Reader, Shape, assemble, gemm, read_num_layers
from kvrsim.model.architectures.routed import read_kinds
from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers import CompressedAttention, Indexer
from kvrsim.model.spec import LayerSpec, ModelSpec

_RATES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_SPARSE_RATE = 4  # tokens an entry in layers whose indexer chooses entries; others attend to all entries
HYPER = "hyper-connections are counted as element-wise traffic of the residual streams"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """The widths that layers share."""

    hidden: int
    heads: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    rotary_dim: int
    index_heads: int
    index_dim: int
    index_top_k: int

    def mixer(self, rate: int) -> CompressedAttention:
        """Of a layer with `rate` tokens an entry; 0: with the window alone."""
        width = self.heads * self.head_dim
        to_latent = gemm("attn.wq_a", self.hidden, self.q_lora_rank)
        queries = gemm("attn.wq_b", self.q_lora_rank, width, split="columns")
        grouped = gemm("attn.wo_a", width, self.o_groups * self.o_lora_rank, split="columns")
        back = gemm("attn.wo_b", self.o_groups * self.o_lora_rank, self.hidden, split="rows")
        keys = (gemm("attn.wkv", self.hidden, self.head_dim), *self._compressor("attn.compressor", self.head_dim, rate))
        return CompressedAttention(
            projections=(to_latent, queries, *keys),
            output=(replace(grouped, groups=self.o_groups), back),
            num_attention_heads=self.heads,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
            sliding_window=self.window,
            compress_ratio=rate,
            indexer=self._indexer() if rate == _SPARSE_RATE else None,
        )

    def _compressor(self, place: str, width: int, rate: int) -> tuple[Gemm, ...]:
        """To what an entry is made of, and to its weights; entries of 4 tokens overlap: both are twice as wide."""
        if not rate:
            return ()
        out = (2 if rate == _SPARSE_RATE else 1) * width
        return tuple(gemm(f"{place}.{name}", self.hidden, out) for name in ("wkv", "wgate"))

    def _indexer(self) -> Indexer:
        place = "attn.indexer"
        return Indexer(
            num_heads=self.index_heads,
            head_dim=self.index_dim,
            top_k=self.index_top_k,
            projections=(
                gemm(f"{place}.wq_b", self.q_lora_rank, self.index_heads * self.index_dim),
                gemm(f"{place}.weights_proj", self.hidden, self.index_heads),
                *self._compressor(f"{place}.compressor", self.index_dim, _SPARSE_RATE),
            ),
            key_bytes=index_key_bytes(self.index_dim),
        )

    def other_parameters(self, rate: int) -> int:
        """Norms of latent and key, sinks; and the compressors' positions and norms."""
        count = self.q_lora_rank + self.head_dim + self.heads
        if rate:
            count += (2 * rate if rate == _SPARSE_RATE else rate) * self.head_dim + self.head_dim
        return count + (2 * rate + 1) * self.index_dim * (rate == _SPARSE_RATE)


def deepseek_v4(config: JsonObject, name: str) -> ModelSpec:
    config = filled(config, "deepseek_v4")
    shape, streams = _read_shape(config), config.integer("hc_mult")
    hidden = shape.hidden
    experts = read_experts(config, "n_routed_experts")
    config.integer("n_shared_experts", 1, maximum=1)  # transformers builds one
    # A block reads hc_mult streams for their weights and again to write one, then reads all and its output and writes
    # all: in passes over hidden_size 4 hc_mult + 2, less the 3 of a residual addition; a norm is two passes.
    passes = (4 * streams - 1) // 2
    mixing = (2 + streams) * streams * (streams * hidden + 1) + 3  # of a block's connection
    layers = []
    for rate in _rates(config, read_num_layers(config)):
        layer = LayerSpec(
            mixer=shape.mixer(rate),
            mlp=_gated("ffn.experts.0", hidden, experts.inner),
            num_experts=experts.count,
            num_experts_per_tok=experts.per_token,
            router=gemm("ffn.gate", hidden, experts.count),
            shared_mlp=_gated("ffn.shared_experts", hidden, experts.inner),
            gated_mlp=True,
            norms_before_mixer=1 + passes,
            norms_after_mixer=1 + passes,
            other_parameters=2 * hidden + shape.other_parameters(rate) + 2 * mixing,
        )
        layers.append(layer)
    plain = Shape(layers=len(layers), hidden=hidden, heads=shape.heads, kv_heads=1, head_dim=shape.head_dim)
    model = assemble(config, name, plain, layers, Norms(count=2), inner=experts.inner)
    head = streams * (streams * hidden + 1) + 1  # makes one stream of all before the last norm
    return replace(model, final_norm_parameters=model.final_norm_parameters + head, approximations=(HYPER,))


def _gated(place: str, hidden: int, inner: int) -> tuple[Gemm, ...]:
    up = (gemm(f"{place}.{name}", hidden, inner, split="columns") for name in ("w1", "w3"))
    return (*up, gemm(f"{place}.w2", inner, hidden, split="rows"))


def _read_shape(config: JsonObject) -> _Shape:
    def width(key: str, default: int | None = None) -> int:
        return config.integer(key, default, maximum=MAX_WIDTH)

    heads, head_dim, groups = width("num_attention_heads"), width("head_dim"), width("o_groups")
    if heads % groups:
        raise config.error("o_groups", f"a divisor of the {heads} attention heads")
    if config.integer("num_key_value_heads", 1) != 1:
        raise config.error("num_key_value_heads", "1: one key serves all heads")
    return _Shape(
        hidden=width("hidden_size"),
        heads=heads,
        head_dim=head_dim,
        q_lora_rank=width("q_lora_rank"),
        o_groups=groups,
        o_lora_rank=width("o_lora_rank"),
        window=width("sliding_window"),
        rotary_dim=width("qk_rope_head_dim", min(64, head_dim)),
        index_heads=width("index_n_heads"),
        index_dim=width("index_head_dim"),
        index_top_k=width("index_topk"),
    )


def _rates(config: JsonObject, num_layers: int) -> list[int]:
    """For each layer tokens an entry: by layer_types, else compress_ratios, else as transformers alternates them."""
    rates = read_kinds(config, "layer_types", num_layers, _RATES)
    ratios = config.sequence("compress_ratios")
    if not rates and ratios:
        if len(ratios) < num_layers or any(ratio not in _RATES.values() for ratio in ratios):
            raise config.error("compress_ratios", f"an array of at least {num_layers}, each 0, 4 or 128")
        rates = [int(str(ratio)) for ratio in ratios[:num_layers]]
    return rates or [4 if layer > 1 and layer % 2 else 128 for layer in range(num_layers)]


READERS: dict[str, Reader] = {"deepseek_v4": deepseek_v4, "deepseek_ref": deepseek_v4}  # _ref: as SGLang publishes it
