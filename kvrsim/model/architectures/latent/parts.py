"""Latent attention of DeepSeek-V2 and its relatives, from their configurations."""

from __future__ import annotations

from dataclasses import dataclass

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.parts import MAX_WIDTH, Shape, gemm, read_num_layers
from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers import Indexer, LatentAttention


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentShape:
    """The widths of latent attention."""

    layers: int
    hidden: int
    heads: int
    q_lora_rank: int | None  # width of the queries' own latent; None: they have none
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool = False  # on the projections to latents and on the output

    @property
    def norm_parameters(self) -> int:
        """Of the norms of both latents."""
        return (self.q_lora_rank or 0) + self.kv_lora_rank

    @property
    def plain(self) -> Shape:
        """What the rest of a model is assembled with."""
        head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        return Shape(layers=self.layers, hidden=self.hidden, heads=self.heads, kv_heads=self.heads, head_dim=head_dim)

    def attention(
        self, *, indexer: Indexer | None = None, rotary: bool = True, gate: Gemm | None = None
    ) -> LatentAttention:
        """Expanded keys and values of all heads from one latent; `gate`: from the layer's input to an output gate."""
        latent = gemm("kv_a_proj_with_mqa", self.hidden, self.kv_lora_rank + self.qk_rope_head_dim, self.bias)
        expanded = self.heads * (self.qk_nope_head_dim + self.v_head_dim)
        return LatentAttention(
            projections=(*self._queries(), latent, *([gate] if gate else [])),
            expand=gemm("kv_b_proj", self.kv_lora_rank, expanded, split="columns"),
            output=(gemm("o_proj", self.heads * self.v_head_dim, self.hidden, self.bias, "rows"),),
            num_attention_heads=self.heads,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            indexer=indexer,
            rotary=rotary,
            gate=gate is not None,
        )

    def _queries(self) -> tuple[Gemm, ...]:
        width = self.heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.q_lora_rank is None:
            return (gemm("q_proj", self.hidden, width, split="columns"),)
        first = gemm("q_a_proj", self.hidden, self.q_lora_rank, self.bias)
        return (first, gemm("q_b_proj", self.q_lora_rank, width, split="columns"))


def read_latent_shape(config: JsonObject) -> LatentShape:
    """The widths of a file in which no key of latent attention is missing (see defaults.filled)."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    widths = {name: config.integer(name, maximum=MAX_WIDTH) for name in names}
    return LatentShape(
        layers=read_num_layers(config),
        hidden=config.integer("hidden_size", maximum=MAX_WIDTH),
        heads=config.integer("num_attention_heads", maximum=MAX_WIDTH),
        q_lora_rank=config.integer("q_lora_rank", maximum=MAX_WIDTH) if config.has("q_lora_rank") else None,
        bias=config.flag("attention_bias", False),
        **widths,
    )
